"""Generated Triton kernels launched: text becomes a module once, triton compiles it for a device.

Triton keeps what it compiled in a folder of its own, by the text's hash. Where its own variable
TRITON_INTERPRET is 1 when it is first imported, kernels run on the CPU, one operation at a time:
that is how tests compare them with interp.py where there is no GPU.

Legend: R rows, which are blocks or pieces of them (``render_triton.row``).
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from types import ModuleType

import torch
from torch import Tensor

from ..interp import Draws
from ..ir import Kernel
from .render import COUNT, WHOLE, counting, render_triton, row

_TILE = 4096  # elements of a long block that a program visits at a time
_SHORT = 2048  # elements that a program has at least, of several blocks if they are short
_PER_THREAD = 16
_MOST_WARPS = 16


class _Plan:
    """The part of a kernel's launch that is the same each time."""

    def __init__(self, kernel: Kernel) -> None:
        self.name, self.draws, self.length = kernel.name, kernel.draws, row(kernel)
        self.operands = tuple(buffer.name for buffer in kernel.buffers)
        self.shape = launch_shape(self.length)
        counted = counting(kernel)
        self.counting = None if counted is None else _Plan(counted)


class Launcher:
    """Kernels of one program, made together; the counterpart of ``build.Built``."""

    def __init__(self, *kernels: Kernel) -> None:
        self._kernels = kernels
        self._plans: dict[str, _Plan] = {}

    @cached_property
    def text(self) -> str:
        """The Triton of all of them."""
        return render_triton(*self._kernels)

    @cached_property
    def module(self) -> ModuleType:
        """The text as a module: under each kernel's name what launches it."""
        return _module(self.text)

    def run(self, kernel: Kernel, operands: Mapping[str, Tensor], numel: int, draws: Draws) -> int:
        """Carries a kernel out as ``interp.run`` does, on operands that all lie on one device."""
        if numel == 0:
            return 0
        plan = self._plans.get(kernel.name)
        if plan is None:
            plan = self._plans[kernel.name] = _Plan(kernel)
        if plan.counting is None:
            self._launch(plan, operands, numel, draws)
            return 0
        device = next(iter(operands.values())).device
        count_R = torch.empty(-(-numel // plan.length), dtype=torch.int32, device=device)
        self._launch(plan.counting, {**operands, COUNT.name: count_R}, numel, draws)
        end_R = count_R.cumsum(0)
        self._launch(plan, operands, numel, draws, (end_R - count_R).int())
        return int(end_R[-1])

    def _launch(
        self,
        plan: _Plan,
        operands: Mapping[str, Tensor],
        numel: int,
        draws: Draws,
        *first_R: Tensor,
    ) -> None:
        given = [operands[name] for name in plan.operands]
        drawn = (_signed(draws.key), _signed(draws.key >> 32), _signed(draws.step))
        grid = (-(-numel // (plan.length * plan.shape["ROWS"])),)
        with _on(given[0].device):
            # A product and a sum rounded as one would be other bits than everywhere else.
            getattr(self.module, plan.name)[grid](
                *given,
                numel,
                *(drawn if plan.draws else ()),
                *first_R,
                **plan.shape,
                enable_fp_fusion=False,
            )


def launch_shape(length: int) -> dict[str, int]:
    """Rows a program, elements a tile and warps, for rows of this length.

    >>> launch_shape(64), launch_shape(4096)["num_warps"]
    ({'ROWS': 32, 'TILE': 64, 'num_warps': 4}, 8)
    """
    tile = 1 << (length - 1).bit_length() if length <= WHOLE else _TILE
    rows = max(1, _SHORT // tile)
    warps = min(_MOST_WARPS, max(1, tile * rows // (32 * _PER_THREAD)))
    return {"ROWS": rows, "TILE": tile, "num_warps": warps}


def _module(text: str) -> ModuleType:
    """Python's own place for the lines of a text that is no file is where triton looks for them."""
    name = f"gradwire_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    file = f"<{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    module = ModuleType(name)
    exec(compile(text, file, "exec"), module.__dict__)
    return module


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _signed(word: int) -> int:
    """The low 32 bits as an int32: a number's size then never makes another kernel."""
    return ((word + 2**31) & 0xFFFFFFFF) - 2**31
