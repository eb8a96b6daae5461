"""Slots on a virtual clock: transfers of all ranks as a coordinator lets them go.

``Slots`` is for any virtual clock. ``simulate_slots`` simulates a plan with ``bulk``,
by the library's events. What ranks tell takes the seconds of a send, and nothing of the
link's rate, as it is small.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from gradwire.compress.none import none
from gradwire.contract.verbs import Among
from gradwire.exchange.by_name import exchange_for
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Bulk, Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.simulation.clock import Demand, Timing
from gradwire.planning.simulation.events import (
    EventEngine,
    Post,
    Timetable,
    Traffic,
    check_met,
)
from gradwire.planning.simulation.supersteps import Hop, Tariff
from gradwire_lab.exchange.bulk import (
    Batch,
    Coordinator,
    Endpoint,
    LinkTransfer,
    ReadyReport,
    batches_of,
    packed_rows,
)
from gradwire_lab.planning.all_ranks import all_ranks


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
        self.num_batches = 0
        self.sent_bytes = 0
        self._rank = rules.rank
        self._clock = clock
        self._sends: list[deque[Batch]] = [deque() for _ in range(world)]
        self._receives: list[deque[Batch]] = [deque() for _ in range(world)]
        self._under_way: set[Batch] = set()
        self._due_s = -1.0
        """The time at which the coordinator looks at the clock next."""
        self._told_s: dict[tuple[int, int], float] = defaultdict(float)

    def offer(self, rank: int, transfer: LinkTransfer, item: Any) -> None:
        """Takes a send or a receive that a rank has come to."""
        for one, payload in self.endpoints[rank].offer(transfer, item):
            self._clock.done(one, payload)
        # what comes at this instant is one report
        self._clock.at(self._clock.now_s, partial(self._report, rank))

    def _tell(
        self, src: int, dst: int, rows: Sequence[LinkTransfer], then: Callable[[], None]
    ) -> None:
        """Tells another rank, in order; the coordinator's own rank knows at once."""
        arrival_s = self._clock.now_s
        if src != dst:
            size_bytes = len(packed_rows(rows))
            self.told_bytes += size_bytes
            arrival_s += self._clock.told_s(src, dst, size_bytes)
            arrival_s = max(arrival_s, self._told_s[src, dst])
            self._told_s[src, dst] = arrival_s
        self._clock.at(arrival_s, then)

    def _report(self, rank: int) -> None:
        report = self.endpoints[rank].report()
        if report is not None:
            counts = LinkTransfer(report.num_arrived, 0, 0, 0)
            rows = (counts, *report.ready)
            self._tell(rank, self._rank, rows, partial(self._decide, report))

    def _decide(self, report: ReadyReport | None) -> None:
        """Has the coordinator take a report, or look at the clock."""
        now_s = self._clock.now_s
        if report is None:
            batches = self.coordinator.due(now_s)
        else:
            batches = self.coordinator.receive(report, now_s)
        for rank in range(len(self.endpoints)):
            own = [one for batch in batches for one in batch if rank in one[1:3]]
            if own:
                self._tell(self._rank, rank, own, partial(self._plan, rank, own))
        due_s = self.coordinator.due_s
        if due_s is not None and due_s != self._due_s:
            self._due_s = due_s
            self._clock.at(due_s, partial(self._decide, None))

    def _plan(self, rank: int, transfers: Sequence[LinkTransfer]) -> None:
        for batch in batches_of(transfers):
            is_sender = batch[0].src == rank
            (self._sends if is_sender else self._receives)[rank].append(batch)
        self._begin()

    def _begin(self) -> None:
        """Begins batches that are the next ones of both ranks."""
        for batch in [sends[0] for sends in self._sends if sends]:
            is_next = [*self._receives[batch[0].dst]][:1] == [batch]
            if is_next and batch not in self._under_way:
                self._under_way.add(batch)
                self.num_batches += 1
                self.sent_bytes += sum(one.size_bytes for one in batch)
                items = self.endpoints[batch[0].src].sent(batch)
                self._clock.carry(batch, items, partial(self._arrived, batch, items))

    def _arrived(self, batch: Batch, items: list[Any]) -> None:
        src = batch[0].src
        dst = batch[0].dst
        self._under_way.remove(batch)
        self._sends[src].popleft()
        self._receives[dst].popleft()
        for item in items:
            self._clock.done(item, None)
        for item, payload in self.endpoints[dst].arrived(batch, items):
            self._clock.done(item, payload)
        self._report(dst)
        self._begin()


class SlotEngine(EventEngine):
    """The library's events, in which sends wait for their slot.

    Args:
        traffic: The messages; ``credit`` bounds them no more.
        rules: The coordinator's rules.
        tariff: The prices of what ranks tell.
    """

    def __init__(self, traffic: Traffic, rules: Bulk, tariff: Tariff) -> None:
        super().__init__(replace(traffic, credit=max(1, len(traffic.labels))))
        self.slots = Slots(len(self.ranks), rules, self)
        self._tariff = tariff

    def come(self, post: Post) -> None:
        verb = post.verb
        if not isinstance(verb, Hop) or verb.among is not Among.RANKS:
            super().come(post)
            return
        ends = (post.rank, verb.peer) if verb.sends else (verb.peer, post.rank)
        transfer = LinkTransfer(post.message, *ends, verb.size_bytes)
        self.slots.offer(post.rank, transfer, post)

    def told_s(self, src: int, dst: int, size_bytes: int) -> float:
        return sum(self._tariff.send(size_bytes, src, dst))

    def carry(self, batch: Batch, items: list[Any], then: Callable[[], None]) -> None:
        prices = [post.verb.price for post in items]
        work_s = sum(price.work_s for price in prices)

        def travel() -> None:
            self.links.transfer(batch[0].src, batch[0].dst, work_s, then)

        self.at(self.now_s + max(price.latency_s for price in prices), travel)

    def done(self, item: Post, payload: Post | None) -> None:
        if payload is not None:
            check_met((payload, item))
        item.done()


class Simulated(NamedTuple):
    """A plan's iteration with a coordinator."""

    timings: list[Timing]
    sent_bytes: int
    told_bytes: int
    num_batches: int


def simulate_slots(
    plan: Plan, profile: Profile, cluster: Cluster, slower: Sequence[float] = ()
) -> Simulated:
    """Simulates one iteration of a plan with ``bulk`` on all ranks.

    Args:
        plan: The plan.
        profile: The model's layers.
        cluster: Ranks and links; hosts have one rank each.
        slower: Factors of each rank's backward seconds. Default: all are 1.
    """
    rules = plan.bulk
    assert rules is not None
    tariff = Tariff.of(exchange_for(none()), cluster)
    engines: list[SlotEngine] = []

    def carry(traffic: Traffic) -> Timetable:
        engines.append(SlotEngine(traffic, rules, tariff))
        return engines[0].run()

    timings = all_ranks(Demand.of(plan, profile, cluster), slower, carry)
    slots = engines[0].slots
    return Simulated(timings, slots.sent_bytes, slots.told_bytes, slots.num_batches)
