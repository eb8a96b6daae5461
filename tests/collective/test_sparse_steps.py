"""Schemes for sparse gradients, step after step: bounds, buffers, and ranks that do not
agree.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.contract.spec import TensorSpec
from gradwire.errors import RanksDiffer
from gradwire.exchange.by_name import steps_of_all
from gradwire.exchange.local import drive
from gradwire.exchange.without_data import expected_bytes, wire_bytes
from tests.each import each
from tests.laws.variable import above
from tests.run import Run

WORLD, NUMEL = 5, 1003
SCHEMES = (
    gw.collective.zen(),
    gw.collective.zen(formats="paper"),
    gw.collective.sparse_ps(),
    gw.collective.sparse_ps_broadcast(),
    gw.collective.omnireduce(block=16),
    gw.collective.sparcml(),
)
each_scheme = each("scheme", SCHEMES)


def gradients(share: float, numel: int = NUMEL) -> list[Tensor]:
    draw = torch.Generator().manual_seed(4)
    return [2.0 * (torch.rand(numel, generator=draw) < share) for _ in range(WORLD)]


@each_scheme
def test_the_bound_is_reached_where_all_is_taken(scheme: gw.Collective) -> None:
    exchange = gw.pair(gw.compress.nonzero(expected_density=1.0), scheme)
    sent = drive(steps_of_all(exchange, gradients(1.0))).sent_bytes
    assert sent == expected_bytes(exchange, TensorSpec("", NUMEL), WORLD)


@each_scheme
def test_what_is_expected_is_what_independent_ranks_send(scheme: gw.Collective) -> None:
    """Sums over ranks within a tenth, of 20,000 elements at 5 %."""
    codec = gw.compress.nonzero(expected_density=0.05)
    exchange = gw.pair(codec, scheme)
    sent = drive(steps_of_all(exchange, gradients(0.05, 20_000))).sent_bytes
    expected = expected_bytes(exchange, TensorSpec("", 20_000), WORLD)
    assert wire_bytes(exchange, TensorSpec("", 20_000), WORLD) is None
    assert expected is not None
    assert sum(sent) == pytest.approx(sum(expected), rel=0.1)


@each(
    "exchange",
    [
        *(gw.pair(gw.compress.nonzero(), scheme) for scheme in SCHEMES),
        gw.pair(above(), gw.collective.allgather_sparse()),
        gw.pair(above(), gw.collective.casync_ps()),
    ],
)
def test_buffers_only_grow(exchange: gw.Pair) -> None:
    """From the step with the most entries on, nothing is allocated."""
    run = Run(exchange, TensorSpec("", NUMEL), WORLD)

    def step(share: float) -> list[dict[str, int]]:
        run.step(gradients(share))
        return [
            {name: buf.data_ptr() for name, buf in me._buffers.items()}
            for me in run.members
        ]

    step(0.01)
    after = step(0.5)
    assert [step(share) for share in (0.1, 0.0, 0.5, 0.3)] == [after] * 4


@each_scheme
def test_a_rank_with_another_model_is_named(scheme: gw.Collective) -> None:
    exchange = gw.pair(gw.compress.nonzero(), scheme)
    of_own = [
        steps_of_all(exchange, gradients(1.0, n))
        for n in [NUMEL] * (WORLD - 1) + [3 * NUMEL]
    ]
    runs = [own[rank] for rank, own in enumerate(of_own)]
    with pytest.raises(
        RanksDiffer, match=r"rank 4 of 5 announces a payload of \d+ units"
    ):
        drive(runs)
