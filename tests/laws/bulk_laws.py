"""The laws of bulk synchronisation, and the runs of ranks that they are asked of.

A run is of all ranks in one process, with messages of real exchanges. Seconds of
computations, of what ranks tell each other and of batches are drawn from a seed. Each
law takes a run, so that it can be shown a wrong one.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from heapq import heappop, heappush
from itertools import count, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.collective.casync_ps import casync_ps
from gradwire.compress.none import none
from gradwire.compress.nonzero import nonzero
from gradwire.compress.onebit import onebit
from gradwire.compress.topk import topk
from gradwire.contract import Exchange, Member
from gradwire.contract.verbs import Compute, Send
from gradwire.exchange.error_feedback import with_error_feedback
from gradwire.exchange.local import drive
from gradwire.exchange.natural import with_natural_sparsity
from gradwire.exchange.pair import pair
from gradwire.exchange.sends import as_sends
from gradwire.planning.data.plan import Bulk
from gradwire_lab.collective.casync_ring import casync_ring
from gradwire_lab.exchange.bulk import (
    Batch,
    Coordinator,
    Endpoint,
    LinkTransfer,
    ReadyReport,
)
from gradwire_lab.laws.cases import Case
from gradwire_lab.laws.tolerance import must, same_bits
from papers.hipress.slots import Slots

EXCHANGES: tuple[Exchange, ...] = (
    pair(onebit(block=64), casync_ps()),
    with_error_feedback(pair(topk(density=0.1), casync_ps(room_bytes=0))),
    pair(onebit(block=64), casync_ring()),
    pair(topk(density=0.2), casync_ring(half_bytes=0)),
    pair(none(), casync_ps(partitions=1)),
    pair(nonzero(), casync_ps()),
    with_natural_sparsity(pair(none(), casync_ps()), 8),
)
"""Payloads of known and of varying sizes, servers and rings, ranks without a chunk."""
LATE_S = 50.0
"""Seconds by which a late rank begins: longer than all others take."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How a run of ranks goes; what is not named is drawn from the seed.

    Args:
        num_messages: Messages of each rank, with exchanges in turn.
        values: The seed of gradients. Default: 0.
        is_plain: Only exchanges whose sizes do not depend on values.
    """

    seed: int = 0
    world: int = 0
    num_messages: int = 3
    values: int = 0
    is_plain: bool = False
    rules: Bulk | None = None
    coordinator: type[Coordinator] = Coordinator
    endpoint: type[Endpoint] = Endpoint

    @property
    def draw(self) -> random.Random:
        return random.Random(self.seed)

    @property
    def num_ranks(self) -> int:
        return self.world or 2 + self.seed % 7

    def drawn_rules(self) -> Bulk:
        draw = self.draw
        return self.rules or Bulk(
            rank=draw.randrange(self.num_ranks),
            timeout_s=draw.choice((0.0, 0.2, 3.0)),
            size_bytes=draw.choice((0, 200, 1000, 10**6)),
            ahead=draw.choice((1, 2, 2, 3)),
        )

    def exchange(self, message: int) -> Exchange:
        few = EXCHANGES[0], EXCHANGES[2], EXCHANGES[4]
        known = few if self.is_plain else EXCHANGES
        return known[(self.seed + message) % len(known)]

    def grads(self, message: int) -> list[Tensor]:
        """Gradients of all ranks. Some rank has nothing but zeros, so it sends few
        bytes or none where sizes vary.
        """
        numel = self.draw.choice((0, 9, 64, 400)) + message
        seed = 100 * (self.seed + 7 * self.values) + message
        grads = Case(world=self.num_ranks, numel=numel, seed=seed).grads()
        if not self.is_plain:
            for rank, grad in enumerate(grads):
                grad[16 + 8 * rank :] = 0.0  # few rows, for natural sparsity
            grads[(self.seed + message) % self.num_ranks].zero_()
        return grads

    def all_steps(self, message: int) -> tuple[list[Any], list[Tensor]]:
        """The steps of a message on all ranks, and the means that they leave."""
        exchange = self.exchange(message)
        grads = self.grads(message)
        means = [torch.full_like(grad, 7.0) for grad in grads]
        case = Case(world=self.num_ranks, numel=grads[0].numel())
        each = zip(case.states(exchange), grads, means, strict=True)
        steps = [
            exchange.synchronise(
                Member(rank, self.num_ranks, order=message), state, grad, mean
            )
            for rank, (state, grad, mean) in enumerate(each)
        ]
        return steps, means


@dataclass(eq=False)
class Course:
    """The way of one rank through a message."""

    rank: int
    message: int
    steps: Any
    num_open: int = 0
    values: Any = None
    is_single: bool = True
    is_done: bool = False


@dataclass(eq=False)
class Item:
    """A send or a receive that a rank waits for."""

    course: Course
    verb: Any
    num_done: int = 0
    sent_N: Tensor | None = None
    """A copy of what is sent, made when its batch leaves."""


class Decided(NamedTuple):
    """A batch that was decided on, and its link at that time."""

    now_s: float
    batch: Batch
    reported_s: list[float]
    """When each of its transfers was reported."""
    waiting_bytes: int
    """The bytes that waited on its link, its own included."""

    @property
    def sizes(self) -> list[int]:
        return [transfer.size_bytes for transfer in self.batch]


class Run:
    """One run: all ranks on a virtual clock, with what they told and sent."""

    def __init__(self, conditions: Conditions) -> None:
        self.conditions = conditions
        self.rules = conditions.drawn_rules()
        self.now_s = 0.0
        self.items: list[Item] = []
        self.batches: list[tuple[float, Batch]] = []
        self.took_items: list[list[Item]] = []
        self.means: list[list[Tensor]] = []
        self.draw = conditions.draw
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        world = conditions.num_ranks
        self.slots = Slots(world, self.rules, self)
        self.slots.coordinator = self._noting(conditions.coordinator(world, self.rules))
        self.slots.endpoints = [conditions.endpoint(rank) for rank in range(world)]
        self.courses: list[Course] = []
        self.decided: list[Decided] = []
        self.most_ahead = 0

    def _noting(self, coordinator: Coordinator) -> Coordinator:
        """A coordinator that notes what it takes and what it decides."""
        reported_s: dict[tuple[int, ...], list[float]] = defaultdict(list)
        waiting_bytes: Counter[tuple[int, int]] = Counter()
        ahead: Counter[tuple[str, int]] = Counter()
        under_way: dict[int, list[int]] = defaultdict(list)
        receive = coordinator.receive
        due = coordinator.due

        def noted(report: ReadyReport, now_s: float) -> list[Batch]:
            for transfer in report.ready:
                reported_s[transfer.key].append(now_s)
                waiting_bytes[transfer.src, transfer.dst] += transfer.size_bytes
            for _ in range(report.num_arrived):
                ahead["dst", report.rank] -= 1
                ahead["src", under_way[report.rank].pop(0)] -= 1
            return receive(report, now_s)

        def decided(now_s: float) -> list[Batch]:
            batches = due(now_s)
            for batch in batches:
                ahead["src", batch[0].src] += 1
                ahead["dst", batch[0].dst] += 1
                under_way[batch[0].dst].append(batch[0].src)
                times_s = [(reported_s[one.key] or [now_s]).pop(0) for one in batch]
                link = batch[0].src, batch[0].dst
                own = Decided(now_s, batch, times_s, waiting_bytes[link])
                waiting_bytes[link] -= sum(own.sizes)
                self.decided.append(own)
            self.most_ahead = max([self.most_ahead, *ahead.values()])
            return batches

        coordinator.receive = noted  # type: ignore[method-assign]
        coordinator.due = decided  # type: ignore[method-assign]
        return coordinator

    def play(self) -> Run:
        draw = self.draw
        world = self.conditions.num_ranks
        late = draw.randrange(2 * world)
        for message in range(self.conditions.num_messages):
            all_steps, means = self.conditions.all_steps(message)
            self.means.append(means)
            for rank, steps in enumerate(all_steps):
                course = Course(rank, message, steps)
                self.courses.append(course)
                begin_s = draw.uniform(0, 3.0) + LATE_S * (rank == late)
                self.at(begin_s, partial(self._resume, course, None))
        num_events = 0
        while self._events and num_events < 200_000:
            self.now_s, _, happen = heappop(self._events)
            happen()
            num_events += 1
        return self

    # ---- the clock of slots

    def at(self, time_s: float, then: Callable[[], None]) -> None:
        assert time_s >= self.now_s
        heappush(self._events, (time_s, next(self._numbers), then))

    def told_s(self, src: int, dst: int, size_bytes: int) -> float:
        return self.draw.choice((0.01, 0.3, 2.0))

    def carry(self, batch: Batch, items: list[Any], then: Callable[[], None]) -> None:
        self.batches.append((self.now_s, batch))
        self.took_items.append(items)
        for item in items:
            item.sent_N = item.verb.buf.clone()
        self.at(self.now_s + self.draw.uniform(0, 1.0), then)

    def done(self, item: Item, payload: Item | None) -> None:
        if payload is not None:
            sent_N = payload.sent_N
            assert sent_N is not None
            # a wrong coordinator may bring anything, which laws notice
            if sent_N.shape == item.verb.buf.shape:
                item.verb.buf.copy_(sent_N)
        item.num_done += 1
        self._closed(item.course)

    # ---- ranks

    def _resume(self, course: Course, value: Any) -> None:
        try:
            asked = course.steps.send(value)
        except StopIteration:
            course.is_done = True
            return
        verbs = asked if isinstance(asked, tuple) else (asked,)
        course.is_single = not isinstance(asked, tuple)
        course.values = [None] * len(verbs)
        world = self.conditions.num_ranks
        own = [
            (at, part)
            for at, verb in enumerate(verbs)
            for part in as_sends(verb, course.rank, world)
        ]
        course.num_open = 1 + len(own)
        computed_s = self.now_s
        for at, verb in own:
            if isinstance(verb, Compute):
                # one behind the other, as steps expect
                computed_s += self.draw.choice((0.0, 0.1, 1.0))
                self.at(computed_s, partial(self._compute, course, at, verb))
            else:
                self._offer(course, verb)
        self._closed(course)

    def _compute(self, course: Course, at: int, verb: Compute) -> None:
        course.values[at] = verb.fn()
        self._closed(course)

    def _offer(self, course: Course, verb: Any) -> None:
        rank = course.rank
        ends = (rank, verb.dst) if isinstance(verb, Send) else (verb.src, rank)
        item = Item(course, verb)
        self.items.append(item)
        self.slots.offer(
            rank, LinkTransfer(course.message, *ends, verb.buf.nbytes), item
        )

    def _closed(self, course: Course) -> None:
        course.num_open -= 1
        if not course.num_open:
            values = course.values
            self._resume(course, values[0] if course.is_single else tuple(values))


@lru_cache(maxsize=2)
def played(conditions: Conditions) -> Run:
    """A run under these conditions, which laws only look at."""
    return Run(conditions).play()


# ---- laws ----------------------------------------------------------------------------


def law_nobody_waits_for_ever(conditions: Conditions) -> None:
    """All messages end on all ranks, also where a rank is late or has nothing to
    send.
    """
    run = played(conditions)
    stuck = [(one.rank, one.message) for one in run.courses if not one.is_done]
    must(not stuck, f"(rank, message) {stuck[:5]} wait for ever")


def law_each_transfer_travels_once(conditions: Conditions) -> None:
    """Each send is in one batch, of its own link, and each verb ends once."""
    run = played(conditions)
    sends = [id(item) for item in run.items if isinstance(item.verb, Send)]
    travelled = Counter(id(item) for items in run.took_items for item in items)
    must(set(travelled) == set(sends), "a send is in no batch")
    must(max(travelled.values(), default=1) == 1, "a send is in two batches")
    wrong = [item for item in run.items if item.num_done != 1]
    must(not wrong, f"{len(wrong)} verbs do not end once")
    for (_, batch), items in zip(run.batches, run.took_items, strict=True):
        for transfer, item in zip(batch, items, strict=True):
            named = (item.course.message, item.course.rank, item.verb.dst)
            must(named == transfer.key, f"{named} travels as {transfer}")


def law_no_slot_is_shared(conditions: Conditions) -> None:
    """In a slot a rank sends to one rank at most, and receives from one at most."""
    run = played(conditions)
    for end in ("src", "dst"):
        counts = Counter(
            (batch[0].slot, getattr(batch[0], end)) for _, batch in run.batches
        )
        twice = [key for key, number in counts.items() if number > 1]
        must(not twice, f"(slot, {end}) {twice[:3]} has two batches")


def law_a_batch_has_a_reason(conditions: Conditions) -> None:
    """``size_bytes`` wait on its link, or one of its transfers has waited long
    enough.
    """
    run = played(conditions)
    for one in run.decided:
        waited_s = one.now_s - min(one.reported_s)
        is_late = waited_s >= run.rules.timeout_s - 1e-9
        must(
            is_late or one.waiting_bytes >= run.rules.size_bytes,
            f"of {one.waiting_bytes} bytes some go after {waited_s} s",
        )


def law_batches_of_a_slot_are_balanced(conditions: Conditions) -> None:
    """Each takes transfers until it holds as many bytes as all others can hold.

    They can hold ``size_bytes``, or what waits on the emptiest link. A transfer is not
    cut, so they hold the slot's largest first one at least.
    """
    run = played(conditions)
    for _, decided in groupby(run.decided, lambda one: one.batch[0].slot):
        slot = [*decided]
        least = min(run.rules.size_bytes, *(one.waiting_bytes for one in slot))
        held = max(1, least, *(one.sizes[0] for one in slot))
        for one in slot:
            must(sum(one.sizes[:-1]) < held, f"{one.sizes} go beside {held} bytes")
            is_all = sum(one.sizes) == one.waiting_bytes
            must(is_all or sum(one.sizes) >= held, f"{one.sizes} leave others behind")


def law_few_batches_are_ahead(conditions: Conditions) -> None:
    """A rank has ``ahead`` batches at most to send, and as many to receive."""
    run = played(conditions)
    must(
        run.most_ahead <= run.rules.ahead, f"a rank has {run.most_ahead} batches ahead"
    )


def law_same_bits_as_without(conditions: Conditions) -> None:
    """Means have the bits that they have without a coordinator."""
    run = played(conditions)
    for message in range(conditions.num_messages):
        all_steps, means = conditions.all_steps(message)
        drive(all_steps, seed=conditions.seed)
        for rank, (want, got) in enumerate(zip(means, run.means[message], strict=True)):
            must(same_bits(want, got), f"rank {rank}'s message {message} differs")


def law_values_change_no_plan(conditions: Conditions) -> None:
    """Where sizes do not depend on values, slots do not either."""
    plain = _changed(conditions, is_plain=True)
    other = _changed(plain, values=1)
    must(played(plain).batches == played(other).batches, "slots depend on values")


def _changed(conditions: Conditions, **changes: Any) -> Conditions:
    return Conditions(**{**vars(conditions), **changes})


LAWS: tuple[Callable[[Conditions], None], ...] = tuple(
    found for name, found in sorted(globals().items()) if name.startswith("law_")
)
