"""The engine: all ranks' messages on one virtual clock, by events.

It is the runtime's engine with seconds in place of work. Every rank has one compute lane, which
takes the computations that are ready in issue order, and ``credit`` communication lanes. A message
is launched when its gradients and those of all messages before it are ready; its computations
before the first transfer begin at once. It may use the wire when the message before it may, its
lane is free (message i - credit has ended) and all messages in its ``after`` have ended. A transfer
begins when sender and receiver are both there, a collective when all ranks are."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

from ...contract.trace.span import Span
from ...contract.travel import members
from ...contract.units import format_bytes
from ...contract.verbs import Among
from ...errors import Deadlock, InvalidSetting
from .network import NEVER, Network
from .pace import HAIR
from .supersteps import Hop, Joint, Superstep, Work

# ---- Meetings of ranks -------------------------------------------------------------------------
#
# A send meets its receive, a collective meets the same one of all ranks.


class Post(NamedTuple):
    """A verb for the network that a rank has come to; ``done`` is called once it is done."""

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


class Meetings:
    """All verbs that wait for their other end, in the order in which ranks came to them.

    Messages never meet: each has a lane of its own while it is on the wire.
    """

    def __init__(self, num_ranks: int, ranks_per_host: int = 1) -> None:
        self._num_ranks, self._ranks_per_host = num_ranks, ranks_per_host
        self._hops: dict[tuple[int, int, int, Among], deque[Post]] = {}
        self._joints: dict[tuple[int, range, Among], dict[int, deque[Post]]] = {}

    def come(self, post: Post) -> tuple[Post, ...]:
        """All posts that meet if ``post`` was the last of them, ranks ascending; () if more must
        come.

        Raises ``InvalidSetting`` if ranks that meet want different verbs or sizes.
        """
        if isinstance(post.verb, Joint):
            return self._come_to_all(post)
        return self._come_to_one(post, post.verb)

    def waiting(self) -> list[Post]:
        """The posts that still wait."""
        hops = [post for posts in self._hops.values() for post in posts]
        joints = [p for ranks in self._joints.values() for posts in ranks.values() for p in posts]
        return sorted((*hops, *joints), key=lambda post: (post.rank, post.message))

    def _come_to_one(self, post: Post, hop: Hop) -> tuple[Post, ...]:
        ends = (post.rank, hop.peer) if hop.sends else (hop.peer, post.rank)
        key = (post.message, *ends, hop.among)
        posts = self._hops.setdefault(key, deque())
        if not posts or _sends(posts[0]) is hop.sends:
            posts.append(post)
            return ()
        other = posts.popleft()
        if not posts:
            del self._hops[key]
        met = (post, other) if hop.sends else (other, post)
        if met[0].verb.size_bytes != met[1].verb.size_bytes:
            raise InvalidSetting(
                f"rank {ends[0]} sends {met[0].verb.size_bytes} bytes to rank {ends[1]}, which "
                f"receives {met[1].verb.size_bytes}; both ends must agree"
            )
        return met

    def _come_to_all(self, post: Post) -> tuple[Post, ...]:
        among = post.verb.among
        own = members(post.rank, self._num_ranks, self._ranks_per_host, among)
        ranks = self._joints.setdefault((post.message, own, among), {})
        ranks.setdefault(post.rank, deque()).append(post)
        if len(ranks) < len(own):
            return ()
        met = tuple(ranks[rank].popleft() for rank in own)
        self._joints[post.message, own, among] = {
            rank: posts for rank, posts in ranks.items() if posts
        }
        first = met[0].verb
        for other in met:
            verb = other.verb
            if (
                isinstance(verb, Joint)
                and isinstance(first, Joint)
                and (verb.name != first.name or verb.like != first.like)
            ):
                raise InvalidSetting(
                    f"ranks call different collectives, or with different sizes, dtypes or roots: "
                    f"{met[0]}; {other}"
                )
        return met


def _sends(post: Post) -> bool:
    return isinstance(post.verb, Hop) and post.verb.sends


# ---- the engine --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """The messages that ranks exchange in one iteration, in issue order."""

    supersteps: Sequence[Sequence[tuple[Superstep, ...]]]
    """The supersteps of each message on each rank: ``supersteps[rank][message]``."""
    ready_s: Sequence[Sequence[float]]
    """The second at which the gradients of each message are ready on each rank."""
    labels: Sequence[str]
    """The name of each message's spans; where it is "", spans are named by their verbs."""
    credit: int = 1
    after: Sequence[Sequence[int]] = ()
    """The messages that must have ended before each goes on the wire; () where none must."""
    early: Sequence[Sequence[Sequence[tuple[float, Work]]]] = ()
    """Computations of each message on each rank that may begin before its launch, and the second
    from which on; its own text begins when all are done. () where there are none."""
    slowness: Sequence[float] = ()
    """The factor on the seconds of each rank's computations; () where all are 1."""
    ranks_per_host: int = 1
    """Ranks that share a link, host after host; what they send each other is not on it."""
    beside: float = 1.0
    """The pace of each rank's backward pass while its compute lane is busy: see ``Pace``. The
    seconds in ``ready_s`` are those of a backward pass that nothing slows down."""


@dataclass
class Timetable:
    """The times at which everything happened, in seconds."""

    spans: list[Span]
    """Spans of the lanes "compute" and "communication" of all ranks, in order of their ends."""
    start_s: list[list[float]]
    """The second at which each message was launched on each rank: ``start_s[rank][message]``."""
    end_s: list[list[float]]
    """The second at which each message ended on each rank."""


def play(traffic: Traffic) -> Timetable:
    """Carries all messages of all ranks.

    Raises ``Deadlock`` when ranks wait for each other, with what each of them waits for, and
    ``InvalidSetting`` when ranks disagree on a verb or a size.
    """
    return _Engine(traffic).run()


@dataclass(eq=False, slots=True)
class _Course:
    """One rank's way through one message."""

    rank: int
    message: int
    supersteps: tuple[Superstep, ...]
    label: str
    at: int = -1
    num_early: int = 0
    """Computations from before its launch that are not done."""
    num_open: int = 0
    """Computations of this superstep, and its wire as one, that are not done."""
    num_wire: int = 0
    """Verbs of its wire that are not done."""
    is_waiting: bool = False
    """At the gate: for its turn to use the wire."""
    posted_s: float = 0.0

    @property
    def has_several(self) -> bool:
        """Whether it is on the wire more than once."""
        return sum(bool(superstep.wire) for superstep in self.supersteps) > 1


@dataclass
class _Rank:
    """The progress of one rank."""

    courses: list[_Course]
    slowness: float
    start_s: list[float]
    end_s: list[float]
    num_passed: int = 0
    """The number of messages that went through the gate: always the first ones in issue order."""
    queue: list[tuple[int, int, _Course, str, float]] = field(default_factory=list)
    """The compute lane: a heap of (message, number, course, name, seconds)."""
    is_busy: bool = False
    busy_until_s: float = 0.0
    """The end of the computation that the lane is busy with."""
    passed_s: float = 0.0
    """The backward pass's own seconds that had passed when the lane's state last changed."""
    changed_s: float = 0.0

    def backward_s(self, now_s: float, beside: float) -> float:
        """The backward pass's own seconds that have passed."""
        return self.passed_s + (now_s - self.changed_s) * (beside if self.is_busy else 1.0)

    def change(self, now_s: float, beside: float, *, is_busy: bool) -> None:
        """Notes that the lane is busy from now on, or no longer."""
        self.passed_s, self.changed_s = self.backward_s(now_s, beside), now_s
        self.is_busy = is_busy


class _Engine:
    def __init__(self, traffic: Traffic) -> None:
        self.credit = traffic.credit
        self.after = traffic.after or ((),) * len(traffic.labels)
        self.ready_s, self.early = traffic.ready_s, traffic.early
        self.num_ranks = len(traffic.supersteps)
        slowness = traffic.slowness or (1.0,) * self.num_ranks
        self.ranks = [
            _Rank(
                [
                    _Course(rank, message, supersteps, traffic.labels[message])
                    for message, supersteps in enumerate(own)
                ],
                slowness[rank],
                [NEVER] * len(own),
                [NEVER] * len(own),
            )
            for rank, own in enumerate(traffic.supersteps)
        ]
        self.ranks_per_host, self.beside = traffic.ranks_per_host, traffic.beside
        num_hosts = -(-self.num_ranks // self.ranks_per_host)
        self.links = Network()
        self.within = [Network() for _ in range(num_hosts)] if self.ranks_per_host > 1 else []
        self.now_s = 0.0
        self.spans: list[Span] = []
        self.events: list[tuple[float, bool, int, Callable[[], None]]] = []
        self.count = count()
        self.meetings = Meetings(self.num_ranks, self.ranks_per_host)

    def run(self) -> Timetable:
        for rank, early in zip(self.ranks, self.early, strict=False):
            for course, own in zip(rank.courses, early, strict=False):
                self._begin_early(rank, course, own)
        for rank in self.ranks:
            self._launch_at(rank, 0, 0.0)
        events, networks = self.events, (self.links, *self.within)
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
            raise Deadlock(self._report())
        start_s = [rank.start_s for rank in self.ranks]
        return Timetable(self.spans, start_s, [rank.end_s for rank in self.ranks])

    def _at(self, time_s: float, then: Callable[[], None], *, is_last: bool = False) -> None:
        """Has something done at a time, in the order of asking, or behind all else at that time."""
        heapq.heappush(self.events, (time_s, is_last, next(self.count), then))

    def _launch_at(self, rank: _Rank, message: int, not_before_s: float) -> None:
        if message < len(rank.courses):
            course = rank.courses[message]
            ready_s = self.ready_s[course.rank][message]
            self._when_ready(rank, ready_s, partial(self._launch, rank, course), not_before_s)

    def _when_ready(
        self, rank: _Rank, ready_s: float, then: Callable[[], None], not_before_s: float = 0.0
    ) -> None:
        """Has something done when the backward pass has come so far, in its own seconds."""
        if self.beside == 1:
            self._at(max(not_before_s, ready_s), then)
            return
        left_s = ready_s - rank.backward_s(self.now_s, self.beside)
        if left_s <= HAIR * (1 + ready_s):
            self._at(self.now_s, then)
            return
        # Until the lane's present computation ends its pace is known; then this is asked again.
        rest_s = max(0.0, rank.busy_until_s - self.now_s) if rank.is_busy else 0.0
        done_s = rest_s * self.beside
        needs_s = left_s / self.beside if left_s <= done_s else rest_s + left_s - done_s
        self._at(self.now_s + needs_s, partial(self._when_ready, rank, ready_s, then))

    def _begin_early(
        self, rank: _Rank, course: _Course, early: Sequence[tuple[float, Work]]
    ) -> None:
        """Puts the computations from before a message's launch on the compute lane in time.

        They count as the message's first superstep, which may be over when it is launched.
        """
        if early:
            course.supersteps = (_AHEAD, *course.supersteps)
        for ready_s, (name, seconds) in early:
            if seconds:
                course.num_early += 1
                begin = partial(self._compute, rank, course, name, seconds)
                self._when_ready(rank, ready_s, begin)
            else:
                self._at(ready_s, partial(self._note, course, "compute", name, ready_s))

    def _launch(self, rank: _Rank, course: _Course) -> None:
        rank.start_s[course.message] = self.now_s
        if course.num_early:
            course.at, course.num_open = 0, course.num_early
            self._open_gate(rank)
        else:
            self._proceed(course)
        self._launch_at(rank, course.message + 1, self.now_s)

    def _proceed(self, course: _Course) -> None:
        """Moves a course on to its next superstep that takes time, or to its end."""
        rank = self.ranks[course.rank]
        while True:
            course.at += 1
            if course.at == len(course.supersteps):
                self._to_the_gate(rank, course)
                return
            superstep = course.supersteps[course.at]
            course.num_open = bool(superstep.wire)
            for name, seconds in superstep.works:
                if seconds:
                    course.num_open += 1
                    self._compute(rank, course, name, seconds)
                else:
                    self._note(course, "compute", name, self.now_s)
            if superstep.wire:
                self._to_the_gate(rank, course)
            if course.num_open:
                return

    def _to_the_gate(self, rank: _Rank, course: _Course) -> None:
        if course.message < rank.num_passed:
            self._pass(rank, course)
        else:
            course.is_waiting = True
        self._open_gate(rank)

    def _open_gate(self, rank: _Rank) -> None:
        """Lets launched messages use the wire, in issue order, each when its lane is free.

        A message that still computes takes its turn too, so that messages behind it need not wait.
        """
        end_s = rank.end_s
        while (message := rank.num_passed) < len(end_s):
            course = rank.courses[message]
            before = message - self.credit
            if (
                course.at < 0
                or (before >= 0 and end_s[before] == NEVER)
                or any(end_s[other] == NEVER for other in self.after[message])
            ):
                return
            rank.num_passed += 1
            if course.is_waiting:
                self._pass(rank, course)

    def _pass(self, rank: _Rank, course: _Course) -> None:
        if course.at == len(course.supersteps):
            rank.end_s[course.message] = self.now_s
            return
        wire = course.supersteps[course.at].wire
        course.posted_s, course.num_wire = self.now_s, len(wire)
        done = partial(self._sent, course)
        for verb in wire:
            met = self.meetings.come(Post(course.rank, course.message, verb, done))
            if met:
                self._begin(met)

    def _begin(self, met: tuple[Post, ...]) -> None:
        """Starts the verbs that met together; where prices differ, the highest counts for all."""
        latency_s, work_s = map(max, zip(*(post.verb.price for post in met), strict=True))
        self._at(self.now_s + latency_s, partial(self._travel, met, work_s))

    def _travel(self, met: tuple[Post, ...], work_s: float) -> None:
        verb, (host, place) = met[0].verb, divmod(met[0].rank, self.ranks_per_host)
        is_within = verb.among is Among.HOST and bool(self.within)
        network = self.within[host] if is_within else self.links
        if isinstance(verb, Joint):
            network.collective(work_s, partial(_tell, met))
            return
        to_host, to_place = divmod(met[1].rank, self.ranks_per_host)
        ends = (place, to_place) if is_within else (host, to_host)
        network.transfer(*ends, work_s, partial(_tell, met))

    def _sent(self, course: _Course) -> None:
        course.num_wire -= 1
        if not course.num_wire:
            self._note(course, "communication", course.supersteps[course.at].name, course.posted_s)
            self._done(course)

    def _done(self, course: _Course) -> None:
        course.num_open -= 1
        if not course.num_open:
            self._proceed(course)

    def _note(self, course: _Course, lane: str, name: str, start_s: float) -> None:
        on_wire = lane == "communication"
        superstep = course.supersteps[course.at]
        if on_wire and course.label:
            name = f"{course.label}: {name}" if course.has_several else course.label
        self.spans.append(
            Span(
                course.rank,
                lane,
                name,
                start_s,
                self.now_s,
                size_bytes=superstep.sent_bytes if on_wire else 0,
                step=0,
                message=course.message,
            )
        )

    def _compute(self, rank: _Rank, course: _Course, name: str, seconds: float) -> None:
        entry = (course.message, next(self.count), course, name, seconds * rank.slowness)
        heapq.heappush(rank.queue, entry)
        if not rank.is_busy:  # it takes the first message's of all that come at this instant
            rank.change(self.now_s, self.beside, is_busy=True)
            self._at(self.now_s, partial(self._compute_next, rank), is_last=True)

    def _compute_next(self, rank: _Rank) -> None:
        rank.change(self.now_s, self.beside, is_busy=bool(rank.queue))
        if rank.queue:
            _, _, course, name, seconds = heapq.heappop(rank.queue)
            rank.busy_until_s = self.now_s + seconds
            done = partial(self._computed, rank, course, name, self.now_s)
            self._at(self.now_s + seconds, done)

    def _computed(self, rank: _Rank, course: _Course, name: str, start_s: float) -> None:
        self._note(course, "compute", name, start_s)
        course.num_early = max(0, course.num_early - 1)
        if course.at >= 0:
            self._done(course)  # what this makes ready competes for the lane
        self._compute_next(rank)

    def _report(self) -> str:
        lines = list(map(str, self.meetings.waiting()))
        ended = [str(i) for i, rank in enumerate(self.ranks) if NEVER not in rank.end_s]
        if ended:
            lines.append(f"already ended: rank {', '.join(ended)}")
        return "deadlock: " + "; ".join(lines)


_AHEAD = Superstep((), (), 0)
"""The place of a message's early computations among its supersteps."""


def _tell(met: tuple[Post, ...]) -> None:
    for post in met:
        post.done()
