"""The one place where the versions stand."""

__version__ = "0.1.0"
WIRE = 4
"""The version of what ranks send each other.

It rises where old and new ranks would misread it.
"""
