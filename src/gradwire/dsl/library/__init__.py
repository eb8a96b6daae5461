"""Operators and coders that are added to the language by its own registry."""
