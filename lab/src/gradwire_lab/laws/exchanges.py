"""The laws of exchanges: each takes an exchange without error feedback, and a case.

Where a law is about error feedback it wraps the exchange itself. Residuals are found by
``gw.residuals``, so an exchange that keeps its own account is held to the same laws.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradwire.contract import Exchange, Result, State
from gradwire.contract.spec import TensorSpec, working_dtype
from gradwire.contract.state import leaves
from gradwire.contract.verbs import Steps
from gradwire.exchange.by_name import clone_state, definition, run_local
from gradwire.exchange.error_feedback import ErrorFeedback, nested
from gradwire.exchange.pair import Pair

from . import ahead, many_steps, skipped
from .cases import (
    Case,
    accuracy,
    kept_of,
    states_of,
    stepped,
    tensors_of,
    total_of,
)
from .collectives import Undefined
from .tolerance import (
    all_same_bits,
    assert_near,
    is_finite,
    largest,
    laws_in,
    must,
    same_bits,
)

NUM_STEPS = 4


@dataclass(frozen=True)
class RunOnly(Exchange):
    """An exchange that knows only ``run``: its ``synchronise`` is that of the base
    class.
    """

    inner: Exchange

    @property
    def ranks_per_host(self) -> int:
        return self.inner.ranks_per_host

    def init(self, spec: TensorSpec, world: int) -> State:
        return self.inner.init(spec, world)

    def run(self, rank: int, world: int, state: State, grad_N: Tensor) -> Steps[Result]:
        return definition(self.inner, rank, world, state, grad_N)


def _assert_same_results(got: list[Any], want: list[Any], what: str) -> None:
    for rank, (a, b) in enumerate(zip(got, want, strict=True)):
        must(same_bits(a[0], b[0]), f"rank {rank}: {what}: the means differ")
        must(
            same_bits(a[1], b[1]), f"rank {rank}: {what}: what was contributed differs"
        )
        must(
            all_same_bits(tensors_of(a[2]), tensors_of(b[2])),
            f"rank {rank}: {what}: states differ",
        )


def law_nothing_is_lost_or_made(exchange: Exchange, case: Case) -> None:
    """Conservation: sum of (gradient + old residual) = W * mean + sum of new residuals.

    To do: whoever loses something, at a re-encoding too, keeps it in its own residual;
    what arrived leaves the residual.
    """
    kept = ErrorFeedback(exchange)
    states = case.states(kept)
    old_N = torch.zeros(case.numel, dtype=torch.float64)
    for step in range(NUM_STEPS):
        grads = case.grads(step)
        results = run_local(kept, grads, states, seed=case.seed + step)
        states = states_of(results)
        new_N = total_of([kept_of(state, case.numel) for state in states])
        size = largest(*grads, *(kept_of(state, case.numel) for state in states))
        assert_near(
            case.world * results[0][0].double() + new_N,
            total_of(grads) + old_N,
            accuracy(exchange, case),
            magnitude=case.world * size,
            terms=case.world + 4,
            what=f"step {step}: W * mean + new residuals against gradients + old "
            "residuals",
        )
        old_N = new_N


def law_contributions_make_the_mean(exchange: Exchange, case: Case) -> None:
    """The sum of what ranks contributed is W * mean, with and without error feedback.

    To do: return as contributed_N what of this rank's gradient is in the mean, in the
    working dtype, and not what was meant to be.
    """
    for tried in (exchange, ErrorFeedback(exchange)):
        states = case.states(tried)
        for step in range(2):
            grads = case.grads(step)
            results = run_local(tried, grads, states, seed=case.seed)
            states = states_of(results)
            parts = [contributed_N for _, contributed_N, _ in results]
            must(
                all(part.dtype == working_dtype(case.dtype) for part in parts),
                f"contributed in {parts[0].dtype}, and not in the working dtype",
            )
            assert_near(
                total_of(parts),
                case.world * results[0][0].double(),
                accuracy(exchange, case),
                magnitude=case.world * max(2 * largest(*grads), largest(*parts)),
                terms=case.world + 4,
                what=f"step {step}: the sum of contributions against W * mean",
            )


def law_contributed_is_what_left_the_residual(exchange: Exchange, case: Case) -> None:
    """On each rank gradient + old residual = contributed + new residual.

    To do: take from the residual exactly what is returned as contributed.
    """
    kept = ErrorFeedback(exchange)
    states = case.states(kept)
    old = [torch.zeros(case.numel, dtype=torch.float64) for _ in range(case.world)]
    for step in range(2):
        grads = case.grads(step)
        results = run_local(kept, grads, states, seed=case.seed)
        states = states_of(results)
        for rank, (_, contributed_N, state) in enumerate(results):
            new_N = kept_of(state, case.numel)
            assert_near(
                contributed_N.double() + new_N,
                grads[rank].double() + old[rank],
                torch.float32,
                magnitude=largest(grads[rank], old[rank], contributed_N, new_N),
                terms=4,
                what=f"step {step}, rank {rank}: contributed + new residual",
            )
            old[rank] = new_N


def law_kept_buffers_change_no_bit(exchange: Exchange, case: Case) -> None:
    """Means and states are those that new buffers give, bit for bit.

    Over two steps with error feedback, and in one without. Kept buffers hold NaN each
    time they are asked for. The definition with new buffers gives every exchange a
    residual, and there is none otherwise.

    To do: write every element of what me.scratch(...) gives before it is read, and
    compute the same with a residual of zeros as without one.
    """
    for tried, num_steps in ((exchange, 1), (ErrorFeedback(exchange), 2)):
        states = case.states(tried)
        members = [Undefined(rank, case.world) for rank in range(case.world)]
        for step in range(num_steps):
            grads = case.grads(step)
            want = run_local(tried, grads, states, seed=case.seed)
            outs = [torch.full_like(g, 3.0) for g in grads]
            before = clone_state(tuple(states))
            states = stepped(tried, members, before, grads, case.seed, outs)
            got = [(outs[r], want[r][1], states[r]) for r in range(case.world)]
            _assert_same_results(
                got, want, f"step {step}: kept buffers against new ones"
            )


def law_fused_form_agrees_with_the_definition(exchange: Exchange, case: Case) -> bool:
    """``synchronise`` with a residual does what the base class makes of ``run``.

    From one common state, because an exchange may cut and round elsewhere. Not for
    16-bit gradients: there the definition rounds the sum before it is encoded, and so
    has another wire. What tells the gradient from the residual knows only the sum
    there: the two agree without one.

    To do: exchange grad_N + residual_N, and leave in residual_N that sum less what was
    contributed.
    """
    if working_dtype(case.dtype) != case.dtype:
        return False
    fused = ErrorFeedback(exchange)
    defined = ErrorFeedback(RunOnly(exchange))
    states = case.states(fused)
    if not (isinstance(exchange, Pair) and exchange.codec.traits.reads_latest):
        states = states_of(run_local(fused, case.grads(), states, seed=case.seed))
    grads = case.grads(step=1)
    got = run_local(fused, grads, states, seed=case.seed)
    want = run_local(defined, grads, states, seed=case.seed)
    size = largest(*grads, *(kept_of(state, case.numel) for state in states))
    for rank in range(case.world):
        own_result = got[rank]
        other = want[rank]
        for what, a_N, b_N in (
            ("mean", own_result[0], other[0]),
            (
                "residual",
                kept_of(own_result[2], case.numel),
                kept_of(other[2], case.numel),
            ),
        ):
            assert_near(
                a_N,
                b_N,
                accuracy(exchange, case),
                magnitude=case.world * size,
                terms=8,
                what=f"rank {rank}: the {what} against its definition",
            )
    return True


def _after_a_step(exchange: Exchange, case: Case, seed: int) -> list[Any]:
    results = run_local(exchange, case.grads(), case.states(exchange), seed=seed)
    return states_of(results)


def law_callers_tensors_untouched(exchange: Exchange, case: Case) -> None:
    """``run_local`` changes neither gradients nor the states it is given.

    To do: return a new state; write neither grad_N nor tensors of the state in run.
    """
    kept = ErrorFeedback(exchange)
    states = _after_a_step(kept, case, case.seed)
    before = clone_state(tuple(states))
    grads = case.grads(step=1)
    run_local(kept, grads, states, seed=case.seed)
    must(all_same_bits(grads, case.grads(step=1)), "a gradient was written")
    must(
        all_same_bits(tensors_of(tuple(states)), tensors_of(before)),
        "a state that the caller holds was written",
    )


def law_repeatable_under_any_interleaving(exchange: Exchange, case: Case) -> None:
    """Means, contributions and states are the same whichever rank runs first.

    To do: merge by rank and never by arrival, and draw from a seed in the state.
    """
    kept = ErrorFeedback(exchange)
    states = _after_a_step(kept, case, 0)
    want = run_local(kept, case.grads(step=1), states, seed=0)
    for seed in (0, 1):
        got = run_local(kept, case.grads(step=1), states, seed=seed)
        _assert_same_results(got, want, f"interleaving {seed}")


def law_non_finite_reaches_all_and_does_not_stay(
    exchange: Exchange, case: Case
) -> bool:
    """An inf or NaN of one rank is in the mean on all, in no residual, and gone in the
    next step.

    To do: send what is not finite instead of dropping it, and set residuals at it to 0.
    """
    if not case.numel:
        return False
    kept = ErrorFeedback(exchange)
    before = _after_a_step(kept, case, case.seed)
    for spoil in (float("nan"), float("inf"), -float("inf")):
        grads = case.grads(step=1)
        grads[-1][case.numel // 2] = spoil
        results = run_local(kept, grads, before, seed=case.seed)
        for rank, (mean_N, _, state) in enumerate(results):
            must(not is_finite(mean_N), f"rank {rank} does not see the {spoil}")
            must(
                is_finite(kept_of(state, case.numel)),
                f"rank {rank} keeps the {spoil} in its residual",
            )
        for mean_N, _, _ in run_local(
            kept, case.grads(step=2), states_of(results), seed=case.seed
        ):
            must(is_finite(mean_N), f"a {spoil} came back in the next step")
    return True


def law_an_undone_step_leaves_no_trace(exchange: Exchange, case: Case) -> bool:
    """Once the state before a step is put back, the next step is as if that one had
    never been.

    The undone step has an inf on one rank, for which a loss scaler would skip it.

    To do: keep all that a later step needs in the state, and none of it in self or in
    buffers.
    """
    if not case.numel:
        return False
    kept = ErrorFeedback(exchange)
    outcomes = []
    for steps in ((0, 1, 2), (0, 2)):
        members = case.members()
        states = case.states(kept)
        for step in steps:
            grads = case.grads(step)
            before = clone_state(tuple(states))
            if step == 1:
                grads[-1][case.numel // 2] = torch.inf
            states = stepped(kept, members, states, grads, step)
            if step == 1:
                states = [*before]
        outcomes.append([*grads, *tensors_of(tuple(states))])
    must(all_same_bits(*outcomes), "an undone step changed the next one")
    return True


def law_residual_finite_for_huge_gradients(exchange: Exchange, case: Case) -> None:
    """Residuals stay finite for gradients near the end of their dtype's range.

    To do: keep residuals in working_dtype(grad_N.dtype), and replace what overflowed in
    them by 0.
    """
    kept = ErrorFeedback(exchange)
    states = case.states(kept)
    for step in range(2):
        grads = [g.sign() * (0.85 * torch.finfo(g.dtype).max) for g in case.grads(step)]
        grads = [
            g * torch.rand(len(g), generator=_seeded(r)).to(g)
            for r, g in enumerate(grads)
        ]
        states = states_of(run_local(kept, grads, states, seed=case.seed))
        for rank, state in enumerate(states):
            must(
                is_finite(kept_of(state, case.numel)),
                f"step {step}: the residual of rank {rank} overflowed",
            )


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def law_alone_is_plain_training(exchange: Exchange, case: Case) -> None:
    """Among one rank the mean is the gradient, bit for bit, and nothing is kept.

    To do: begin synchronise with: if me.world == 1: yield from
    synchronise_alone(grad_N, out_N, residual_N).
    """
    for tried in (exchange, ErrorFeedback(exchange)):
        states = [tried.init(case.spec, 1)]
        for step in range(2):
            grad_N = case.grads(step)[0]
            [(mean_N, contributed_N, state)] = run_local(tried, [grad_N], states)
            must(same_bits(mean_N, grad_N), "alone, the mean is not the gradient")
            must(
                same_bits(contributed_N, grad_N.to(contributed_N.dtype)),
                "contributed is not",
            )
            must(
                not bool(kept_of(state, case.numel).any()), "alone, something was kept"
            )
            states = [state]


def law_tensors_are_encoded_apart(exchange: Exchange, case: Case) -> bool:
    """Where elements share a scale, a tensor's mean does not depend on the tensors
    beside it.

    To do: encode each tensor of a message by itself, as pair does for codecs that
    declare shared_scale=True.
    """
    if not isinstance(exchange, Pair) or not exchange.codec.traits.shared_scale:
        return False
    kept = ErrorFeedback(exchange)
    first = prod(case.spec.shapes[0])

    def of_first(factor: float) -> list[Tensor]:
        grads = case.grads()
        for grad_N in grads:
            grad_N[first:] *= factor
        return [
            mean_N[:first] for mean_N, _, _ in run_local(kept, grads, case.states(kept))
        ]

    for mean_N, other_N in zip(of_first(1.0), of_first(1000.0), strict=True):
        must(
            same_bits(mean_N, other_N),
            "the mean of the first tensor changes when the gradients of the others do",
        )
    return True


def law_no_tensor_is_missing(exchange: Exchange, case: Case) -> bool:
    """Something of each tensor is sent, however small beside others, where
    ``every_tensor`` is set.

    Each rank, of every tensor whose gradient is not all zeros.

    To do: select in each tensor of TensorSpec.shapes by itself, at least one element
    that is not 0, or do not declare every_tensor.
    """
    if exchange.traits is None or not exchange.traits.every_tensor:
        return False
    sizes = [prod(shape) for shape in case.spec.shapes]
    for kept in (exchange, ErrorFeedback(exchange)):
        grads = case.grads()
        for grad_N in grads:
            for number, part in enumerate(torch.split(grad_N, sizes)):
                part *= 100.0 ** (-number)
        grads[-1][: sizes[0]] = 0.0
        results = run_local(kept, grads, case.states(kept), seed=case.seed)
        for rank, (_, contributed_N, _) in enumerate(results):
            given_T = torch.split(grads[rank], sizes)
            sent_T = torch.split(contributed_N, sizes)
            for number, (given, sent) in enumerate(zip(given_T, sent_T, strict=True)):
                must(
                    bool(sent.any()) or not bool(given.any()),
                    f"rank {rank} sends nothing of tensor {number} of {sizes} elements",
                )
    return True


def law_whole_numbers_of_the_state_are_shared(exchange: Exchange, case: Case) -> bool:
    """Whole numbers of the state, and fields that it ``decides_by``, are the same on
    all ranks.

    Fields with a value for each element, whose names end in ``_N``, are each rank's
    own. Checkpoints compare the others.

    To do: count what all ranks know, or keep a rank's own figure as a floating-point
    number.
    """
    if exchange.ranks_per_host > 1:
        return False
    states = case.states(exchange)
    for step in range(NUM_STEPS):
        states = states_of(
            run_local(exchange, case.grads(step), states, seed=case.seed)
        )
    deciding = {name for part in nested(exchange) for name in part.decides_by}
    first, *others = (dict(leaves(state)) for state in states)
    for path, held in first.items():
        decides = not held.is_floating_point() or not deciding.isdisjoint(
            path.split(".")
        )
        if path.endswith("_N") or not decides:
            continue
        for rank, other in enumerate(others, 1):
            is_same = path in other and torch.equal(held, other[path])
            must(
                is_same,
                f"{path} is {held.tolist()} on rank 0, and another on rank {rank}",
            )
    return True


LAWS = (
    *laws_in(globals()),
    *ahead.LAWS,
    *many_steps.LAWS,
    *skipped.LAWS,
)
OF_ANY_ACCOUNT = (
    law_kept_buffers_change_no_bit,
    law_callers_tensors_untouched,
    law_repeatable_under_any_interleaving,
    law_non_finite_reaches_all_and_does_not_stay,
    law_residual_finite_for_huge_gradients,
)
"""Laws that hold for exchanges with an account of their own too, as momentum is."""
