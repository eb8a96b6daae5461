"""What exchanges of their own share; of some one support, summed values, and what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gradwire as gw
from gradwire.compress._support import SharedSupport
from gradwire.contract import Layout, Member, Selection, Traits
from gradwire.errors import IncompatiblePair
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.local import drive
from gradwire_lab.laws.tolerance import same_bits
from tests.compress.allocations import Allocations
from tests.strategies import bounded

Shapes = tuple[tuple[int, ...], ...]
KINDS = (gw.compress.randomk, gw.compress.cltk, gw.compress.deft)
MODEL: Shapes = ((16, 3, 3, 3), (16,), (30, 40), (12, 20), (1,), (8, 70))
OTHERS = (gw.compress.oktopk, gw.compress.spardl, gw.compress.powersgd)
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
every_own = pytest.mark.parametrize("kind", [*KINDS, *OTHERS], ids=lambda kind: kind.__name__)


def spec_of(shapes: Shapes, dtype: torch.dtype = torch.float32) -> gw.TensorSpec:
    return gw.TensorSpec("message", sum(map(prod, shapes)), dtype, shapes)


def draw(spec: gw.TensorSpec, world: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(spec.numel, generator=generator).to(spec.dtype) for _ in range(world)]


def made(kind: Any, density: float) -> gw.Exchange:
    """With error feedback; ``powersgd`` has no density."""
    return exchange_for(kind() if kind is gw.compress.powersgd else kind(density=density))


class Run:
    """Ranks that keep their members and states from step to step, and what they sent in all."""

    def __init__(self, exchange: gw.Exchange, spec: gw.TensorSpec, world: int) -> None:
        self.exchange = exchange
        self.members = [Member(rank, world) for rank in range(world)]
        self.states: list[Any] = [exchange.init(spec, world) for _ in range(world)]
        self.sent_bytes = [0] * world

    def step(self, grads: Sequence[Tensor], seed: int = 0) -> Tensor:
        """One step in place of copies of ``grads``; all ranks' mean."""
        outs = [grad_N.clone() for grad_N in grads]
        texts = [
            self.exchange.synchronise(me, state, out_N, out_N)
            for me, state, out_N in zip(self.members, self.states, outs, strict=True)
        ]
        outcome = drive(texts, seed=seed)
        self.states = outcome.results
        self.sent_bytes = [a + b for a, b in zip(self.sent_bytes, outcome.sent_bytes, strict=True)]
        assert all(same_bits(out_N, outs[0]) for out_N in outs)
        return outs[0]

    def allocated(self, grads: Sequence[Tensor]) -> int:
        """The elements of the largest tensor that is made by one step in place of ``grads``."""
        texts = [
            self.exchange.synchronise(me, state, grad_N, grad_N)
            for me, state, grad_N in zip(self.members, self.states, grads, strict=True)
        ]
        with Allocations() as seen:
            self.states = drive(texts).results
        return max(seen.numels, default=0)


@every_kind
@pytest.mark.parametrize("world", [2, 3, 5])
def test_only_the_support_arrives_and_is_counted(kind: type[SharedSupport], world: int) -> None:
    spec = spec_of(MODEL)
    run = Run(exchange_for(kind(density=0.1)), spec, world)
    for step in range(3):
        mean_N = run.step(draw(spec, world, step))
        selections = [me.selection for me in run.members]
        arrived = int(mean_N.count_nonzero())
        assert {s.arrived for s in selections if s} == {arrived}
        assert all(s and s.asked == pytest.approx(0.1 * spec.numel) for s in selections)
        for state in run.states:
            assert not bool(state.residual_N[mean_N != 0].any())
    own = [s.selected for s in selections if s]
    if kind is gw.compress.deft:
        common = own[0] + sum(own[1:]) - arrived  # counted once by each rank
        assert common % (world - 1) == 0
        assert 1 <= common // (world - 1) <= 20  # the one-element layer, and small saturated ones
    else:
        assert own == (
            [arrived] * world
            if kind is gw.compress.randomk
            else [arrived if rank == 2 % world else 0 for rank in range(world)]
        )


@every_kind
@pytest.mark.parametrize("world", [2, 4])
def test_bytes_are_as_stated(kind: type[SharedSupport], world: int) -> None:
    """randomk's exactly, cltk's over a round of leaders; deft's are expected, and near."""
    spec = spec_of(((50, 60),) * 24)
    exchange = kind(density=0.05)
    run = Run(exchange, spec, world)
    for step in range(world):
        run.step(draw(spec, world, step))
    expected = exchange.expected_bytes(spec, world)
    assert expected is not None
    assert (exchange.wire_bytes(spec, world) is None) == (kind is not gw.compress.randomk)
    within = 0.1 if kind is gw.compress.deft else 1e-3
    each = zip(run.sent_bytes, expected, strict=True)
    if kind is not gw.compress.randomk:  # each step has another root, and the first has rank 0
        each = zip([sum(run.sent_bytes)], [sum(expected)], strict=True)
    for sent, stated in each:
        assert sent == pytest.approx(world * stated, rel=within)
    assert exchange.expected_bytes(spec, 1) == [0]


@every_kind
@pytest.mark.parametrize("spoil", [float("nan"), float("-inf")])
def test_what_is_not_finite_is_seen_wherever_it_is(kind: type[SharedSupport], spoil: float) -> None:
    """Also at an element that nobody selects; all that was sent is NaN, and the next step is not.

    In each layer, so in those of others, in common ones, on the leader and elsewhere.
    """
    spec, world = spec_of(((4, 4), (6,), (1,))), 3
    for place in (0, 15, 18, 22):
        run = Run(exchange_for(kind(density=0.2)), spec, world)
        run.step(draw(spec, world))
        grads = draw(spec, world, 1)
        grads[1][place] = spoil
        mean_N = run.step(grads)
        assert bool(mean_N.isnan().any())
        assert bool((mean_N.isnan() | (mean_N == 0)).all())
        assert all(bool(state.residual_N.isfinite().all()) for state in run.states)
        assert bool(run.step(draw(spec, world, 2)).isfinite().all())


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS[1:]], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_gradients_are_summed_in_float32(kind: Any, dtype: torch.dtype) -> None:
    exchange = made(kind, 0.2)
    coarse, fine = (Run(exchange, spec_of(MODEL, to), 3) for to in (dtype, torch.float32))
    for step in range(2):
        grads = draw(spec_of(MODEL, dtype), 3, step)
        want_N = fine.step([grad_N.float() for grad_N in grads])
        assert torch.equal(coarse.step(grads), want_N.to(dtype))


@every_own
def test_later_steps_allocate_nothing_of_the_gradients_size(kind: Any) -> None:
    """A quarter of it would be seen; the local driver copies what it sums, a twentieth."""
    spec = spec_of(((60, 80), (60, 80), (400,)))
    run = Run(made(kind, 0.02), spec, 2)
    for step in range(3):
        run.step(draw(spec, 2, step))
    assert run.allocated(draw(spec, 2, 3)) < spec.numel // 4


@bounded(30)
@given(
    shapes=st.lists(
        st.lists(st.integers(0, 9), min_size=1, max_size=2).map(tuple), min_size=1, max_size=5
    ).map(tuple),
    kind=st.sampled_from((*KINDS, *OTHERS)),
    density=st.sampled_from([0.01, 0.3, 1.0]),
    world=st.integers(2, 6),
    seed=st.integers(0, 99),
)
def test_nothing_is_lost_whatever_the_shapes(
    shapes: Shapes, kind: Any, density: float, world: int, seed: int
) -> None:
    """Over steps: empty and one-element layers, zeros, fewer layers or elements than ranks."""
    spec = spec_of(shapes)
    run = Run(made(kind, density), spec, world)
    pending_N = torch.zeros(spec.numel)
    for step in range(4):
        grads = draw(spec, world, seed + step)
        if step == 1:
            grads = [torch.zeros_like(grad_N) for grad_N in grads]
        if step == 2:
            grads[0].zero_()
        pending_N += torch.stack(grads).sum(0)
        pending_N -= world * run.step(grads, seed)
        left_N = torch.stack([state.residual_N for state in run.states]).sum(0)
        torch.testing.assert_close(left_N, pending_N, rtol=1e-4, atol=1e-4)


@every_kind
def test_what_ranks_must_share_follows_from_the_step_alone(kind: type[SharedSupport]) -> None:
    """One rank's state may be any other's: a job that goes on with it goes on alike."""
    spec = spec_of(MODEL)
    run = Run(kind(density=0.2), spec, 3)
    for step in range(4):
        run.step(draw(spec, 3, step))
    again = Run(kind(density=0.2), spec, 3)
    again.states = [run.states[2]] * 3
    assert torch.equal(run.step(draw(spec, 3, 9)), again.step(draw(spec, 3, 9)))


@every_own
def test_alone_nothing_is_selected(kind: Any) -> None:
    spec = spec_of(MODEL)
    run = Run(made(kind, 0.1), spec, 1)
    [grad_N] = draw(spec, 1)
    assert same_bits(run.step([grad_N]), grad_N)
    assert run.members[0].selection is None


@every_kind
def test_it_goes_with_no_collective_and_pair_says_why(kind: type[SharedSupport]) -> None:
    with pytest.raises(IncompatiblePair, match=r"agree on the elements.*gw.exchange_for by itself"):
        gw.pair(kind(), gw.collective.allreduce())  # type: ignore[arg-type]
    with pytest.raises(IncompatiblePair, match="talks in the middle"):
        gw.pair(gw.compress.powersgd(), gw.collective.allreduce())  # type: ignore[arg-type]


class Agreeing(gw.compress.topk):
    traits = Traits(layout=Layout.SPARSE, shared_support=True)


def test_a_compressor_cannot_promise_a_shared_support() -> None:
    with pytest.raises(IncompatiblePair, match=r"before anyone can agree.*as cltk is"):
        gw.pair(Agreeing(), gw.collective.allgather_sparse())


def test_cltk_sends_what_is_largest_on_each_rank_in_turn() -> None:
    spec, world = gw.TensorSpec("vector", 1000), 3
    run = Run(gw.compress.cltk(density=0.02), spec, world)
    for step in range(4):
        grads = draw(spec, world, step)
        mean_N = run.step(grads)
        largest = grads[step % world].abs().topk(20).indices.sort().values
        assert torch.equal(mean_N.nonzero().flatten(), largest)
        assert run.members[step % world].selection == Selection(20.0, 20, 20)


def drawn(exchange: Any, spec: gw.TensorSpec, num_steps: int) -> list[list[int]]:
    state, found = exchange.init(spec, 2), []
    for _ in range(num_steps):
        out_K = torch.empty(exchange.kept(spec.numel), dtype=torch.int32)
        found.append(exchange.draw(state, spec.numel, out_K).tolist())
        state = state + torch.tensor([0, 1])
    return found


def test_randomk_draws_without_replacement_every_element_as_often() -> None:
    spec, num_steps = gw.TensorSpec("vector", 200), 500
    found = drawn(gw.compress.randomk(density=0.1), spec, num_steps)
    assert all(len(set(one)) == 20 and one == sorted(one) for one in found)
    counts_N = torch.tensor(found).flatten().bincount(minlength=200).double()
    expected, spread = 0.1 * num_steps, (0.1 * 0.9 * num_steps) ** 0.5
    assert float(((counts_N - expected) / spread).square().mean()) == pytest.approx(1, abs=0.35)
    # Neighbours come together as often as any two do.
    beside = sum(b - a == 1 for one in found for a, b in pairwise(one))
    assert beside / num_steps == pytest.approx(20 * 19 / 200, abs=0.25)


def test_randomk_draws_others_for_another_seed_message_or_step() -> None:
    spec = gw.TensorSpec("vector", 10_000)
    one, two = drawn(gw.compress.randomk(), spec, 2)
    [other] = drawn(gw.compress.randomk(seed=1), spec, 1)
    [elsewhere] = drawn(gw.compress.randomk(), gw.TensorSpec("another", 10_000), 1)
    assert drawn(gw.compress.randomk(), spec, 1) == [one]
    assert all(len(set(one) & set(them)) < 15 for them in (two, other, elsewhere))
    [last] = drawn(gw.compress.randomk(seed=2**64 - 1), spec, 1)
    assert len(set(one) & set(last)) < 15


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS[:2]], ids=lambda kind: kind.__name__)
def test_what_int32_cannot_address_is_refused_before_a_step(kind: Any) -> None:
    kind().init(gw.TensorSpec("largest", 2**31 - 1), 2)
    with pytest.raises(gw.InvalidSetting, match=f"{kind.__name__} gradient must be below"):
        kind().init(gw.TensorSpec("too large", 2**31), 2)
