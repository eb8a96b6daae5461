"""What exchanges of their own share; of some one support, summed values, and what was
sent.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.exchange.by_name import exchange_for, run_local
from gradwire.exchange.without_data import expected_bytes, wire_bytes
from gradwire_lab.compress._support import SharedSupport
from gradwire_lab.compress.randomk import draw_elements
from tests.each import each
from tests.run import Run

Shapes = tuple[tuple[int, ...], ...]
KINDS = (gw.compress.randomk, gw.compress.cltk, gw.compress.deft)
MODEL: Shapes = ((16, 3, 3, 3), (16,), (30, 40), (12, 20), (1,), (8, 70))
OTHERS = (gw.compress.oktopk, gw.compress.spardl, gw.compress.powersgd)
every_kind = each("kind", KINDS, ids=lambda kind: kind.__name__)
every_own = pytest.mark.parametrize(
    "kind", [*KINDS, *OTHERS], ids=lambda kind: kind.__name__
)


def spec_of(shapes: Shapes, dtype: torch.dtype = torch.float32) -> gw.TensorSpec:
    return gw.TensorSpec("message", sum(map(prod, shapes)), dtype, shapes)


def draw(spec: gw.TensorSpec, world: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(spec.numel, generator=generator).to(spec.dtype)
        for _ in range(world)
    ]


def made(kind: Any, density: float) -> gw.Exchange:
    """With error feedback; ``powersgd`` has no density."""
    return exchange_for(
        kind() if kind is gw.compress.powersgd else kind(density=density)
    )


@every_kind
@each("world", [2, 3, 5])
def test_only_the_support_arrives_and_is_counted(
    kind: type[SharedSupport], world: int
) -> None:
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
        # the one-element layer, and small saturated ones
        assert 1 <= common // (world - 1) <= 20
    else:
        assert own == (
            [arrived] * world
            if kind is gw.compress.randomk
            else [arrived if rank == 2 % world else 0 for rank in range(world)]
        )


@every_kind
@each("world", [2, 4])
def test_bytes_are_as_stated(kind: type[SharedSupport], world: int) -> None:
    """randomk's exactly, cltk's over a round of leaders; deft's are expected, and
    near.
    """
    spec = spec_of(((50, 60),) * 24)
    exchange = kind(density=0.05)
    run = Run(exchange, spec, world)
    for step in range(world):
        run.step(draw(spec, world, step))
    expected = expected_bytes(exchange, spec, world)
    assert expected is not None
    assert (wire_bytes(exchange, spec, world) is None) == (
        kind is not gw.compress.randomk
    )
    within = 0.1 if kind is gw.compress.deft else 1e-3
    each = zip(run.sent_bytes, expected, strict=True)
    # each step has another root, and the first has rank 0
    if kind is not gw.compress.randomk:
        each = zip([sum(run.sent_bytes)], [sum(expected)], strict=True)
    for sent, stated in each:
        assert sent == pytest.approx(world * stated, rel=within)
    assert expected_bytes(exchange, spec, 1) == [0]


@every_own
def test_later_steps_allocate_nothing_of_the_gradients_size(kind: Any) -> None:
    """A quarter of it would be seen; the local driver copies what it sums, a
    twentieth.
    """
    spec = spec_of(((60, 80), (60, 80), (400,)))
    run = Run(made(kind, 0.02), spec, 2)
    for step in range(3):
        run.step(draw(spec, 2, step))
    assert run.allocated(draw(spec, 2, 3)) < spec.numel // 4


@every_kind
def test_what_ranks_must_share_follows_from_the_step_alone(
    kind: type[SharedSupport],
) -> None:
    """One rank's state may be any other's: a job that goes on with it goes on alike."""
    spec = spec_of(MODEL)
    run = Run(kind(density=0.2), spec, 3)
    for step in range(4):
        run.step(draw(spec, 3, step))
    again = Run(kind(density=0.2), spec, 3)
    again.states = [run.states[2]] * 3
    assert torch.equal(run.step(draw(spec, 3, 9)), again.step(draw(spec, 3, 9)))


def drawn(exchange: Any, spec: gw.TensorSpec, num_steps: int) -> list[list[int]]:
    state, found = exchange.init(spec, 2), []
    for _ in range(num_steps):
        out_K = torch.empty(exchange.kept(spec.numel), dtype=torch.int32)
        draw_elements(exchange.seed, state, spec.numel, out_K)
        found.append(out_K.tolist())
        state = state + torch.tensor([0, 1])
    return found


def test_randomk_draws_without_replacement_every_element_as_often() -> None:
    spec, num_steps = gw.TensorSpec("vector", 200), 500
    found = drawn(gw.compress.randomk(density=0.1), spec, num_steps)
    assert all(len(set(one)) == 20 and one == sorted(one) for one in found)
    counts_N = torch.tensor(found).flatten().bincount(minlength=200).double()
    expected, spread = 0.1 * num_steps, (0.1 * 0.9 * num_steps) ** 0.5
    assert float(((counts_N - expected) / spread).square().mean()) == pytest.approx(
        1, abs=0.35
    )
    # Neighbours come together as often as any two do.
    beside = sum(b - a == 1 for one in found for a, b in pairwise(one))
    assert beside / num_steps == pytest.approx(20 * 19 / 200, abs=0.25)


@each("kind", [*KINDS, *OTHERS[:2]], ids=lambda kind: kind.__name__)
def test_what_int32_cannot_address_is_refused_before_a_step(kind: Any) -> None:
    kind().init(gw.TensorSpec("largest", 2**31 - 1), 2)
    with pytest.raises(
        gw.InvalidSetting, match=f"{kind.__name__} gradient must be below"
    ):
        kind().init(gw.TensorSpec("too large", 2**31), 2)


def test_localrandomk_draws_other_elements_on_each_rank_and_in_each_step() -> None:
    codec = gw.compress.localrandomk(density=0.1)
    grad_N = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    state = codec.init(gw.TensorSpec("vector", 1000))
    found = set()
    for rank in range(3):
        own = codec.for_world(3, rank)
        assert own is codec.for_world(3, rank)
        for step in range(2):
            payload, after = own.encode(state + torch.tensor([0, step]), grad_N)
            assert after.tolist() == [state[0], step + 1]
            found.add(tuple(payload["indices"].tolist()))
    assert len(found) == 6
    assert all(len(set(one)) == 100 and [*one] == sorted(one) for one in found)


def test_selective_takes_random_elements_of_each_tensor() -> None:
    exchange = gw.exchange_for(
        gw.compress.selective(sparsifier="localrandomk", density=0.1, num_dense=1)
    )
    spec = gw.TensorSpec("two", 1100, shapes=((1000,), (100,)))
    grads = [torch.ones(1100), 3 * torch.ones(1100)]
    states = [exchange.init(spec, 2)] * 2
    mean_N = run_local(exchange, grads, states)[0][0]
    assert mean_N[1000:].tolist() == [2.0] * 100
    taken = mean_N[:1000]
    assert 100 < int(taken.count_nonzero()) <= 200
    assert set(taken.unique().tolist()) <= {0.0, 0.5, 1.5, 2.0}
