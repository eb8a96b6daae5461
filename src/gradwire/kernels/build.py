"""The hand-written kernels by name: each csrc/*.cpp as a library; says which backend serves."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from .compiler import CppSource, load_compiled, reference_only

__all__ = ["backend", "libraries", "load_library", "reference_only"]

_PERIOD_S = 3.0
"""Seconds between two lines that tell how far the compiler is."""
_log = logging.getLogger("gradwire")
_SOURCES = Path(__file__).parent / "csrc"


def libraries() -> tuple[str, ...]:
    """Names that ``load_library`` knows: one for each C++ file."""
    return tuple(sorted(path.stem for path in _SOURCES.glob("*.cpp")))


def load_library(
    name: str, on_build: Callable[[Path], None] = lambda folder: None
) -> ctypes.CDLL | None:
    """The compiled csrc/``name``.cpp, or None where the torch reference has to serve."""
    return load_compiled(source(name), on_build)


def backend() -> Literal["cpp", "reference"]:
    """The implementation that serves float32 on the CPU; compiles all kernels if none is cached.

    Calling it early (when a model is attached) keeps the compiler out of the first step. Compiling
    takes 10 to 40 s, so the first rank of each machine logs how far it is, as a warning: lines of
    lower levels are not shown unless they are asked for.
    """
    names, said_s, loaded = libraries(), list[float](), list[ctypes.CDLL | None]()

    def compiling(folder: Path) -> None:
        now_s = time.monotonic()
        if os.environ.get("LOCAL_RANK", "0") != "0" or (said_s and now_s - said_s[-1] < _PERIOD_S):
            return
        said_s.append(now_s)
        where = "" if said_s[1:] else f" (once on this machine; they are kept in {folder})"
        _log.warning(
            "compiling %d C++ kernels%s: %d are done", len(names), where, sum(map(bool, loaded))
        )

    for name in names:
        loaded.append(load_library(name, compiling))
    if said_s:
        _log.warning("compiling took %.0f s", time.monotonic() - said_s[0])
    return "reference" if None in loaded else "cpp"


@functools.cache
def source(name: str) -> CppSource:
    """The text of csrc/``name``.cpp."""
    return CppSource(name, (_SOURCES / f"{name}.cpp").read_text(encoding="utf-8"), _SOURCES)
