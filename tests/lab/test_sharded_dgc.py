"""sharded_dgc: which elements all parts of a layer send together, on a grid in one
process.
"""

from __future__ import annotations

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
from tests.each import each

Drawn = list[list[Tensor]]


def drawn(
    numels: tuple[int, ...], scales: tuple[float, ...], world: int = 2, step: int = 0
) -> Drawn:
    """Heavy-tailed gradients by shard and rank; each shard's are ``scales`` times as
    large.
    """
    draw = torch.Generator().manual_seed(step)

    def one(numel: int, scale: float) -> Tensor:
        spread_N = torch.exp(2 * torch.randn(numel, generator=draw))
        return scale * spread_N * torch.randn(numel, generator=draw)

    return [
        [one(n, s) for _ in range(world)] for n, s in zip(numels, scales, strict=True)
    ]


@each("numels", [(300, 300), (500, 100, 1), (0, 40)], ids=str)
def test_parts_that_are_sampled_whole_send_the_largest_of_all(
    numels: tuple[int, ...],
) -> None:
    """The union over parts is the exact top-k of the whole layer, on every rank of its
    own.
    """
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
    apart = Grid(sharded_dgc(), numels, announced=False)
    apart.step(drawn(numels, scales))
    assert all(asked / 4 < taken < asked for taken in apart.taken(0))
    agreed, totals = Grid(sharded_dgc(), numels), []
    # nothing is left from step to step, or it would come to be sent
    for step in range(10):
        agreed.states = Grid(sharded_dgc(seed=step), numels).states
        agreed.step(drawn(numels, scales, step=step))
        for rank in range(2):
            first, second = agreed.taken(rank)
            assert second < 0.1 * first
            totals.append(first + second)
    assert asked / 2 < min(totals) <= max(totals) < 2 * asked
    # Each misses by an eighth, one standard deviation, or less; twenty of them by a
    # thirtieth.
    assert abs(sum(totals) / len(totals) / asked - 1) < 0.1


@pytest.mark.smoke
def test_nothing_is_lost_and_all_ranks_hold_the_same() -> None:
    """Of each part by itself: its residuals and means hold all gradients, whatever
    others do.
    """
    numels, given = (
        (9_000, 8_000),
        [torch.zeros(n, dtype=torch.float64) for n in (9_000, 8_000)],
    )
    grid, arrived = (
        Grid(sharded_dgc(density=0.05), numels),
        [torch.zeros_like(g) for g in given],
    )
    again = Grid(sharded_dgc(density=0.05), numels)
    for step in range(4):
        grads = drawn(numels, (1.0, 5.0), step=step)
        means, repeated = grid.step(grads, seed=step), again.step(grads, seed=99 - step)
        for shard in range(2):
            assert torch.equal(means[shard][0], means[shard][1])
            assert torch.equal(means[shard][0], repeated[shard][0]), (
                "interleaving matters"
            )
            given[shard] += sum(g.double() for g in grads[shard])
            arrived[shard] += 2 * means[shard][0].double()
            kept_N = sum(grid.residual(shard, rank).double() for rank in range(2))
            torch.testing.assert_close(
                arrived[shard] + kept_N, given[shard], rtol=0, atol=1e-2
            )


def test_shards_that_do_not_do_the_same_are_named() -> None:
    grid = Grid(sharded_dgc(), (100, 100))
    other: Any = gw.exchange_for(topk())
    grads = drawn((100, 100), (1.0, 1.0))
    all_steps = [
        *(
            grid.exchange.synchronise(me, s, g, g.clone())
            for me, s, g in zip(grid.members[0], grid.states[0], grads[0], strict=True)
        ),
        *by_name.steps_of_all(other, grads[1]),
    ]
    with pytest.raises(
        Deadlock, match=r"rank 0 waits in AllGather\(100 elements among shards\)"
    ):
        drive(all_steps, num_shards=2)
    with pytest.raises(InvalidSetting, match="multiple of num_shards"):
        drive(all_steps[:3], num_shards=2)
