"""Verbs on torch.distributed: the only place where payloads meet a process group.

A rank records its last verbs on the network, and writes the record to a file when its
run fails. If ranks wait for each other, their records side by side show the cause: a
verb that one rank has launched, started or ended, and another rank has not.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore
from torch._utils import _take_tensors

from ...collective.steps.travel import sent_bytes
from ...contract.files import write_anew
from ...contract.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Among,
    Broadcast,
    Communication,
    Compute,
    Recv,
    ReduceScatter,
    Send,
    Steps,
    carried_out,
    rewritten,
)
from ...errors import InvalidSetting, log
from ...exchange.mapped_room import MappedRoom
from ..device.devices import kind_of
from ..device.streams import SideStream
from .direct import (
    DIRECT_TAGS,
    PIECE_BYTES,
    TREE_BYTES,
    HostChannel,
    OtherSize,
    Waits,
    agree_on_ways,
    begin_straight,
    goes_straight,
)
from .task_graph import Once, Over, wall_clock

if TYPE_CHECKING:
    from .checksums import Seals

Group = Any
"""A torch.distributed process group."""
Channel = Any
"""A process group of gradwire's own: of gloo, or of a device's own back end."""
_T = TypeVar("_T")
AMONG_SHARDS = Among.SHARDS.ending
"""The end of the name of a communication among shards."""
NUM_VERBS = 64
"""The number of last verbs that a record holds."""
FOLDER = "GRADWIRE_RECORDS"
"""The environment variable with the folder for records; default: the system's folder
for temporary files.
"""
BATCH_BYTES = 2**25
"""About the bytes of small tensors that one broadcast of an attach carries."""
POLL_S = 0.02
"""Seconds between two reads of a store by a rank that waits for other ranks' keys."""
# gloo then asks a store for all ranks' addresses at once, not for one after another
os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")


def open_channels(
    name: str,
    rank: int,
    world: int,
    count: int,
    timeout: timedelta,
    *,
    is_measured: bool = True,
) -> list[Channel]:
    """``count`` process groups of the same ranks, each for one message at a time.

    They are gloo groups, whatever the back end of the user's group is: their payloads
    lie in host memory (`streams`). Payloads in a device's memory may take another way
    (`backends`). These ranks know ``name``, and use it once. If ``is_measured``, the
    channels know their latency, by which collectives choose their way.

    ``dist.new_group`` cannot be used: it names a group by the number of groups that the
    process has. Ranks with different numbers of groups would wait for each other for
    ever. It also keeps groups, with their connections, until the job ends.
    """
    store = group_store(name, timeout)
    channels = [
        HostChannel(PrefixStore(f"{i}", store), rank, world, timeout)
        for i in range(count)
    ]
    if is_measured:
        agree_on_ways(channels[0])
    for channel in channels:
        channel.latency_s = channels[0].latency_s
        channel.row_width = channels[0].row_width
    return channels


def give_back(channels: list[Channel]) -> None:
    """Closes the channels and empties the list.

    They are closed side by side: gloo only waits, for about 20 ms each.
    """
    closing = [
        threading.Thread(target=channels.pop, name="gradwire close") for _ in channels
    ]
    # an interpreter that ends starts no thread, since Python 3.12
    with suppress(RuntimeError):
        for thread in closing:
            thread.start()
    for thread in closing:
        if thread.ident is not None:
            thread.join()
    channels.clear()


def open_direct(group: RankGroup, device: torch.device, timeout: timedelta) -> None:
    """Connects the ranks of ``group`` by the device's back end; all ranks call it."""
    kind = kind_of(device)
    assert kind is not None, "the host has no network back end of its own"
    store = PrefixStore(f"gradwire/{group.name}/direct", default_store())
    channel = kind.connect(device, store, group.rank, group.world, timeout)
    # All ranks take part in connecting, so the first verb is an all-reduce.
    carry_directly([AllReduce(torch.zeros(1, device=device))], [channel], device)
    group.direct = channel


def default_store() -> Any:
    """The job's rendezvous store: the given one, or torch's, which is not public."""
    return _given[0] if _given else dist.distributed_c10d._get_default_store()


REJOINED = "rejoin"
"""The beginning of a membership's name if one of its ranks joined the running job."""
_given: list[Any] = []
"""The store that the user gave, if any."""


def meet_in(store: Any) -> None:
    """Has this process meet the other ranks in ``store``, in place of torch's own."""
    _given[:] = [store]


def has_store() -> bool:
    """Whether this process can meet others."""
    return bool(_given) or dist.is_initialized()


def root_store() -> Any:
    """The job's store without torch's key prefixes, which a newcomer cannot know."""
    store = default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def store_for(name: str) -> Any:
    """The store in which the ranks under a ``Membership``'s name meet."""
    return root_store() if name.startswith(REJOINED) else default_store()


def own_store(name: str) -> Any:
    """A ``Membership``'s part of the job's store, by a connection of its own.

    So a call that is blocked elsewhere does not hold it up.
    """
    return PrefixStore(f"gradwire/{name}", store_for(name).clone())


def group_store(name: str, timeout: timedelta) -> Any:
    """``own_store`` for a process group, whose ranks wait in it for each other.

    The wait for a rank that never comes blocks this connection alone.
    """
    store = own_store(name)
    store.set_timeout(timeout)
    return store


def missing_keys(store: Any, keys: list[str], within_s: float) -> tuple[int, ...]:
    """The places in ``keys`` of those that a store still lacks after ``within_s``.

    The store is asked again and again, and not by ``store.wait()``: each of its
    time-outs would write a warning to the log.
    """
    end_s = time.monotonic() + within_s
    while not store.check(keys):
        if time.monotonic() > end_s:
            return tuple(at for at, key in enumerate(keys) if not store.check([key]))
        time.sleep(POLL_S)
    return ()


def in_background(work: Callable[[], _T]) -> Future[_T]:
    """Runs work that may wait for ever, in a daemon thread of its own.

    Calls of a store may wait for ever: torch bounds the wait for a key, but not the
    wait for the store's host. If the host is stopped, no call returns. Since Python
    3.12 an interpreter that ends starts no thread. Then the future holds that error.
    """
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    try:
        threading.Thread(target=run, name="gradwire background", daemon=True).start()
    except RuntimeError as error:
        done.set_exception(error)
    return done


@dataclass
class RankGroup:
    """The ranks that one kind of verbs reaches (`Among`), and the channels to them.

    ``rank`` is this rank's place among these ``world`` ranks. There is a channel for
    each communication lane. ``direct`` is the channel that sends from a device's
    memory, if there is one. ``name`` is used once, as for ``open_channels``. ``ranks``
    are their numbers among the ranks that average; it is empty for ranks with other
    shards. If the group ``lends``, its ranks read each other's host memory.
    """

    name: str
    rank: int
    world: int
    channels: list[Channel]
    direct: Channel = None
    ranks: Sequence[int] = ()
    lends: bool = False

    def close_direct(self) -> None:
        """Gives the device's own channel back, if there is one."""
        direct = self.direct
        self.direct = None
        if direct:
            direct.shutdown()


@dataclass(slots=True)
class NotedVerb:
    """One verb for the network, or several that were started together.

    ``sequence`` numbers a rank's verbs from 0. Times are seconds since the epoch on a
    clock that all processes of a machine share; None if it has not happened yet.
    """

    sequence: int
    step: int
    message: int
    name: str
    size_bytes: int
    launched_s: float
    started_s: float | None = None
    done_s: float | None = None


class LastVerbs:
    """The last ``NUM_VERBS`` verbs of one rank."""

    def __init__(self) -> None:
        self._verbs: deque[NotedVerb] = deque(maxlen=NUM_VERBS)
        self._numbers = count()

    def launch(self, step: int, message: int, name: str, size_bytes: int) -> NotedVerb:
        """Notes a verb that waits for its channel; returns the note, to fill it in."""
        verb = NotedVerb(
            next(self._numbers), step, message, name, size_bytes, wall_clock()
        )
        self._verbs.append(verb)
        return verb

    def write(
        self, rank: int, world: int, error: BaseException, text: str
    ) -> Path | None:
        """Writes the record, with the error's ``text``; adds its path to the error.

        Returns the path, or None if there is nothing to write. If the folder cannot be
        written to, that is only logged, as the error itself matters more.
        """
        verbs = [asdict(verb) for verb in tuple(self._verbs)]
        if not verbs:
            return None
        record = {
            "rank": rank,
            "world": world,
            "failed_s": wall_clock(),
            "error": text,
            "verbs": verbs,
        }
        folder = Path(os.environ.get(FOLDER) or tempfile.gettempdir())
        path = folder / f"gradwire-record-{os.getpid()}-{id(self):x}-rank-{rank}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_anew(path, json.dumps(record, indent=1))
        except OSError as failed:
            log.warning(
                "the record of the last operations cannot be written: %s", failed
            )
            return None
        error.add_note(f"the last operations of rank {rank} are in {path}")
        return path


class Routes:
    """The channels of one rank, by the ranks that they lead to.

    A rank that is alone in a group has no channel there.
    """

    def __init__(self, lanes: Sequence[str], *, checksums: bool = False) -> None:
        self.lanes = lanes
        self.checksums = checksums
        self.groups: dict[Among, RankGroup] = {}
        self.last_verbs = LastVerbs()

    @property
    def first_channel(self) -> Channel:
        """A channel to all ranks, for what no message carries."""
        return self.groups[Among.RANKS].channels[0]

    def of(
        self, verbs: Sequence[Communication], message: int, lane: int
    ) -> list[Channel]:
        """The channel that each of a message's verbs takes on a lane.

        Raises ``InvalidSetting`` where there is nobody to reach.
        """
        for verb in verbs:
            if verb.among not in self.groups:
                is_alone = Among.RANKS not in self.groups
                why = "this rank is alone" if is_alone else "attach was given none"
                raise InvalidSetting(
                    f"message {message} asks for {verb!r}{verb.among.ending}, "
                    f"and {why}: "
                    f"{_REMEDIES[verb.among]}"
                )
        return [self.groups[verb.among].channels[lane] for verb in verbs]

    def lane(self, index: int, credit: int) -> int:
        """The lane of a message of gradients: one of the first ``credit`` lanes.

        If a device sends from its own memory, all messages take the first lane: ranks
        must launch a device's communication in one order. Otherwise each of two ranks
        could wait for a transfer that the other has not begun.
        """
        if any(group.direct for group in self.groups.values()):
            return 0
        return index % credit

    def parted(
        self, verbs: Sequence[Communication], lane: int
    ) -> Sequence[list[Communication]]:
        """The verbs that a device's own channel carries on a lane, and the others."""
        direct = [verb for verb in verbs if self._is_direct(verb, lane)]
        others = [verb for verb in verbs if not self._is_direct(verb, lane)]
        return direct, others

    def _is_direct(self, verb: Communication, lane: int) -> bool:
        group = self.groups[verb.among]
        return lane == 0 and bool(group.direct) and not verb.buf.is_cpu

    def seals(self, verbs: Sequence[Communication], step: int) -> Seals | None:
        """The checksums that travel beside verbs from host memory; None if none do."""
        if not self.checksums:
            return None
        from .checksums import Seals

        with as_on_a_lane():
            return Seals(verbs, [self.groups[verb.among] for verb in verbs], step)

    def sealed(self, steps: Steps[Any], lane: int) -> Steps[Any]:
        """The steps for a lane; with checksums, each payload comes from one sender."""
        if not self.checksums:
            return steps
        from .checksums import pairwise

        def group_of(verb: Communication) -> RankGroup | None:
            group = self.groups.get(verb.among)
            return None if group and self._is_direct(verb, lane) else group

        return pairwise(steps, group_of)

    def lending(self, steps: Steps[Any]) -> Steps[Any]:
        """The steps, in which the ranks of a host read each other's memory."""
        host = self.groups.get(Among.HOST)
        if host is None:
            return steps

        def each(asked: Any) -> Steps[Any]:
            if isinstance(asked, AllToAll) and asked.among is Among.HOST:
                return (yield from lent(asked, host))
            return (yield asked)

        return rewritten(steps, each)

    def sent_bytes(self, verb: Communication) -> int:
        """Bytes that this rank sends for a verb."""
        group = self.groups[verb.among]
        return sent_bytes(verb, group.rank, group.world)

    @property
    def ahead_bytes(self) -> int:
        """Bytes of the memory for receives that are posted ahead; see `direct`."""
        groups = tuple(self.groups.values())
        return sum(one.ahead_bytes for group in groups for one in group.channels)

    def all_channels(self) -> list[Channel]:
        """Every channel that is open."""
        channels = []
        for group in tuple(self.groups.values()):
            channels += group.channels
            if group.direct:
                channels.append(group.direct)
        return channels

    def clear(self) -> None:
        """Gives all channels back."""
        channels = []
        while self.groups:
            group = self.groups.popitem()[1]
            group.close_direct()
            channels += group.channels
            # else they would be closed one by one, as the group is dropped
            group.channels = []
        give_back(channels)


def lent(verb: AllToAll, host: RankGroup) -> Steps[list[Tensor] | None]:
    """An all-to-all of a host's ranks through shared memory.

    A room is memory that the other ranks of the host can map (`mapped_room`). Ranks map
    each other's rooms once, and read from them in each step. In each step an all-gather
    says whether a rank has a new room. By it ranks also wait until all rooms are
    written. Returns the parts in the rooms, or None if the bytes were sent.
    """
    room = verb.room
    if not host.lends:
        if room is not None:
            room.settle(is_lent=False)
        yield verb
        return None
    own = torch.tensor((0,) * 4 if room is None else room.announce(), device="cpu")
    announced = own.repeat(host.world, 1)
    yield AllGather(announced.view(-1), own, Among.HOST)
    if bool(announced.any()):
        is_mapped = False
        if room is not None:
            is_mapped = yield Compute(
                "map", lambda: room.map(announced.tolist(), host.rank)
            )
        own_mapped = torch.tensor([int(is_mapped)], device="cpu")
        all_mapped = own_mapped.repeat(host.world)
        yield AllGather(all_mapped, own_mapped, Among.HOST)
        if room is not None:
            room.settle(is_lent=bool(all_mapped.all()))
    if room is not None and room.parts is not None:
        return room.parts
    yield replace(verb, room=None)
    return None


def agree_to_lend(host: RankGroup) -> bool:
    """Whether a host's ranks, which all call this, can read each other's memory."""
    host.lends = True
    one = torch.zeros(1, device="cpu")
    room = MappedRoom(1, one, one.dtype)
    sizes = (0,) * host.world

    def carry(verbs: Sequence[Any]) -> list[Any]:
        if isinstance(verbs[0], Compute):
            return [verbs[0].fn()]
        carry_out(verbs, host.channels[:1])
        return [None]

    carried_out(
        lent(AllToAll(one[:0], one[:0], sizes, sizes, Among.HOST, room), host), carry
    )
    if room.parts is None:
        log.info("gradients of a host's ranks pass through sockets: %s", room.why)
    return room.parts is not None


_ON_HOSTS = "write mesh= where hosts have several ranks"
_REMEDIES = {
    Among.RANKS: "have your exchange return the gradient itself where world is 1",
    Among.SHARDS: "write shards=mesh['tp'], or have the exchange see whether me.shards "
    "is None",
    Among.HOST: _ON_HOSTS,
    Among.HOSTS: _ON_HOSTS,
}


def as_on_a_lane(side: SideStream | None = None) -> AbstractContextManager[None]:
    """A block without the caller's settings of torch, such as autocast.

    So code in it computes as on a lane's thread. If a device computes, the block
    launches on the ``side`` stream. Only settings that are set are undone: to undo all
    took 0.28 ms per message, more than the encode.
    """
    is_set = (
        torch.is_grad_enabled()
        or torch._C._len_torch_function_stack()
        or torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
    )
    # nothing is set within most backward passes, and on lanes
    return _undone(side) if is_set or side is not None else _UNCHANGED


_UNCHANGED = nullcontext()


@contextmanager
def _undone(side: SideStream | None) -> Iterator[None]:
    """A block in which no setting is set."""
    with ExitStack() as undo:
        if torch._C._len_torch_function_stack():  # a default device is on it, too
            undo.enter_context(torch.device("cpu"))
        if torch.is_inference_mode_enabled():
            undo.enter_context(torch.inference_mode(False))
        if torch.is_autocast_enabled("cpu"):
            undo.enter_context(torch.autocast("cpu", enabled=False))
        if side is not None:
            undo.enter_context(side.use())
        # the last, as inference_mode(False) enables gradients
        undo.enter_context(torch.no_grad())
        yield


def is_begun(verbs: Sequence[Communication], channel: Channel) -> bool:
    """Whether a verb needs only to be begun, as gloo's future reports its end.

    Other verbs need a thread that waits for them.
    """
    verb, *others = verbs
    waits = isinstance(verb, Send | Recv) or goes_straight(verb, channel)
    is_cut = verb.buf.nbytes > _most_bytes(verb, channel)
    return not others and not waits and not is_cut


def begin(
    verb: Communication, channel: Channel, over: Over, seals: Seals | None = None
) -> None:
    """Starts a verb, and has ``over`` called when it has ended.

    One of the channel's own threads calls it. If the verb has ended already, this
    thread does so at once. ``seals`` are the verb's checksums.
    """
    works = [start(verb, channel)]
    last = over
    if seals is not None:
        works += [start(one, channel) for _, one in seals.written([verb])]
        last = Once(over)
    ended = count(1)
    beginning = threading.get_ident()

    def arrived(future: Any) -> None:
        if threading.get_ident() != beginning:
            torch._C._set_grad_enabled(False)  # a thread of the channel's own
        try:
            future.value()
            if next(ended) < len(works):
                return
            if seals is not None:
                seals.check([verb])
        except BaseException as error:
            last(error)
        else:
            last(None)

    for work in works:
        future = work.get_future()
        # torch would drop an interrupt that comes while it calls back
        if future.done():
            arrived(future)
        else:
            future.add_done_callback(arrived)


def carry_out(
    verbs: Sequence[Communication],
    channels: Sequence[Channel],
    seals: Seals | None = None,
    *,
    straight: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Starts all verbs, each on its own channel, then waits for all of them.

    Receives start first: gloo sends a payload only once the receiver's note says that
    the receive has started. If a rank's own payload left first, its note would wait
    behind the payload for the link. 8 hosts at 100 Mbit/s then took 320 ms for rounds
    that take 280 ms. ``seals`` are the verbs' checksums, which are computed while
    payloads are on their way. With ``straight`` the parts of some verbs go straight to
    each rank: see `direct`. ``meanwhile`` is called before the wait.
    """
    order = sorted(range(len(verbs)), key=lambda at: isinstance(verbs[at], Send))
    works = [(at, start(verbs[at], channels[at], straight=straight)) for at in order]
    if seals is not None:
        works += [
            (at, start(one, channels[at], straight=straight))
            for at, one in seals.written(verbs)
        ]
    meanwhile()
    for at, work in works:
        try:
            work.wait()
        except OtherSize as error:
            if seals is None:
                raise
            raise seals.damaged(verbs[at], at, error.src) from error
    if seals is not None:
        seals.check(verbs)


def carry_directly(
    verbs: Sequence[Communication], channels: Sequence[Channel], device: torch.device
) -> None:
    """Launches verbs on the memory of ``device``; the current stream waits for them.

    All sends and receives of a channel are launched together. Launched one by one, each
    would wait for the one before it, and two ranks could wait for each other.
    """
    for channel in dict.fromkeys(channels):
        own = [
            verb for verb, its in zip(verbs, channels, strict=True) if its is channel
        ]
        if any(isinstance(verb, Send | Recv) for verb in own):
            channel._start_coalescing(device)
            for verb in own:
                start(verb, channel)
            channel._end_coalescing(device).wait()
        else:
            carry_out(own, [channel] * len(own))


def _tag(buf: Tensor) -> int:
    """The tag of a transfer, which is its size: only a send and a receive of the same
    size meet. gloo ends a process that receives more bytes than it has room for.
    """
    return buf.nbytes % DIRECT_TAGS


class Works:
    """The works of a buffer's pieces; the time-out bounds the wait for each piece.

    So it bounds how long a peer is silent, and not how long a payload takes.
    """

    def __init__(self, works: Sequence[Waits]) -> None:
        self._works = works

    def wait(self) -> None:
        """Waits for all pieces."""
        for work in self._works:
            work.wait()


def _most_bytes(verb: Communication, channel: Channel) -> float:
    """The most bytes of a verb that gloo gets at once.

    There is no limit for verbs that gloo itself cuts into pieces.
    """
    match verb:
        case Send() | Recv():
            return PIECE_BYTES
        case Broadcast():
            return getattr(channel, "tree_bytes", TREE_BYTES)
        case _:
            return math.inf


def start(verb: Communication, channel: Channel, *, straight: bool = False) -> Any:
    """Has a channel begin a verb; returns its work."""
    if straight and goes_straight(verb, channel):
        return begin_straight(verb, channel)
    most_bytes = _most_bytes(verb, channel)
    if verb.buf.nbytes > most_bytes:
        pieces = torch.split(verb.buf, int(most_bytes) // verb.buf.itemsize)
        return Works([start(replace(verb, buf=piece), channel) for piece in pieces])
    match verb:
        case Send(dst, buf):
            return channel.send([buf], dst, _tag(buf))
        case Recv(src, buf):
            return channel.recv([buf], src, _tag(buf))
        case AllReduce(buf):
            return channel.allreduce([buf])
        case AllGather(out, buf):
            return channel._allgather_base(out, buf)
        case AllToAll(out, buf, out_sizes, in_sizes):
            return channel.alltoall_base(out, buf, list(out_sizes), list(in_sizes))
        case ReduceScatter(out, buf):
            return channel._reduce_scatter_base(out, buf)
        case Broadcast(src, buf):
            options = BroadcastOptions()
            options.rootRank = src
            return channel.broadcast([buf], options)


def broadcast_all(tensors: Sequence[Tensor], channel: Channel, *, src: int) -> None:
    """Replaces tensors, wherever they lie, by those of group rank ``src``.

    Tensors of one kind travel together, in batches of about ``BATCH_BYTES``: far away a
    broadcast of each would cost its own latency.
    """
    own = [tensor.detach() for tensor in tensors]
    for batch in _take_tensors(own, BATCH_BYTES):  # type: ignore[no-untyped-call]
        hosts = [tensor.cpu().contiguous().view(-1) for tensor in batch]
        values_N = torch.cat(hosts) if len(hosts) > 1 else hosts[0]
        if values_N.numel():
            # As bytes: gloo does not know every dtype.
            carry_out([Broadcast(src, values_N.view(torch.uint8))], [channel])
        if channel.rank() != src:
            sizes = [tensor.numel() for tensor in batch]
            for tensor, part in zip(batch, values_N.split(sizes), strict=True):
                tensor.copy_(part.view(tensor.shape))
