"""Generated C++ compiled and called; the interpreter where there is no compiler.

Hand-written kernels have the same compiler and cache (``kernels/compiler.py``).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..kernels.compiler import CppSource, load_compiled
from ..kernels.libraries import has_triton
from . import interp
from .interp import Call
from .ir import Kernel
from .render_cpp import render_cpp

if TYPE_CHECKING:
    from .gpu.launch import Launcher

_HEADERS = Path(__file__).parent / "csrc"
# Operations raise no exceptions and set no errno, so a vector may compute what is then
# not chosen; integers wrap, as in torch. The widest vectors are worth it: these loops
# do nothing else.
_FLAGS = ("-fno-trapping-math", "-fno-math-errno", "-fwrapv")
_WIDE = ("-mprefer-vector-width=512",)
_NUM_KEPT = 3  # its place among the words of a csrc/blocks.h Tensor


class Built:
    """Kernels of one program, compiled together.

    Each is called by its form's kernel.
    """

    def __init__(self, *kernels: Kernel) -> None:
        self.kernels = kernels

    @cached_property
    def text(self) -> str:
        """The C++ of all of them."""
        return render_cpp(*self.kernels)

    @cached_property
    def source(self) -> CppSource:
        """The C++ source that the compiler is given."""
        return CppSource("compll", self.text, _HEADERS, flags=_FLAGS, wishes=_WIDE)

    @cached_property
    def keeping(self) -> frozenset[str]:
        """The names of the kernels that keep some elements."""
        return frozenset(
            kernel.name for kernel in self.kernels if kernel.keep is not None
        )

    @cached_property
    def launcher(self) -> Launcher:
        """The same kernels for a GPU."""
        from .gpu.launch import Launcher

        return Launcher(*self.kernels)

    def library(self) -> ctypes.CDLL | None:
        """The compiled kernels; None where the interpreter has to serve."""
        return load_compiled(self.source)

    def run_many(self, kernel: Kernel, calls: Sequence[Call]) -> list[int]:
        """Carries ``kernel`` out on several tensors of one device, over all their
        blocks at once.

        Returns how many elements of each were kept, which lie in the front of their
        buffers.
        """
        if not calls:
            return []
        on_cpu = calls[0].on_cpu
        library = self.library() if on_cpu else None
        if library is None:
            if not on_cpu and has_triton():
                return self.launcher.run_many(kernel, calls)
            return [interp.run(kernel, c.tensors, c.numel, c.draws) for c in calls]
        words = array("Q", [word for call in calls for word in call.words(kernel)])
        address, _ = words.buffer_info()
        getattr(library, kernel.name)(address, len(calls))
        if kernel.name not in self.keeping:
            return [0] * len(calls)
        kept = words[_NUM_KEPT :: len(words) // len(calls)].tolist()
        if max(kept) >= 2**63:  # -1
            raise MemoryError(f"{kernel.name}: no memory for what it keeps")
        return kept
