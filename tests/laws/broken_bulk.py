"""Deliberately wrong coordinators and endpoints, and the law that must reject each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from gradwire.planning.data.plan import Bulk
from gradwire_lab.exchange.bulk import (
    Batch,
    Coordinator,
    Endpoint,
    LinkTransfer,
    ReadyReport,
)
from tests.laws import bulk_laws as laws
from tests.laws.bulk_laws import Conditions


class KnowsNoTimeOut(Coordinator):
    """A link waits until it is full, which it may never be."""

    def due(self, now_s: float) -> list[Batch]:
        return super().due(-1.0)


class ForgetsWhatArrives(Coordinator):
    """A rank that has had two batches gets no more."""

    def receive(self, report: ReadyReport, now_s: float) -> list[Batch]:
        return super().receive(report._replace(num_arrived=0), now_s)


class ForgetsTheSecond(Coordinator):
    """Of several transfers of a report it notes the first two."""

    def receive(self, report: ReadyReport, now_s: float) -> list[Batch]:
        return super().receive(report._replace(ready=report.ready[:2]), now_s)


class KeepsNothingEarly(Endpoint):
    """A payload that nobody waits for is dropped."""

    def arrived(self, batch: Batch, payloads: Sequence[Any]) -> list[tuple[Any, Any]]:
        wanted = super().arrived(batch, payloads)
        self._early.clear()
        return wanted


class SendsAgain(Endpoint):
    """A batch's first transfer stays, and travels again in place of the next."""

    def sent(self, batch: Batch) -> list[Any]:
        items = super().sent(batch)
        return [items[0]] * len(items)


class MixesMessages(Endpoint):
    """A batch carries what became ready on its link, whatever the message."""

    def sent(self, batch: Batch) -> list[Any]:
        return super().sent(batch)[::-1]


class SharesSlots(Coordinator):
    """All slots have one number, so all due links share it."""

    def _selected(self, now_s: float) -> dict[int, int]:
        self._slot = 0
        return super()._selected(now_s)


class CountsBySender(Coordinator):
    """Each sender has slots of its own, so several ranks send to one in a slot."""

    def __init__(self, world: int, rules: Bulk) -> None:
        super().__init__(world, rules)
        self.slots = [0] * world

    def _batch(self, src: int, dst: int, size_bytes: int) -> Batch:
        self.slots[src] += 1
        self._slot = self.slots[src]
        return super()._batch(src, dst, size_bytes)


class IsHasty(Coordinator):
    """A link is due at once."""

    def due(self, now_s: float) -> list[Batch]:
        return super().due(now_s + 100.0)


class TakesAll(Coordinator):
    """A batch takes all that waits on its link."""

    def _slot_bytes(self, links: Collection[tuple[int, int]]) -> int:
        return 2**40


class FillsEachAlone(Coordinator):
    """A batch takes ``size_bytes``, however little others of its slot hold."""

    def _slot_bytes(self, links: Collection[tuple[int, int]]) -> int:
        return max(1, self._rules.size_bytes)


class TakesOneEach(Coordinator):
    """A batch takes the first transfer of its link."""

    def _slot_bytes(self, links: Collection[tuple[int, int]]) -> int:
        return 1


class PlansFarAhead(Coordinator):
    """All that is due is decided on at once."""

    def _may_begin(self, src: int, dst: int) -> bool:
        return True


class TakesTheLastEarly(Endpoint):
    """Of a message's early payloads the last is taken first."""

    def offer(self, transfer: LinkTransfer, item: Any) -> list[tuple[Any, Any]]:
        for queue in self._early.values():
            queue.reverse()
        wanted = super().offer(transfer, item)
        for queue in self._early.values():
            queue.reverse()
        return wanted


class GivesTheFirstToAll(Endpoint):
    """Each transfer of a batch gets the payload of the first of its size."""

    def arrived(self, batch: Batch, payloads: Sequence[Any]) -> list[tuple[Any, Any]]:
        sizes = [transfer.size_bytes for transfer in batch]
        firsts = [payloads[sizes.index(size)] for size in sizes]
        return super().arrived(batch, firsts)


class LooksAtValues(Endpoint):
    """Payloads with large bytes are reported first."""

    def offer(self, transfer: LinkTransfer, item: Any) -> list[tuple[Any, Any]]:
        wanted = super().offer(transfer, item)
        if transfer.src == self.rank and transfer.message % 2 and _is_odd(item):
            self._ready.insert(0, self._ready.pop())
            self._ready.append(self._ready.pop(0)._replace(size_bytes=1))
        return wanted


def _is_odd(item: Any) -> bool:
    return bool(item.verb.buf.view(-1).view(dtype=item.verb.buf.dtype).sum() % 2)


FULL = Bulk(timeout_s=0.3, size_bytes=10**6)
SMALL = Bulk(timeout_s=0.3, size_bytes=60)
AT_ONCE = Bulk(timeout_s=0.0)

BITES: tuple[tuple[Callable[[Conditions], None], Conditions], ...] = (
    (
        laws.law_nobody_waits_for_ever,
        Conditions(world=3, rules=FULL, coordinator=KnowsNoTimeOut),
    ),
    (
        laws.law_nobody_waits_for_ever,
        Conditions(world=3, rules=FULL, coordinator=ForgetsWhatArrives),
    ),
    (
        laws.law_nobody_waits_for_ever,
        Conditions(world=4, rules=FULL, coordinator=ForgetsTheSecond),
    ),
    (
        laws.law_nobody_waits_for_ever,
        Conditions(seed=1, world=4, rules=FULL, endpoint=KeepsNothingEarly),
    ),
    (
        laws.law_each_transfer_travels_once,
        Conditions(world=3, is_plain=True, rules=FULL, endpoint=SendsAgain),
    ),
    (
        laws.law_each_transfer_travels_once,
        Conditions(world=3, is_plain=True, rules=FULL, endpoint=MixesMessages),
    ),
    (
        laws.law_no_slot_is_shared,
        Conditions(world=4, rules=AT_ONCE, coordinator=SharesSlots),
    ),
    (
        laws.law_no_slot_is_shared,
        Conditions(world=4, rules=AT_ONCE, coordinator=CountsBySender),
    ),
    (laws.law_a_batch_has_a_reason, Conditions(rules=FULL, coordinator=IsHasty)),
    (
        laws.law_batches_of_a_slot_are_balanced,
        Conditions(world=4, rules=SMALL, coordinator=TakesAll),
    ),
    (
        laws.law_batches_of_a_slot_are_balanced,
        Conditions(world=4, rules=FULL, coordinator=FillsEachAlone),
    ),
    (
        laws.law_batches_of_a_slot_are_balanced,
        Conditions(world=4, rules=FULL, coordinator=TakesOneEach),
    ),
    (
        laws.law_few_batches_are_ahead,
        Conditions(world=4, rules=AT_ONCE, coordinator=PlansFarAhead),
    ),
    (
        laws.law_same_bits_as_without,
        Conditions(world=3, rules=FULL, endpoint=GivesTheFirstToAll),
    ),
    (
        laws.law_same_bits_as_without,
        Conditions(seed=7, world=3, rules=FULL, endpoint=TakesTheLastEarly),
    ),
    (
        laws.law_values_change_no_plan,
        Conditions(world=3, rules=FULL, endpoint=LooksAtValues),
    ),
)
