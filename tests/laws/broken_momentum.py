"""Deliberately wrong momentum corrections, and the law that must reject each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.collective.allgather_sparse import allgather_sparse
from gradwire.compress.topk import topk
from gradwire.contract import Member, State
from gradwire.contract.verbs import Steps
from gradwire.exchange.pair import Pair, pair
from gradwire_lab.exchange.momentum import MomentumCorrection
from tests.laws import momentum_laws as laws


@dataclass(frozen=True)
class altered(MomentumCorrection):
    """Sound: calls ``before`` and ``after`` each step, which do nothing. The others
    break it.
    """

    def synchronise(self, me, state, grad_N, out_N, residual_N=None):
        self.before(state, grad_N)
        latest_N = grad_N.clone()
        state = yield from super().synchronise(me, state, grad_N, out_N, residual_N)
        self.after(state, latest_N)
        return state

    def before(self, state: Any, grad_N: Tensor) -> None:
        """Nothing."""

    def after(self, state: Any, grad_N: Tensor) -> None:
        """Nothing."""


class forgets_velocity(altered):
    """Begins anew in every step."""

    def before(self, state: Any, grad_N: Tensor) -> None:
        state.velocity_N.zero_()


class never_masks(altered):
    """Leaves stale momentum where an element has left."""

    def synchronise(self, me: Member, *given: Any) -> Steps[State]:
        plain = MomentumCorrection(
            self.inner, self.momentum, self.nesterov, masking=False
        )
        state = yield from plain.synchronise(me, *given)
        return state


class masks_everything(altered):
    """Clears the velocity of elements that stayed too."""

    def after(self, state: Any, grad_N: Tensor) -> None:
        state.velocity_N.zero_()


class masks_what_is_not_stale(altered):
    """Clears the velocity of all that left, though nothing stayed: the paper's rule."""

    def after(self, state: Any, grad_N: Tensor) -> None:
        state.velocity_N.mul_(state.residual_N != 0)


class forgets_what_waits(altered):
    """Momentum alone: what was not sent is gone."""

    def before(self, state: Any, grad_N: Tensor) -> None:
        state.residual_N.zero_()


class counts_the_gradient_twice(altered):
    """Once in velocity, and once by itself."""

    def before(self, state: Any, grad_N: Tensor) -> None:
        state.residual_N.add_(grad_N)


class keeps_infinities(altered):
    """Adds the gradient to velocity whatever it is."""

    def after(self, state: Any, grad_N: Tensor) -> None:
        state.velocity_N.copy_(torch.where(grad_N.isfinite(), state.velocity_N, grad_N))


class dampens(altered):
    """u = m u + (1 - m) g."""

    def _accumulate(self, grad_N: Tensor, *operands: Any) -> None:
        super()._accumulate((1 - self.momentum) * grad_N, *operands)


class claims_the_gradient(altered):
    """Says that it contributed its gradient."""

    def synchronise(
        self, me: Any, state: Any, grad_N: Tensor, *given: Any
    ) -> Steps[State]:
        state = yield from super().synchronise(me, state, grad_N, *given)
        me.contributed_N = grad_N.to(me.contributed_N.dtype)
        return state


def _sparse(density: float = 0.3) -> Pair:
    return pair(topk(density=density), allgather_sparse())


SOUND = (altered(_sparse()), altered(_sparse(1.0)), altered(_sparse(), nesterov=True))
BITES = (
    (laws.law_velocity_goes_on_or_is_cleared, forgets_velocity(_sparse())),
    (laws.law_velocity_goes_on_or_is_cleared, never_masks(_sparse())),
    (laws.law_velocity_goes_on_or_is_cleared, masks_everything(_sparse())),
    (laws.law_velocity_goes_on_or_is_cleared, masks_what_is_not_stale(_sparse(1.0))),
    (laws.law_what_momentum_adds_arrives_or_waits, forgets_what_waits(_sparse())),
    (
        laws.law_what_momentum_adds_arrives_or_waits,
        counts_the_gradient_twice(_sparse()),
    ),
    (laws.law_without_momentum_it_is_error_feedback, forgets_what_waits(_sparse())),
    (laws.law_contributions_make_the_mean, claims_the_gradient(_sparse())),
    (laws.law_velocity_stays_finite, keeps_infinities(_sparse())),
    (laws.law_alone_is_momentum_sgd, dampens(_sparse())),
)
