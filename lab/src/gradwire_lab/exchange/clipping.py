"""Local clipping: every rank clips its own gradient before anything is added to it.

Clipping the mean, as plain training does, comes too late where gradients accumulate for
many steps before they are sent: a gradient that exploded is in the residual by then.

Source: Lin et al., ICLR 2018, "Deep Gradient Compression", section 3.2 (local gradient
    clipping): a rank's threshold is the global one over sqrt(W), as the norm of a sum
    of W independent gradients of one size is sqrt(W) times theirs.
Differences: an exchange sees one message, so the norm is that message's and not the
    whole model's. Gradients in M messages therefore keep a norm of up to sqrt(M) *
    max_norm / sqrt(W) on a rank; attached with a ``bucket_cap_mb`` above the model's
    size they are one message of each dtype, and of each kind of exchange, and the norm
    is the paper's. The whole model's norm would be known only when the last gradient
    is: no message could leave before backward ends. A gradient with an inf or a NaN has
    no direction. Its finite elements become 0, and its other elements become NaN,
    which reaches all ranks.
Wire and State: the inner exchange's.
Contributed: that of the clipped gradient. The part that was clipped off is gone on
purpose.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.contract import Compressor, Exchange, Member, Residual, State
from gradwire.contract.bounds import check_number
from gradwire.contract.spec import working_dtype
from gradwire.contract.verbs import Steps
from gradwire.errors import names_checked
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.error_feedback import Wrapper

from ..kernels.magnitudes import range_norms


@dataclass(frozen=True)
class Clipping(Wrapper):
    """Scales a rank's gradient to a norm of at most ``max_norm / sqrt(W)``.

    Made by ``with_clipping``.
    """

    goes_beside: ClassVar[bool] = True
    is_of_rank: ClassVar[bool] = True

    max_norm: float = 1.0

    def __post_init__(self) -> None:
        check_norm("max_norm", self.max_norm)

    def synchronise(
        self,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[State]:
        def clip() -> None:
            own_norm = norm(grad_N)
            most = self.max_norm / math.sqrt(me.world)
            factor = 1.0
            if not math.isfinite(own_norm):
                factor = 0.0
            elif own_norm:
                factor = min(factor, most / own_norm)
            # The mean's buffer serves for the clipped gradient: an exchange may work in
            # place.
            torch.mul(grad_N, factor, out=out_N)

        yield me.sized("clip", clip, grad_N.numel())
        return (yield from me.through(self.inner, state, out_N, out_N, residual_N))


def check_norm(what: str, value: object) -> None:
    """Refuses ``value`` unless a gradient's norm can be bounded by it."""
    accepted = "a positive finite number, 1e-300 to 1e300"
    check_number(what, value, accepted, "write 1.0", 1e-300, 1e300)


def norm(grad_N: Tensor) -> float:
    """The norm of a gradient: squares added up in float64, without a copy of it.

    The number of threads changes no bit of it.
    """
    working_N = grad_N.to(working_dtype(grad_N.dtype)).contiguous()
    start_1 = torch.tensor([0])
    stop_1 = torch.tensor([grad_N.numel()])
    squares_1 = torch.empty(1, dtype=torch.float64)
    range_norms(working_N, start_1, stop_1, squares_1)
    return math.sqrt(squares_1.item())


@names_checked
def with_clipping(algorithm: Compressor | Exchange, max_norm: float) -> Exchange:
    """Clips each rank's own gradient, message by message, before it is exchanged.

    Momentum correction goes inside:
        ``with_clipping(with_momentum_correction(...), 0.25)``.

    Args:
        algorithm: A compressor or an exchange.
        max_norm: The norm to which plain training would clip the mean.

    Returns:
        The exchange.

    Raises:
        InvalidSetting: ``max_norm`` is no positive number.

    >>> from gradwire.compress.none import none
    >>> from gradwire.exchange.by_name import run_local
    >>> grads = [torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0])]
    >>> exchange = with_clipping(none(), 2.0**0.5)  # each to a norm of 1
    >>> mean = run_local(exchange, grads)[0][0]
    >>> torch.allclose(mean, torch.tensor([0.3, 0.4]))
    True
    """
    return Clipping(exchange_for(algorithm), max_norm)
