"""Momentum correction: every rank sends parts of its velocity, not its gradient.

A gradient that is held back for T steps and then arrives at once has missed T steps of
an optimizer's momentum. So each rank keeps the momentum of its own gradients, before
the exchange, and the optimizer has none.

Source: Lin et al., ICLR 2018, "Deep Gradient Compression", section 3.2 (momentum
    correction) and 3.3 (momentum factor masking).
Differences:
    - An exchange of any kind may send v, not only one that selects by a threshold. So
      the mask is read off v: an element has left where v changed, in full or (16-bit
      values, a quantiser) in part.
    - Where all elements of a tensor left, but for those too small for the gradient's
      dtype, its velocity is not masked, as it is no older than the values sent. So with
      density 1, and for tensors that ``selective`` sends dense, this is momentum SGD
      exactly; the paper's mask would clear all of the velocity.
    - Velocity that is not finite is dropped, where an optimizer's would stay infinite.
Wire: the inner exchange's.
State: velocity_N and residual_N, the paper's u and v, in the working dtype, the inner
    state, and the tensors' sizes.
Contributed: the values that left v. The sum over ranks of (v + u) is W * mean plus the
    sum over ranks of the values that stay in v.

**Decoupled momentum.** Every rank keeps a momentum of its own, and sends parts of it
away.

The momentum decays as an optimizer's does, and parts that were sent leave it.
So it is a residual that decays: parts that move fast, which a compressor takes, arrive;
slow ones add up until they are large enough, or fade.

Source: Peng, Quesnelle and Kingma, "Decoupled Momentum Optimization" (DeMo), arXiv
    2411.19870, algorithm 1.
Differences: around any exchange that never loses more than it was given, not only
    around ``compress.demo``. The paper's SGD steps by the mean's sign, which is the
    optimizer's here. The paper's program adds gradients times the learning rate; here
    they are added as they are, which is the same while the rate stays, and a rate that
    falls does not weigh old gradients more. Losses of a collective stay
    in the momentum of the rank that lost it.
Wire: the inner exchange's.
State: residual_N, the paper's m, in the working dtype, and the inner state.
Contributed: the parts that left m. The sum over ranks of (gradient + decay * old m) is
    W * mean plus the sum over ranks of the new m.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.collective.steps.tensorwise import tensor_sizes
from gradwire.contract import Compressor, Exchange, Member, Residual, State
from gradwire.contract.bounds import check_number
from gradwire.contract.spec import TensorSpec, working_dtype
from gradwire.contract.verbs import Compute, Steps
from gradwire.errors import invalid, names_checked
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.error_feedback import (
    ErrorFeedback,
    FeedbackState,
    Wrapper,
    with_error_feedback,
)

from ..kernels import momentum as kernel
from .clipping import Clipping


@dataclass(frozen=True)
class DecoupledMomentum(Wrapper):
    """m = decay m + g; exchanged parts of m leave it.

    Made by ``with_decoupled_momentum``.

    ``inner`` is an exchange with error feedback, whose residual is m.
    """

    of_gradients: ClassVar[bool] = False

    inner: ErrorFeedback
    decay: float = 0.999

    def __post_init__(self) -> None:
        check_number(
            "decay", self.decay, "a fraction in (0, 1]", "write 0.999", 5e-324, 1
        )

    def synchronise(
        self,
        me: Member,
        state: FeedbackState,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[State]:
        yield Compute(
            "decay", lambda: state.residual_N.mul_(self.decay), grad_N.numel()
        )
        return (yield from me.through(self.inner, state, grad_N, out_N, residual_N))


@names_checked
def with_decoupled_momentum(
    algorithm: Compressor | Exchange, decay: float = 0.999
) -> Exchange:
    """Sends the largest part of each rank's momentum, which then leaves it (DeMo).

    The paper steps by the sign of the mean:
    ``torch.optim.AdamW(parameters, lr=..., betas=(0.0, 0.0))`` does so. No other
    momentum is needed. Uncompressed gradients have no momentum here.

    Args:
        algorithm: A compressor or an exchange.
        decay: The share, in (0, 1], of the momentum that remains in each step. 1 is
            error feedback. Default: 0.999.

    Returns:
        The exchange.

    Raises:
        InvalidSetting: The exchange may lose more than it was given.

    >>> from gradwire.compress.topk import topk
    >>> with_decoupled_momentum(topk()).decay
    0.999
    """
    exchange = exchange_for(algorithm)
    if not isinstance(exchange, ErrorFeedback):
        exchange = with_error_feedback(exchange)
    return DecoupledMomentum(exchange, decay)


class MomentumState(NamedTuple):
    """The paper's u and v, the inner exchange's state, and elements of each tensor."""

    velocity_N: Tensor
    residual_N: Tensor
    inner: State
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class MomentumCorrection(Wrapper):
    """u = m u + g; v = v + u; v is exchanged. Made by ``with_momentum_correction``."""

    goes_beside: ClassVar[bool] = True
    of_gradients: ClassVar[bool] = False

    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True

    def __post_init__(self) -> None:
        below_1 = math.nextafter(1, 0)
        check_number(
            "momentum", self.momentum, "a number in [0, 1)", "write 0.9", 0, below_1
        )

    @property
    def own_momentum(self) -> float:
        return self.momentum

    def init(self, spec: TensorSpec, world: int) -> MomentumState:
        velocity_N, residual_N = (
            torch.zeros(spec.numel, dtype=working_dtype(spec.dtype)) for _ in range(2)
        )
        inner = self.inner.init(spec, world)
        return MomentumState(velocity_N, residual_N, inner, tensor_sizes(spec))

    def synchronise(
        self,
        me: Member,
        state: MomentumState,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[State]:
        velocity_N, pending_N, inner, sizes = state
        if residual_N is not None:
            # An outer wrapper keeps the account: hand it all that is pending here.
            residual_N.add_(pending_N)
            pending_N.zero_()
            pending_N = residual_N
        whole_N: Tensor | None = None
        if self.masking and me.world > 1:  # alone, everything arrives
            numel = velocity_N.numel()
            dtype = velocity_N.dtype
            whole_N = me.scratch("velocity and residual", numel, velocity_N, dtype)

        def accumulate() -> None:
            self._accumulate(grad_N, velocity_N, pending_N, whole_N)

        # Less than W times the smallest number there is may be 0 on the wire: nobody
        # held it back.
        number = torch.finfo(grad_N.dtype)
        least = me.world * number.tiny * number.eps

        def mask() -> None:
            assert whole_N is not None
            parts = (
                torch.split(vector, list(sizes))
                for vector in (velocity_N, whole_N, pending_N)
            )
            for velocity_T, whole_T, pending_T in zip(*parts, strict=True):
                kernel.mask(velocity_T, whole_T, pending_T, least=least)

        yield Compute("accumulate", accumulate, grad_N.numel())
        inner = yield from me.through(self.inner, inner, grad_N, out_N, pending_N)
        if whole_N is not None:
            yield Compute("mask", mask, grad_N.numel())
        return MomentumState(velocity_N, state.residual_N, inner, sizes)

    def _accumulate(
        self,
        grad_N: Tensor,
        velocity_N: Tensor,
        pending_N: Tensor,
        whole_N: Tensor | None,
    ) -> None:
        """Updates velocity and residual by the gradient.

        ``whole_N``, if given, becomes the vector that the exchange is to send: the
        gradient and all that waits.
        """
        latest_N = grad_N.to(velocity_N.dtype).contiguous()
        all_N = latest_N, velocity_N, pending_N, whole_N
        kernel.accumulate(*all_N, momentum=float(self.momentum), nesterov=self.nesterov)


@names_checked
def with_momentum_correction(
    algorithm: Compressor | Exchange,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
) -> Exchange:
    """Exchanges velocities in place of gradients.

    Train with an optimizer without momentum.

    ``torch.optim.SGD(lr=...)`` then makes the steps of momentum SGD, with sparse
    gradients. Error feedback inside is removed, since the velocity is a residual
    already. Uncompressed gradients get the same momentum, and row-sparse gradients get
    none. Weight decay must be 1 / (1 - m) times that of momentum SGD.
    ``handle.residuals()`` shows the velocity.

    Args:
        algorithm: A compressor or an exchange.
        momentum: The factor m of the velocity in each step, in [0, 1); default 0.9.
        nesterov: Whether g + m u is exchanged in place of the velocity u. Default:
            False.
        masking: Whether the velocity of sent elements is cleared. Old momentum then
            moves them no further. An element that is sent every T steps moves less than
            under momentum SGD, by the factor 1 - m (1 - m^T) / ((1 - m) T). With m =
            0.9 this factor is 0.99 at T = 1000, 0.41 at 10 and 0.1 at 1. A tensor that
            is sent whole is not masked. Default: True.

    Returns:
        The exchange.

    Raises:
        InvalidSetting: Clipping is inside: a gradient is clipped before momentum.

    >>> from gradwire.compress.topk import topk
    >>> with_momentum_correction(topk(density=0.5)).inner
    Pair(codec=topk(density=0.5, values=torch.float32), collective=allgather_sparse())
    """
    return MomentumCorrection(
        _bare(exchange_for(algorithm)), momentum, nesterov, masking
    )


_CLIP = "write with_clipping(with_momentum_correction(...), max_norm)"


def _bare(exchange: Exchange) -> Exchange:
    """The exchange without error feedback."""
    if isinstance(exchange, ErrorFeedback):
        return _bare(exchange.inner)
    for kind, accepted, remedy in (
        (
            Clipping,
            "an exchange that does not clip, as momentum adds up clipped gradients",
            _CLIP,
        ),
        (MomentumCorrection, "one without it", "wrap it once"),
        (
            DecoupledMomentum,
            "an exchange without momentum of its own",
            "use one of them",
        ),
    ):
        if isinstance(exchange, kind):
            raise invalid(
                "exchange inside momentum correction", exchange, accepted, remedy
            )
    if isinstance(exchange, Wrapper):
        return replace(exchange, inner=_bare(exchange.inner))
    return exchange
