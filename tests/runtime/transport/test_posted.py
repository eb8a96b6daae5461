"""Direct transfers: what arrives, whatever was posted a step ahead and for which size.

The channels of most tests are lists in this process: a payload that meets a receive of
another size raises there, where gloo would end the process. One test takes gloo's own.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from gradwire.contract.verbs import AllGather, AllReduce, AllToAll
from gradwire.runtime.transport import posted
from gradwire.runtime.transport.posted import EARLY_BYTES, PostedReceives, Sum

WORLDS = (2, 3, 5, 7)


class Network:
    """Payloads on their way and receives that wait, by receiver, sender and tag."""

    def __init__(self) -> None:
        self.sent: dict[Any, list[Tensor]] = defaultdict(list)
        self.waiting: dict[Any, list[Received]] = defaultdict(list)
        self.num_posted_first = 0

    def meet(self, key: Any) -> None:
        """Gives payloads to receives of their tag, each in the order of its call."""
        while self.sent[key] and self.waiting[key]:
            payload, receive = self.sent[key].pop(0), self.waiting[key].pop(0)
            if payload.numel() != receive.memory.numel():
                raise ProcessEnded(key)
            receive.memory.copy_(payload)
            receive.is_over = True


class ProcessEnded(Exception):
    """A payload met a receive of another size."""


class Received:
    """A receive; to wait for it where nothing came would never end."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.is_over = False

    def wait(self) -> None:
        assert self.is_over, "a hang: nothing came"


class Sent:
    def wait(self) -> None:
        return


class Wire:
    """One rank's end of a network, with the calls of a process group."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network = network
        self.rank = rank

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> Sent:
        key = (dst, self.rank, tag)
        self.network.num_posted_first += bool(self.network.waiting[key])
        self.network.sent[key].append(tensors[0].view(torch.uint8).clone())
        self.network.meet(key)
        return Sent()

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> Received:
        key = (self.rank, src, tag)
        receive = Received(tensors[0])
        self.network.waiting[key].append(receive)
        self.network.meet(key)
        return receive


Use = tuple[str, str, list[list[int]]]
"""A verb's place, its kind, and how many elements each rank sends to each."""


def uses(world: int, seed: int) -> list[Use]:
    """Steps of three places: of fixed sizes, of sizes that vary, and of both kinds."""
    rng = random.Random(seed)
    fixed = [[rng.randrange(4) * 3 for _ in range(world)] for _ in range(world)]
    found: list[Use] = []
    for step in range(8):
        varies = [[rng.randrange(3) for _ in range(world)] for _ in range(world)]
        changed = fixed if step < 5 else [row[::-1] for row in fixed]
        found += [
            ("fixed", "all-to-all", fixed),
            ("report", "all-gather", [[5] * world] * world),
            ("varies", "all-to-all", varies),
            ("late", "all-to-all", changed),
            ("gathered", "all-gather", [[1 + step % 2] * world] * world),
            ("sum", "sum", [[11] * world] * world),
            ("tiny sum", "sum", [[1 + step // 6] * world] * world),
        ]
    return found


def verb_of(rank: int, use: Use, number: int) -> tuple[Any, Tensor]:
    """A rank's verb and what has to arrive: values say sender, receiver and use."""
    _, kind, sizes = use
    world = len(sizes)

    def part(src: int, dst: int) -> Tensor:
        to = dst if kind == "all-to-all" else 0
        value = float(1 + src + 10 * to + 100 * number)
        return torch.full((sizes[src][dst],), value)

    arrives = torch.cat([part(src, rank) for src in range(world)])
    if kind == "sum":
        total = torch.stack([part(src, 0) for src in range(world)]).sum(0)
        return AllReduce(part(rank, 0)), total
    out = torch.full_like(arrives, -1.0)
    if kind == "all-gather":
        return AllGather(out, part(rank, rank)), arrives
    sent = torch.cat([part(rank, dst) for dst in range(world)])
    came = tuple(sizes[src][rank] for src in range(world))
    return AllToAll(out, sent, came, tuple(sizes[rank])), arrives


def finished(transfers: dict[int, Any], rng: random.Random) -> list[int]:
    """The ranks, in any order, after each has waited.

    A sum sends its second round only once it has waited for the first. In this one
    thread all ranks have to get there before any of them waits for the second.
    """
    ranks = rng.sample(range(len(transfers)), len(transfers))
    sums = [transfers[rank] for rank in ranks if isinstance(transfers[rank], Sum)]
    for one in sums:
        one.add_up()
    for rank in ranks:
        transfers[rank].wait()
    return ranks


def result(verb: Any) -> Tensor:
    """Where what a verb brings lies."""
    found: Tensor = verb.buf if isinstance(verb, AllReduce) else verb.out
    return found


def run(world: int, seed: int, rng: random.Random) -> Network:
    """Ranks that carry out all uses; they start and wait in any order."""
    network = Network()
    ranks = [PostedReceives(Wire(network, rank), rank, world) for rank in range(world)]
    for number, use in enumerate(uses(world, seed)):
        verbs = [verb_of(rank, use, number) for rank in range(world)]
        transfers = {}
        for rank in rng.sample(range(world), world):
            transfers[rank] = ranks[rank].start(verbs[rank][0], use[0])
        for rank in finished(transfers, rng):
            verb, arrives = verbs[rank]
            assert result(verb).equal(arrives), (number, use, rank)
    return network


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("seed", range(4))
def test_each_part_arrives_whatever_sizes_come_next(world: int, seed: int) -> None:
    network = run(world, seed, random.Random(seed))
    assert network.num_posted_first > 0


def _no_use(name: str, use: int, part: Tensor) -> int:
    return hash((name, part.nbytes)) % 2**30


def _no_size(name: str, use: int, part: Tensor) -> int:
    return hash((name, use)) % 2**30


def _no_name(name: str, use: int, part: Tensor) -> int:
    return hash((use, part.nbytes)) % 2**30


@pytest.mark.parametrize("tag", [_no_size, _no_name, _no_use])
def test_tags_that_leave_something_out_are_found(
    tag: Callable[[str, int, Tensor], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posted, "_tag", tag)

    def runs() -> None:
        for seed in range(4):
            run(3, seed, random.Random(seed))

    with pytest.raises((AssertionError, ProcessEnded)):
        runs()


def test_the_receives_of_the_next_step_are_posted_before_it_begins() -> None:
    network = Network()
    ranks = [PostedReceives(Wire(network, rank), rank, 2) for rank in range(2)]
    met = []
    for _ in range(3):
        use: Use = ("report", "all-gather", [[4, 4], [4, 4]])
        transfers = [
            ranks[rank].start(verb_of(rank, use, 0)[0], "report") for rank in range(2)
        ]
        for transfer in transfers:
            transfer.wait()
        met.append(network.num_posted_first)
    # In the first step rank 1 sends after rank 0 has posted; later both find receives.
    assert met == [1, 3, 5]


def test_large_parts_take_no_memory_of_their_own() -> None:
    network = Network()
    ranks = [PostedReceives(Wire(network, rank), rank, 2) for rank in range(2)]
    numel = EARLY_BYTES // 4 + 1
    use: Use = ("large", "all-gather", [[numel] * 2] * 2)
    for _ in range(2):
        transfers = [
            ranks[rank].start(verb_of(rank, use, 0)[0], "large") for rank in range(2)
        ]
        for transfer in transfers:
            transfer.wait()
    assert not any(network.waiting.values())


def test_gloo_carries_them_and_closes_over_receives_that_nothing_met() -> None:
    world = 3
    store = HashStore()

    def train(rank: int) -> None:
        channel = ProcessGroupGloo(store, rank, world, timedelta(seconds=60))
        receives = PostedReceives(channel, rank, world)
        for number, use in enumerate(uses(world, 0)):
            verb, arrives = verb_of(rank, use, number)
            receives.start(verb, use[0]).wait()
            assert result(verb).equal(arrives), (number, use, rank)
        receives.clear()

    with ThreadPoolExecutor(world) as threads:
        for done in [threads.submit(partial(train, rank)) for rank in range(world)]:
            done.result()
