"""Settings of each layer: the exact choice, what it saves, and that all ranks choose
alike.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.contract.spec import TensorSpec
from gradwire.errors import InvalidSetting
from gradwire.exchange.by_name import run_local
from gradwire.exchange.error_feedback import chooser_of
from gradwire_lab.exchange._cheapest import cheapest, chosen, total
from gradwire_lab.exchange.adapt import Adapted, adapted_states
from gradwire_lab.laws.cases import states_of
from tests.each import each

rows = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=4
)


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
def test_adapt_sends_fewer_bytes_at_no_more_loss(made: gw.Compressor) -> None:
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


def test_gradients_that_are_not_finite_or_zero_change_no_settings() -> None:
    exchange = gw.adapt(gw.compress.topk(density=0.1), every=1)
    states = [exchange.init(SPEC, 3) for _ in range(3)]
    states = states_of(run_local(exchange, _grads(), states))
    own = chooser_of(exchange)
    before = own.settings(states[0])
    for factor in (float("nan"), 0.0):
        states = states_of(run_local(exchange, [g * factor for g in _grads()], states))
        assert own.settings(states[0]) == before


def test_what_cannot_be_adapted_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="algorithm to adapt"):
        gw.adapt(gw.compress.onebit())
    with pytest.raises(InvalidSetting, match="algorithm to adapt"):
        gw.adapt(gw.compress.cltk())
    with pytest.raises(InvalidSetting, match="warm up"):
        gw.with_density_warmup(gw.adapt(gw.compress.topk()), steps_per_stage=9)
