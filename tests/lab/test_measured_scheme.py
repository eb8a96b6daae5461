"""A scheme is chosen once, from what all ranks know, and nothing is lost before or
after.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.contract import Member, State
from gradwire.contract.spec import TensorSpec
from gradwire.exchange.local import drive
from gradwire.exchange.sparse_schemes import schemes
from gradwire_lab.exchange.measured_scheme import (
    MeasuredScheme,
    scheme_of,
    with_measured_scheme,
)
from tests.each import each

WORLD, NUMEL = 8, 400_000


def measured(codec: Any, num_steps: int = 2) -> MeasuredScheme:
    made = with_measured_scheme(
        gw.pair(codec, gw.collective.allgather_sparse()), num_steps=2
    )
    assert isinstance(made, MeasuredScheme)
    return replace(made, num_steps=num_steps)


def taken(rank: int, *, shared: bool, count: int = 8000) -> Tensor:
    """A gradient that is not zero at ``count`` elements: the same ones on all ranks, or
    its own.
    """
    grad_N = torch.zeros(NUMEL)
    first = 0 if shared else rank * count
    grad_N[first : first + count] = 1.0 + rank
    return grad_N


def ways(
    exchange: gw.Exchange, grads: list[Tensor], num_steps: int
) -> tuple[list[list[str | None]], list[State]]:
    """The ways of all ranks by step, and their states at the end."""
    world = len(grads)
    members = [Member(rank, world) for rank in range(world)]
    states = [exchange.init(TensorSpec("", len(grads[0])), world) for _ in grads]
    found = []
    for _ in range(num_steps):
        all_steps = [
            exchange.synchronise(*given, torch.empty_like(given[2]))
            for given in zip(members, states, grads, strict=True)
        ]
        states = list(drive(all_steps, seed=3).results)
        found.append([member.way for member in members])
    return found, states


@each("shared, scheme", [(True, "sparcml"), (False, "zen")])
def test_overlap_decides_once_it_is_known(shared: bool, scheme: str) -> None:
    grads = [taken(rank, shared=shared) for rank in range(WORLD)]
    found, states = ways(measured(gw.compress.nonzero()), grads, 4)
    assert found == [["allgather_sparse"] * WORLD] * 2 + [[scheme] * WORLD] * 2
    steps, own, merged = states[0].noted_T[0].tolist()
    assert (steps, own) == (2.0, pytest.approx(2 * 8000 / NUMEL))
    assert merged == pytest.approx(own * (1 if shared else WORLD))
    assert all(torch.equal(state.noted_T[0], states[0].noted_T[0]) for state in states)


@pytest.mark.smoke
def test_choices_are_those_of_the_formulas() -> None:
    names = {*schemes(by_counts=True)}
    found = {
        scheme_of(count, NUMEL, 1, torch.float32, growth, world)
        for count in (0, 10, 40_000)
        for growth in (0.0, 1.0, 8.0)
        for world in (2, 8, 16)
    }
    assert found == names
    assert scheme_of(0, 0, 1, torch.float32, 0.0, 4) in names
