"""Layouts of sparse vectors beside gradwire's own, one in each file."""
