"""Warm-up of compression: the first steps average whole gradients.

In its first steps a network changes fast. Values that a compressor holds back then
arrive when they no longer fit. Adam's squared gradients are then squares of the
compressor's errors.

Source: Tang et al., ICML 2021, "1-bit Adam", algorithm 1: uncompressed Adam for the
    first 15 to 25 % of the steps. Torch's hook of PowerSGD begins after 1000 steps by
    default.
Differences: 1-bit Adam also freezes Adam's second moment afterwards; that is the
optimizer's.
Wire: a dense all-reduce's in the first steps, then the inner exchange's.
State: step_T, the steps done (int64), once for each tensor of the message; and the
    inner state, untouched until the inner exchange begins.
Contributed: all of the gradient in the first steps, then the same as the inner
exchange's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.compress.none import none
from gradwire.contract import Compressor, Exchange, Member, Residual, State
from gradwire.contract.bounds import check_whole
from gradwire.contract.spec import TensorSpec
from gradwire.contract.verbs import Steps
from gradwire.errors import invalid, names_checked
from gradwire.exchange.by_name import beside, exchange_for
from gradwire.exchange.error_feedback import Wrapper
from gradwire.exchange.pair import PairState

# ---- steps done, counted alike on all ranks ------------------------------------------
#
# The count is a tensor for each tensor of the message, so that it is saved by parameter
# and training resumes in the same stage, however messages are fused.

Steps_T = tuple[Tensor, ...]
"""The steps done (int64), once for each tensor of the message."""


def no_steps(spec: TensorSpec) -> Steps_T:
    """The count before the first step."""
    return tuple(torch.zeros((), dtype=torch.int64) for _ in spec.tensor_shapes)


def steps_done(step_T: Steps_T) -> int | None:
    """The message's count; None in predictions, whose states hold no values."""
    # A parameter that no rank used in some step is one step behind; the message is not.
    done = torch.stack(step_T).max()
    if done.is_meta:
        return None
    return int(done)


def count_step(step_T: Steps_T) -> None:
    """Counts one more step of the message, in place."""
    done = steps_done(step_T)
    if done is not None:
        for step in step_T:
            step.fill_(done + 1)


# ---- dense first steps ---------------------------------------------------------------


class WarmupState(NamedTuple):
    """Steps done, for every tensor of the message, and the inner exchange's state."""

    step_T: Steps_T
    inner: State

    def after(self, inner: State) -> WarmupState:
        """The state after one more step."""
        count_step(self.step_T)
        return WarmupState(self.step_T, inner)


@dataclass(frozen=True)
class Warmup(Wrapper):
    """A dense exchange for ``steps`` steps, then the inner one.

    Made by ``with_warmup``.
    """

    changes: ClassVar[bool] = True

    steps: int = 1

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, "write 100")
        if beside(self.inner) != _DENSE:
            raise invalid(
                "exchange to warm up",
                self.inner,
                "an exchange of gradients, as warm-up averages gradients",
                "write with_momentum_correction(with_warmup(...)), and clipping "
                "outermost",
            )

    def init(self, spec: TensorSpec, world: int) -> WarmupState:
        return WarmupState(no_steps(spec), self.inner.init(spec, world))

    def synchronise(
        self,
        me: Member,
        state: WarmupState,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[State]:
        done = steps_done(state.step_T)
        operands = (grad_N, out_N, residual_N)
        if done is None or done >= self.steps:
            return state.after(
                (yield from me.through(self.inner, state.inner, *operands))
            )
        yield from me.through(_DENSE, PairState((), None), *operands)
        return state.after(state.inner)


_DENSE = exchange_for(none())


@names_checked
def with_warmup(algorithm: Compressor | Exchange, steps: int) -> Exchange:
    """Averages gradients without compression in the first steps.

    All ranks share the count of steps, and checkpoints keep it.

    Args:
        algorithm: A compressor or an exchange.
        steps: The number of uncompressed steps.

    Returns:
        The exchange.

    Raises:
        InvalidSetting: Momentum correction or clipping is inside: they go around it.

    >>> import torch
    >>> from gradwire.compress.topk import topk
    >>> from gradwire.exchange.by_name import run_local
    >>> exchange, states = with_warmup(topk(density=0.5), steps=1), None
    >>> for _ in range(2):
    ...     results = run_local(exchange, [torch.tensor([1.0, 3.0])] * 2, states)
    ...     states = [state for _, _, state in results]
    ...     print(results[0][0].tolist())
    [1.0, 3.0]
    [0.0, 3.0]
    """
    return Warmup(exchange_for(algorithm), steps)
