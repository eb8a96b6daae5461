"""Settings of each layer: the exact choice, what it saves, and that all ranks choose alike."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.compress.powersgd import powersgd
from gradwire.contract import Member
from gradwire.contract.shapes_only import record
from gradwire.contract.spec import TensorSpec
from gradwire.contract.verbs import Compute
from gradwire.errors import InvalidSetting
from gradwire.exchange.by_name import clone_state, run_local
from gradwire.exchange.error_feedback import choose_together, chooser_of
from gradwire.exchange.local import drive
from gradwire_lab.exchange._cheapest import cheapest, chosen, total
from gradwire_lab.exchange.adapt import Adapted, adapted_states
from gradwire_lab.exchange.ladders import MatrixLadder
from gradwire_lab.laws.cases import states_of
from tests.each import each

rows = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=4)


@pytest.mark.smoke
@given(st.lists(rows, max_size=4), st.integers(0, 30))
def test_the_programme_finds_what_all_combinations_show(
    tensors: list[list[tuple[int, int]]], most: int
) -> None:
    bytes_TL = [[size for size, _ in row] for row in tensors]
    units_TL = [[units for _, units in row] for row in tensors]
    every = product(*(range(len(row)) for row in tensors))
    sound = [rungs for rungs in every if total(units_TL, rungs) <= most]
    found = cheapest(bytes_TL, units_TL, most)
    if not sound:
        assert found is None
        return
    assert found in sound
    assert total(bytes_TL, found) == min(total(bytes_TL, rungs) for rungs in sound)


@given(st.lists(rows, min_size=1, max_size=4), st.floats(1e-6, 40))
def test_no_more_is_lost_than_allowed_and_little_room_is_given_away(
    tensors: list[list[tuple[int, int]]], allowed: float
) -> None:
    """Losses are rounded up to units, of which there are many more than tensors."""
    bytes_TL = [[size for size, _ in row] for row in tensors]
    lost_TL = [[lost / 3 for _, lost in row] for row in tensors]
    every = [*product(*(range(len(row)) for row in tensors))]
    rungs = chosen(bytes_TL, lost_TL, allowed)
    sound = [one for one in every if total(lost_TL, one) <= allowed * (1 - 1 / 64)]
    if sound:
        assert total(lost_TL, rungs) <= allowed
        assert total(bytes_TL, rungs) <= min(total(bytes_TL, one) for one in sound)
    elif total(lost_TL, rungs) > allowed:
        assert total(lost_TL, rungs) == min(total(lost_TL, one) for one in every)


LARGE, SMALL = 1024, 64
SPEC = TensorSpec("two layers", LARGE + SMALL, shapes=((32, 32), (SMALL,)))


def _grads(step: int = 0) -> list[torch.Tensor]:
    """A large layer with a few large elements, and a small one with all alike."""
    draw = torch.Generator().manual_seed(step)
    grads = [torch.randn(LARGE + SMALL, generator=draw) for _ in range(3)]
    for grad_N in grads:
        grad_N[:LARGE] *= torch.logspace(0, -6, LARGE)
    return grads


@each("made", [gw.compress.topk(density=0.1), gw.compress.qsgd(block=64)])
def test_fewer_bytes_at_no_more_loss(made: gw.Compressor) -> None:
    exchange = gw.adapt(made, every=4)
    own = chooser_of(exchange)
    assert isinstance(own, Adapted)
    states = [exchange.init(SPEC, 3) for _ in range(3)]
    for step in range(9):
        states = states_of(run_local(exchange, _grads(step), states, seed=step))
        seen = [next(adapted_states(state)) for state in states]
        assert len({tuple(one.rungs) for one in seen}) == 1
        if not own.is_due(step + 1):
            continue
        lost_TL = [row[:-1].tolist() for row in seen[0].lost_T]
        given_T = [own.choices.given] * 2
        rungs, sizes = seen[0].rungs, seen[0].bytes_TL
        assert total(lost_TL, rungs) <= total(lost_TL, given_T)
        assert total(sizes, rungs) <= total(sizes, given_T)
    if isinstance(made, gw.compress.topk):
        assert rungs[0] < own.choices.given  # where few elements are large, few do


def test_messages_are_weighed_against_one_another() -> None:
    """Alone, each keeps to its own loss; together, one gives what another needs less."""
    exchange = Adapted(gw.pair(gw.compress.topk(density=0.1), gw.collective.allgather_sparse()))
    states = []
    for layer in (slice(0, LARGE), slice(LARGE, None)):
        grads = [grad_N[layer] for grad_N in _grads()]
        spec = TensorSpec("a layer", grads[0].numel())
        states.append(run_local(exchange, grads, [exchange.init(spec, 3)] * 3)[0][2])
    assert [state.rungs for state in states] == [[exchange.choices.given]] * 2
    joint = run_local(exchange, _grads(), [exchange.init(SPEC, 3)] * 3)[0][2]
    choose_together([(exchange, state) for state in states])
    assert [state.rungs[0] for state in states] == joint.rungs != [exchange.choices.given] * 2
    # not due in the next step, so nothing changes
    for state in states:
        state.rung_T[0].fill_(0)
        state.step_T[0].fill_(3)
    choose_together([(exchange, state) for state in states])
    assert [state.rungs for state in states] == [[0], [0]]


def test_gradients_that_are_not_finite_or_zero_change_no_settings() -> None:
    exchange = gw.adapt(gw.compress.topk(density=0.1), every=1)
    states = [exchange.init(SPEC, 3) for _ in range(3)]
    states = states_of(run_local(exchange, _grads(), states))
    own = chooser_of(exchange)
    assert own is not None
    before = own.settings(states[0])
    for factor in (float("nan"), 0.0):
        states = states_of(run_local(exchange, [g * factor for g in _grads()], states))
        assert own.settings(states[0]) == before


ADAPTABLE = (
    gw.compress.topk(density=0.1),
    gw.compress.dgc(density=0.1),
    gw.compress.qsgd(block=64),
    gw.compress.uniform(block=64),
    gw.compress.powersgd(rank=2),
)


@each("made", ADAPTABLE)
def test_predictions_are_those_of_its_own_settings(made: gw.Compressor | gw.Exchange) -> None:
    def sent(exchange: gw.Exchange) -> int:
        rows = record(exchange, SPEC, 0, 3).rows
        verbs = [verb for row in rows for verb in row if not isinstance(verb, Compute)]
        return sum(verb.buf.numel() * verb.buf.itemsize for verb in verbs)

    # each tensor of a message by itself: its size may go before it, and it is rounded up
    assert sent(gw.adapt(made)) == pytest.approx(sent(gw.exchange_for(made)), rel=0.05)


def test_what_cannot_be_adapted_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="algorithm to adapt"):
        gw.adapt(gw.compress.onebit())
    with pytest.raises(InvalidSetting, match="algorithm to adapt"):
        gw.adapt(gw.compress.cltk())
    with pytest.raises(InvalidSetting, match="warm up"):
        gw.with_density_warmup(gw.adapt(gw.compress.topk()), steps_per_stage=9)


def test_one_step_shows_what_every_rank_of_the_ladder_would_lose() -> None:
    shapes = ((20, 24), (20, 24), (5,), (9, 14))
    sizes = [prod(shape) for shape in shapes]
    spec = TensorSpec("message", sum(sizes), torch.float64, shapes)
    ladder = MatrixLadder(powersgd(rank=2))
    state, world = ladder.init(spec, 3), 3
    members = [Member(rank, world) for rank in range(world)]
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(spec.numel, generator=generator).double() for _ in members]
    told = drive(
        [ladder.measure(me, state, grad_N) for me, grad_N in zip(members, grads, strict=True)]
    ).results
    for rung in range(len(ladder.settings)):
        left = [torch.zeros_like(grad_N) for grad_N in grads]
        steps = [
            ladder.synchronise(me, clone_state(state), [rung] * 4, grad_N, grad_N.clone(), own_N)
            for me, grad_N, own_N in zip(members, grads, left, strict=True)
        ]
        drive(steps)
        for own_N, told_TL in zip(left, told, strict=True):
            lost = [float(part_N.square().sum()) for part_N in own_N.split(sizes)]
            np.testing.assert_allclose(told_TL[:, rung], lost, rtol=1e-9, atol=1e-9)
    assert all(told_TL[0].unique().numel() == len(ladder.settings) for told_TL in told)
