"""Direct transfers among ranks of this process, by gloo: values and bytes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from gradwire.collective.steps.rounds import ROOM_BYTES
from gradwire.collective.steps.travel import AHEAD_BYTES, FAR_S, SIZE_BYTES
from gradwire.contract.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    ReduceScatter,
    Send,
)
from gradwire.errors import ExitCode, RankFailed
from gradwire.runtime.transport import direct
from gradwire.runtime.transport.checksums import Seals
from gradwire.runtime.transport.direct import (
    PIECE_BYTES,
    GatherInRows,
    HostChannel,
    Sum,
    agree_on_ways,
    begin_straight,
    goes_straight,
    room_bytes,
    row_width,
)
from gradwire.runtime.transport.wire import RankGroup, carry_out

WORLDS = (2, 3, 5, 6, 7)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
LIMIT = timedelta(seconds=120)


class Counting(HostChannel):
    """A channel that counts the bytes of its sends."""

    sent_bytes = 0

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        has_size = tag & direct._ROOM_TAGS == direct._ROOM_TAGS
        self.sent_bytes += tensors[0].nbytes - SIZE_BYTES * has_size
        return super().send(tensors, dst, tag)


class Unready(HostChannel):
    """Posts nothing ahead."""

    def _post_ahead(self, key: tuple[int, int]) -> None:
        return


class Eager(HostChannel):
    """Posts more ahead than is in use, now and then."""

    def _post_ahead(self, key: tuple[int, int]) -> None:
        super()._post_ahead(key)
        if self._num_used.total() % 2 and self.ahead_bytes < 2**20:
            self._ahead[key].append(self._post(key[0], self._room(key)))


def among(
    world: int,
    work: Callable[[Any], Any],
    kinds: Sequence[type[HostChannel]] = (Counting,),
) -> list[Any]:
    """What ``work`` returns on each rank, a thread each, given its channel.

    Ranks take channels of ``kinds`` in turn, and close them when they return.
    """
    store = HashStore()

    def run(rank: int) -> Any:
        return work(kinds[rank % len(kinds)](store, rank, world, LIMIT))

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


class Sending(Counting):
    """Counts its sends too."""

    num_sent = 0

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        self.num_sent += 1
        return super().send(tensors, dst, tag)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("numel", [0, 1, 35, AHEAD_BYTES // 4])
def test_a_reduce_scatter_is_one_hop_of_parts(world: int, numel: int) -> None:
    values = [torch.randn(world * numel) for _ in range(world)]
    sums = torch.stack(values).double().sum(0)

    def work(channel: Sending) -> tuple[int, int]:
        me = channel.rank()
        # else a rank that gets nothing closes while others connect
        agree_on_ways(channel)
        channel.num_sent = 0
        channel.sent_bytes = 0
        own = values[me].clone()
        out = torch.empty(numel)
        begin_straight(ReduceScatter(out, own), channel).wait()
        assert out.double().allclose(sums.view(world, numel)[me], atol=1e-4)
        assert own.equal(values[me])
        return channel.num_sent, channel.sent_bytes

    num_pieces = len(direct.piece_numels(4 * numel, world))
    sent = ((world - 1) * num_pieces, (world - 1) * 4 * numel)
    assert among(world, work, [Sending]) == [sent] * world


@pytest.mark.parametrize("numel", [1, 35, ROOM_BYTES // 4])
def test_two_ranks_sum_in_one_hop(numel: int) -> None:
    values = torch.randn(2, numel)

    def work(channel: Sending) -> tuple[int, int]:
        own = values[channel.rank()].clone()
        begin_straight(AllReduce(own), channel).wait()
        assert own.equal(values[0] + values[1])
        return channel.num_sent, channel.sent_bytes

    assert among(2, work, [Sending]) == [(1, 4 * numel)] * 2


def test_a_channel_keeps_the_buffers_of_its_sums_and_gathers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps after the first ones take no new memory."""
    allocated: list[int] = []
    memory = direct._memory

    def counted(size_bytes: int) -> Tensor:
        allocated.append(size_bytes)
        return memory(size_bytes)

    monkeypatch.setattr(direct, "_memory", counted)
    world = 3
    barrier = Barrier(world)

    def work(channel: HostChannel) -> tuple[int, int]:
        counts = []
        for _ in range(4):
            for numel in (40, 3000):
                values = torch.ones(world * numel)
                begin_straight(AllReduce(values), channel).wait()
                gather = AllGather(torch.empty(world * numel), torch.ones(numel))
                begin_straight(gather, channel).wait()
            barrier.wait()
            counts.append(len(allocated))
            barrier.wait()
        return counts[0], counts[-1]

    for first, last in among(world, work, [HostChannel]):
        assert 0 < first == last


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few kB have a room and more pieces than wait at once."""
    monkeypatch.setattr(direct, "AHEAD_BYTES", 2048)
    monkeypatch.setattr(direct, "PIECE_BYTES", 1024)
    monkeypatch.setattr(direct, "_UNDER_WAY_BYTES", 1)


def sums_like_the_ring(channel: HostChannel, numel: int, dtype: torch.dtype) -> None:
    """Two sums of one task have the bits of gloo's all-reduces, one by one."""
    world = channel.size()
    torch.manual_seed(numel)
    values = torch.randn(2, world, numel) * 10.0 ** torch.randint(
        -4, 5, (2, world, numel)
    )
    own = values[:, channel.rank()].to(dtype)
    expected = own.clone()
    for row in expected:
        channel.allreduce([row]).wait()
    for work in [begin_straight(AllReduce(row), channel) for row in own]:
        work.wait()
    assert own.equal(expected)


RINGS = (1, 2, 7, 13, 1001, 5003, 65537)


@pytest.mark.parametrize("world", WORLDS)
def test_sums_have_the_bits_of_gloos_ring(world: int) -> None:
    def work(channel: HostChannel) -> None:
        for numel in RINGS:
            sums_like_the_ring(channel, numel, torch.float32)
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            sums_like_the_ring(channel, 1001, dtype)

    among(world, work, [HostChannel])


@pytest.mark.parametrize("world", [2, 3])
def test_sums_of_several_segments_have_the_bits_of_gloos_ring(world: int) -> None:
    """Here gloo's segments are as long as they may be."""
    work = partial(sums_like_the_ring, numel=1_700_001, dtype=torch.float32)
    among(world, work, [HostChannel])


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("world", WORLDS)
def test_sums_in_pieces_have_the_bits_of_gloos_ring(world: int) -> None:
    def work(channel: HostChannel) -> None:
        for numel in RINGS:
            sums_like_the_ring(channel, numel, torch.float32)

    among(world, work, [HostChannel])


def test_a_sum_in_rank_order_has_other_bits() -> None:
    """So the tests above can fail."""
    torch.manual_seed(1001)
    values = torch.randn(3, 1001) * 10.0 ** torch.randint(-4, 5, (3, 1001))

    def work(channel: HostChannel) -> bool:
        own = values[channel.rank()].clone()
        begin_straight(AllReduce(own), channel).wait()
        return own.equal(values[0] + values[1] + values[2])

    assert among(3, work, [HostChannel]) == [False] * 3


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("world", WORLDS)
def test_parts_in_pieces_arrive_whole(world: int) -> None:
    among(world, partial(parts_arrive, uses=sizes_of_steps(world, 1, 3, 30)))


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


class Distant:
    """What the rule asks of a channel."""

    def __init__(self, world: int, latency_s: float) -> None:
        self.size = lambda: world
        self.latency_s = latency_s
        self.row_width = world


@pytest.mark.parametrize("world", WORLDS)
def test_large_gathers_and_sums_of_near_hosts_keep_to_the_ring(world: int) -> None:
    numel = ROOM_BYTES // 4
    small = torch.empty(numel, device="meta")
    large = torch.empty(numel + 1, device="meta")
    for latency_s in (0.0, 0.9 * FAR_S, FAR_S, 1.0):
        channel: Any = Distant(world, latency_s)
        rings = world > 2 and latency_s < FAR_S
        assert goes_straight(AllReduce(small), channel)
        assert goes_straight(AllGather(small, small[:1]), channel)
        assert goes_straight(AllToAll(large, large, (1,), (1,)), channel)
        assert goes_straight(ReduceScatter(large[:1], large), channel)
        assert goes_straight(AllReduce(large), channel) != rings
        assert goes_straight(AllGather(large, large[:1]), channel) != rings
        assert not goes_straight(Send(0, small), channel)


@pytest.mark.parametrize("world", [3, 6])
def test_all_ranks_have_the_latency_of_the_farthest_and_rows_alike(world: int) -> None:
    def work(channel: HostChannel) -> tuple[float, int]:
        agree_on_ways(channel)
        return channel.latency_s, channel.row_width

    found = among(world, work, [HostChannel])
    assert len({*found}) == 1
    latency_s, width = found[0]
    assert 0 < latency_s < LIMIT.total_seconds()
    assert width in (row_width(world), world)


@pytest.mark.parametrize("straight_is_slower", [False, True])
def test_rows_are_taken_where_they_are_faster(
    monkeypatch: pytest.MonkeyPatch, straight_is_slower: bool
) -> None:
    seconds = {6: 3.0 if straight_is_slower else 1.0, 3: 2.0}
    monkeypatch.setattr(direct, "_slowest_s", lambda it: seconds[it.row_width])

    def work(channel: HostChannel) -> tuple[float, int]:
        agree_on_ways(channel)
        return channel.latency_s, channel.row_width

    # a hop of two is at least as far as the latency
    assert among(6, work) == [(1.0, 3 if straight_is_slower else 6)] * 6


# Gathers in rows.

ROWS = [6, 8, 9, 12]
"""Numbers of ranks whose small gathers may take two hops."""


def in_rows(channel: Any) -> Any:
    # else a rank that gets nothing closes while others connect
    agree_on_ways(channel)
    channel.row_width = row_width(channel.size())
    return channel


@pytest.mark.parametrize("world", ROWS)
@pytest.mark.parametrize("numel", [0, 1, 35, 4096])
def test_gathers_in_rows_are_those_of_all_ranks(world: int, numel: int) -> None:
    """Each rank sends as many parts as its row and its column have others."""

    def work(channel: Sending) -> tuple[int, int]:
        me = in_rows(channel).rank()
        for dtype in DTYPES:
            own = part(me, 0, numel, dtype)
            each = [part(src, 0, numel, dtype) for src in range(world)]
            out = torch.empty(world * numel, dtype=dtype)
            channel.num_sent = 0
            channel.sent_bytes = 0
            begin_straight(AllGather(out, own), channel).wait()
            assert out.equal(torch.cat(each))
        return channel.num_sent, channel.sent_bytes

    width = row_width(world)
    num_sent = width - 1 + world // width - 1 if numel else 0
    size_bytes = (world - 1) * numel * DTYPES[-1].itemsize
    assert among(world, work, [Sending]) == [(num_sent, size_bytes)] * world


def verbs_beside_rows(channel: Any) -> None:
    """Two gathers and a sum; some ranks begin one before the one before it ends."""
    me = in_rows(channel).rank()
    world = channel.size()
    outs = [torch.empty(world * 16) for _ in range(2)]
    for step in range(6):
        values = torch.full((world,), 1.0 + step)
        own = [torch.full((16,), 1000.0 * step + 100 * at + me) for at in range(2)]
        gathers = [AllGather(out, part) for out, part in zip(outs, own, strict=True)]
        works = []
        for verb in (gathers[0], AllReduce(values), gathers[1]):
            works.append(begin_straight(verb, channel))
            if (me + step) % 3 == 0:
                works.pop().wait()
        for one in works:
            one.wait()
        assert values.unique().tolist() == [world * (1.0 + step)]
        for at, out in enumerate(outs):
            wanted = 1000 * step + 100 * at + torch.arange(world)
            assert out.view(world, -1)[:, 0].tolist() == wanted.tolist()


@pytest.mark.parametrize("world", ROWS)
def test_gathers_in_rows_do_not_meet_other_verbs(world: int) -> None:
    among(world, verbs_beside_rows)


def test_second_hops_with_tags_of_first_ones_meet_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broken specimen: its rows of 4 ranks are as large as the rooms of parts."""
    monkeypatch.setattr(GatherInRows, "TAGS", direct._ROOM_TAGS)
    # its ranks wait for each other
    monkeypatch.setattr(sys.modules[__name__], "LIMIT", timedelta(seconds=3))
    with pytest.raises((AssertionError, RuntimeError)):
        among(8, verbs_beside_rows)


# Receives that are posted ahead.


def sizes_of_steps(
    world: int, seed: int, num_steps: int, times: int = 1
) -> list[list[list[int]]]:
    """Elements that each rank sends to each, use after use: some change each time."""
    rng = random.Random(seed)
    most = 300 * times

    def drawn(draw: Callable[[], int]) -> list[list[int]]:
        return [[draw() for _ in range(world)] for _ in range(world)]

    fixed = drawn(lambda: rng.randrange(4) * 30)
    found = []
    for step in range(num_steps):
        varying = drawn(lambda: rng.randrange(most))
        found += [fixed, varying]
        if step % 3:  # a step may skip a message
            found += [[row[::-1] for row in fixed]]
    return found


def parts_arrive(channel: HostChannel, uses: Sequence[list[list[int]]]) -> None:
    """All-to-alls with a sum and a gather beside each, whose values say the use."""
    me = channel.rank()
    world = channel.size()
    for number, sizes in enumerate(uses):
        come = [sizes[src][me] for src in range(world)]
        sent = [part(me, dst, sizes[me][dst]) + number for dst in range(world)]
        parts = AllToAll(
            torch.empty(sum(come)), torch.cat(sent), tuple(come), tuple(sizes[me])
        )
        total = AllReduce(part(me, 0, 40 * world) + number)
        gather = AllGather(torch.empty(40 * world), part(me, 0, 40) - number)
        works = [begin_straight(verb, channel) for verb in (total, parts, gather)]
        for work in works:
            work.wait()
        each = [part(src, me, come[src]) + number for src in range(world)]
        assert parts.out.equal(torch.cat(each))
        assert total.buf.unique().tolist() == [
            sum(1 + src + number for src in range(world))
        ]
        each = [part(src, 0, 40) - number for src in range(world)]
        assert gather.out.equal(torch.cat(each))


@pytest.mark.parametrize(
    "kinds",
    [
        (HostChannel,),
        (Unready,),
        (Eager,),
        (HostChannel, Unready),
        (Eager, HostChannel, Unready),
    ],
)
@pytest.mark.parametrize("world", WORLDS)
def test_parts_meet_their_receives_whatever_each_rank_posts_ahead(
    world: int, kinds: Sequence[type[HostChannel]]
) -> None:
    uses = sizes_of_steps(world, world, 5)
    among(world, partial(parts_arrive, uses=uses), kinds)


class Impatient(Sum):
    """A broken sum: its second receives take their places before the second sends."""

    def __init__(
        self,
        own: Sequence[Tensor],
        total: Tensor,
        gathered: Sequence[Tensor],
        channel: HostChannel,
    ) -> None:
        super().__init__(own, total, (), channel)
        self._total = total
        ranks = {*range(channel.size())} - {channel.rank()}
        self.taken = {
            src: channel.begin_receive(
                src, gathered[src].view(torch.uint8), is_awaited=True
            )
            for src in ranks
        }
        self.sums = gathered

    def wait(self) -> None:
        super().wait()
        channel = self._channel
        sends = channel.begin_sends([(dst, self._total) for dst in self.taken])
        for src, receive in self.taken.items():
            part = self.sums[src].view(torch.uint8)
            part.copy_(channel.arrived(receive, part))
            channel.free(receive, part)
        channel.end_sends(sends)


def test_receives_that_are_bound_before_their_sends_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(direct, "Sum", Impatient)
    with pytest.raises((AssertionError, RankFailed)):
        among(3, partial(parts_arrive, uses=sizes_of_steps(3, 0, 5)))


@pytest.mark.parametrize("verb", [AllGather, AllReduce])
def test_a_rank_sends_before_others_have_begun_the_verb(verb: Any) -> None:
    """Both sends of rank 0 end though rank 1 comes later, by the first verb's rooms."""
    sent = Event()

    def work(channel: HostChannel) -> None:
        values = part(channel.rank(), 0, 6)

        def begun() -> Any:
            if verb is AllReduce:
                return begin_straight(AllReduce(values.clone()), channel)
            return begin_straight(AllGather(torch.empty(12), values), channel)

        begun().wait()
        if channel.rank():
            assert sent.wait(LIMIT.total_seconds())
        transfer = begun()
        if not channel.rank():
            push = transfer._pushes[0] if isinstance(transfer, Sum) else transfer
            for send in push._sends:
                send.work.wait(timedelta(seconds=20))
            sent.set()
            push._sends = []
        transfer.wait()

    among(2, work)


class Late(HostChannel):
    """Posts ahead once the other ranks have closed their channels."""

    closed: Event

    def arrived(self, receive: Any, part: Tensor) -> Tensor:
        receive.work.wait()
        assert self.closed.wait(LIMIT.total_seconds())
        return super().arrived(receive._replace(work=Over()), part)


class Over:
    def wait(self) -> None:
        return


def test_a_rank_ends_its_last_verb_though_others_have_closed() -> None:
    world = 3
    store = HashStore()
    Late.closed = Event()

    def run(rank: int) -> Tensor:
        channel = (HostChannel if rank else Late)(store, rank, world, LIMIT)
        last = AllGather(torch.zeros(world * 4), torch.ones(4))
        begin_straight(last, channel).wait()
        return last.out

    with ThreadPoolExecutor(world) as threads:
        late, *others = [threads.submit(partial(run, rank)) for rank in range(world)]
        for one in others:
            one.result()
        Late.closed.set()
        assert late.result().equal(torch.ones(world * 4))


class Noting(HostChannel):
    """Notes each receive that it posts, and each part that it sends."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.notes: list[tuple[str, int]] = []

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        self.notes.append(("receive", src))
        return super().recv(tensors, src, tag)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        self.notes.append(("part", dst))
        return super().send(tensors, dst, tag)


class Hasty(Noting):
    """A broken channel: it posts a room again as soon as the room is free."""

    def free(self, receive: Any, part: Tensor) -> None:
        super().free(receive, part)
        self._post_ahead((receive.src, receive.memory.nbytes))


def last_posts(kind: type[Noting]) -> list[bool]:
    """Whether some rank posts a receive after its last part to a rank that may close.

    Rank 0 gets two parts of each other rank in a task, and then none in another.
    """
    world = 3

    def work(channel: Any) -> bool:
        me = channel.rank()
        gathers = [AllGather(torch.zeros(12), torch.ones(4)) for _ in range(2)]
        for transfer in [begin_straight(gather, channel) for gather in gathers]:
            transfer.wait()
        come = (4,) * world if me else (4, 0, 0)
        sent = (0 if me else 4, 4, 4)
        parts = AllToAll(torch.zeros(sum(come)), torch.ones(sum(sent)), come, sent)
        begin_straight(parts, channel).wait()
        if not me:
            return False
        notes = [what for what, rank in channel.notes if rank == 0]
        last_part = max(place for place, what in enumerate(notes) if what == "part")
        return "receive" in notes[last_part:]

    return among(world, work, [kind])


def test_no_receive_is_posted_at_a_rank_that_may_have_closed() -> None:
    """Its note would make TCP drop the parts that are still on their way from there."""
    assert last_posts(Noting) == [False] * 3
    assert True in last_posts(Hasty)


def test_a_part_of_a_rank_that_has_closed_is_an_error_once_it_is_wanted() -> None:
    world = 2
    store = HashStore()
    closed = Event()

    def run(rank: int) -> None:
        channel = HostChannel(store, rank, world, LIMIT)
        gather = AllGather(torch.zeros(8), torch.ones(4))
        begin_straight(gather, channel).wait()
        if rank:
            return
        assert closed.wait(LIMIT.total_seconds())
        with pytest.raises(RuntimeError):
            begin_straight(gather, channel).wait()

    with ThreadPoolExecutor(world) as threads:
        first, second = [threads.submit(partial(run, rank)) for rank in range(world)]
        second.result()
        closed.set()
        first.result()


def test_rooms_are_few_whatever_the_sizes_and_however_many() -> None:
    world = 3

    def work(channel: HostChannel) -> None:
        rng = random.Random(0)
        for _ in range(200):
            numel = rng.randrange(1, 4000)
            gather = AllGather(torch.empty(world * numel), torch.ones(numel))
            begin_straight(gather, channel).wait()
        sizes = {room_bytes(4 * numel, world) for numel in range(1, 4000)}
        assert channel.ahead_bytes == 2 * (world - 1) * sum(sizes)

    among(world, work, [HostChannel])


def test_rooms_serve_again_where_the_other_rank_awaits_nothing() -> None:
    def work(channel: HostChannel) -> int:
        sent, come = ((0, 9), (0, 0)) if channel.rank() == 0 else ((0, 0), (9, 0))
        for _ in range(20):
            parts = AllToAll(torch.empty(sum(come)), torch.ones(sum(sent)), come, sent)
            begin_straight(parts, channel).wait()
            assert parts.out.unique().tolist() in ([], [1.0])
        return channel.ahead_bytes

    assert among(2, work, [HostChannel]) == [0, room_bytes(36, 2)]


@pytest.mark.parametrize(("others", "own"), [(96, 104), (104, 96), (1, 2)])
def test_a_part_of_another_size_is_an_error_that_says_both(
    others: int, own: int
) -> None:
    """A rank whose exchange goes wrong sends more bytes than another takes, or less."""

    def work(channel: HostChannel) -> str:
        nbytes = own if channel.rank() else others
        mine = torch.ones(nbytes, dtype=torch.uint8)
        gather = AllGather(torch.empty(2 * nbytes, dtype=torch.uint8), mine)
        with pytest.raises(RankFailed) as caught:
            begin_straight(gather, channel).wait()
        return str(caught.value)

    first, second = among(2, work, [HostChannel])
    assert f"rank 1 sent {own} bytes where rank 0 wants {others}" in first
    assert f"rank 0 sent {others} bytes where rank 1 wants {own}" in second


class Damaging(HostChannel):
    """Flips a bit of the size that stands before each part that it sends."""

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        sent = tensors[0].clone()
        sent[1] ^= 1
        return super().send([sent], dst, tag)


def test_checksums_name_the_rank_whose_parts_size_was_damaged() -> None:
    ranks = (4, 7)

    def work(channel: HostChannel) -> RankFailed | None:
        me = channel.rank()
        group = RankGroup("checked", me, 2, [channel], ranks=ranks)
        gather = AllGather(torch.empty(8), torch.ones(4))
        try:
            carry_out([gather], [channel], Seals([gather], [group]), straight=True)
        except RankFailed as failure:
            return failure
        return None

    first, second = among(2, work, [HostChannel, Damaging])
    assert second is None
    assert (first.ranks, first.exit_code) == ((7,), ExitCode.BITS)
    assert "that rank 7 sent arrived damaged at rank 4" in str(first)


def test_rooms_have_space_for_their_parts_and_large_pieces_have_none() -> None:
    """The first piece of a large part has a room, and one is posted ahead."""

    def work(channel: HostChannel) -> int:
        numel = AHEAD_BYTES // 2 + PIECE_BYTES
        both = torch.ones(2 * numel, dtype=torch.uint8)
        verb = AllToAll(both, both.clone(), (numel,) * 2, (numel,) * 2)
        begin_straight(verb, channel).wait()
        return channel.ahead_bytes

    rooms_bytes = 2 * (AHEAD_BYTES // 2 + direct._LEAST_BYTES)
    assert among(2, work, [HostChannel]) == [rooms_bytes] * 2
    for world in (2, 3, 7, 100):
        for size_bytes in range(1, 2 * AHEAD_BYTES, 997):
            room = room_bytes(size_bytes, world)
            assert not room or size_bytes + SIZE_BYTES <= room < 2 * AHEAD_BYTES / world
            assert bool(room) == (size_bytes + SIZE_BYTES <= AHEAD_BYTES / world)


class WithoutCollectives(HostChannel):
    """Refuses gloo's own all-to-all, which takes two latencies."""

    def alltoall_base(self, *given: Any) -> Any:
        raise AssertionError("not straight")


def test_checksums_go_straight_beside_their_payloads() -> None:
    def work(channel: HostChannel) -> None:
        me = channel.rank()
        group = RankGroup("checked", me, 2, [channel], ranks=(0, 1))
        verb = AllToAll(torch.empty(2), part(me, 0, 2), (1, 1), (1, 1))
        carry_out([verb], [channel], Seals([verb], [group]), straight=True)
        assert verb.out.tolist() == [1.0, 2.0]

    among(2, work, [WithoutCollectives])
