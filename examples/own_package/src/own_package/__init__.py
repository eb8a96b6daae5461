"""A package that adds a compressor and a command to gradwire, by entry points."""
