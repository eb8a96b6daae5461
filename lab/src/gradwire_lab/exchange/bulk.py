"""Bulk synchronisation: a coordinator on one rank says which transfers travel when.

Each rank reports its sends as they become ready: message, receiver, number and size.
The coordinator has a queue for each link, which is an ordered pair of ranks. A link is
due once its queue holds ``size_bytes``, or once a transfer has waited there for
``timeout_s``. A slot takes due links that do not conflict: a rank sends to at most one
rank in it, and receives from at most one. What a link sends in a slot is a batch. The
batches of a slot are balanced: they differ by about one transfer. The coordinator tells
each batch to its two ranks. They carry their batches out in the order of slots, and the
steps of a message go on as its transfers arrive.

The coordinator decides on a batch while the batch before travels. So each rank has at
most ``ahead`` batches to send, by default two, and as many to receive. A receiver
reports each batch that it has.

A plan depends on sizes and on when ranks are ready. It never depends on gradients'
values, and sums are made in an order that the steps give. So means have the same bits
as without a coordinator. A batch may arrive before its receiver wants it: it is kept
there. So a rank waits only for earlier slots, and the earliest slot waits for nothing.

Nothing here sends or waits. ``slots`` carries batches out among processes.

Source: HiPress (Wu et al.) sections 3.2 and 4.1, figure 3.
Differences: a rank reports at once, not periodically, and what becomes ready meanwhile
    goes into its next report. The paper does not say how batches are balanced. Here a
    batch takes transfers in the order of their reports until it holds the bytes of the
    slot: ``size_bytes``, or as many as wait on the slot's emptiest link. Slots have no
    common end: a rank begins its next batch when its last one is over.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby, starmap
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gradwire.planning.data.plan import Bulk

MOST_TOLD = 2**12
"""The most transfers of a report or a batch, so that what is told has a bound."""
MOST_MESSAGES = 2**16
"""Messages have numbers below. After the last number comes the first again."""


class LinkTransfer(NamedTuple):
    """A send of ``src``, which meets a receive of ``dst``.

    Transfers of a message on a link are in the order of the message's verbs.
    """

    message: int
    src: int
    dst: int
    size_bytes: int
    slot: int = 0
    """The slot in which it travels, once the coordinator has decided on it."""

    @property
    def key(self) -> tuple[int, int, int]:
        """The part by which a send finds its receive."""
        return self[:3]


Batch = tuple[LinkTransfer, ...]
"""Transfers of one link and one slot, which travel as one."""


class ReadyReport(NamedTuple):
    """A rank's news for the coordinator."""

    rank: int
    ready: tuple[LinkTransfer, ...]
    """Sends that became ready."""
    num_arrived: int = 0
    """Batches that arrived at the rank."""
    num_ended: int = 0
    """Messages that ended at the rank, which only waits of processes depend on."""


_ROW = struct.Struct("<HHHII")
_RAW = -zlib.MAX_WBITS
"""Deflate without a header and a checksum, which TCP has."""


def packed_rows(rows: Iterable[Sequence[int]]) -> bytes:
    """The bytes of transfers, or of other rows of five numbers.

    Most numbers are those of the row above, so deflate leaves 4 of 14 bytes. resnet50
    by onebit tells 0.3 % of its bytes so, and 1.05 % without.

    >>> next(unpacked_rows(packed_rows([(7, 1, 2, 9, 0)])))
    LinkTransfer(message=7, src=1, dst=2, size_bytes=9, slot=0)
    """
    return zlib.compress(b"".join(starmap(_ROW.pack, rows)), 1, _RAW)


def unpacked_rows(data: bytes) -> Iterator[LinkTransfer]:
    """The rows at the front of some bytes; deflate knows its end."""
    rows = _ROW.iter_unpack(zlib.decompressobj(_RAW).decompress(data))
    return starmap(LinkTransfer, rows)


class Coordinator:
    """Decides on slots. A driver calls ``due`` at ``due_s``.

    >>> from gradwire.planning.data.plan import Bulk
    >>> coordinator = Coordinator(2, Bulk(size_bytes=100, timeout_s=1.0))
    >>> report = ReadyReport(0, (LinkTransfer(0, src=0, dst=1, size_bytes=60),))
    >>> coordinator.receive(report, 5.0), coordinator.due_s
    ([], 6.0)
    >>> [len(batch) for batch in coordinator.receive(report, 5.5)]
    [2]
    """

    def __init__(self, world: int, rules: Bulk) -> None:
        self._rules = rules
        self._links: dict[tuple[int, int], deque[tuple[float, LinkTransfer]]] = {}
        """Transfers of each link in the order of reports, with ends of time-outs."""
        self._coming: list[deque[tuple[int, int]]] = [deque() for _ in range(world)]
        """The slots and senders of each receiver's batches that have not arrived."""
        self._slot = 0

    def receive(self, report: ReadyReport, now_s: float) -> list[Batch]:
        """Takes a report; returns the batches of new slots."""
        for _ in range(report.num_arrived):
            self._coming[report.rank].popleft()
        for transfer in report.ready:
            link = self._links.setdefault((transfer.src, transfer.dst), deque())
            link.append((now_s + self._rules.timeout_s, transfer))
        return self.due(now_s)

    def due(self, now_s: float) -> list[Batch]:
        """The batches of new slots."""
        batches: list[Batch] = []
        while links := self._selected(now_s):
            self._slot = (self._slot + 1) % 2**32
            size_bytes = self._slot_bytes(links.items())
            batches += [self._batch(*link, size_bytes) for link in links.items()]
        return batches

    @property
    def due_s(self) -> float | None:
        """The time at which the next free link is due; None if nothing waits there."""
        return min((end_s for end_s, _, _ in self._free()), default=None)

    def _free(self) -> list[tuple[float, int, int]]:
        """Links with transfers that may have another batch: the end of the first
        time-out, sender and receiver.
        """
        return [
            (waiting[0][0], *link)
            for link, waiting in self._links.items()
            if waiting and self._may_begin(*link)
        ]

    def _may_begin(self, src: int, dst: int) -> bool:
        """Whether both ranks are idle, or at batches of one slot.

        A slot's batches end at about one time. After others, one rank would wait for
        the other, and the link for both: half of the rate was lost so.
        """
        receives = {slot for slot, _ in self._coming[dst]}
        sends = {slot for own in self._coming for slot, rank in own if rank == src}
        return sends == receives and len(sends) < self._rules.ahead

    def _selected(self, now_s: float) -> dict[int, int]:
        """The receiver of each sender in the next slot.

        Of due links, those that have waited longest are first.
        """
        chosen: dict[int, int] = {}
        for end_s, src, dst in sorted(self._free()):
            if src in chosen or dst in chosen.values():
                continue
            is_full = self._waiting_bytes(src, dst) >= self._rules.size_bytes
            if is_full or end_s <= now_s:
                chosen[src] = dst
        return chosen

    def _waiting_bytes(self, src: int, dst: int) -> int:
        return sum(transfer.size_bytes for _, transfer in self._links[src, dst])

    def _slot_bytes(self, links: Collection[tuple[int, int]]) -> int:
        """The bytes that each batch of a slot is to hold.

        A batch cannot hold more than waits on its link, nor less than the first
        transfer there.
        """
        least = min(self._waiting_bytes(*link) for link in links)
        largest = max(self._links[link][0][1].size_bytes for link in links)
        return max(1, largest, min(least, self._rules.size_bytes))

    def _batch(self, src: int, dst: int, size_bytes: int) -> Batch:
        waiting = self._links[src, dst]
        batch: list[LinkTransfer] = []
        while waiting and size_bytes > 0 and len(batch) < MOST_TOLD:
            batch.append(waiting.popleft()[1]._replace(slot=self._slot))
            size_bytes -= batch[-1].size_bytes
        self._coming[dst].append((self._slot, src))
        return tuple(batch)


Key = tuple[int, ...]


class Endpoint:
    """One rank's side: its transfers that are ready, and payloads that came early.

    A driver carries this rank's batches to send out one behind the other, in the order
    in which they are told, and those to receive likewise.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.num_ended = 0
        """Messages that have ended since the last report."""
        self._ready: list[LinkTransfer] = []
        self._num_arrived = 0
        self._waiting: dict[Key, deque[Any]] = {}
        """Items of sends and receives that no batch has carried yet."""
        self._early: dict[Key, deque[Any]] = {}
        """Payloads that arrived before they were wanted."""

    def offer(self, transfer: LinkTransfer, item: Any) -> list[tuple[Any, Any]]:
        """Takes a send or a receive that this rank has come to.

        Returns the item of a receive with its payload, if the payload is here.
        """
        if transfer.key in self._early:
            return [(item, _pop(self._early, transfer.key))]
        self._waiting.setdefault(transfer.key, deque()).append(item)
        if transfer.src == self.rank:
            self._ready.append(transfer)
        return []

    def report(self) -> ReadyReport | None:
        """The news since the last report; None if there are none."""
        ready = tuple(self._ready[:MOST_TOLD])
        report = ReadyReport(self.rank, ready, self._num_arrived, self.num_ended)
        del self._ready[:MOST_TOLD]
        self._num_arrived = 0
        self.num_ended = 0
        return report if any(report[1:]) else None

    def sent(self, batch: Batch) -> list[Any]:
        """The items of a batch of sends, which is carried out now."""
        return [_pop(self._waiting, transfer.key) for transfer in batch]

    def arrived(self, batch: Batch, payloads: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Notes a batch; returns the items that waited for its payloads, with them."""
        self._num_arrived += 1
        wanted = []
        for transfer, payload in zip(batch, payloads, strict=True):
            if transfer.key in self._waiting:
                wanted.append((_pop(self._waiting, transfer.key), payload))
            else:
                self._early.setdefault(transfer.key, deque()).append(payload)
        return wanted


def _pop(queues: dict[Key, deque[Any]], key: Key) -> Any:
    """Takes the first of a queue."""
    queue = queues[key]
    first = queue.popleft()
    if not queue:
        del queues[key]
    return first


def batches_of(transfers: Iterable[LinkTransfer]) -> list[Batch]:
    """Transfers, as a plan lists them, by their batches."""
    # a rank has one batch to send in a slot
    return [
        tuple(own) for _, own in groupby(transfers, lambda one: (one.slot, one.src))
    ]
