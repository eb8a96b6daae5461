"""Layers cut among a mesh's tensor-parallel ranks: real ranks agree on one
threshold.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.contract.verbs import AllGather, AllReduce, Among
from gradwire.errors import InvalidSetting, RankFailed
from gradwire.runtime.transport.wire import RankGroup, Routes
from gradwire_lab.compress.sharded_dgc import sharded_dgc
from tests.compress.grid import Grid
from tests.each import each
from tests.runtime.given import keywords
from tests.runtime.meshes import device_mesh
from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.multi

ROWS = (60, 40)
"""Of each shard: a vocabulary that does not divide."""
LAYERS, WIDTH, STEPS = 5, 100, 4
EXCHANGE = sharded_dgc(density=0.02, sample_share=0.1)


def mesh() -> Any:
    """Two ranks average each of two shards; rank 2 * r + s is rank r of shard s."""
    return device_mesh((2, 2), ("dp", "tp"))


def grad_of(shard: int, rank: int, layer: int, step: int) -> Tensor:
    """Shard 1's are ten times as large."""
    draw = torch.Generator().manual_seed(1000 * shard + 100 * rank + 10 * layer + step)
    return 10.0**shard * torch.randn(ROWS[shard], WIDTH, generator=draw)


def shard_of(shard: int) -> nn.ParameterList:
    return nn.ParameterList(torch.zeros(ROWS[shard], WIDTH) for _ in range(LAYERS))


def backward(model: nn.ParameterList, shard: int, rank: int, step: int) -> None:
    """Gives every layer its gradient."""
    model.zero_grad()
    losses = [(p * grad_of(shard, rank, i, step)).sum() for i, p in enumerate(model)]
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]


def on_the_grid(rank: int, world: int) -> tuple[list[Tensor], dict[str, Any], int]:
    """The means of every layer in every step, message after message on two channels."""
    dp, shard = divmod(rank, 2)
    model, grid = shard_of(shard), mesh()
    handle = gw.attach(
        model,
        EXCHANGE,
        group=grid["dp"],
        **keywords(shards=grid["tp"], bucket_cap_mb=0.001, num_channels=2),
    )
    found = []
    for step in range(STEPS):
        backward(model, shard, dp, step)
        found += [p.grad.flatten().clone() for p in model if p.grad is not None]
    stats, numel = handle.stats(), ROWS[shard] * WIDTH * LAYERS
    assert handle.state_dict()["shard"] == f"part {shard} of 2"
    handle.detach()
    return found, stats, numel


def expected() -> list[list[Tensor]]:
    """By shard: what one process computes; messages take layers last to first."""
    grids = [
        Grid(EXCHANGE, tuple(rows * WIDTH for rows in ROWS), name=f"message {index}")
        for index in range(LAYERS)
    ]
    found: list[list[Tensor]] = [[], []]
    for step in range(STEPS):
        for layer in range(LAYERS):
            grads = [
                [grad_of(s, r, layer, step).flatten() for r in (0, 1)] for s in (0, 1)
            ]
            means = grids[LAYERS - 1 - layer].step(grads)
            for shard in (0, 1):
                found[shard].append(means[shard][0])
    return found


def test_a_grid_of_real_ranks_computes_what_a_local_one_does(four: Ranks) -> None:
    want, results = expected(), four.run(on_the_grid)
    for rank, (found, _, _) in enumerate(results):
        assert len(found) == STEPS * LAYERS
        for got_N, want_N in zip(found, want[rank % 2], strict=True):
            assert torch.equal(got_N, want_N), f"rank {rank} has other bits"
    for dp in (0, 1):
        parts = [(stats, numel) for _, stats, numel in results[2 * dp : 2 * dp + 2]]
        taken = [stats["density_local"] * numel for stats, numel in parts]
        asked = 0.02 * sum(numel for _, numel in parts)
        assert asked / 2 < sum(taken) < 2 * asked
        assert taken[0] < 0.1 * taken[1], "the shard with small gradients sends as much"


def given_wrongly(rank: int, world: int) -> list[str]:
    """Every mistake is told on every rank, and none of them waits for another."""
    grid, shard, reported = mesh(), rank % 2, []

    def attached(model: nn.Module, **settings: Any) -> None:
        with pytest.raises(InvalidSetting) as refused:
            gw.attach(model, EXCHANGE, **keywords(**settings))
        reported.append(f"{type(refused.value).__name__}: {refused.value}")

    attached(shard_of(shard), group=grid)
    attached(shard_of(shard), group=grid["dp"], shards=grid)
    attached(shard_of(shard), group=grid["dp"], shards=grid["dp"])
    attached(shard_of(shard), shards=grid["tp"])
    attached(shard_of(shard), group=grid["dp"], shards="tp")
    attached(shard_of(shard), group="dp", shards=grid["tp"])
    axes = {"group": grid["dp"], "shards": grid["tp"]}
    attached(nn.ParameterList([*shard_of(0), *shard_of(1)][: 3 + shard]), **axes)
    # shard 0 has several layers in each
    attached(shard_of(shard), **axes, bucket_cap_mb=0.08)
    attached(shard_of(shard), **axes, num_channels=2 + shard)
    attached(shard_of(shard), **axes, num_channels=0 if rank == 3 else 2)
    attached(shard_of(0), group=grid["dp"], shards=grid["tp"] if rank < 2 else None)
    return reported


def test_mistakes_are_told_on_every_rank(four: Ranks) -> None:
    wanted = [
        r"InvalidSetting: group must be .* write group=mesh\['dp'\]",
        r"InvalidSetting: shards must be one dimension of it: the tensor-parallel one",
        r"InvalidSetting: shards must be one that shares this rank alone",
        r"InvalidSetting: shards must be one that shares this rank alone",
        r"InvalidSetting: shards must be a process group this rank is in",
        r"InvalidSetting: group must be a process group this rank is in",
        r"RanksDiffer: shard 0 and shard 1 .* 3 messages against 4|message 0 is of",
        r"RanksDiffer: shard 0 and shard 1 .* message 0 is of",
        r"RanksDiffer: shard 0 and shard 1 .* num_channels is 2 against 3",
        r"num_channels must be an integer of at least 1|"
        r"refused to attach: .*num_channels",
        r"RanksDiffer: rank 0 and rank 1 .* setting shards is 'part [01] of 2' against",
    ]
    for reported in four.run(given_wrongly):
        for text, pattern in zip(reported, wanted, strict=True):
            assert re.search(pattern, text), text


@each(
    "verb, said",
    [
        (
            AllGather(torch.empty(2), torch.empty(1), Among.SHARDS),
            "given none: write shards=",
        ),
        (AllReduce(torch.empty(2), Among.HOSTS), "among hosts, .* write mesh="),
    ],
)
def test_verbs_among_ranks_that_there_are_none_of_are_refused(
    verb: Any, said: str
) -> None:
    routes = Routes(["communication 0"])
    routes.groups[Among.RANKS] = RankGroup("", 0, 2, [object()])
    with pytest.raises(InvalidSetting, match=f"message 7 .* {said}"):
        routes.of([verb], 7, 0)


def until_a_rank_dies(rank: int, world: int) -> str:
    """Rank 3 ends in the second step: it shares a shard with rank 1 and layers with
    rank 2.
    """
    dp, shard = divmod(rank, 2)
    model, grid = shard_of(shard), mesh()
    gw.attach(
        model,
        EXCHANGE,
        group=grid["dp"],
        **keywords(shards=grid["tp"], bucket_cap_mb=0.001),
    )
    backward(model, shard, dp, 0)
    if rank == 3:
        os._exit(3)
    with pytest.raises(RankFailed) as failed:
        backward(model, shard, dp, 1)
    return str(failed.value)


def test_a_lost_shard_ends_the_step_on_all_ranks(doomed: Ranks) -> None:
    first, second, third, dead = doomed.outcomes(until_a_rank_dies)
    assert dead.exit_code == 3
    assert "step 1 cannot be finished: rank 1 of 2 stopped answering" in second.value
    for one in (first, third):
        assert "a rank with another shard of these layers is lost" in one.value, one
