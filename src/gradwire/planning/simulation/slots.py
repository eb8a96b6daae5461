"""Slots on a virtual clock: transfers of all ranks as a coordinator lets them go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from ...exchange.bulk import (
    Batch,
    Coordinator,
    Endpoint,
    Report,
    Transfer,
    packed_plan,
    packed_report,
)
from ..data.plan import Bulk


class Clock(Protocol):
    """A virtual clock with links."""

    now_s: float

    def at(self, time_s: float, then: Callable[[], None]) -> None:
        """Has something done at a time, in the order of asking."""

    def told_s(self, src: int, dst: int, size_bytes: int) -> float:
        """Seconds of so many bytes of a report or of a plan."""

    def carry(self, batch: Batch, items: list[Any], then: Callable[[], None]) -> None:
        """Carries a batch, which has these items at its sender."""

    def done(self, item: Any, payload: Any) -> None:
        """Ends a verb: a send without a payload, a receive with the sender's item."""


class Slots:
    """All ranks' endpoints and their coordinator.

    Args:
        world: The number of ranks.
        rules: The rules.
        clock: Carries and waits.
    """

    def __init__(self, world: int, rules: Bulk, clock: Clock) -> None:
        self.endpoints = [Endpoint(rank) for rank in range(world)]
        self.coordinator = Coordinator(world, rules)
        self.told_bytes = 0
        """Bytes of reports and plans that left a rank."""
        self._rank = rules.rank
        self._clock = clock
        self._under_way: set[Batch] = set()
        self._told_s: dict[tuple[int, int], float] = defaultdict(float)

    def offer(self, rank: int, transfer: Transfer, item: Any) -> None:
        """Takes a send or a receive that a rank has come to."""
        for one, payload in self.endpoints[rank].offer(transfer, item):
            self._clock.done(one, payload)
        # what comes at this instant is one report
        self._clock.at(self._clock.now_s, partial(self._report, rank))

    def _tell(self, src: int, dst: int, data: bytes, then: Callable[[], None]) -> None:
        """Tells another rank, in order; the coordinator's own rank knows at once."""
        arrival_s = self._clock.now_s
        if src != dst:
            self.told_bytes += len(data)
            arrival_s += self._clock.told_s(src, dst, len(data))
            arrival_s = max(arrival_s, self._told_s[src, dst])
            self._told_s[src, dst] = arrival_s
        self._clock.at(arrival_s, then)

    def _report(self, rank: int) -> None:
        report = self.endpoints[rank].report()
        if report is not None:
            data = packed_report(report)
            self._tell(rank, self._rank, data, partial(self._decide, report))

    def _decide(self, report: Report | None) -> None:
        """Has the coordinator take a report, or look at the clock."""
        now_s = self._clock.now_s
        coordinator = self.coordinator
        due = (
            coordinator.due(now_s)
            if report is None
            else coordinator.receive(report, now_s)
        )
        for endpoint in self.endpoints:
            rank = endpoint.rank
            own = [batch for batch in due if rank in (batch.src, batch.dst)]
            if own:
                self._tell(
                    self._rank,
                    rank,
                    packed_plan(own),
                    partial(self._plan, endpoint, own),
                )
        if (due_s := coordinator.due_s) is not None:
            self._clock.at(due_s, partial(self._decide, None))

    def _plan(self, endpoint: Endpoint, batches: list[Batch]) -> None:
        endpoint.plan(batches)
        self._begin()

    def _begin(self) -> None:
        """Begins batches that are the next ones of both ranks."""
        for endpoint in self.endpoints:
            for batch in [*endpoint.sends][:1]:
                is_next = [*self.endpoints[batch.dst].receives][:1] == [batch]
                if is_next and batch not in self._under_way:
                    self._under_way.add(batch)
                    items = endpoint.sent(batch)
                    self._clock.carry(
                        batch, items, partial(self._arrived, batch, items)
                    )

    def _arrived(self, batch: Batch, items: list[Any]) -> None:
        self._under_way.remove(batch)
        self.endpoints[batch.src].sends.popleft()
        receiver = self.endpoints[batch.dst]
        receiver.receives.popleft()
        for item in items:
            self._clock.done(item, None)
        for item, payload in receiver.arrived(batch, items):
            self._clock.done(item, payload)
        self._report(batch.dst)
        self._begin()
