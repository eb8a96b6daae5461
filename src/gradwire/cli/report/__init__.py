"""Tables and pages of algorithms, as text, of rows only; pictures are gradwire-bench's."""
