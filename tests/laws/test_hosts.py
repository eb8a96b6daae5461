"""Exchanges among hosts of several ranks keep the laws of exchanges, and lose nothing
inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.collective.steps.shares import Shares, shares_of
from gradwire.contract import Exchange, Member, State
from gradwire.contract.spec import TensorSpec
from gradwire.contract.state import leaves
from gradwire.contract.verbs import AllGather, Among, Steps, rewritten
from gradwire.errors import InvalidSetting
from gradwire.exchange import two_level
from gradwire.exchange.by_name import exchange_for, run_local
from gradwire.exchange.error_feedback import ErrorFeedback
from gradwire.exchange.local import drive
from gradwire.exchange.two_level import HostState, TwoLevel, on_hosts
from gradwire_lab.laws import collectives, exchanges, many_steps
from gradwire_lab.laws.cases import Case, states_of
from gradwire_lab.laws.tolerance import assert_near, largest, same_bits
from tests.each import each
from tests.laws.cases import SHARES, Shaped, Share, draw_of, name_of, part_of, share_of
from tests.laws.test_laws_bite import rejected

codecs, together, pair = gw.compress, gw.collective, gw.pair


CASES = (
    (2, Case(world=4, numel=300, seed=3)),
    (
        2,
        Shaped(world=6, numel=71, seed=8, shapes=((3, 5), (0, 4), (6, 6), (20,), (0,))),
    ),
    (3, Shaped(world=6, numel=240, seed=9, shapes=((2,), (14, 17)))),
    (2, Shaped(world=4, numel=63, seed=2, shapes=((9, 7),))),
    (3, Case(world=6, numel=9, seed=2)),
    (2, Case(world=2, numel=0)),
    (4, Case(world=8, numel=64, dtype=torch.float64, seed=1)),
    (2, Case(world=4, numel=9, dtype=torch.bfloat16, seed=4)),
    (3, Case(world=6, numel=200, dtype=torch.float16, seed=6)),
    (2, Case(world=1, numel=9)),
    (4, Case(world=4, numel=1, seed=5)),
)
"""Ranks on each host, and all else: some tensors are empty, or fewer than the ranks of
a host, or one has nearly all elements. In one case there are fewer elements than shares
hold.
"""

WHOLE = (
    codecs.powersgd(rank=1),
    codecs.deft(density=0.3),
    codecs.selective(sparsifier="topk", density=0.3),
)
"""Exchanges that take tensors whole."""

PAIRS = (
    pair(codecs.none(), together.allreduce()),
    pair(codecs.none(), together.ring()),
    pair(codecs.cast16(dtype=torch.float16), together.allreduce()),
    pair(codecs.onebit(block=64), together.casync_ps()),
    pair(codecs.onebit(block=64), together.casync_ring()),
    pair(codecs.terngrad(), together.casync_ps()),
    pair(codecs.topk(density=0.3), together.allgather_sparse()),
    pair(codecs.topk(density=0.3), together.zen()),
    *WHOLE,
)


@pytest.mark.parametrize(
    "are_long",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["few steps", "many steps"],
)
@SHARES
@each("inner", PAIRS, ids=name_of)
def test_two_level_exchanges_keep_every_law(
    inner: Exchange, share: Share, are_long: bool
) -> None:
    laws: tuple[Callable[..., Any], ...] = (*exchanges.LAWS, *collectives.OF_ANY)
    cases = CASES[:4] if are_long else CASES
    for law in laws:
        is_chosen = share_of(law, inner, inner in part_of(law, PAIRS, 2)) is share
        if is_chosen and (law in many_steps.LAWS) is are_long:
            place = draw_of("case", law.__name__, name_of(inner)) % len(cases)
            ranks_per_host, case = cases[place]
            law(TwoLevel(inner, ranks_per_host), case)


KEEPING = tuple(
    ErrorFeedback(one)
    for one in (
        pair(codecs.topk(density=0.3), together.allgather_sparse()),
        pair(codecs.onebit(block=64), together.casync_ps()),
        pair(codecs.onebit(block=64), together.casync_ring()),
        pair(codecs.topk(density=0.3), together.zen()),
        *WHOLE,
    )
)


def _kept(states: list[State], shares: Shares, numel: int) -> Tensor:
    """What all ranks keep of a message, each for its whole host."""
    total_N = torch.zeros(numel, dtype=torch.float64)
    for rank, state in enumerate(states):
        own_S = state.inner.residual_N.double()
        part_N = torch.zeros_like(total_N)
        shares.put(own_S, rank % shares.count, part_N)
        total_N += shares.count * part_N
    return total_N


def law_nothing_is_lost_at_either_level(exchange: TwoLevel, case: Case) -> None:
    """Sum of gradients + L * old residuals = W * mean + L * new residuals, element by
    element.
    """
    shares = shares_of(
        case.spec.shapes, exchange.ranks_per_host, exchange.declared.whole_tensors
    )
    states = case.states(exchange)
    for step in range(3):
        grads, old_N = case.grads(step), _kept(states, shares, case.numel)
        results = run_local(exchange, grads, states, seed=case.seed + step)
        states = states_of(results)
        new_N = _kept(states, shares, case.numel)
        assert_near(
            case.world * results[0][0].double() + new_N,
            torch.stack([g.double() for g in grads]).sum(0) + old_N,
            max(case.dtype, torch.float32, key=lambda d: torch.finfo(d).eps),
            magnitude=case.world * largest(*grads, old_N, new_N),
            terms=case.world + 4,
            what=f"step {step}: W * mean + L * new residuals",
        )
        assert all(torch.equal(mean_N, results[0][0]) for mean_N, _, _ in results)


@each("inner", KEEPING)
def test_nothing_is_lost_at_either_level(inner: Exchange) -> None:
    for ranks_per_host, case in CASES:
        if case.world > 1:
            law_nothing_is_lost_at_either_level(TwoLevel(inner, ranks_per_host), case)


class _Early(TwoLevel):
    """Reads the means of others before they are there."""

    def synchronise(self, *given: Any) -> Steps[Any]:
        def each_asked(asked: Any) -> Steps[Any]:
            if isinstance(asked, tuple) and isinstance(asked[0], AllGather):
                asked = asked[1] if asked[0].among is Among.HOST else asked
            return (yield asked)

        return rewritten(super().synchronise(*given), each_asked)


def law_rooms_change_no_bit(exchange: TwoLevel, case: Case) -> None:
    """Ranks that read each other's rooms make the bits of ranks that send, in every
    step.
    """
    found = []
    for lends in (False, True):
        states, means = case.states(exchange), []
        members = [Member(rank, case.world) for rank in range(case.world)]
        for step in range(3):
            outs = case.grads(step)
            each = zip(members, states, outs, strict=True)
            all_steps = [exchange.synchronise(*one, one[2]) for one in each]
            seed, hosts = case.seed + step, exchange.ranks_per_host
            states = drive(
                all_steps, seed=seed, ranks_per_host=hosts, lends=lends
            ).results
            means += outs
        found.append([*means, *(own for state in states for _, own in leaves(state))])
        buffers = [buffer for member in members for buffer in member.buffers]
        assert case.world == 1 or lends is ("sums" not in buffers), (
            "rooms were not used"
        )
    assert all(map(same_bits, *found)), "rooms change bits"


@each("place", range(len(PAIRS)), ids=lambda at: name_of(PAIRS[at]))
def test_rooms_change_no_bit(place: int) -> None:
    for ranks_per_host, case in CASES[place % len(CASES) :: len(PAIRS)]:
        law_rooms_change_no_bit(TwoLevel(PAIRS[place], ranks_per_host), case)


def test_the_law_of_rooms_bites() -> None:
    with rejected(by=law_rooms_change_no_bit):
        for seed in range(4):
            law_rooms_change_no_bit(
                _Early(PAIRS[0], 2), Case(world=4, numel=64, seed=seed)
            )


LONG = Case(world=4, numel=2 * two_level._BLOCK + 7, seed=6)
"""On hosts of two ranks a share is longer than what is added up at once."""


_write_mean = two_level._write_mean
_average = two_level._HostMean.average


def _first_block(parts: Sequence[Tensor], into: Tensor) -> None:
    """Adds up the first block of a share, and leaves the others as they lie there."""
    block = slice(0, two_level._BLOCK)
    _write_mean([part_S[block] for part_S in parts], into[block])


def test_shares_of_several_blocks_lose_nothing() -> None:
    law_nothing_is_lost_at_either_level(TwoLevel(KEEPING[0], 2), LONG)
    law_rooms_change_no_bit(TwoLevel(PAIRS[0], 2), LONG)
    with (
        patch.object(two_level, "_write_mean", _first_block),
        rejected(by=law_nothing_is_lost_at_either_level),
    ):
        law_nothing_is_lost_at_either_level(TwoLevel(KEEPING[0], 2), LONG)


def _sums_only(parts: Sequence[Tensor], into: Tensor) -> None:
    """Hands the host's sum on as if it were its mean."""
    into.copy_(torch.stack([*parts]).sum(0))


def _one_rank_alone(parts: Sequence[Tensor], into: Tensor) -> None:
    """Lets only the first rank of a host count."""
    into.copy_(parts[0])


class _Forgetful(TwoLevel):
    """Begins each step with an empty residual."""

    def synchronise(self, me: Member, state: Any, *given: Any) -> Steps[Any]:
        state.inner.residual_N.zero_()
        after = yield from super().synchronise(me, state, *given)
        return after


def _drops_a_tensor(host: Any) -> None:
    """Lets the owner of the message's first tensor exchange zeros in its place."""
    _average(host)
    first = host.pending.shares.ranges(host.pending.place)[0]
    host.mean_S[first.place : first.place + first.stop - first.start] = 0


WRONG: dict[str, AbstractContextManager[Any]] = {
    "forgets the residual": patch.object(two_level, "TwoLevel", _Forgetful),
    "sums only": patch.object(two_level, "_write_mean", _sums_only),
    "one rank alone": patch.object(two_level, "_write_mean", _one_rank_alone),
    "drops a tensor": patch.object(two_level._HostMean, "average", _drops_a_tensor),
}


@each("wrong", [*WRONG])
@each("inner", [KEEPING[0], *KEEPING[-len(WHOLE) :]])
def test_the_law_bites(wrong: str, inner: Exchange) -> None:
    with WRONG[wrong], rejected(by=law_nothing_is_lost_at_either_level):
        exchange = two_level.TwoLevel(inner, 2)
        law_nothing_is_lost_at_either_level(exchange, CASES[0][1])


def test_state_of_another_ranks_tensors_is_refused() -> None:
    exchange, case = on_hosts(exchange_for(codecs.powersgd()), 2), CASES[0][1]
    states = [exchange.init(case.spec, case.world)] * case.world
    with pytest.raises(
        InvalidSetting, match=r"rank 1 of a host: .*replace\(spec, rank=rank\)"
    ):
        run_local(exchange, case.grads(), states)


def test_a_rank_keeps_the_residual_of_its_share_only() -> None:
    exchange = on_hosts(exchange_for(codecs.onebit()), 4)
    state = exchange.init(TensorSpec("gradient", 4000, shapes=((30, 100), (1000,))), 8)
    assert isinstance(state, HostState)
    assert state.inner.residual_N.numel() == 1000


def test_places_that_hold_no_element_keep_nothing() -> None:
    """A saved state does not have them, so a run that goes on would have other bits."""
    exchange, case = TwoLevel(KEEPING[1], 2), Case(world=4, numel=7, seed=4)
    shares = shares_of(case.spec.shapes, 2)
    assert shares.is_filled
    for rank, (_, _, state) in enumerate(
        run_local(exchange, case.grads(), case.states(exchange))
    ):
        own_S = state.inner.residual_N.clone()
        shares.clear_filled(own_S, rank % 2)
        assert torch.equal(own_S, state.inner.residual_N)
        assert bool(own_S.any())


def test_tensors_of_many_rows_are_cut_between_rows() -> None:
    shares = shares_of(((70, 10), (31, 10), (5,)), 2)
    assert [one.start for one in shares.ranges(1)] == [350, 700 + 155, 1010 + 3]
    shares = shares_of(((71, 10),), 2)
    assert shares.ranges(1)[0] == (360, 710, 0)
    assert not shares.in_place


def test_whole_tensors_go_the_largest_first_to_the_rank_with_fewest_elements() -> None:
    shares = shares_of(((2, 2), (0,), (3, 3), (5,)), 2, whole=True)
    assert shares.tensors == [(1, 2), (0, 3)]
    assert shares.shapes == [((0,), (3, 3)), ((2, 2), (5,))]
    assert [one.start for one in shares.ranges(0)] == [0, 4, 4, 13]
    assert shares_of(((9,), (2,)), 3, whole=True).numels == (9, 2, 0)
    assert shares_of(((9,), (2,)), 2, whole=True).in_place


@each(
    "shapes, count, whole",
    product(
        [((8,),), ((9,),), ((3,), (2, 2), (0,), (1,)), ((70, 3), (5,))],
        [1, 2, 3],
        [False, True],
    ),
)
def test_shares_hold_every_element_once(
    shapes: tuple[tuple[int, ...], ...], count: int, whole: bool
) -> None:
    shares = shares_of(shapes, count, whole)
    spec = TensorSpec(
        "gradient", sum(torch.Size(shape).numel() for shape in shapes), shapes=shapes
    )
    grad_N, back_N = torch.arange(1.0, spec.numel + 1), torch.zeros(spec.numel)
    shares_M = torch.full((sum(shares.numels),), torch.nan)
    shares.cut(grad_N, shares_M)
    assert bool(shares_M.isfinite().all()), (
        "something of what is filled up was not written"
    )
    assert shares_M.count_nonzero() == spec.numel
    for share, own_S in enumerate(torch.split(shares_M, list(shares.numels))):
        assert torch.equal(own_S, shares.own(grad_N, share))
        shares.put(own_S, share, back_N)
    assert torch.equal(back_N, grad_N)
    slots = torch.split(shares_M, list(shares.numels))
    shares.join(dict(enumerate(slots)), back_N.zero_())
    assert torch.equal(back_N, grad_N)
    if count == 1:
        return
    slots[-1].fill_(torch.nan)
    shares.cut(grad_N, shares_M, but=count - 1)
    assert bool(slots[-1].isnan().all()), "the share that others read was written"
    slots[-1].copy_(shares.own(grad_N, count - 1))
    back_N.zero_()
    for share, own_S in enumerate(slots):
        shares.join({share: own_S}, back_N)
    assert torch.equal(back_N, grad_N)


def test_a_rank_clips_its_own_gradient_on_hosts_while_density_warms_up() -> None:
    clipped = gw.with_clipping(codecs.topk(density=1.0), 1.0)
    warmed = gw.with_density_warmup(clipped, steps_per_stage=1, densities=(1.0,))
    grads = [torch.zeros(4) for _ in range(4)]
    grads[0][0], grads[1][0] = 0.1, 1000.0
    means = [
        run_local(on_hosts(exchange_for(made), 2), grads)[0][0]
        for made in (clipped, warmed)
    ]
    assert torch.equal(*means)
    assert float(means[0][0]) == pytest.approx((0.1 + 0.5) / 4)


def test_a_nan_arrives_where_only_what_fills_a_share_up_was_drawn() -> None:
    exchange = on_hosts(exchange_for(codecs.randomk(density=0.1)), 2)
    states = [exchange.init(TensorSpec("w", 9), 4) for _ in range(4)]
    for _ in range(8):
        grads = [torch.ones(9) for _ in range(4)]
        grads[1][8] = torch.nan
        results = run_local(exchange, grads, states)
        states = [state for _, _, state in results]
        assert all(bool(mean_N.isnan().any()) for mean_N, _, _ in results)
