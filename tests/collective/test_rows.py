"""Row-sparse means: either way gives the rows of the union, with the same bits on every
rank.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.collective.allgather_sparse import allgather_sparse
from gradwire.collective.steps.rows import TableRows, average_rows
from gradwire.collective.zen import zen
from gradwire.compress.nonzero import nonzero
from gradwire.contract import Member
from gradwire.contract.collective import Collective
from gradwire.contract.registry import examples
from gradwire.contract.spec import TensorSpec
from gradwire.errors import RanksDiffer
from gradwire.exchange.local import drive
from gradwire_lab.exchange.bytes_of_sets import bytes_of
from gradwire_lab.laws.collectives import Undefined
from tests.each import each
from tests.strategies import bounded

NUM_ROWS, WIDTH = 60, 3
SERVED, GATHERED = zen(), allgather_sparse()
CARRYING = [one for one in examples("collective") if one.carries_rows]
"""All that rows can take, with every example of their settings."""


def averaged(
    given: list[TableRows], way: Collective, seed: int = 0
) -> tuple[list[TableRows], list[Member]]:
    members: list[Member] = [Undefined(rank, len(given)) for rank in range(len(given))]
    all_steps = [
        average_rows(me, rows, NUM_ROWS, lambda counts: way)
        for me, rows in zip(members, given, strict=True)
    ]
    return list(drive(all_steps, seed=seed).results), members


@each("way", CARRYING)
def test_rows_are_averaged_right_when_their_number_falls_and_rises(
    way: Collective,
) -> None:
    """Through the same members, whose buffers are let go and made anew between."""
    members: list[Member] = [Undefined(rank, 3) for rank in range(3)]
    for count in (3000, 2, 0, 3000):
        given = [
            (torch.arange(count) + rank, torch.randn(count, 8)) for rank in range(3)
        ]
        exact = torch.zeros(3002, 8)
        for rows, values in given:
            exact[rows] += values / 3
        all_steps = [
            average_rows(me, rows, len(exact), lambda counts: way)
            for me, rows in zip(members, given, strict=True)
        ]
        for rows, values in drive(all_steps, seed=count).results:
            torch.testing.assert_close(
                torch.zeros_like(exact).index_copy(0, rows, values), exact
            )


@bounded(8)
@given(
    counts=st.lists(st.sampled_from((0, 1, 5, NUM_ROWS)), min_size=2, max_size=7),
    dtype=st.sampled_from(
        (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    ),
    seed=st.integers(0, 99),
)
def test_all_ways_give_the_same_bits(
    counts: list[int], dtype: torch.dtype, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    given = []
    for count in counts:
        rows = torch.randperm(NUM_ROWS, generator=draw)[:count].sort().values
        values = torch.randn(count, WIDTH, generator=draw).to(dtype)
        values[:1] = 0  # a row that was touched stays one, whatever is in it
        given.append((rows, values))
    gathered, _ = averaged(given, GATHERED, seed)
    others = [found for way in CARRYING for found in averaged(given, way, seed)[0]]
    union = torch.cat([rows for rows, _ in given]).unique()
    exact = torch.zeros(NUM_ROWS, WIDTH, dtype=torch.float64)
    for rows, values in given:
        exact[rows] += values.double() / len(given)
    for found, values in (*gathered, *others):
        assert torch.equal(found, union)
        assert torch.equal(values, gathered[0][1])
        torch.testing.assert_close(values, exact[union].to(dtype))


def test_gathered_rows_take_the_bytes_that_the_collective_states() -> None:
    taken = [torch.arange(3), torch.arange(20, 60, 5), torch.tensor([0])]
    all_steps = [
        average_rows(
            Member(rank, 3), (rows, torch.ones(len(rows), WIDTH)), NUM_ROWS, _gathered
        )
        for rank, rows in enumerate(taken)
    ]
    spec, codec = TensorSpec("table", NUM_ROWS * WIDTH), nonzero(width=WIDTH)
    stated = bytes_of(GATHERED, codec, spec, [rows.to(torch.int32) for rows in taken])
    assert drive(all_steps).sent_bytes == stated


def _gathered(counts: list[int]) -> Collective:
    return GATHERED


def test_more_rows_than_there_are_is_told() -> None:
    many = torch.arange(NUM_ROWS + 1), torch.ones(NUM_ROWS + 1, WIDTH)
    with pytest.raises(RanksDiffer, match="61 rows"):
        averaged([many, many], SERVED)
