"""The engine: all ranks' messages on one virtual clock, by events.

It is the runtime's engine with seconds in place of work. Every rank has one compute
lane, which takes the computations that are ready in issue order, and ``credit``
communication lanes. A message is launched when its gradients, and the gradients of all
messages before it, are ready; its computations before the first transfer begin at once.
It may use the wire when the message before it may, its lane is free (message i - credit
has ended) and all messages in its ``after`` have ended. A transfer begins when sender
and receiver are both there, a collective when all ranks are.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple

from ...collective.steps.travel import members
from ...contract.trace.span import Span
from ...contract.units import format_bytes
from ...contract.verbs import Among
from ...errors import Deadlock, InvalidSetting
from .closed_form import NEVER, carry
from .network import Network
from .supersteps import Hop, Joint, Superstep, Work


@dataclass(frozen=True)
class Traffic:
    """The messages that ranks exchange in one iteration, in issue order."""

    supersteps: Sequence[Sequence[tuple[Superstep, ...]]]
    """The supersteps of each message on each rank: ``supersteps[rank][message]``."""
    ready_s: Sequence[Sequence[float]]
    """The second at which the gradients of each message are ready on each rank."""
    labels: Sequence[str]
    """The name of each message's spans.

    Where it is "", spans are named by their verbs.
    """
    credit: int = 1
    after: Sequence[Sequence[int]] = ()
    """The messages that must have ended before each goes on the wire.

    () where none must.
    """
    early: Sequence[Sequence[Sequence[tuple[float, Work]]]] = ()
    """Computations of each message on each rank that may begin before its launch, and
    the second from which on; its own steps begin when all are done. () where there are
    none.
    """
    ranks_per_host: int = 1
    """Ranks that share a link, host after host.

    What they send each other is not on it.
    """
    speeds: Sequence[tuple[float, float]] = ()
    """Each host's rates up and down, the slowest of which is 1; empty: all are 1."""


@dataclass
class Timetable:
    """The times at which everything happened, in seconds."""

    spans: list[Span]
    """All ranks' spans of lanes "compute" and "communication", in order of ends."""
    start_s: list[list[float]]
    """Seconds of each message's launch on each rank: ``start_s[rank][message]``."""
    end_s: list[list[float]]
    """The second at which each message ended on each rank."""


def play(traffic: Traffic) -> Timetable:
    """Carries all messages of all ranks.

    Raises ``Deadlock`` when ranks wait for each other, with what each of them waits
    for, and ``InvalidSetting`` when ranks disagree on a verb or a size.
    """
    return _closed(traffic) or EventEngine(traffic).run()


def _closed(traffic: Traffic) -> Timetable | None:
    """The closed form, for one rank's messages that are one collective each.

    None for others.
    """
    every = traffic.supersteps[0]
    ready_s = traffic.ready_s[0]
    alone = [
        own[0]
        for own in every
        if len(own) == 1 == len(own[0].wire) and not own[0].works
    ]
    is_joint = all(isinstance(one.wire[0], Joint) for one in alone)
    if len(traffic.supersteps) > 1 or len(alone) < len(every) or not is_joint:
        return None
    if any(map(any, traffic.early)):
        return None
    parts_s = [one.wire[0].price for one in alone]
    carried = carry(ready_s, parts_s, traffic.credit, after=traffic.after)
    spans = [
        Span(
            0,
            "communication",
            traffic.labels[number] or alone[number].name,
            carried.start_s[number],
            carried.end_s[number],
            size_bytes=int(alone[number].sent_bytes),
            step=0,
            message=number,
        )
        for number in carried.order
    ]
    return Timetable(spans, [carried.start_s], [carried.end_s])


class Post(NamedTuple):
    """A verb for the network that a rank has come to.

    ``done`` is called once it is done.
    """

    rank: int
    message: int
    verb: Hop | Joint
    done: Callable[[], None]

    def __str__(self) -> str:
        size = format_bytes(self.verb.size_bytes)
        if isinstance(self.verb, Joint):
            what = f"{self.verb.name}({size})"
        elif self.verb.sends:
            what = f"Send({size} to rank {self.verb.peer})"
        else:
            what = f"Recv({size} from rank {self.verb.peer})"
        return f"rank {self.rank} waits in {what} of message {self.message}"


def check_met(met: tuple[Post, ...]) -> None:
    """Refuses posts that meet and want different verbs or sizes."""
    first = met[0].verb
    for other in met[1:]:
        verb = other.verb
        if isinstance(first, Hop):
            if first.size_bytes != verb.size_bytes:
                raise InvalidSetting(
                    f"rank {met[0].rank} sends {first.size_bytes} bytes to rank "
                    f"{other.rank}, "
                    f"which receives {verb.size_bytes}; both ends must agree"
                )
        elif isinstance(verb, Joint) and (verb.name, verb.like) != (
            first.name,
            first.like,
        ):
            raise InvalidSetting(
                "ranks call different collectives, or with different sizes, dtypes or "
                f"roots: {met[0]}; {other}"
            )


@dataclass(eq=False, slots=True)
class _Course:
    """One rank's way through one message."""

    rank: _Rank
    message: int
    supersteps: tuple[Superstep, ...]
    label: str
    is_launched: bool = False
    at: int = -1
    num_open: int = 1
    """Events before its next superstep: its launch, computations that are not done, and
    its wire as one.
    """
    num_wire: int = 0
    """Verbs of its wire that are not done."""
    is_waiting: bool = False
    """At the gate: for its turn to use the wire."""
    posted_s: float = 0.0


@dataclass(eq=False)
class _Rank:
    """The progress of one rank."""

    number: int
    ready_s: Sequence[float]
    start_s: list[float]
    end_s: list[float]
    courses: list[_Course] = field(default_factory=list)
    num_passed: int = 0
    """The number of messages through the gate, the first ones in issue order."""
    queue: list[tuple[int, int, _Course, Work]] = field(default_factory=list)
    """The compute lane: a heap of (message, number, course, computation)."""
    is_busy: bool = False


class EventEngine:
    """All ranks at their messages, from one event to the next."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.after = traffic.after or ((),) * len(traffic.labels)
        num_messages = len(traffic.labels)
        self.ranks = [
            _Rank(number, own_s, [NEVER] * num_messages, [NEVER] * num_messages)
            for number, own_s in enumerate(traffic.ready_s)
        ]
        for rank, every in zip(self.ranks, traffic.supersteps, strict=True):
            for message, supersteps in enumerate(every):
                rank.courses.append(
                    _Course(rank, message, supersteps, traffic.labels[message])
                )
        self.per_host = traffic.ranks_per_host
        num_hosts = -(-len(self.ranks) // self.per_host)
        self.links = Network(traffic.speeds)
        self.within = [Network() for _ in range(num_hosts)] if self.per_host > 1 else []
        self.now_s = 0.0
        self.spans: list[Span] = []
        self.events: list[tuple[float, bool, int, Callable[[], None]]] = []
        self.count = count()
        self.waiting: dict[tuple[Any, ...], dict[int, deque[Post]]] = {}
        """Verbs that wait for their other end, in the order in which ranks came to
        them. Messages never meet: each has a lane of its own while it is on the
        wire.
        """

    def run(self) -> Timetable:
        for rank, early in zip(self.ranks, self.traffic.early, strict=False):
            for course, works in zip(rank.courses, early, strict=False):
                for ready_s, work in works:
                    self._begin_early(course, ready_s, work)
        for rank in self.ranks:
            self._launch_at(rank, 0, 0.0)
        events = self.events
        networks = (self.links, *self.within)
        while True:
            network_s = min(network.next_end_s() for network in networks)
            self.now_s = min(network_s, events[0][0] if events else NEVER)
            if self.now_s == NEVER:
                break
            for network in networks:
                network.advance(self.now_s)
            while events and events[0][0] <= self.now_s:
                heapq.heappop(events)[3]()
        if any(NEVER in rank.end_s for rank in self.ranks):
            raise self._deadlock()
        start_s = [rank.start_s for rank in self.ranks]
        return Timetable(self.spans, start_s, [rank.end_s for rank in self.ranks])

    def at(
        self, time_s: float, then: Callable[[], None], *, is_last: bool = False
    ) -> None:
        """Has something done at a time, in the order of asking, or last of all then."""
        heapq.heappush(self.events, (time_s, is_last, next(self.count), then))

    def _launch_at(self, rank: _Rank, message: int, not_before_s: float) -> None:
        if message < len(rank.courses):
            launch_s = max(not_before_s, rank.ready_s[message])
            self.at(launch_s, partial(self._launch, rank.courses[message]))

    def _begin_early(self, course: _Course, ready_s: float, work: Work) -> None:
        """Puts a computation from before a message's launch on the lane in time."""
        if work.seconds:
            course.num_open += 1
            self.at(ready_s, partial(self._compute, course, work))
        else:
            self.at(ready_s, partial(self._note, course, "compute", work.name, ready_s))

    def _launch(self, course: _Course) -> None:
        course.rank.start_s[course.message] = self.now_s
        course.is_launched = True
        self._done(course)
        self._open_gate(course.rank)
        self._launch_at(course.rank, course.message + 1, self.now_s)

    def _proceed(self, course: _Course) -> None:
        """Moves a course on to its next superstep that takes time, or to its end."""
        while not course.num_open:
            course.at += 1
            if course.at == len(course.supersteps):
                self._to_the_gate(course)
                return
            superstep = course.supersteps[course.at]
            course.num_open = bool(superstep.wire)
            for work in superstep.works:
                if work.seconds:
                    course.num_open += 1
                    self._compute(course, work)
                else:
                    self._note(course, "compute", work.name, self.now_s)
            if superstep.wire:
                self._to_the_gate(course)

    def _to_the_gate(self, course: _Course) -> None:
        if course.message < course.rank.num_passed:
            self._pass(course)
        else:
            course.is_waiting = True
        self._open_gate(course.rank)

    def _open_gate(self, rank: _Rank) -> None:
        """Lets launched messages use the wire in issue order, as their lanes are free.

        A message that still computes takes its turn too, so that messages behind it
        need not wait.
        """
        end_s = rank.end_s
        while (message := rank.num_passed) < len(end_s):
            course = rank.courses[message]
            before = message - self.traffic.credit
            if (
                not course.is_launched
                or (before >= 0 and end_s[before] == NEVER)
                or any(end_s[other] == NEVER for other in self.after[message])
            ):
                return
            rank.num_passed += 1
            if course.is_waiting:
                self._pass(course)

    def _pass(self, course: _Course) -> None:
        if course.at == len(course.supersteps):
            course.rank.end_s[course.message] = self.now_s
            return
        wire = course.supersteps[course.at].wire
        course.posted_s = self.now_s
        course.num_wire = len(wire)
        for verb in wire:
            self.come(
                Post(
                    course.rank.number,
                    course.message,
                    verb,
                    partial(self._sent, course),
                )
            )

    def come(self, post: Post) -> None:
        """Begins a verb if its rank is the last one to come to it."""
        verb = post.verb
        parties = range(2)
        key = tuple[Any, ...]()
        if isinstance(verb, Joint):
            parties = members(post.rank, len(self.ranks), self.per_host, verb.among)
            key = (post.message, parties, verb.among)
            party = post.rank
        else:  # the sender, then the receiver
            ends = (post.rank, verb.peer) if verb.sends else (verb.peer, post.rank)
            key = (post.message, *ends, verb.among)
            party = int(not verb.sends)
        posts = self.waiting.setdefault(key, {})
        posts.setdefault(party, deque()).append(post)
        if len(posts) == len(parties):
            met = tuple(posts[party].popleft() for party in parties)
            self.waiting[key] = {
                party: queue for party, queue in posts.items() if queue
            }
            check_met(met)
            # Where prices differ, the highest counts for all.
            latency_s, work_s = map(
                max, zip(*(post.verb.price for post in met), strict=True)
            )
            self.at(self.now_s + latency_s, partial(self._travel, met, work_s))

    def _travel(self, met: tuple[Post, ...], work_s: float) -> None:
        verb = met[0].verb
        sender = met[0].rank
        host = sender // self.per_host
        is_within = verb.among is Among.HOST and bool(self.within)
        network = self.within[host] if is_within else self.links
        done = partial(_announce, met)
        if isinstance(verb, Joint):
            network.collective(work_s, done)
            return
        receiver = met[1].rank
        if is_within:
            places = (sender % self.per_host, receiver % self.per_host)
        else:
            places = (host, receiver // self.per_host)
        network.transfer(*places, work_s, done)

    def _sent(self, course: _Course) -> None:
        course.num_wire -= 1
        if not course.num_wire:
            self._note(
                course,
                "communication",
                course.supersteps[course.at].name,
                course.posted_s,
            )
            self._done(course)

    def _done(self, course: _Course) -> None:
        course.num_open -= 1
        self._proceed(course)

    def _note(self, course: _Course, lane: str, name: str, start_s: float) -> None:
        size_bytes = 0
        if lane == "communication":
            size_bytes = int(course.supersteps[course.at].sent_bytes)
            if course.label:
                has_several = (
                    sum(bool(superstep.wire) for superstep in course.supersteps) > 1
                )
                name = f"{course.label}: {name}" if has_several else course.label
        span = Span(
            rank=course.rank.number,
            lane=lane,
            name=name,
            start_s=start_s,
            end_s=self.now_s,
            size_bytes=size_bytes,
            step=0,
            message=course.message,
        )
        self.spans.append(span)

    def _compute(self, course: _Course, work: Work) -> None:
        rank = course.rank
        heapq.heappush(rank.queue, (course.message, next(self.count), course, work))
        # it takes the first message's of all that come at this instant
        if not rank.is_busy:
            rank.is_busy = True
            self.at(self.now_s, partial(self._compute_next, rank), is_last=True)

    def _compute_next(self, rank: _Rank) -> None:
        rank.is_busy = bool(rank.queue)
        if rank.queue:
            _, _, course, work = heapq.heappop(rank.queue)
            end_s = self.now_s + work.seconds
            self.at(end_s, partial(self._computed, course, work.name, self.now_s))

    def _computed(self, course: _Course, name: str, start_s: float) -> None:
        self._note(course, "compute", name, start_s)
        self._done(course)  # what this makes ready competes for the lane
        self._compute_next(course.rank)

    def _deadlock(self) -> Deadlock:
        queues = (queue for posts in self.waiting.values() for queue in posts.values())
        posts = sorted(chain(*queues), key=lambda post: (post.rank, post.message))
        ended = [i for i, rank in enumerate(self.ranks) if NEVER not in rank.end_s]
        return Deadlock.of(map(str, posts), ended)


def _announce(met: tuple[Post, ...]) -> None:
    for post in met:
        post.done()
