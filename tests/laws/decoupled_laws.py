"""The laws of decoupled momentum: each takes a wrapped exchange, which keeps its own
account.

Laws of exchanges about any account hold here as they stand
(``exchanges.OF_ANY_ACCOUNT``).
"""

from __future__ import annotations

import torch

from gradwire.contract import State
from gradwire.exchange.by_name import run_local
from gradwire_lab.exchange.momentum import DecoupledMomentum
from gradwire_lab.laws.cases import Case, kept_of, states_of
from gradwire_lab.laws.tolerance import (
    assert_near,
    coarser,
    largest,
    laws_in,
    must,
    same_bits,
)

NUM_STEPS = 4


def law_what_decays_arrives_or_waits(exchange: DecoupledMomentum, case: Case) -> None:
    """Conservation: sum of (gradient + decay * old m) = W * mean + sum of new m.

    To do: multiply m by decay once a step, before anything is added to it, and take
    away only what arrived.
    """
    states: list[State] = case.states(exchange)
    for number in range(NUM_STEPS):
        grads = case.grads(number)
        old = [kept_of(state, case.numel) for state in states]
        results = run_local(exchange, grads, states, seed=case.seed + number)
        states = states_of(results)
        new = [kept_of(state, case.numel) for state in states]
        given_N = torch.stack(
            [g.double() + exchange.decay * m for g, m in zip(grads, old, strict=True)]
        ).sum(0)
        assert_near(
            case.world * results[0][0].double() + torch.stack(new).sum(0),
            given_N,
            coarser(case.dtype, torch.float32),
            magnitude=case.world * largest(*grads, *old, *new, results[0][0]),
            terms=case.world + 8,
            what=f"step {number}: W * mean + new m against gradients + decay * old m",
        )


def law_without_decay_it_is_error_feedback(
    exchange: DecoupledMomentum, case: Case
) -> None:
    """Decay 1 is error feedback, bit for bit.

    To do: keep what is pending as with_error_feedback does.
    """
    plain = type(exchange)(exchange.inner, 1.0)
    kept = exchange.inner
    states = case.states(plain)
    others = case.states(kept)
    for number in range(NUM_STEPS):
        got = run_local(plain, case.grads(number), states, seed=case.seed)
        want = run_local(kept, case.grads(number), others, seed=case.seed)
        states = states_of(got)
        others = states_of(want)
        for a, b in zip(got, want, strict=True):
            must(same_bits(a[0], b[0]), f"step {number}: the means differ")
            must(
                same_bits(kept_of(a[2], case.numel), kept_of(b[2], case.numel)),
                "m differs",
            )


LAWS = laws_in(globals())
