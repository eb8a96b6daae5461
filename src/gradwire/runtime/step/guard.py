"""Guard: how far the means of a sample of messages are from those of dense training.

Once in ``guard_every`` steps some messages, other messages each time, also sum up a few
thousand elements of the gradients themselves. Counts alone choose the steps and the
messages, so all ranks compare alike. Sums over ranks have the same bits on all ranks.
The part that an exchange holds back for later steps counts as missed in this step, so
error feedback does not lower the figure.
"""

from collections.abc import Callable, Sequence
from math import isfinite, sqrt
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ...contract import Exchange, Member, State
from ...contract.spec import working_dtype
from ...contract.verbs import AllReduce, Compute, Steps
from ...errors import log
from ...exchange.error_feedback import Wrapper
from ...exchange.pair import Pair

SAMPLE = 2**12
"""Elements of a message that are compared, about."""
MESSAGES = 4
"""Messages that are compared in one step, at most."""


class Missed(NamedTuple):
    """Squared norms of a sample: of mean less dense mean, and of the dense mean."""

    error: float
    dense: float


Compare = Callable[[Member, Tensor, Steps[State]], Steps[tuple[State, Missed]]]


class Guarded(Protocol):
    """A message, as far as a guard looks at it."""

    names: list[str]
    exchange: Exchange
    compare: Compare | None
    missed: Missed | None


class Guard:
    """The comparisons of one attached model, every ``every`` steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.reading: dict[str, Any] | None = None
        """The last comparison, for ``stats()``; None before the first."""
        self._since = Missed(0.0, 0.0)

    def begin(self, step: int, messages: Sequence[Guarded]) -> None:
        """Has some of a step's messages compared, if it is their turn."""
        number, is_turn = divmod(step + 1, self.every)
        lossy = [message for message in messages if loses(message.exchange)]
        groups = -(-len(lossy) // MESSAGES)
        for message in messages:
            message.compare = None
        for place, message in enumerate(lossy if not is_turn else ()):
            message.compare = compared if place % groups == number % groups else None

    def end(self, step: int, messages: Sequence[Guarded], rank: int) -> None:
        """Notes what a step's comparisons have shown, and logs it on rank 0."""
        found = [
            (m.missed, m.names[0])
            for m in messages
            if m.compare and m.missed is not None
        ]
        sound = [
            one
            for one in found
            if isfinite(one[0].error) and 0 < one[0].dense < float("inf")
        ]
        if not sound:
            return
        now = _sum([missed for missed, _ in sound])
        self._since = _sum([self._since, now])
        worst, name = max(
            (sqrt(missed.error / missed.dense), name) for missed, name in sound
        )
        error = sqrt(now.error / now.dense)
        self.reading = {
            "step": step,
            "error": error,
            "worst": name,
            "worst_error": worst,
        }
        if rank == 0:
            log.info(
                "step %d: means are off the dense ones by %.3g of their norm, most in "
                "the message of %s, by %.3g",
                step,
                error,
                name,
                worst,
            )

    def take(self) -> float | None:
        """The relative error of all comparisons since the last call.

        None if there were none.
        """
        since = self._since
        self._since = Missed(0.0, 0.0)
        return sqrt(since.error / since.dense) if since.dense else None


def _sum(parts: Sequence[Missed]) -> Missed:
    return Missed(*map(sum, zip(*parts, strict=True)))


def loses(exchange: Exchange) -> bool:
    """Whether the mean of an exchange can be another than the dense one."""
    while isinstance(exchange, Wrapper):
        exchange = exchange.inner
    traits = exchange.codec.traits if isinstance(exchange, Pair) else exchange.traits
    return traits is None or not traits.lossless


def compared(
    me: Member, grad_N: Tensor, steps: Steps[State]
) -> Steps[tuple[State, Missed]]:
    """An exchange's steps, which leave the mean in ``grad_N``, and the mean's error.

    It adds an all-reduce of about ``SAMPLE`` elements at the end.
    """
    # Odd, so that a sample of a matrix is not one of a few columns.
    sample_S = grad_N[:: (grad_N.numel() // SAMPLE) | 1]
    dtype = working_dtype(grad_N.dtype)
    dense_S = me.scratch("guard", sample_S.numel(), grad_N, dtype)
    yield Compute(
        "sample", lambda: dense_S.copy_(sample_S).mul_(1 / me.world), sample_S.numel()
    )
    state = yield from steps
    yield AllReduce(dense_S)
    missed = yield Compute(
        "compare", lambda: _missed(sample_S, dense_S), sample_S.numel()
    )
    return state, missed


def _missed(mean_S: Tensor, dense_S: Tensor) -> Missed:
    dense_S = dense_S.double()
    return Missed(
        float(mean_S.double().sub_(dense_S).square().sum()),
        float(dense_S.square().sum()),
    )
