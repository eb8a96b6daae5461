"""sharded_dgc: which elements all parts of a layer send together, on a grid in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.compress.topk import topk
from gradwire.errors import Deadlock, InvalidSetting
from gradwire.exchange import by_name
from gradwire.exchange.local import drive
from gradwire_lab.compress.sharded_dgc import sharded_dgc
from tests.compress.grid import Grid

Drawn = list[list[Tensor]]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Vectors here are too short to share out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(
    numels: tuple[int, ...], scales: tuple[float, ...], world: int = 2, step: int = 0
) -> Drawn:
    """Heavy-tailed gradients by shard and rank; each shard's are ``scales`` times as large."""
    draw = torch.Generator().manual_seed(step)

    def one(numel: int, scale: float) -> Tensor:
        spread_N = torch.exp(2 * torch.randn(numel, generator=draw))
        return scale * spread_N * torch.randn(numel, generator=draw)

    return [[one(n, s) for _ in range(world)] for n, s in zip(numels, scales, strict=True)]


@pytest.mark.parametrize("numels", [(300, 300), (500, 100, 1), (0, 40)], ids=str)
def test_parts_that_are_sampled_whole_send_the_largest_of_all(numels: tuple[int, ...]) -> None:
    """The union over parts is the exact top-k of the whole layer, on every rank of its own."""
    grid, grads = (
        Grid(sharded_dgc(density=0.1), numels),
        drawn(numels, (1.0, 3.0, 9.0)[: len(numels)]),
    )
    grid.step(grads)
    for rank in range(grid.world):
        whole_N = torch.cat([shard[rank] for shard in grads])
        kept_N = torch.cat([grid.residual(shard, rank) for shard in range(len(numels))])
        k = max(1, round(0.1 * whole_N.numel()))
        largest_K = whole_N.abs().topk(k).indices.sort().values
        assert torch.equal((kept_N != whole_N).nonzero().flatten(), largest_K)
        assert sum(grid.taken(rank)) == k


def test_density_goes_to_the_part_that_has_the_large_elements() -> None:
    """A threshold of each part's own would take as many of both."""
    numels, scales, asked = (20_000, 20_000), (100.0, 1.0), 400
    apart = Grid(sharded_dgc(), numels, told=False)
    apart.step(drawn(numels, scales))
    assert all(asked / 4 < taken < asked for taken in apart.taken(0))
    agreed, totals = Grid(sharded_dgc(), numels), []
    for step in range(10):  # nothing is left from step to step, or it would come to be sent
        agreed.states = Grid(sharded_dgc(seed=step), numels).states
        agreed.step(drawn(numels, scales, step=step))
        for rank in range(2):
            first, second = agreed.taken(rank)
            assert second < 0.1 * first
            totals.append(first + second)
    assert asked / 2 < min(totals) <= max(totals) < 2 * asked
    # Each misses by an eighth, one standard deviation, or less; twenty of them by a thirtieth.
    assert abs(sum(totals) / len(totals) / asked - 1) < 0.1


def test_parts_of_unequal_length_weigh_by_it() -> None:
    """One draw of the long part stands for five elements, one of the short part for one."""
    numels, asked, totals = (32_000, 6_400), 384, []
    for step in range(10):
        grid = Grid(sharded_dgc(seed=step), numels)
        grid.step(drawn(numels, (1.0, 1.0), step=step))
        totals += [sum(grid.taken(rank)) for rank in range(2)]
    assert abs(sum(totals) / len(totals) / asked - 1) < 0.1


def test_nothing_is_lost_and_all_ranks_hold_the_same() -> None:
    """Of each part by itself: its residuals and means hold all gradients, whatever others do."""
    numels, given = (9_000, 8_000), [torch.zeros(n, dtype=torch.float64) for n in (9_000, 8_000)]
    grid, arrived = Grid(sharded_dgc(density=0.05), numels), [torch.zeros_like(g) for g in given]
    again = Grid(sharded_dgc(density=0.05), numels)
    for step in range(4):
        grads = drawn(numels, (1.0, 5.0), step=step)
        means, repeated = grid.step(grads, seed=step), again.step(grads, seed=99 - step)
        for shard in range(2):
            assert torch.equal(means[shard][0], means[shard][1])
            assert torch.equal(means[shard][0], repeated[shard][0]), "interleaving matters"
            given[shard] += sum(g.double() for g in grads[shard])
            arrived[shard] += 2 * means[shard][0].double()
            kept_N = sum(grid.residual(shard, rank).double() for rank in range(2))
            torch.testing.assert_close(arrived[shard] + kept_N, given[shard], rtol=0, atol=1e-2)


@pytest.mark.parametrize("numels", [(5_000, 5_000), (20_000, 300)], ids=str)
def test_ties_are_cut_to_the_cap(numels: tuple[int, ...]) -> None:
    """No threshold is right; memory and time are bounded, of a part and of all of them."""
    grid = Grid(sharded_dgc(density=0.01), numels)
    grid.step([[torch.ones(numel)] * 2 for numel in numels])
    assert 0.01 * sum(numels) <= sum(grid.taken(0)) <= 1.25 * 2 * 0.01 * sum(numels)


def test_zeros_are_not_sent_and_what_is_not_finite_is() -> None:
    numels = (2_000, 2_000)
    grads = [[torch.zeros(2_000) for _ in range(2)] for _ in numels]
    grid = Grid(sharded_dgc(), numels)
    assert not any(bool(mean_N.any()) for shard in grid.step(grads) for mean_N in shard)
    assert grid.taken(0) == [0, 0]
    grads[1][0][7] = torch.nan
    means = grid.step(grads)
    assert all(bool(mean_N[7].isnan()) for mean_N in means[1])
    assert grid.taken(0) == [0, 1]
    assert all(bool(grid.residual(s, r).isfinite().all()) for s in range(2) for r in range(2))


def test_bytes_among_shards_are_those_of_the_header() -> None:
    """What a rank sends more than a rank of an uncut layer that sends as many elements."""
    numels = (9_000, 3_000)
    grid = Grid(sharded_dgc(), numels)
    grid.step(drawn(numels, (1.0, 1.0)))
    draws = 6_400  # 64 / density; the shorter part is looked at whole
    for shard in range(2):
        taken = [one.selection.selected for one in grid.members[shard] if one.selection]
        assert grid.sent_bytes[2 * shard] == 4 * draws + 8 + 8 * max(taken)


def test_shards_that_do_not_do_the_same_are_named() -> None:
    grid = Grid(sharded_dgc(), (100, 100))
    other: Any = gw.exchange_for(topk())
    grads = drawn((100, 100), (1.0, 1.0))
    texts = [
        *(
            grid.exchange.synchronise(me, s, g, g.clone())
            for me, s, g in zip(grid.members[0], grid.states[0], grads[0], strict=True)
        ),
        *by_name.texts(other, grads[1]),
    ]
    with pytest.raises(Deadlock, match=r"rank 0 waits in AllGather\(100 elements among shards\)"):
        drive(texts, num_shards=2)
    with pytest.raises(InvalidSetting, match="multiple of num_shards"):
        drive(texts[:3], num_shards=2)


def test_any_sparse_collective_carries_it() -> None:
    numels = (4_000, 2_000)
    grads = drawn(numels, (1.0, 1.0))
    want, got = (
        Grid(sharded_dgc(collective=one), numels).step(grads)
        for one in (gw.collective.allgather_sparse(), gw.collective.zen())
    )
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a[0], b[0])
