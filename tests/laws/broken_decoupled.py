"""Deliberately wrong decoupled momenta, and the law that must reject each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradwire as gw
from gradwire.contract import Member, State
from gradwire.contract.verbs import Steps
from gradwire_lab.exchange.momentum import DecoupledMomentum
from tests.laws import decoupled_laws as laws


@dataclass(frozen=True)
class forgets_to_decay(DecoupledMomentum):
    """Keeps the momentum as it is."""

    def synchronise(self, me: Member, state: Any, *given: Any) -> Steps[State]:
        found = yield from me.through(self.inner, state, *given)
        return found


@dataclass(frozen=True)
class keeps_what_it_sent(DecoupledMomentum):
    """Leaves what arrived in the momentum too, as an optimizer's momentum does."""

    def synchronise(self, me: Any, *given: Any) -> Steps[Any]:
        after = yield from super().synchronise(me, *given)
        after.residual_N.add_(me.contributed_N)
        return after


def _around(kind: type[DecoupledMomentum]) -> DecoupledMomentum:
    sound = gw.with_decoupled_momentum(gw.compress.topk(density=0.3), 0.5)
    return kind(sound.inner, sound.decay)


SOUND = (_around(DecoupledMomentum),)
BITES = (
    (laws.law_what_decays_arrives_or_waits, _around(forgets_to_decay)),
    (laws.law_without_decay_it_is_error_feedback, _around(keeps_what_it_sent)),
)
