"""Operators that are added to the language by its own registry, and matrix operators."""
