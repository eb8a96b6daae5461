"""Direct transfers among ranks of this process, by gloo: values and bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from gradwire.collective.steps.rounds import ROOM_BYTES
from gradwire.contract.verbs import AllGather, AllReduce, AllToAll, Send
from gradwire.runtime.transport.direct import begin_straight, goes_straight

WORLDS = (2, 3, 5, 7)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
LIMIT = timedelta(seconds=120)


class Counting:
    """A channel that counts the bytes of its sends."""

    def __init__(self, channel: ProcessGroupGloo) -> None:
        self.channel = channel
        self.sent_bytes = 0
        self.rank = channel.rank
        self.size = channel.size
        self.recv = channel.recv

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        self.sent_bytes += tensors[0].nbytes
        return self.channel.send(tensors, dst, tag)


def among(world: int, work: Callable[[Any], Any]) -> list[Any]:
    """What ``work`` returns on each rank, a thread each, given its channel."""
    store = HashStore()

    def run(rank: int) -> Any:
        return work(Counting(ProcessGroupGloo(store, rank, world, LIMIT)))

    with ThreadPoolExecutor(world) as threads:
        done = [threads.submit(partial(run, rank)) for rank in range(world)]
        return [one.result() for one in done]


def part(src: int, dst: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values that say who sends to whom."""
    return torch.full((numel,), 1 + src + 10 * dst).to(dtype)


@pytest.mark.parametrize("world", WORLDS)
def test_parts_arrive_at_their_ranks_whatever_their_sizes(world: int) -> None:
    rng = random.Random(world)
    all_sizes = [
        [[rng.randrange(4) * 3 for _ in range(world)] for _ in range(world)]
        for _ in range(12)
    ]

    def work(channel: Any) -> None:
        me = channel.rank()
        for sizes in all_sizes:
            come = [sizes[src][me] for src in range(world)]
            sent = torch.cat([part(me, dst, sizes[me][dst]) for dst in range(world)])
            out = torch.empty(sum(come))
            verb = AllToAll(out, sent, tuple(come), tuple(sizes[me]))
            begin_straight(verb, channel).wait()
            assert out.equal(
                torch.cat([part(src, me, come[src]) for src in range(world)])
            )

    among(world, work)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("numel", [0, 1, 6, 35])
def test_gathers_and_sums_are_those_of_all_ranks(world: int, numel: int) -> None:
    def work(channel: Any) -> int:
        me = channel.rank()
        for dtype in DTYPES:
            out = torch.empty(world * numel, dtype=dtype)
            own = part(me, 0, numel, dtype)
            begin_straight(AllGather(out, own), channel).wait()
            each = [part(src, 0, numel, dtype) for src in range(world)]
            assert out.equal(torch.cat(each))
        channel.sent_bytes = 0
        values = part(me, 0, numel)
        begin_straight(AllReduce(values), channel).wait()
        assert values.equal(sum(part(src, 0, numel) for src in range(world)))
        return int(channel.sent_bytes)

    sent = among(world, work)
    assert sum(sent) == 2 * (world - 1) * numel * 4


@pytest.mark.parametrize("world", [3, 5])
def test_sums_are_added_in_rank_order_and_alike_on_all_ranks(world: int) -> None:
    torch.manual_seed(world)
    values = torch.randn(world, 1001) * 10.0 ** torch.randint(-4, 5, (world, 1001))
    expected = values[0].clone()
    for row in values[1:]:
        expected += row

    def work(channel: Any) -> Tensor:
        own = values[channel.rank()].clone()
        begin_straight(AllReduce(own), channel).wait()
        return own

    assert all(found.equal(expected) for found in among(world, work))


def test_verbs_of_one_task_do_not_meet_each_other() -> None:
    """Parts of one size, of two sums and a gather that are under way together."""

    def work(channel: Any) -> None:
        me = channel.rank()
        first = torch.full((6,), 1.0 + me)
        second = torch.full((6,), 10.0 + me)
        out = torch.empty(6)
        verbs = [AllReduce(first), AllGather(out, torch.full((2,), 100.0 + me))]
        works = [begin_straight(verb, channel) for verb in [*verbs, AllReduce(second)]]
        for one in works:
            one.wait()
        assert first.unique().tolist() == [6.0]
        assert second.unique().tolist() == [33.0]
        assert out.tolist() == [100.0, 100.0, 101.0, 101.0, 102.0, 102.0]

    among(3, work)


def test_large_gathers_and_sums_keep_to_the_ring() -> None:
    numel = ROOM_BYTES // 4
    small = torch.empty(numel, device="meta")
    large = torch.empty(numel + 1, device="meta")
    assert goes_straight(AllReduce(small))
    assert goes_straight(AllGather(small, small[:1]))
    assert goes_straight(AllToAll(large, large, (1,), (1,)))
    assert not goes_straight(AllReduce(large))
    assert not goes_straight(AllGather(large, large[:1]))
    assert not goes_straight(Send(0, small))
