"""HSDP: a replica that has lost a rank leaves, and the others go on."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from copy import deepcopy
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.errors import ExitCode
from gradwire.runtime.grid.dtensors import shard_of
from gradwire.runtime.transport.wire import default_store
from tests.runtime.given import keywords
from tests.runtime.meshes import device_mesh
from tests.runtime.ranks import Ranks
from tests.runtime.state.test_sharded import held
from tests.runtime.training import (
    DENSE,
    ONEBIT,
    SMALL_MB,
    TOPK,
    Net,
    digest,
    loss_of,
    momentum,
)

pytestmark = [pytest.mark.multi, pytest.mark.timeout(180)]
LIMIT = timedelta(seconds=60)
STEPS = 7
NUM_SHARDS = 2
Accidents = dict[int, tuple[tuple[int, ...], str]]
"""The victims in a step, and the moment at which they die."""


class State(NamedTuple):
    """A rank's whole state before a step that was repeated."""

    step: int
    tensors: list[Tensor]
    handle: dict[str, Any]


class Report(NamedTuple):
    """What a survivor has seen."""

    bits: list[str]
    lost: list[tuple[tuple[int, ...], int]]
    left: list[tuple[int, ...]]
    num_replicas: int
    total: float
    states: list[State]


class Ended(NamedTuple):
    """How a rank ended that was not killed."""

    code: int
    text: str


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def means_of(handle: gw.Handle) -> str:
    return f"ranks with the means of step {handle.step}"


def meet_the_end(handle: gw.Handle, net: Any, how: str) -> None:
    """Kills this process later in its next step."""
    if how == "in backward":
        net.get_submodule("middle").register_forward_hook(
            lambda module, args, out: out.register_hook(die) and None
        )
        return
    store = default_store()
    name = means_of(handle)
    others = dist.get_world_size(handle.group) * NUM_SHARDS - 1

    def steps(*_: Any) -> Any:
        while store.add(name, 0) < others:
            time.sleep(0.01)
        die()
        yield

    handle._synchroniser.report.confirmation = steps  # type: ignore[method-assign]


def announce_means(handle: gw.Handle) -> None:
    """Counts this rank once it has all means of its next step."""
    report = handle._synchroniser.report
    confirmation = report.confirmation
    name = means_of(handle)

    def steps(*given: Any) -> Any:
        del report.confirmation  # of this one step
        default_store().add(name, 1)
        yield from confirmation(*given)

    report.confirmation = steps  # type: ignore[method-assign]


def by_blocks(mesh: Any) -> Any:
    net: Any = Net()
    for block in (net.middle, net.deep):
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


class Layers(nn.Module):
    """Layers for tensor parallelism, with the names of ``Net``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.middle = nn.Linear(13, 38)
        self.deep = nn.Linear(38, 29)
        self.last = nn.Linear(29, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.deep(torch.relu(self.middle(x)))))  # type: ignore[no-any-return]


def by_tensors(mesh: Any) -> Any:
    """DTensors without FSDP; layers cut by columns and by rows, and a whole one."""
    cut = {"middle": ColwiseParallel(), "deep": RowwiseParallel()}
    return parallelize_module(Layers(), mesh, cut)


WAYS: dict[str, Callable[[Any], Any]] = {
    way.__name__: way for way in (by_blocks, by_tensors)
}


def attached(way: str, exchange: Exchange, world: int) -> tuple[Any, gw.Handle, Any]:
    mesh = device_mesh((world // NUM_SHARDS, NUM_SHARDS), ("replicate", "shard"))
    net = WAYS[way](mesh["shard"])
    handle = gw.attach(
        net,
        exchange,
        group=mesh["replicate"],
        **keywords(
            bucket_cap_mb=SMALL_MB, timeout=LIMIT, on_failure="shrink", check_every=2
        ),
    )
    return net, handle, momentum(net.parameters())


def seed_of(rank: int, way: str) -> int:
    """The number of a rank's batches; ranks of tensor parallelism have the same."""
    return rank // NUM_SHARDS if way == "by_tensors" else rank


def tensors_of(net: Any, optimizer: Any) -> list[Tensor]:
    """This rank's shards of parameters and of momenta, which may be written to."""
    moments = [optimizer.state[param]["momentum_buffer"] for param in net.parameters()]
    return [shard_of(tensor).detach() for tensor in (*net.parameters(), *moments)]


def ended_by(error: BaseException) -> Ended:
    """The exit code and the last words of a script that does not catch ``error``."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            sys.excepthook(type(error), error, None)
    except SystemExit as end:
        return Ended(int(str(end.code)), said.getvalue())
    return Ended(1, said.getvalue())


def loses_replicas(
    rank: int, world: int, way: str, exchange: Exchange, accidents: Accidents
) -> Report | Ended:
    """Trains on while ranks die; the loop catches what a user's loop catches."""
    net, handle, optimizer = attached(way, exchange, world)
    bits = []
    lost = []
    states = []
    try:
        for step in range(STEPS):
            victims, how = accidents.get(step, ((), ""))
            if rank in victims:
                meet_the_end(handle, net, how)
            elif how == "confirming":
                announce_means(handle)
            while True:
                try:
                    optimizer.zero_grad()
                    loss_of(net, seed_of(rank, way), step).backward()
                    break
                except gw.RanksLost as error:
                    lost.append((error.ranks, step))
                    assert all(param.grad is None for param in net.parameters())
                    states.append(
                        State(
                            step,
                            [*map(torch.clone, tensors_of(net, optimizer))],
                            deepcopy(handle.state_dict()),
                        )
                    )
            optimizer.step()
            bits.append(digest(held(net)))
    except RuntimeError as error:
        return ended_by(error)
    total = torch.ones(1)
    dist.all_reduce(total, group=handle.group)
    left = [one["ranks"] for one in handle.stats()["left"]]
    num_replicas = handle.world_size
    handle.detach()
    return Report(bits, lost, left, num_replicas, total.item(), states)


def goes_on_afresh(
    rank: int,
    world: int,
    way: str,
    exchange: Exchange,
    numbers: list[int],
    states: list[State],
) -> list[str]:
    """Trains with the states that survivors had when they lost a replica."""
    net, handle, optimizer = attached(way, exchange, world)
    state = states[rank]
    # moments come into being by a step
    loss_of(net, 0, 0).backward()
    optimizer.step()
    for tensor, kept in zip(tensors_of(net, optimizer), state.tensors, strict=True):
        tensor.copy_(kept)
    handle.load_state_dict(state.handle)
    bits = []
    for step in range(state.step, STEPS):
        optimizer.zero_grad()
        loss_of(net, seed_of(numbers[rank], way), step).backward()
        optimizer.step()
        bits.append(digest(held(net)))
    handle.detach()
    return bits


def goes_on(
    ranks_of: Callable[[int], Ranks],
    world: int,
    exchange: Exchange,
    accidents: Accidents,
    way: str = "by_blocks",
) -> None:
    """Fails unless victims' replicas leave and the others have a fresh run's bits."""
    found = survivors(ranks_of(world), world, exchange, accidents, way)
    lost = []
    numbers = [*range(world)]
    for step, ((victim,), how) in sorted(accidents.items()):
        first = victim // NUM_SHARDS * NUM_SHARDS
        replica = tuple(range(first, first + NUM_SHARDS))
        for mate in {*replica} - {victim}:
            assert_leaves(found.pop(mate))
        # a step that all survivors have whole counts, and the next one says so
        lost.append((replica, step + (how == "confirming")))
        numbers = [rank for rank in numbers if rank not in replica]
    assert [*found] == numbers
    reports = [*found.values()]
    for rank, report in found.items():
        assert isinstance(report, Report), report
        assert report.lost == lost
        assert report.left == [replica for replica, _ in lost]
        assert report.num_replicas == report.total == len(numbers) // NUM_SHARDS
        assert report.bits == reports[rank % NUM_SHARDS].bits
    states = [report.states[-1] for report in reports]
    fresh = ranks_of(len(numbers))
    again = fresh.run(goes_on_afresh, way, exchange, numbers, states)
    begin = lost[-1][1]
    assert again == [report.bits[begin:] for report in reports]


def survivors(
    ranks: Ranks, world: int, exchange: Exchange, accidents: Accidents, way: str
) -> dict[int, Any]:
    """What ranks answer that were not killed."""
    ranks.send(loses_replicas, way, exchange, accidents)
    dead = {victim for victims, _ in accidents.values() for victim in victims}
    living = [rank for rank in range(world) if rank not in dead]
    return dict(zip(living, ranks.survivors(dead), strict=True))


def assert_leaves(end: object) -> None:
    """Fails unless a rank ended by itself, with the sentence and the code."""
    assert isinstance(end, Ended), end
    assert end.code == ExitCode.RANK_LOST, end.text
    assert "a replica that has lost a rank leaves" in end.text


def test_a_lost_rank_takes_its_replica_along(ranks_of: Callable[[int], Ranks]) -> None:
    """The replica that is left has the bits of a fresh run of one replica."""
    goes_on(ranks_of, 4, TOPK, {3: ((3,), "in backward")})


def test_a_replica_ends_a_step_whole_or_not_at_all(
    ranks_of: Callable[[int], Ranks],
) -> None:
    """Rank 0 has heard of all ranks with its shard, and rank 1 never hears of rank 3.

    Without each other's word rank 0 would wait for rank 1 in FSDP's next forward pass.
    """
    goes_on(ranks_of, 4, ONEBIT, {3: ((3,), "confirming")})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "exchange", "accidents", "way"),
    [
        (6, TOPK, {3: ((2,), "in backward")}, "by_blocks"),
        (6, DENSE, {2: ((5,), "in backward"), 4: ((2,), "confirming")}, "by_blocks"),
        (4, TOPK, {3: ((2,), "in backward")}, "by_tensors"),
    ],
    ids=["in the middle", "two in turn", "no FSDP"],
)
def test_replicas_go_on_without_others(
    world: int,
    exchange: Exchange,
    accidents: Accidents,
    way: str,
    ranks_of: Callable[[int], Ranks],
) -> None:
    goes_on(ranks_of, world, exchange, accidents, way)


@pytest.mark.slow
def test_a_run_without_a_whole_replica_ends(ranks_of: Callable[[int], Ranks]) -> None:
    """A rank of each replica dies."""
    accidents = {3: ((1, 3), "in backward")}
    found = survivors(ranks_of(4), 4, TOPK, accidents, "by_blocks")
    assert [*found] == [0, 2]
    for end in found.values():
        assert_leaves(end)
