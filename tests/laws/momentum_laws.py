"""The laws of momentum correction: each takes a wrapped exchange, which keeps its own
account.

Laws of exchanges about any account hold here as they stand
(``exchanges.OF_ANY_ACCOUNT``). What momentum changes has a form of its own. u is
velocity, v what is pending, m the momentum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.collective.steps.tensorwise import tensor_sizes
from gradwire.contract import State
from gradwire.contract.spec import working_dtype
from gradwire.exchange.by_name import run_local
from gradwire.exchange.error_feedback import with_error_feedback
from gradwire_lab.exchange.momentum import MomentumCorrection
from gradwire_lab.laws.cases import Case, total_of
from gradwire_lab.laws.tolerance import (
    assert_near,
    coarser,
    largest,
    laws_in,
    must,
    same_bits,
)

NUM_STEPS = 4


class MomentumStep(NamedTuple):
    """One rank's step: its state before and after, its gradient, and what it is said to
    give.
    """

    before: Any
    grad_N: Tensor
    contributed_N: Tensor
    after: Any

    def velocity(self, momentum: float) -> Tensor:
        """u as it is before anything is masked."""
        velocity_N: Tensor = self.before.velocity_N
        fresh_N = momentum * velocity_N.double() + self.grad_N.double()
        return fresh_N.to(velocity_N.dtype)


def _steps(
    exchange: MomentumCorrection, case: Case
) -> list[tuple[Tensor, list[MomentumStep]]]:
    """The mean and every rank's step, of a few steps."""
    states: list[State] = case.states(exchange)
    found = []
    for number in range(NUM_STEPS):
        grads = case.grads(number)
        results = run_local(exchange, grads, states, seed=case.seed + number)
        ranks = zip(states, grads, results, strict=True)
        found.append(
            (
                results[0][0],
                [MomentumStep(old, g, given, new) for old, g, (_, given, new) in ranks],
            )
        )
        states = [state for _, _, state in results]
    return found


def law_what_momentum_adds_arrives_or_waits(
    exchange: MomentumCorrection, case: Case
) -> None:
    """Conservation: sum of (old v + u) = W * mean + sum of new v; with Nesterov g + m u
    for u.

    To do: add the velocity to what is pending once a step, and take away only what was
    contributed.
    """
    m = exchange.momentum
    for number, (mean_N, ranks) in enumerate(_steps(exchange, case)):
        moved = [step.velocity(m) for step in ranks]
        if exchange.nesterov:
            moved = [
                step.grad_N + m * u_N for step, u_N in zip(ranks, moved, strict=True)
            ]
        old = [step.before.residual_N for step in ranks]
        new = [step.after.residual_N for step in ranks]
        assert_near(
            case.world * mean_N.double() + total_of(new),
            total_of(old) + total_of(moved),
            coarser(case.dtype, torch.float32),
            magnitude=case.world * largest(mean_N, *moved, *old, *new),
            terms=case.world + 8,
            what=f"step {number}: W * mean + new v against old v + u",
        )


def law_contributions_make_the_mean(exchange: MomentumCorrection, case: Case) -> None:
    """The sum of what ranks contributed is W * mean.

    To do: return as contributed_N what of this rank's gradient is in the mean, in the
    working dtype, and not what was meant to be.
    """
    for number, (mean_N, ranks) in enumerate(_steps(exchange, case)):
        given = [step.contributed_N for step in ranks]
        must(
            all(c.dtype == working_dtype(case.dtype) for c in given),
            f"contributed in {given[0].dtype}, and not in the working dtype",
        )
        assert_near(
            total_of(given),
            case.world * mean_N.double(),
            coarser(case.dtype, torch.float32),
            magnitude=case.world
            * largest(mean_N, *given, *(s.after.residual_N for s in ranks)),
            terms=case.world + 8,
            what=f"step {number}: the sum of contributions against W * mean",
        )


def law_velocity_goes_on_or_is_cleared(
    exchange: MomentumCorrection, case: Case
) -> None:
    """u is 0 exactly where the element left, if another one of its tensor stayed; else
    m u + g.

    To do: clear the velocity of the elements that were sent, and of no others; of no
    tensor all of which was sent.
    """
    for number, (_, ranks) in enumerate(_steps(exchange, case)):
        for rank, step in enumerate(ranks):
            left_N = step.contributed_N != 0
            whole_N = step.contributed_N.double() + step.after.residual_N.double()
            stayed = torch.split(
                ~left_N & (whole_N != 0), list(tensor_sizes(case.spec))
            )
            is_masked_N = left_N & torch.cat(
                [one.any().expand_as(one) for one in stayed]
            )
            masks = exchange.masking and case.world > 1
            fresh_N = step.velocity(exchange.momentum)
            assert_near(
                step.after.velocity_N,
                fresh_N.masked_fill(is_masked_N, 0.0) if masks else fresh_N,
                torch.float32,
                magnitude=largest(fresh_N, step.before.velocity_N),
                terms=4,
                what=f"step {number}, rank {rank}: the velocity",
            )


def law_velocity_stays_finite(exchange: MomentumCorrection, case: Case) -> bool:
    """An inf or NaN of one rank is in no velocity afterwards, and in no later mean.

    To do: set the velocity to 0 at what is not finite.
    """
    if not case.numel:
        return False
    for spoil in (float("nan"), float("inf"), -float("inf")):
        grads = case.grads()
        grads[-1][case.numel // 2] = spoil
        results = run_local(exchange, grads, case.states(exchange), seed=case.seed)
        states = [state for _, _, state in results]
        for rank, state in enumerate(states):
            must(
                bool(state.velocity_N.isfinite().all()),
                f"rank {rank} keeps the {spoil}",
            )
        for mean_N, _, _ in run_local(exchange, case.grads(1), states, seed=case.seed):
            must(bool(mean_N.isfinite().all()), f"a {spoil} came back in the next step")
    return True


def law_alone_is_momentum_sgd(exchange: MomentumCorrection, case: Case) -> None:
    """Among one rank means are what torch.optim.SGD steps by, bit for bit in working
    dtypes.

    To do: compute u = m u + g in the working dtype, without dampening.
    """
    m = exchange.momentum
    states = [exchange.init(case.spec, 1)]
    buffer_N = torch.zeros(case.numel, dtype=working_dtype(case.dtype))
    for number in range(NUM_STEPS):
        grad_N = case.grads(number)[0]
        buffer_N = buffer_N * m + grad_N
        want_N = grad_N + buffer_N * m if exchange.nesterov else buffer_N
        [(mean_N, _, state)] = run_local(exchange, [grad_N], states)
        states = [state]
        if case.dtype == buffer_N.dtype and not exchange.nesterov:
            must(torch.equal(mean_N, want_N), f"step {number}: not momentum's bits")
        assert_near(
            mean_N,
            want_N,
            case.dtype,
            magnitude=largest(want_N, grad_N),
            terms=4 * (number + 1),
            what=f"step {number}: the mean against momentum SGD's step",
        )


def law_without_momentum_it_is_error_feedback(
    exchange: MomentumCorrection, case: Case
) -> None:
    """Momentum 0 leaves only the residual: means and residuals are error feedback's.

    To do: keep what is pending as with_error_feedback does.
    """
    plain = type(exchange)(exchange.inner, 0.0)
    kept = with_error_feedback(exchange.inner)
    states = case.states(plain)
    others = case.states(kept)
    for number in range(NUM_STEPS):
        got = run_local(plain, case.grads(number), states, seed=case.seed)
        want = run_local(kept, case.grads(number), others, seed=case.seed)
        states, others = ([state for _, _, state in results] for results in (got, want))
        for a, b in zip(got, want, strict=True):
            must(same_bits(a[0], b[0]), f"step {number}: the means differ")
            must(
                torch.equal(a[2].residual_N, b[2].residual_N),
                f"step {number}: residuals differ",
            )


LAWS = laws_in(globals())
