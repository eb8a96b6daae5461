"""Deliberately wrong decoupled momenta, and the law that must reject each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

import gradwire as gw
from gradwire.contract import Member, State
from gradwire.contract.verbs import Steps
from gradwire.exchange.decoupled_momentum import DecoupledMomentum
from gradwire_lab.laws import decoupled as laws


@dataclass(frozen=True)
class forgets_to_decay(DecoupledMomentum):
    """Keeps the momentum as it is."""

    def synchronise(self, me: Member, state: Any, *given: Any) -> Steps[State]:
        found = yield from self.inner.synchronise(me, state, *given)
        return found

    def run(self, rank: int, world: int, state: State, grad_N: Tensor) -> Steps[Any]:
        found = yield from self.inner.run(rank, world, state, grad_N)
        return found


@dataclass(frozen=True)
class keeps_what_it_sent(DecoupledMomentum):
    """Leaves what arrived in the momentum too, as an optimizer's momentum does."""

    def run(self, rank: int, world: int, state: Any, grad_N: Tensor) -> Steps[Any]:
        mean_N, given_N, after = yield from super().run(rank, world, state, grad_N)
        after.residual_N.add_(given_N)
        return mean_N, given_N, after


def _around(kind: type[DecoupledMomentum]) -> DecoupledMomentum:
    sound = gw.with_decoupled_momentum(gw.compress.topk(density=0.3), 0.5)
    return kind(sound.inner, sound.decay)


SOUND = (_around(DecoupledMomentum),)
BITES = (
    (laws.law_what_decays_arrives_or_waits, _around(forgets_to_decay)),
    (laws.law_without_decay_it_is_error_feedback, _around(keeps_what_it_sent)),
)
