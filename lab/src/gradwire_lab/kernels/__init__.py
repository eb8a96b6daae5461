"""Kernels of the lab's exchanges, each with its reference in torch."""

from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
"""The folder of their C++, which includes the library's headers."""
