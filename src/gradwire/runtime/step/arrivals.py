"""Arrivals: the means of a plain module's backward passes, on their way into its gradients."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..grid.dtensors import put_grad
from .lanes import wall_clock
from .progress import Progress


class Arrivals:
    """The means of the last backward pass; ``params`` are all that it may have gradients for."""

    def __init__(self, progress: Progress, params: Sequence[tuple[str, Tensor]]) -> None:
        self._progress, self._synchroniser = progress, progress.synchroniser
        self._params = dict(params)

    def arrived(self, name: str) -> bool:
        """Whether the mean of a parameter is complete; does not block."""
        return self._synchroniser.arrived(name)

    def wait(self, names: Sequence[str]) -> None:
        """Blocks until the means of ``names`` are there; raises ``RankFailed``."""
        start_s = wall_clock()
        self._synchroniser.wait(names)
        self._progress.mark_wait(start_s, wall_clock())

    def follow(self, names: Sequence[str]) -> None:
        """Has the device's current stream wait for means that have arrived; does not block."""
        self._synchroniser.follow(names)

    def finish(self) -> None:
        """Waits for the whole step, and puts the means where the training loop looks for them."""
        synchroniser, start_s = self._synchroniser, wall_clock()
        if not synchroniser.open:
            return
        self._put(synchroniser.finish(), start_s)

    def put_means(self) -> None:
        """Ends a step whose means are all here, though its engine has failed."""
        self._put(self._synchroniser.settled(), wall_clock())

    def _put(self, arrived: set[str], start_s: float) -> None:
        synchroniser = self._synchroniser
        for name, param in self._params.items():
            if name in arrived:
                put_grad(param, synchroniser.mean(name))
            elif synchroniser.is_sparse(name):
                param.grad = synchroniser.grads[name]
        self._progress.mark_wait(start_s, wall_clock())
        self._progress.end_step()

    def give_up(self, text: str) -> BaseException:
        """Fails on behalf of this rank and tells the others; returns the error to raise."""
        return self._progress.give_up(text)
