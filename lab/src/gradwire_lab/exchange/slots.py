"""Slots: one rank's sends and receives, carried out as a coordinator lets them go.

Payloads have a channel of their own, and so has what ranks tell: a report or a plan
takes one hop, beside payloads. A thread waits for another rank only if that rank owes
something, so no wait outlasts a step. A rank is owed a plan while it has transfers in
no batch. The coordinator is owed reports until all ranks have ended its own messages.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.contract.verbs import Recv, Send
from gradwire.errors import RankFailed
from gradwire.exchange.sends import THREADS
from gradwire.runtime.transport.task_graph import Over

from .bulk import (
    MOST_MESSAGES,
    Batch,
    Coordinator,
    Endpoint,
    LinkTransfer,
    ReadyReport,
    batches_of,
    packed_rows,
    unpacked_rows,
)

if TYPE_CHECKING:
    from gradwire.planning.data.plan import Bulk

_FRAME_BYTES = 2**17
"""Room for what is told at once: `MOST_TOLD` rows of 14 bytes, even if none shrinks."""


class Slots:
    """This rank's endpoint, and the coordinator if it is on this rank.

    Args:
        rules: The rules.
        payloads: The channel of batches.
        told: The channel of reports and plans.
    """

    def __init__(self, rules: Bulk, payloads: Any, told: Any) -> None:
        self.told_bytes = 0
        """Bytes of reports and plans that this rank has sent."""
        self.num_batches = 0
        """Batches that this rank has sent."""
        self._payloads = payloads
        self._told = told
        self._rank = told.rank()
        world = told.size()
        self._num_owed = [0] * world
        """Messages launched here that each rank has not ended."""
        self._num_launched = 0
        self._head = min(rules.rank, world - 1)
        self._endpoint = Endpoint(self._rank)
        self._lock = threading.Condition()
        self._is_stopped = False
        self._error: BaseException | None = None
        self._overs: set[Over] = set()
        """Calls that end the transfers under way."""
        self._unplanned: Counter[tuple[int, ...]] = Counter()
        """Transfers in no batch yet; below 0 if their batch was told early."""
        self._up: SimpleQueue[Batch | None] = SimpleQueue()
        self._down: SimpleQueue[tuple[Batch, Tensor, Any] | None] = SimpleQueue()
        self._coordinator = Coordinator(world, rules)
        self._deciding = threading.Condition()
        self._plans: list[Any] = []
        """Sends of plans, whose memory they need until they are over."""
        works = [self._report, self._send, self._receive]
        if self._rank == self._head:
            others = {*range(world)} - {self._rank}
            works += [self._wake, *(partial(self._hear, rank) for rank in others)]
        else:
            works.append(self._follow)
        for work in works:
            # After a failure they may wait for ranks for long, and nobody joins them.
            guarded = partial(self._guarded, work)
            threading.Thread(target=guarded, name=THREADS, daemon=True).start()

    def offer(self, message: int, verb: Send | Recv, over: Over) -> None:
        """Takes a verb that its message has come to; calls ``over`` when it is done."""
        if isinstance(verb, Send):
            ends = (self._rank, verb.dst)
        else:
            ends = (verb.src, self._rank)
        transfer = LinkTransfer(message, *ends, verb.buf.nbytes)
        with self._lock:
            if self._error is not None:
                raise self._error
            self._overs.add(over)
            wanted = self._endpoint.offer(transfer, (verb, over))
            self._unplanned[transfer.key] += 1
            self._lock.notify_all()
        self._deliver(wanted)

    def launch(self) -> int:
        """Counts a message, which all ranks launch; returns its number."""
        with self._lock:
            number = self._num_launched
            self._num_launched = (number + 1) % MOST_MESSAGES
            self._num_owed = [owed + 1 for owed in self._num_owed]
            self._lock.notify_all()
        return number

    def end(self) -> None:
        """Counts a message that has ended here."""
        with self._lock:
            self._endpoint.num_ended += 1
            self._lock.notify_all()

    def stop(self, error: BaseException | None) -> None:
        """Ends the threads, at once after an error.

        On the coordinator's rank they end once no other rank needs them.
        """
        with self._lock:
            self._is_stopped = True
            self._error = self._error or error
            self._lock.notify_all()
        with self._deciding:
            self._deciding.notify_all()
        self._up.put(None)
        self._down.put(None)

    # ---- threads

    def _guarded(self, work: Callable[[], None]) -> None:
        """Does a thread's work; an error in it ends the transfers under way."""
        try:
            work()
        except BaseException as error:
            self.stop(error)
            for over in tuple(self._overs):
                over(error)

    def _report(self) -> None:
        """Tells news as soon as there are some."""
        while True:
            with self._lock:
                while (report := self._endpoint.report()) is None:
                    if self._is_stopped:
                        return
                    self._lock.wait()
            if self._rank == self._head:
                self._decide(report)
            else:
                counts = (report.num_arrived, report.num_ended, 0, 0, 0)
                self._tell(self._head, [counts, *report.ready]).wait()

    def _follow(self) -> None:
        """Takes the coordinator's plans."""
        while self._is_owed(lambda: any(n > 0 for n in self._unplanned.values())):
            self._plan(self._heard(self._head))

    def _hear(self, rank: int) -> None:
        """Hears a rank, on the coordinator's."""
        while self._is_owed(lambda: self._num_owed[rank] > 0):
            counts, *ready = self._heard(rank)
            self._decide(ReadyReport(rank, tuple(ready), *counts[:2]))

    def _wake(self) -> None:
        """Looks at the clock, on the coordinator's rank."""
        with self._deciding:
            while not self._error and (not self._is_stopped or max(self._num_owed) > 0):
                self._announce(self._coordinator.due(time.monotonic()))
                due_s = self._coordinator.due_s
                self._deciding.wait(due_s and max(0.0, due_s - time.monotonic()))

    def _send(self) -> None:
        while (batch := self._up.get()) is not None:
            with self._lock:
                items = self._endpoint.sent(batch)
            data = torch.cat([verb.buf.view(torch.uint8) for verb, _ in items])
            if data.numel():
                self._payloads.send([data], batch[0].dst, 0).wait()
            self.num_batches += 1
            for _, over in items:
                self._end(over)

    def _receive(self) -> None:
        while (receive := self._down.get()) is not None:
            batch, data, work = receive
            if work:
                work.wait()
            with self._lock:
                payloads = torch.split(data, [one.size_bytes for one in batch])
                wanted = self._endpoint.arrived(batch, payloads)
                self._lock.notify_all()
            self._deliver(wanted)

    # ---- their parts

    def _is_owed(self, something: Callable[[], bool]) -> bool:
        """Waits until another rank owes something; False if the thread is to end."""
        with self._lock:
            self._lock.wait_for(lambda: self._is_stopped or something())
            return not self._error and something()

    def _decide(self, report: ReadyReport) -> None:
        with self._deciding:
            with self._lock:
                self._num_owed[report.rank] -= report.num_ended
                self._lock.notify_all()
            self._announce(self._coordinator.receive(report, time.monotonic()))
            self._deciding.notify_all()
            # where all ranks have ended all messages, they have had all plans
            while self._plans and not any(self._num_owed):
                self._plans.pop().wait()

    def _announce(self, batches: Sequence[Batch]) -> None:
        for rank in {end for batch in batches for end in batch[0][1:3]}:
            own = [one for batch in batches for one in batch if rank in one[1:3]]
            if rank == self._rank:
                self._plan(own)
            else:
                self._plans.append(self._tell(rank, own))

    def _plan(self, transfers: Iterable[LinkTransfer]) -> None:
        """Begins the batches of a plan. Receives begin at once, so no send waits."""
        for batch in batches_of(transfers):
            with self._lock:
                self._unplanned.subtract(one.key for one in batch)
                for one in batch:
                    if not self._unplanned[one.key]:
                        del self._unplanned[one.key]
            if batch[0].src == self._rank:
                self._up.put(batch)
                continue
            size_bytes = sum(one.size_bytes for one in batch)
            data = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
            work = size_bytes and self._payloads.recv([data], batch[0].src, 0)
            self._down.put((batch, data, work))

    def _deliver(self, wanted: Sequence[tuple[Any, Tensor]]) -> None:
        """Gives receives their payloads, and ends them."""
        for (verb, over), payload in wanted:
            if verb.buf.nbytes != payload.nbytes:
                raise RankFailed(
                    f"rank {verb.src} sent {payload.nbytes} bytes where rank "
                    f"{self._rank} wants {verb.buf.nbytes}: the exchange asks for "
                    "other sizes there"
                )
            verb.buf.view(torch.uint8).copy_(payload)
            self._end(over)

    def _end(self, over: Over) -> None:
        with self._lock:
            self._overs.discard(over)
        over(None)

    def _tell(self, rank: int, rows: Iterable[Sequence[int]]) -> Any:
        """Sends rows."""
        frame = bytearray(packed_rows(rows))
        self.told_bytes += len(frame)
        return self._told.send([torch.frombuffer(frame, dtype=torch.uint8)], rank, 0)

    def _heard(self, rank: int) -> Iterable[LinkTransfer]:
        """The next rows that a rank tells."""
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8, device="cpu")
        self._told.recv([frame], rank, 0).wait()
        return unpacked_rows(frame.numpy().tobytes())
