"""Generated Triton kernels: text becomes a module once, and is compiled and launched.

Triton keeps what it compiled in a folder of its own, by the text's hash. Where its own
variable TRITON_INTERPRET is 1 when it is first imported, kernels run on the CPU, one
operation at a time: that is how tests compare them with interp.py where there is no
GPU.

Legend: R rows, which are blocks or pieces of them (``render_triton.row``).
"""

import hashlib
import linecache
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import accumulate, pairwise
from types import ModuleType

import torch
from torch import Tensor

from ..interp import Call
from ..ir import Kernel
from .render import COUNT, FIRST, WHOLE, counting, is_wide, render_triton, row

_TILE = 4096
"""Elements of a long block that a program visits at a time."""
_SHORT = 2048
"""The fewest elements of a program; short blocks are put together."""
_PER_THREAD = 16
_MOST_WARPS = 16
_VECTOR = 4
"""float32 of the widest load; torch's own vectors begin at multiples of it."""


class _Plan:
    """The part of a kernel's launch that is the same each time."""

    def __init__(self, kernel: Kernel) -> None:
        self.name = kernel.name
        self.draws = kernel.draws
        self.length = row(kernel)
        self.operands = tuple(buffer.name for buffer in kernel.buffers)
        self.wide = [b.name for b in kernel.buffers if is_wide(b)]
        self.shape = launch_shape(self.length)
        counted = counting(kernel)
        self.counting = None if counted is None else _Plan(counted)

    def given(self, part: Call) -> list[Tensor | int]:
        """The arguments of the kernel, in the order of ``render.parameters``."""
        key = part.draws.key
        step = part.draws.step
        drawn = (_signed(key), _signed(key >> 32), _signed(step)) if self.draws else ()
        first = (part.operands[FIRST],) if self.counting is not None else ()
        return [
            *(part.operands[name] for name in self.operands),
            part.numel,
            *drawn,
            *first,
        ]


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

    def run_many(self, kernel: Kernel, calls: Sequence[Call]) -> list[int]:
        """Carries a kernel out on several tensors of one device, in one launch.

        Returns how many elements of each were kept. Where some may be, there are two
        launches and one copy to the host, of 8 bytes a tensor; else nothing waits for
        the device.
        """
        live = [
            Call(call.tensors, call.numel, call.draws) for call in calls if call.numel
        ]
        if not live:
            return [0] * len(calls)
        plan = self._plans.get(kernel.name)
        if plan is None:
            plan = self._plans[kernel.name] = _Plan(kernel)
        counts = iter([0] * len(live))
        if plan.counting is None:
            self._launch(plan, live)
        else:
            counts = iter(self._keep(plan, plan.counting, live))
        return [next(counts) if call.numel else 0 for call in calls]

    def _keep(self, plan: _Plan, counting: _Plan, live: Sequence[Call]) -> list[int]:
        """Counts each row's elements, then writes them from the last row's end on."""
        device = live[0].device
        rows_T = [-(-part.numel // plan.length) for part in live]
        count_R = torch.empty(sum(rows_T), dtype=torch.int32, device=device)
        counted = zip(live, torch.split(count_R, rows_T), strict=True)
        self._launch(
            counting, [part.beside({COUNT.name: own_R}) for part, own_R in counted]
        )
        ends_R = count_R.cumsum(0)
        first_R = (ends_R - count_R).int()
        kept = zip(live, torch.split(first_R, rows_T), strict=True)
        self._launch(plan, [part.beside({FIRST: own_R}) for part, own_R in kept])
        last_T = to_device([last - 1 for last in accumulate(rows_T)], device)
        ends_T = [0, *ends_R[last_T].tolist()]
        return [end - start for start, end in pairwise(ends_T)]

    def _launch(self, plan: _Plan, live: Sequence[Call]) -> None:
        size = plan.length * plan.shape["ROWS"]
        programs_T = [-(-part.numel // size) for part in live]
        with _on(live[0].device):
            name = plan.name
            arguments = plan.given(live[0])
            if len(live) > 1:
                name = f"{plan.name}_many"
                arguments = _table(plan, live, programs_T)
            # A product and a sum rounded as one would be other bits than everywhere
            # else.
            getattr(self.module, name)[(sum(programs_T),)](
                *arguments, **plan.shape, enable_fp_fusion=False
            )


def _table(
    plan: _Plan, live: Sequence[Call], programs_T: Sequence[int]
) -> list[Tensor | int]:
    """The table of ``device.tensor_of``, its count of tensors, a divisor of lengths."""
    arguments = (argument for part in live for argument in plan.given(part))
    words = [
        argument if isinstance(argument, int) else argument.data_ptr()
        for argument in arguments
    ]
    wide = [part.operands[name].data_ptr() for part in live for name in plan.wide]
    even = all(part.numel % _VECTOR == 0 for part in live)
    align = (
        _VECTOR if even and all(address % (4 * _VECTOR) == 0 for address in wide) else 1
    )
    words = [*accumulate(programs_T[:-1], initial=0), *words]
    return [to_device(words, live[0].device), len(live), align]


def to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Whole numbers (int64) on a device, by pinned memory so that nothing waits."""
    on_host = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return (
        on_host.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else on_host
    )


def launch_shape(length: int) -> dict[str, int]:
    """Rows a program, elements a tile and warps, for rows of this length.

    >>> launch_shape(64), launch_shape(4096)["num_warps"]
    ({'ROWS': 32, 'TILE': 64, 'num_warps': 4}, 8)
    """
    tile = 1 << (length - 1).bit_length() if length <= WHOLE else _TILE
    rows = max(1, _SHORT // tile)
    # A loop keeps what a thread adds up beside what it reads, so a thread has fewer
    # elements.
    per_thread = _PER_THREAD if length <= WHOLE else _PER_THREAD // 2
    warps = min(_MOST_WARPS, max(1, tile * rows // (32 * per_thread)))
    return {"ROWS": rows, "TILE": tile, "num_warps": warps}


def _module(text: str) -> ModuleType:
    """Python's own place for lines of a text without a file is where triton looks."""
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
