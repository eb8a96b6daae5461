"""The hand-written kernels by name: each csrc/*.cpp as a library; says which backend serves."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import time
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from ..errors import invalid
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
    name: str, on_build: Callable[[Path], None] = lambda folder: None, folder: Path = _SOURCES
) -> ctypes.CDLL | None:
    """The compiled ``name``.cpp of csrc/, or of another package's ``folder``, which includes the
    same headers; None where the torch reference has to serve."""
    return load_compiled(source(name, folder), on_build)


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
def source(name: str, folder: Path = _SOURCES) -> CppSource:
    """The text of ``name``.cpp, of csrc/ or of another package's folder."""
    return CppSource(name, (folder / f"{name}.cpp").read_text(encoding="utf-8"), _SOURCES)


# ---- whether kernels for a GPU can be made here ------------------------------------------------
#
# Triton is optional.


@cache
def has_triton() -> bool:
    """Whether triton is installed; says once that it is not, so ask only where a GPU waits."""
    found = find_spec("triton") is not None
    if not found:
        _log.warning(
            "GPU kernels run as slow torch code: triton is not installed; "
            'run: pip install "gradwire[triton]" to have them fast'
        )
    return found


# ---- Checks of operands and their hand-over to C -----------------------------------------------

INT32_MAX = 2**31 - 1


def check_vector(name: str, tensor: torch.Tensor | None, numel: int, *dtypes: torch.dtype) -> None:
    """Raises InvalidSetting unless this is a contiguous vector of ``numel`` and a listed dtype."""
    if tensor is None:
        return
    if tensor.dim() != 1 or tensor.numel() != numel or not tensor.is_contiguous():
        raise invalid(
            name,
            f"shape {tuple(tensor.shape)}, stride {tensor.stride()}",
            f"a contiguous vector of {numel} elements",
            "pass tensor.reshape(-1) or slice it to that length",
        )
    if dtypes and tensor.dtype not in dtypes:
        listed = " or ".join(str(dtype) for dtype in dtypes)
        raise invalid(name, tensor.dtype, f"of dtype {listed}", "convert it with .to()")


def check_floating(name: str, tensor: torch.Tensor) -> None:
    """Raises InvalidSetting unless ``tensor`` is a contiguous vector of floating point numbers."""
    check_vector(name, tensor, tensor.numel())
    if not tensor.dtype.is_floating_point:
        raise invalid(name, tensor.dtype, "of a floating point dtype", "convert it with .float()")


def serves_cpp(*tensors: torch.Tensor | None) -> bool:
    """Whether these floating operands are what the C++ takes: float32 on the CPU."""
    found = [one is None or (one.dtype == torch.float32 and one.is_cpu) for one in tensors]
    return all(found)  # a generator costs as much as the kernel of a short vector
