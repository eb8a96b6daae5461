"""Payloads that vary in size: what collectives send, refuse and keep."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.contract.payload import Format
from gradwire.contract.spec import TensorSpec
from gradwire.contract.verbs import rewritten
from gradwire.errors import IncompatiblePair, RanksDiffer
from gradwire.exchange.by_name import steps_of_all
from gradwire.exchange.local import drive
from gradwire.exchange.pair import Pair, suited
from gradwire.exchange.without_data import expected_bytes, record, wire_bytes
from tests.each import each
from tests.laws.variable import above, trimmed

WORLD = 4
ALL = above(threshold=-1.0)
"""Every payload is as large as there is."""


class expected_whole(above):
    """Expects payloads as large as there are."""

    def typical(self, spec: TensorSpec) -> Format:
        return self.format(spec)


COLLECTIVES = (
    gw.collective.allgather_sparse(),
    gw.collective.casync_ps(),
    gw.collective.casync_ring(),
    gw.collective.casync_ring(half_bytes=0, partitions=3),
)


def gradients(share: float, numel: int = 1000, world: int = WORLD) -> list[Tensor]:
    """About a ``share`` of the elements exceed 1, on other places on each rank."""
    draw = torch.Generator().manual_seed(7)
    return [2.0 * (torch.rand(numel, generator=draw) < share) for _ in range(world)]


def sent(exchange: Pair, grads: list[Tensor]) -> list[int]:
    return drive(steps_of_all(exchange, grads)).sent_bytes


def test_an_all_gather_sends_sizes_and_the_largest_payload() -> None:
    exchange = gw.pair(above(), gw.collective.allgather_sparse())
    grads = gradients(0.0)
    grads[2][:5] = 3.0
    slot = 5 * (4 + 4)
    assert sent(exchange, grads) == [(WORLD - 1) * (8 + slot)] * WORLD
    assert sent(exchange, gradients(0.0)) == [(WORLD - 1) * 8] * WORLD


def test_an_all_to_all_sends_sizes_and_each_payload() -> None:
    exchange = gw.pair(above(), gw.collective.casync_ps())
    grads = [torch.zeros(64) for _ in range(2)]  # chunks of 32
    grads[0][40:43] = (
        5.0  # rank 0 pushes three elements to rank 1, and rank 1 one to rank 0
    )
    grads[1][7] = 5.0
    # All four come back at 2.5, three of them in one chunk, so both payloads have room
    # for three.
    assert sent(exchange, grads) == [8 + 3 * 8 + 8 + 3 * 8, 8 + 1 * 8 + 8 + 3 * 8]


def test_a_ring_tells_each_size_ahead_of_its_payload() -> None:
    """The 8 bytes go for an empty payload too, which is a message of no bytes."""
    exchange = gw.pair(above(), gw.collective.casync_ring())
    grads = [torch.zeros(64) for _ in range(2)]  # chunks of 32
    assert sent(exchange, grads) == [2 * 8, 2 * 8]
    grads[0][3:5] = (
        5.0  # rank 0 sends two elements of its chunk, and the sum comes back
    )
    grads[1][4:7] = 5.0
    assert sent(exchange, grads) == [2 * 8 + 2 * 8, 2 * 8 + 4 * 8]


@each("collective", COLLECTIVES)
def test_the_bound_is_reached_by_the_largest_payloads(
    collective: gw.Collective,
) -> None:
    exchange = gw.pair(ALL, collective)
    spec = TensorSpec("", 1001)
    most = expected_bytes(gw.pair(expected_whole(), collective), spec, WORLD)
    assert most is not None
    assert sent(exchange, gradients(0.1, 1001)) == most
    assert wire_bytes(exchange, spec, WORLD) is None
    # A tenth is typical, in whole elements of a chunk.
    expected = expected_bytes(exchange, spec, WORLD)
    assert expected is not None
    assert all(0.1 * a <= b <= 0.11 * a for a, b in zip(most, expected, strict=True))
    kept = gw.with_error_feedback(exchange)
    assert wire_bytes(kept, spec, WORLD) is None
    assert expected_bytes(kept, spec, WORLD) == expected


def test_a_simulation_goes_at_once_where_training_does() -> None:
    """Payloads of usual size find room at once, and the largest ones would not."""
    exchange = gw.pair(above(), gw.collective.casync_ps(room_bytes=1000))
    kinds = list[type]()

    def noted(steps: Any) -> Any:
        def note(asked: Any) -> Any:
            kinds.extend(map(type, asked if isinstance(asked, tuple) else [asked]))
            return (yield asked)

        return rewritten(steps, note)

    own, *others = steps_of_all(exchange, gradients(0.1))
    drive([noted(own), *others])
    recorded = record(exchange, TensorSpec("", 1000), 0, WORLD).rows
    assert [type(verb) for row in recorded for verb in row] == kinds


@each(
    "collective, numel",
    [*product(COLLECTIVES[:2], [0, 1, 9, 1001]), (COLLECTIVES[2], 1001)],
)
def test_a_payload_beyond_its_largest_is_refused(
    collective: gw.Collective, numel: int
) -> None:
    """As where ranks hold other models; who announces it is named."""
    exchange, larger = gw.pair(ALL, collective), gradients(1.0, numel + 40, 1)
    grads = [*gradients(1.0, numel, WORLD - 1), *larger]
    runs = [
        steps for grad in grads for steps in steps_of_all(exchange, [grad] * WORLD)
    ][:: WORLD + 1]
    with pytest.raises(
        RanksDiffer, match=r"rank 3 of 4 announces a payload of \d+ bytes"
    ):
        drive(runs)


def test_payloads_that_vary_get_a_suited_collective_or_are_refused() -> None:
    assert suited(above()) == gw.collective.allgather_sparse()
    assert suited(trimmed()) == gw.collective.casync_ps()
    with pytest.raises(
        IncompatiblePair, match="these payloads vary in size; use allreduce"
    ):
        gw.pair(summable(), gw.collective.allreduce())
    with pytest.raises(
        IncompatiblePair, match=r"share a scale make sums larger .* use casync_ps"
    ):
        gw.pair(scaled(), gw.collective.casync_ring())


class summable(trimmed):
    """Claims that payloads may be summed, whatever their sizes."""

    traits = replace(trimmed.traits, additive=True)


class scaled(trimmed):
    """Claims that elements share a scale."""

    traits = replace(trimmed.traits, shared_scale=True)
