"""Models whose layers take a known time: they count on a clock that only they move."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

TICK_S = 1 / 1024


class Clock:
    """Stands still but when a layer says how long it took; put in the place of
    time.perf_counter.

    Times are multiples of 1/1024 s, so that sums of them are exact.
    """

    def __init__(self) -> None:
        self.now_s = 0.0

    def pass_by(self, ticks: int) -> None:
        self.now_s += ticks * TICK_S

    def __call__(self) -> float:
        return self.now_s


class _Pass(torch.autograd.Function):
    """The identity; lets ticks pass by when its gradient is computed."""

    @staticmethod
    def forward(ctx: object, x: Tensor, act: Callable[[], None]) -> Tensor:
        ctx.act = act  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.act()  # type: ignore[attr-defined]
        return grad, None


class Timed(nn.Module):
    """y = x * weight, that takes ``forward`` and ``backward`` ticks of a clock."""

    def __init__(
        self, clock: Clock, forward: int, backward: int, width: int = 3
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.clock, self.ticks = clock, (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        self.clock.pass_by(self.ticks[0])
        # The node behind the product is computed before the product's own gradients
        # are.
        product: Tensor = _Pass.apply(
            x * self.weight, lambda: self.clock.pass_by(self.ticks[1])
        )
        return product


class Pause(nn.Module):
    """Owns nothing and takes time, as an activation does."""

    def __init__(self, clock: Clock, forward: int, backward: int) -> None:
        super().__init__()
        self.clock, self.ticks = clock, (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        self.clock.pass_by(self.ticks[0])
        same: Tensor = _Pass.apply(x, lambda: self.clock.pass_by(self.ticks[1]))
        return same


def step_of(model: nn.Module, width: int = 3) -> Callable[[], Tensor]:
    """One forward and backward on a batch of four."""
    x = torch.linspace(-1, 1, 4 * width).view(4, width)

    def step() -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    return step
