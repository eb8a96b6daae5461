"""One tensor's run of a kernel, by anything that runs several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from gradwire.dsl.interp import Call, Draws
from gradwire.dsl.ir import Kernel

Run = Callable[[Kernel, Mapping[str, Tensor], int, Draws], int]


def run_of(runner: Any) -> Run:
    """``interp.run``'s form of ``Built.run_many`` or ``Launcher.run_many``."""

    def run(
        kernel: Kernel, operands: Mapping[str, Tensor], numel: int, draws: Draws
    ) -> int:
        kept: int = runner.run_many(kernel, [Call(operands, numel, draws)])[0]
        return kept

    return run
