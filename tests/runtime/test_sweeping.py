"""What an attach leaves behind: no keys in the job's store, and no memory."""

from __future__ import annotations

import gc
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw
from gradwire.runtime.transport.wire import default_store
from tests.runtime.meshes import device_mesh
from tests.runtime.ranks import HURRIED, Ranks

pytestmark = [pytest.mark.multi, pytest.mark.slow]
MOST_KEYS = 2 * (1 + 4 + 1 + 2) + 2
"""While two ranks are attached: a key of each for its channels, its probe port, its
pulse and so on.
"""
ROUNDS = 8
MOST_MB_A_ROUND = 1.5
"""Of memory that ten attaches may add in the best round; it was 4 MB in each before.

The allocator's pools grow in the first rounds and then stay.
"""


def keys_now() -> set[str]:
    return {key for key in default_store().list_keys() if "gradwire" in key}


def settled_keys(most: int, old: set[str]) -> set[str]:
    """The store's keys beside ``old`` ones, once they are no more than ``most`` or
    after 10 s.
    """
    deadline_s = time.monotonic() + 10
    while True:
        keys = keys_now() - old
        if len(keys) <= most or time.monotonic() > deadline_s:
            return keys
        time.sleep(0.05)


def resident_mb() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def attach_and_train(
    num_steps: int = 1, num_loads: int = 0, width: int = 8
) -> gw.Handle:
    net = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
    handle = gw.attach(
        net, gw.compress.onebit(block=64), options=gw.Options(bucket_cap_mb=0.4)
    )
    for _ in range(num_steps):
        net(torch.ones(2, width)).sum().backward()
        net.zero_grad()
    for _ in range(num_loads):
        handle.load_state_dict(handle.state_dict())
    return handle


def keys_in_use(rank: int, world: int) -> tuple[int, int, set[str]]:
    """Keys while attached, after one step and after many steps and loads; and after
    detach.

    The process group's own keys are there before, and are not counted.
    """
    old = keys_now()
    dist.barrier()
    handle = attach_and_train(1, 1)
    time.sleep(2 * HURRIED["PERIOD_S"])  # by then the pulse has swept
    dist.barrier()
    few = len(settled_keys(MOST_KEYS, old))
    for _ in range(4):
        handle.load_state_dict(handle.state_dict())
    many = len(settled_keys(few, old))
    dist.barrier()
    handle.detach()
    for _ in range(3):
        attach_and_train().detach()
    return few, many, settled_keys(0, old)


def test_keys_do_not_grow_with_steps_loads_and_attaches(doomed_two: Ranks) -> None:
    """On a store of its own: another test's handles may write into a shared one."""
    for few, many, left in doomed_two.run(keys_in_use):
        assert many <= few <= MOST_KEYS
        assert left == set()


def notes_of_shards(rank: int, world: int) -> tuple[set[str], set[str]]:
    """Keys that go before all ranks of a shard group are done, and keys that stay after
    that.
    """
    old, grid = keys_now(), device_mesh((2, 2), ("dp", "tp"))
    dist.barrier()
    net = nn.Linear(8, 8)
    handle = gw.attach(
        net, "none", group=grid["dp"], options=gw.Options(shards=grid["tp"])
    )
    dist.barrier()
    time.sleep(2 * HURRIED["PERIOD_S"])  # by then the pulse has swept
    name = (
        f"/{'-'.join(map(str, dist.get_process_group_ranks(grid['tp'].get_group())))}/"
    )
    notes = {key for key in keys_now() - old if name in key}
    dist.barrier()
    is_early = rank % 2 == 0
    if is_early:
        handle.detach()
        del net, handle
        gc.collect()
        time.sleep(2 * HURRIED["PERIOD_S"])
    dist.barrier()
    gone = notes - keys_now()
    dist.barrier()
    if not is_early:
        handle.detach()
    assert notes
    return gone, settled_keys(0, old)


def test_what_shards_agree_by_stays_until_the_last_rank_is_done(four: Ranks) -> None:
    """Each leaves once, by detach, although a handle that is dropped closes its engine
    again.
    """
    assert four.run(notes_of_shards) == [(set(), set())] * 4


def memory_of_attaches(rank: int, world: int) -> list[float]:
    """MB that each round of ten attaches adds."""
    marks_mb = [resident_mb()]
    for _ in range(ROUNDS):
        for _ in range(10):
            attach_and_train(width=400).detach()
        marks_mb.append(resident_mb())
    return [after - before for before, after in pairwise(marks_mb)]


def test_memory_does_not_grow_with_attaches(two: Ranks) -> None:
    for grown_mb in two.run(memory_of_attaches):
        assert min(grown_mb) < MOST_MB_A_ROUND, grown_mb
