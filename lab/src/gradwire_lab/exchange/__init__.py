"""Exchanges to compare gradwire's with; they wrap those of the library."""
