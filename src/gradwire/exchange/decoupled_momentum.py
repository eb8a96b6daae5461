"""Decoupled momentum: every rank keeps a momentum of its own, and sends parts of it away.

The momentum decays as an optimizer's does, and what was sent of it is taken out of it. So it is
a residual that decays: parts that move fast, which a compressor takes, arrive; slow ones add up
until they are large enough, or fade.

Source: Peng, Quesnelle and Kingma, "Decoupled Momentum Optimization" (DeMo), arXiv 2411.19870,
    algorithm 1.
Differences: around any exchange that never loses more than it was given, not only around
    ``compress.demo``. The paper's SGD steps by the mean's sign, which is the optimizer's here. The
    paper's program adds gradients times the learning rate; here they are added as they are, which
    is the same while the rate stays, and a rate that falls does not weigh old gradients more.
    What a collective loses of the mean stays in the momentum of the rank that lost it.
Wire: the inner exchange's.
State: residual_N, the paper's m, in the working dtype, and the inner state.
Contributed: what left m. The sum over ranks of (gradient + decay * old m) is W * mean plus the sum
    over ranks of the new m.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..contract import Compressor, Exchange, Member, State
from ..contract.bounds import check_number
from ..contract.verbs import Compute, Steps
from .by_name import exchange_for
from .error_feedback import ErrorFeedback, FeedbackState, Wrapper, with_error_feedback


@dataclass(frozen=True)
class DecoupledMomentum(Wrapper):
    """m = decay m + g; parts of m are exchanged and leave it. Made by ``with_decoupled_momentum``.

    ``inner`` is an exchange with error feedback, whose residual is m.
    """

    of_gradients: ClassVar[bool] = False

    inner: ErrorFeedback
    decay: float = 0.999

    def __post_init__(self) -> None:
        check_number("decay", self.decay, "a fraction in (0, 1]", "write 0.999", 5e-324, 1)

    def synchronise(
        self,
        me: Member,
        state: FeedbackState,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None = None,
    ) -> Steps[State]:
        yield Compute("decay", lambda: state.residual_N.mul_(self.decay), grad_N.numel())
        inner = yield from me.through(self.inner, state, grad_N, out_N, residual_N)
        return inner


def with_decoupled_momentum(
    algorithm: Compressor | Exchange, decay: float = 0.999
) -> DecoupledMomentum:
    """Sends the largest part of each rank's momentum, which then leaves the momentum (DeMo).

    The paper steps by the sign of the mean: ``torch.optim.AdamW(parameters, lr=..., betas=(0.0,
    0.0))`` does so. No other momentum is needed. Uncompressed gradients have no momentum here.

    Args:
        algorithm: A compressor or an exchange.
        decay: The share, in (0, 1], of the momentum that remains in each step. 1 is error feedback.

    Returns:
        The exchange.

    Raises:
        InvalidSetting: The exchange may lose more than it was given.

    >>> from gradwire.compress.demo import demo
    >>> with_decoupled_momentum(demo(keep=8)).decay
    0.999
    """
    exchange = exchange_for(algorithm)
    if not isinstance(exchange, ErrorFeedback):
        exchange = with_error_feedback(exchange)
    return DecoupledMomentum(exchange, decay)
