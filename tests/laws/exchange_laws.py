"""The laws of exchanges: each takes an exchange without error feedback, and a case.

Where a law is about error feedback it wraps the exchange itself. Residuals are found by
``gw.residuals``, so an exchange that keeps its own account is held to the same laws.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradwire.collective._local import drive
from gradwire.collective._verbs import Steps
from gradwire.contract import Exchange, Member, Result, State
from gradwire.error_feedback import (
    ErrorFeedback,
    feedback_refusal,
    residuals,
    synchronise,
    with_error_feedback,
)
from gradwire.exchange import clone_state, run_local
from gradwire.pairing import Pair
from gradwire.spec import TensorSpec, working_dtype

from .cases import Case
from .tolerance import assert_near, largest, same_bits

NUM_STEPS = 4
NUM_KEPT_STEPS = 60
"""Steps with gradients and steps without, where a law is about what is kept."""
NUM_DRAWS = 100
"""Steps, where a law is about what is drawn."""


@dataclass(frozen=True)
class RunOnly(Exchange):
    """An exchange that knows only ``run``: its ``synchronise`` is the base class's definition."""

    inner: Exchange

    def init(self, spec: TensorSpec, world: int) -> State:
        return self.inner.init(spec, world)

    def run(self, rank: int, world: int, state: State, grad_N: Tensor) -> Steps[Result]:
        return self.inner.run(rank, world, state, grad_N)


def accuracy(exchange: Exchange, case: Case) -> torch.dtype:
    """The dtype to whose rounding an exchange must balance.

    Float32, unless the mean is of 16 bits itself, or a library sums 16-bit payloads on the way,
    whose rounding no rank sees.
    """
    coarsest = max(case.dtype, torch.float32, key=lambda d: torch.finfo(d).eps)
    if not isinstance(exchange, Pair):
        return coarsest
    if exchange.collective.needs.additive and not exchange.codec.traits.exact_sum:
        wire = exchange.codec.format(case.spec).fields[0].dtype
        return max(coarsest, wire, key=lambda d: torch.finfo(d).eps)
    return coarsest


def _total(tensors: list[Tensor]) -> Tensor:
    return torch.stack([t.double() for t in tensors]).sum(0)


def _residual(state: State, numel: int) -> Tensor:
    """All that a rank keeps for later."""
    kept = [t.double() for t in residuals(state).values()]
    return torch.stack(kept).sum(0) if kept else torch.zeros(numel, dtype=torch.float64)


def _states(results: list[Any]) -> list[State]:
    return [state for _, _, state in results]


def _tensors(state: State) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    parts = state if isinstance(state, tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _assert_same_results(got: list[Any], want: list[Any], what: str) -> None:
    for rank, (a, b) in enumerate(zip(got, want, strict=True)):
        assert same_bits(a[0], b[0]), f"rank {rank}: {what}: the means differ"
        assert same_bits(a[1], b[1]), f"rank {rank}: {what}: what was contributed differs"
        pairs = zip(_tensors(a[2]), _tensors(b[2]), strict=True)
        assert all(same_bits(x, y) for x, y in pairs), f"rank {rank}: {what}: states differ"


def law_nothing_is_lost_or_made(exchange: Exchange, case: Case) -> None:
    """Conservation: sum of (gradient + old residual) = W * mean + sum of new residuals."""
    kept = ErrorFeedback(exchange)
    states = case.states(kept)
    old_N = torch.zeros(case.numel, dtype=torch.float64)
    for step in range(NUM_STEPS):
        grads = case.grads(step)
        results = run_local(kept, grads, states, seed=case.seed + step)
        states = _states(results)
        new_N = _total([_residual(state, case.numel) for state in states])
        size = largest(*grads, *(_residual(state, case.numel) for state in states))
        assert_near(
            case.world * results[0][0].double() + new_N,
            _total(grads) + old_N,
            accuracy(exchange, case),
            magnitude=case.world * size,
            terms=case.world + 4,
            what=f"step {step}: W * mean + new residuals against gradients + old residuals",
        )
        old_N = new_N


def law_contributions_make_the_mean(exchange: Exchange, case: Case) -> None:
    """Sum of what ranks contributed = W * mean, with and without error feedback."""
    for tried in (exchange, ErrorFeedback(exchange)):
        states = case.states(tried)
        for step in range(2):
            grads = case.grads(step)
            results = run_local(tried, grads, states, seed=case.seed)
            states = _states(results)
            given = [contributed_N for _, contributed_N, _ in results]
            assert all(c.dtype == working_dtype(case.dtype) for c in given)
            assert_near(
                _total(given),
                case.world * results[0][0].double(),
                accuracy(exchange, case),
                magnitude=case.world * max(2 * largest(*grads), largest(*given)),
                terms=case.world + 4,
                what=f"step {step}: the sum of contributions against W * mean",
            )


def law_contributed_is_what_left_the_residual(exchange: Exchange, case: Case) -> None:
    """On each rank: gradient + old residual = contributed + new residual."""
    kept = ErrorFeedback(exchange)
    states = case.states(kept)
    old = [torch.zeros(case.numel, dtype=torch.float64) for _ in range(case.world)]
    for step in range(2):
        grads = case.grads(step)
        results = run_local(kept, grads, states, seed=case.seed)
        states = _states(results)
        for rank, (_, contributed_N, state) in enumerate(results):
            new_N = _residual(state, case.numel)
            assert_near(
                contributed_N.double() + new_N,
                grads[rank].double() + old[rank],
                torch.float32,
                magnitude=largest(grads[rank], old[rank], contributed_N, new_N),
                terms=4,
                what=f"step {step}, rank {rank}: contributed + new residual",
            )
            old[rank] = new_N


def law_synchronise_agrees_with_run(exchange: Exchange, case: Case) -> None:
    """Means and states bit for bit, over two steps, with and without error feedback."""
    for tried in (exchange, ErrorFeedback(exchange)):
        states = case.states(tried)
        members = [Member(rank, case.world) for rank in range(case.world)]
        for step in range(2):
            grads = case.grads(step)
            want = run_local(tried, grads, states, seed=case.seed)
            outs = [torch.full_like(g, 3.0) for g in grads]
            steps = [
                synchronise(tried, members[r], clone_state(states[r]), grads[r], outs[r])
                for r in range(case.world)
            ]
            states = drive(steps, seed=case.seed).results
            got = [(outs[r], want[r][1], states[r]) for r in range(case.world)]
            _assert_same_results(got, want, f"step {step}: synchronise against run")


def law_fused_form_agrees_with_the_definition(exchange: Exchange, case: Case) -> None:
    """``synchronise`` with a residual does what the base class says in terms of ``run``.

    From one common state, because an exchange may cut and round elsewhere. Not for 16-bit
    gradients: there the definition rounds the sum before it is encoded, and so has another wire.
    What tells the gradient from the residual knows only the sum there: the two agree without one.
    """
    if working_dtype(case.dtype) != case.dtype:
        return
    fused, defined = ErrorFeedback(exchange), ErrorFeedback(RunOnly(exchange))
    states = case.states(fused)
    if not (isinstance(exchange, Pair) and exchange.codec.traits.reads_latest):
        states = _states(run_local(fused, case.grads(), states, seed=case.seed))
    grads = case.grads(step=1)
    got = run_local(fused, grads, states, seed=case.seed)
    want = run_local(defined, grads, states, seed=case.seed)
    size = largest(*grads, *(_residual(state, case.numel) for state in states))
    for rank in range(case.world):
        for what, a, b in (
            ("mean", got[rank][0], want[rank][0]),
            ("residual", *(_residual(r[rank][2], case.numel) for r in (got, want))),
        ):
            assert_near(
                a,
                b,
                accuracy(exchange, case),
                magnitude=case.world * size,
                terms=8,
                what=f"rank {rank}: the {what} against its definition",
            )


def law_callers_tensors_untouched(exchange: Exchange, case: Case) -> None:
    """``run_local`` changes neither gradients nor the states it is given."""
    kept = ErrorFeedback(exchange)
    states = _states(run_local(kept, case.grads(), case.states(kept), seed=case.seed))
    before = clone_state(tuple(states))
    grads = case.grads(step=1)
    run_local(kept, grads, states, seed=case.seed)
    for now_N, was_N in zip(grads, case.grads(step=1), strict=True):
        assert same_bits(now_N, was_N), "a gradient was written"
    for now_N, was_N in zip(_tensors(tuple(states)), _tensors(before), strict=True):
        assert same_bits(now_N, was_N), "a state that the caller holds was written"


def law_repeatable_under_any_interleaving(exchange: Exchange, case: Case) -> None:
    kept = ErrorFeedback(exchange)
    states = _states(run_local(kept, case.grads(), case.states(kept), seed=0))
    want = run_local(kept, case.grads(step=1), states, seed=0)
    for seed in (0, 1, 2):
        got = run_local(kept, case.grads(step=1), states, seed=seed)
        _assert_same_results(got, want, f"interleaving {seed}")


def law_non_finite_reaches_all_and_does_not_stay(exchange: Exchange, case: Case) -> None:
    """inf or NaN on one rank: in the mean on all ranks, in no residual, gone in the next step."""
    if not case.numel:
        return
    kept = ErrorFeedback(exchange)
    before = _states(run_local(kept, case.grads(), case.states(kept), seed=case.seed))
    for spoil in (float("nan"), float("inf"), -float("inf")):
        grads = case.grads(step=1)
        grads[-1][case.numel // 2] = spoil
        results = run_local(kept, grads, before, seed=case.seed)
        for rank, (mean_N, _, state) in enumerate(results):
            assert not bool(mean_N.isfinite().all()), f"rank {rank} does not see the {spoil}"
            assert bool(_residual(state, case.numel).isfinite().all()), (
                f"rank {rank} keeps the {spoil} in its residual"
            )
        for mean_N, _, _ in run_local(kept, case.grads(step=2), _states(results), seed=case.seed):
            assert bool(mean_N.isfinite().all()), f"a {spoil} came back in the next step"


def law_residual_finite_for_huge_gradients(exchange: Exchange, case: Case) -> None:
    """Whatever overflows on the way, no residual does."""
    kept = ErrorFeedback(exchange)
    states = case.states(kept)
    for step in range(2):
        grads = [g.sign() * (0.85 * torch.finfo(g.dtype).max) for g in case.grads(step)]
        grads = [g * torch.rand(len(g), generator=_seeded(r)).to(g) for r, g in enumerate(grads)]
        states = _states(run_local(kept, grads, states, seed=case.seed))
        for rank, state in enumerate(states):
            assert bool(_residual(state, case.numel).isfinite().all()), (
                f"step {step}: the residual of rank {rank} overflowed"
            )


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def law_alone_is_plain_training(exchange: Exchange, case: Case) -> None:
    """Among one rank the mean is the gradient, bit for bit, and nothing is kept."""
    for tried in (exchange, ErrorFeedback(exchange)):
        states = [tried.init(case.spec, 1)]
        for step in range(2):
            grad_N = case.grads(step)[0]
            [(mean_N, contributed_N, state)] = run_local(tried, [grad_N], states)
            assert same_bits(mean_N, grad_N), "alone, the mean is not the gradient"
            assert same_bits(contributed_N, grad_N.to(contributed_N.dtype)), "contributed is not"
            assert not bool(_residual(state, case.numel).any()), "alone, something was kept"
            states = [state]


@lru_cache(maxsize=1)
def _drawn(exchange: Pair, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """What becomes of equal gradients on all ranks in S steps, in float64.

    The gradient_N, means_SN, and what ranks contributed, given_SWN.
    """
    states, means, given = None, [], []
    for _ in range(NUM_DRAWS):
        results = run_local(exchange, case.grads()[:1] * case.world, states, seed=case.seed)
        states = _states(results)
        means.append(results[0][0].double())
        given.append(torch.stack([contributed_N.double() for _, contributed_N, _ in results]))
    return case.grads()[0].double(), torch.stack(means), torch.stack(given)


def _rounds_at_random(exchange: Exchange, case: Case) -> bool:
    """Whether the codec is unbiased, and the case large enough for statistics."""
    traits = exchange.codec.traits if isinstance(exchange, Pair) else None
    is_random = traits is not None and traits.unbiased and not traits.lossless
    return is_random and case.world > 1 and case.numel >= 200 and case.dtype == torch.float32


def law_ranks_draw_apart(exchange: Exchange, case: Case) -> None:
    """Equal gradients are rounded on each rank by itself, where rounding is drawn.

    Then the mean has 1/W of the variance of what a rank contributes. Were the same numbers drawn
    everywhere, it would have all of it.
    """
    if not isinstance(exchange, Pair) or not _rounds_at_random(exchange, case):
        return
    grad_N, means_SN, given_SWN = _drawn(exchange, case)
    of_mean, of_one = (float((t - grad_N).square().mean()) for t in (means_SN, given_SWN))
    share = case.world * of_mean / of_one
    assert 0.8 < share < 1.25, f"the mean has {share:.3g} / W of the variance of one"


def law_unbiased_codecs_make_unbiased_means(exchange: Exchange, case: Case) -> None:
    """Also where the mean is encoded again: the numbers drawn for it were not used before.

    Over steps and elements, means miss the gradient by no more than chance has them miss it.
    """
    if not isinstance(exchange, Pair) or not _rounds_at_random(exchange, case):
        return
    grad_N, means_SN, _ = _drawn(exchange, case)
    spread_N = means_SN.std(0)
    is_spread_N = spread_N > 0.3 * spread_N.median()  # others were drawn too few times
    off_N = (means_SN.mean(0) - grad_N) * NUM_DRAWS**0.5 / spread_N
    chance = float(off_N[is_spread_N].square().mean())
    assert chance < 1.25, f"means miss by {chance**0.5:.3g} times what is to be expected"


def law_tensors_are_encoded_apart(exchange: Exchange, case: Case) -> None:
    """Where elements share a scale, what becomes of a tensor does not depend on those beside it."""
    if not isinstance(exchange, Pair) or not exchange.codec.traits.shared_scale:
        return
    kept, first = ErrorFeedback(exchange), prod(case.spec.shapes[0])

    def of_first(factor: float) -> list[Tensor]:
        grads = case.grads()
        for grad_N in grads:
            grad_N[first:] *= factor
        return [mean_N[:first] for mean_N, _, _ in run_local(kept, grads, case.states(kept))]

    for mean_N, other_N in zip(of_first(1.0), of_first(1000.0), strict=True):
        assert same_bits(mean_N, other_N), (
            "the mean of the first tensor changes when the gradients of the others do"
        )


def law_what_is_kept_does_not_grow_by_itself(exchange: Exchange, case: Case) -> None:
    """60 steps of gradients, then 60 of zeros: what was kept is delivered, or stays as it is.

    A loss that comes back larger than it was, through an encoder that is no contraction or through
    one after another, grows in every step. Between ranks what is kept may move: W times at most.
    """
    if feedback_refusal(exchange) is not None:
        return
    kept = with_error_feedback(exchange)
    states, members = case.states(kept), [Member(rank, case.world) for rank in range(case.world)]

    def step(grads: list[Tensor]) -> float:
        texts = [
            synchronise(kept, me, state, grad_N, grad_N)
            for me, state, grad_N in zip(members, states, grads, strict=True)
        ]
        states[:] = drive(texts, seed=case.seed).results
        return float(torch.stack([_residual(state, case.numel) for state in states]).norm())

    for number in range(NUM_KEPT_STEPS):
        before = step(case.grads(number))
    for number in range(NUM_KEPT_STEPS):
        left = step([torch.zeros_like(grad_N) for grad_N in case.grads()])
        assert left <= 2 * case.world * before, (
            f"{number + 1} steps of zeros after gradients, what is kept grew from {before:.3g} to "
            f"{left:.3g}"
        )


LAWS = tuple(found for name, found in sorted(globals().items()) if name.startswith("law_"))
