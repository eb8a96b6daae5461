"""The hand-written kernels by name: each csrc/*.cpp as a library; says which backend serves."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Literal

from .compiler import CppSource, load_compiled, reference_only

__all__ = ["backend", "libraries", "load_library", "reference_only"]

_SOURCES = Path(__file__).parent / "csrc"


def libraries() -> tuple[str, ...]:
    """Names that ``load_library`` knows: one for each C++ file."""
    return tuple(sorted(path.stem for path in _SOURCES.glob("*.cpp")))


def load_library(name: str) -> ctypes.CDLL | None:
    """The compiled csrc/``name``.cpp, or None where the torch reference has to serve."""
    return load_compiled(source(name))


def backend() -> Literal["cpp", "reference"]:
    """The implementation that serves float32 on the CPU; compiles all kernels if none is cached.

    Calling it early (when a model is attached) keeps the compiler out of the first step.
    """
    loaded = [load_library(name) for name in libraries()]
    return "reference" if None in loaded else "cpp"


@functools.cache
def source(name: str) -> CppSource:
    """The text of csrc/``name``.cpp."""
    return CppSource(name, (_SOURCES / f"{name}.cpp").read_text(encoding="utf-8"), _SOURCES)
