"""Generated C++ compiled, cached, loaded and called; the interpreter where there is no compiler.

The cache, its locks, the compiler and the warning are those of the hand-written kernels
(``kernels/_build.py``): a library's name carries a hash of its text, the headers, the flags, the
compiler and the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from ..kernels import _build as kernels_build
from . import interp
from .interp import Draws
from .ir import Kernel
from .render_cpp import render

_HEADERS = Path(__file__).parent / "csrc"
# Operations raise no exceptions and set no errno, so a vector may compute what is then not chosen;
# integers wrap, as in torch. The widest vectors are worth it: these loops do nothing else.
_OWN_FLAGS = ("-fno-trapping-math", "-fno-math-errno", "-fwrapv")
_WIDE = "-mprefer-vector-width=512"
_COMPILE_TIMEOUT_S = 300.0


class Built:
    """Kernels of one program, compiled together; each is called by its form's kernel."""

    def __init__(self, *kernels: Kernel) -> None:
        self._kernels = kernels

    @functools.cached_property
    def text(self) -> str:
        """The C++ of all of them."""
        return render(*self._kernels)

    def run(self, kernel: Kernel, operands: Mapping[str, Tensor], numel: int, draws: Draws) -> None:
        """Carries ``kernel`` out on its buffers: float32 vectors, bytes for packed fields."""
        library = self.library() if all(t.is_cpu for t in operands.values()) else None
        if library is None:
            interp.run(kernel, operands, numel, draws)
            return
        places = [operands[buffer.name].data_ptr() for buffer in kernel.buffers]
        getattr(library, kernel.name)(
            (ctypes.c_void_p * len(places))(*places),
            ctypes.c_int64(numel),
            ctypes.c_uint64(draws.key),
            ctypes.c_uint64(draws.step),
            torch.get_num_threads(),
        )

    def library(self) -> ctypes.CDLL | None:
        """The compiled kernels; None where the interpreter has to serve."""
        return None if kernels_build._state["forced"] else _library(self.text)


@functools.cache
def _library(text: str) -> ctypes.CDLL | None:
    compiler = kernels_build._find_compiler()
    if compiler is None:
        kernels_build._warn("no C++ compiler (c++, g++ or clang++) is on the PATH")
        return None
    failure = ""
    for flags in _flag_sets():
        try:
            return _load_or_build(text, compiler, flags)
        except (OSError, subprocess.SubprocessError) as error:
            failure = kernels_build._reason(error)
    kernels_build._warn(f"{compiler} could not build a generated kernel: {failure}")
    return None


def _flag_sets() -> list[tuple[str, ...]]:
    known = [(*flags, *_OWN_FLAGS, f"-I{_HEADERS}") for flags in kernels_build._FLAG_SETS]
    return [(*known[0], _WIDE), *known]


def _load_or_build(text: str, compiler: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    folder = kernels_build._cache_folder()
    path = folder / f"compll-{_content_hash(text, compiler, flags)}.so"
    if path.exists():
        with suppress(OSError):  # a damaged file is built again
            return ctypes.CDLL(str(path))
        path.unlink(missing_ok=True)
    with kernels_build._one_builder(path.with_suffix(".lock")):
        if not path.exists():
            kernels_build._remove_stale(folder)
            _compile(text, compiler, flags, path)
    return ctypes.CDLL(str(path))


def _content_hash(text: str, compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(text.encode())
    for path in sorted(_HEADERS.glob("*.h")):
        digest.update(path.read_bytes())
    options = [flag for flag in flags if not flag.startswith("-I")]
    version, cpu = kernels_build._compiler_version(compiler), kernels_build._cpu_model()
    for part in (*options, compiler, version, cpu):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _compile(text: str, compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """Compiles from standard input under another name, then renames: no half a library is seen."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    command = [compiler, *flags, "-o", name, "-x", "c++", "-"]
    try:
        subprocess.run(
            command,
            input=text,
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMPILE_TIMEOUT_S,
        )
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
