"""The hand-written kernels by name: each csrc/*.cpp is a library."""

import ctypes
import functools
import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from ..errors import invalid, log
from .compiler import CppSource, load_compiled, reference_only

__all__ = ["backend", "libraries", "load_library", "loader", "reference_only"]

_SOURCES = Path(__file__).parent / "csrc"
_named: dict[tuple[str, Path], None] = {}
"""The libraries that imported modules call."""


def libraries() -> tuple[str, ...]:
    """Names that ``load_library`` knows: one for each C++ file."""
    return tuple(sorted(path.stem for path in _SOURCES.glob("*.cpp")))


def load_library(name: str, folder: Path = _SOURCES) -> ctypes.CDLL | None:
    """The compiled ``name``.cpp of csrc/, or of another package's ``folder``, which
    includes the same headers; None where the torch reference has to serve.
    """
    return load_compiled(source(name, folder))


def loader(name: str, folder: Path = _SOURCES) -> Callable[..., ctypes.CDLL | None]:
    """The function that loads one library, for the module that calls its kernels.

    It is given floating operands, and returns None where the C++ does not take them:
    see ``serves_cpp``. An attach builds the libraries of the modules that are imported
    by then.
    """
    _named[name, folder] = None

    def load(*operands: torch.Tensor | None) -> ctypes.CDLL | None:
        return load_library(name, folder) if serves_cpp(*operands) else None

    return load


def backend() -> Literal["cpp", "reference"]:
    """The implementation that serves float32 on the CPU.

    Compiles all kernels if none is cached.
    """
    with being_built(lambda: [(name, _SOURCES) for name in libraries()]) as built:
        pass
    return "reference" if None in built else "cpp"


@contextmanager
def being_built(
    wanted: Callable[[], Collection[tuple[str, Path]]] = lambda: [*_named],
) -> Iterator[list[ctypes.CDLL | None]]:
    """Loads the ``wanted`` kernels beside what the block does, and then waits for them.

    By default these are the kernels of modules that are imported, also by the block.

    An attach does so, which keeps the compiler out of the first step. What neither the
    wheel nor the cache has is compiled, as many at a time as there are cores. The list
    that is given is filled at the end.
    """
    built = list[ctypes.CDLL | None]()
    jobs = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "gradwire-kernels") as pool:

        def submit() -> None:
            for name, folder in wanted():
                if (name, folder) not in jobs:
                    jobs[name, folder] = pool.submit(load_library, name, folder)

        submit()
        yield built
        submit()
    built += [job.result() for job in jobs.values()]


@functools.cache
def source(name: str, folder: Path = _SOURCES) -> CppSource:
    """The text of ``name``.cpp, of csrc/ or of another package's folder."""
    return CppSource(
        name, (folder / f"{name}.cpp").read_text(encoding="utf-8"), _SOURCES
    )


# ---- whether kernels for a GPU can be made here --------------------------------------
#
# Triton is optional.


@cache
def has_triton() -> bool:
    """Whether triton is installed.

    Says once that it is not, so ask only where a GPU waits.
    """
    is_there = find_spec("triton") is not None
    if not is_there:
        log.warning(
            "GPU kernels run as slow torch code: triton is not installed; "
            'run: pip install "gradwire[triton]" to have them fast'
        )
    return is_there


# ---- Checks of operands and their hand-over to C -------------------------------------

INT32_MAX = 2**31 - 1
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
"""The whole numbers that have the bits of a number of so many bytes."""


def check_vector(
    name: str, tensor: torch.Tensor | None, numel: int, *dtypes: torch.dtype
) -> None:
    """Raises InvalidSetting unless a vector has ``numel`` and a listed dtype.

    It must be contiguous.
    """
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


def first_outside(indices_K: torch.Tensor, num_places: int) -> int:
    """The place of the first index that is not in [0, num_places); -1 if all are."""
    outside = ((indices_K < 0) | (indices_K >= num_places)).nonzero()
    return int(outside[0]) if outside.numel() else -1


def check_floating(name: str, tensor: torch.Tensor) -> None:
    """Raises InvalidSetting unless ``tensor`` is a contiguous floating-point vector."""
    check_vector(name, tensor, tensor.numel())
    if not tensor.dtype.is_floating_point:
        raise invalid(
            name, tensor.dtype, "of a floating point dtype", "convert it with .float()"
        )


def serves_cpp(*tensors: torch.Tensor | None) -> bool:
    """Whether these floating operands are what the C++ takes: float32 on the CPU."""
    suits = [
        tensor is None or (tensor.dtype == torch.float32 and tensor.is_cpu)
        for tensor in tensors
    ]
    return all(suits)  # a generator costs as much as the kernel of a short vector
