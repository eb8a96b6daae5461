"""The virtual clock: when messages start and end on a link, and layers before and after them.

Source: US-Byte, equations 2, 3, 9, 11 and 12, for any plan; several messages at once are not in
that model. Here they share the bandwidth equally (processor sharing). Their latencies overlap, but
for the host's share of them, during which the link waits for the host. ``Plan`` says which
messages may be under way at once.
Differences from the paper: none at credit 1; blocks of any size cost what their bytes cost, so its
    delta t (equation 8) is not needed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from ...contract.trace.span import Span
from ..data.cluster import Cluster
from ..data.plan import Plan
from ..data.profile import Profile
from .demand import Demand, Encoding, Inline
from .events import Traffic, play
from .network import NEVER
from .pace import Pace, carrying_s, missing_s
from .representative import supersteps_of_one

MessageCosts = Sequence[tuple[float, float]]
"""For each message: seconds of latency, and seconds that it takes of a whole link."""


class Line(Protocol):
    """Messages that wait for the wire."""

    def next_s(self, end_s: Sequence[float]) -> float:
        """The earliest second at which a message could start; ``NEVER`` when none is left.

        ``end_s`` holds the second at which each message ended, ``NEVER`` where it has not.
        """

    def take(self, now_s: float) -> int:
        """Removes and returns the message that starts now."""


class FixedOrder:
    """The head of the line waits: message 0 first, then message 1.

    Message i waits until it is ready and until all messages in ``after[i]`` have ended.
    """

    def __init__(self, ready_s: Sequence[float], after: Sequence[Sequence[int]] = ()) -> None:
        self._ready_s = ready_s
        self._after = after if any(after) else ()
        self._head = 0

    def next_s(self, end_s: Sequence[float]) -> float:
        head = self._head
        if head == len(self._ready_s):
            return NEVER
        ready_s = self._ready_s[head]
        if not self._after:
            return ready_s
        return max(ready_s, max((end_s[other] for other in self._after[head]), default=0.0))

    def take(self, now_s: float) -> int:
        self._head += 1
        return self._head - 1


class ByPriority:
    """The ready message whose ``priority`` is the smallest number starts first."""

    def __init__(self, ready_s: Sequence[float], priority: Sequence[int]) -> None:
        self._ready_s = ready_s
        self._priority = priority
        self._coming = sorted(range(len(ready_s)), key=lambda i: (ready_s[i], i), reverse=True)
        self._ready: list[tuple[int, int]] = []

    def next_s(self, end_s: Sequence[float]) -> float:
        if self._ready:
            return 0.0
        return self._ready_s[self._coming[-1]] if self._coming else NEVER

    def take(self, now_s: float) -> int:
        while self._coming and self._ready_s[self._coming[-1]] <= now_s:
            arrived = self._coming.pop()
            heapq.heappush(self._ready, (self._priority[arrived], arrived))
        return heapq.heappop(self._ready)[1]


@dataclass
class Carried:
    """Messages in the order in which they started, and when each started and ended."""

    order: list[int]
    start_s: list[float]
    end_s: list[float]


def carry(line: Line, parts_s: MessageCosts, credit: int) -> Carried:
    """Carries all messages of ``line``: each waits for its latency and then uses the link.

    ``parts_s`` holds both for each message, in seconds. There are ``credit`` channels, which
    messages take in turn: a message starts when the one that started ``credit`` places before it
    has ended.
    """
    carried = Carried([], [0.0] * len(parts_s), [NEVER] * len(parts_s))
    if credit == 1:
        _carry_singly(line, parts_s, carried)
    else:
        _carry_shared(line, parts_s, credit, carried)
    return carried


def _carry_singly(line: Line, parts_s: MessageCosts, carried: Carried) -> None:
    free_s, end_s = 0.0, carried.end_s
    while (next_s := line.next_s(end_s)) < NEVER:
        start_s = max(free_s, next_s)
        message = line.take(start_s)
        latency_s, work_s = parts_s[message]
        free_s = start_s + (latency_s + work_s)
        carried.order.append(message)
        carried.start_s[message] = start_s
        end_s[message] = free_s


def _carry_shared(line: Line, parts_s: MessageCosts, credit: int, carried: Carried) -> None:
    """Fair queueing: ``served_s`` is the work done for each sharing message, whenever it joined."""
    now_s, served_s = 0.0, 0.0
    order, ends_s = carried.order, carried.end_s
    latent: list[tuple[float, int]] = []  # a heap of (end of its latency, message)
    sharing: list[tuple[float, int]] = []  # a heap of (served_s at which it ends, message)
    while True:
        launch_s = _launch_s(line, carried, credit)
        while launch_s <= now_s:
            message = line.take(now_s)
            order.append(message)
            carried.start_s[message] = now_s
            heapq.heappush(latent, (now_s + parts_s[message][0], message))
            launch_s = _launch_s(line, carried, credit)
        while latent and latent[0][0] <= now_s:
            message = heapq.heappop(latent)[1]
            heapq.heappush(sharing, (served_s + parts_s[message][1], message))
        arrival_s = latent[0][0] if latent else NEVER
        end_s = NEVER
        if sharing:  # rounding may have served a hair more than the work there was
            end_s = now_s + max(0.0, sharing[0][0] - served_s) * len(sharing)
        until_s = min(launch_s, arrival_s, end_s)
        if until_s == NEVER:
            return
        if end_s == until_s:
            served_s, message = heapq.heappop(sharing)
            ends_s[message] = end_s
        elif sharing:
            served_s += (until_s - now_s) / len(sharing)
        now_s = until_s


def _launch_s(line: Line, carried: Carried, credit: int) -> float:
    """The second at which the next message starts; ``NEVER`` while it is unknown or its channel is
    taken."""
    order, end_s = carried.order, carried.end_s
    if len(order) >= credit and end_s[order[-credit]] == NEVER:
        return NEVER
    return line.next_s(end_s)


@dataclass(frozen=True)
class Timing:
    """The starts and ends of everything in one iteration, in seconds from the start of the
    backward pass; layers are in forward order, messages in issue order. A layer's backward ends
    when what is encoded behind it is encoded."""

    backward_start_s: list[float]
    backward_end_s: list[float]
    message_start_s: list[float]
    message_end_s: list[float]
    message_bytes: list[int]
    message_layers: list[set[int]]
    """The places in forward order of the layers whose gradients each message carries."""
    ready_s: list[float]
    """When all gradients of each message are ready, and encoded if they are so inline."""
    forward_start_s: list[float]
    forward_end_s: list[float]
    inline: Sequence[Inline] = ()
    """Encodes that the backward pass waits for, behind the computation of their layers."""
    early_s: float = 0.0
    """Seconds of the compute lane in which tensors are encoded before their message is whole."""
    spans: Sequence[Span] = ()
    """Spans of messages that were played by events; empty where closed forms gave their times."""

    @property
    def inline_s(self) -> float:
        """Seconds by which encodes lengthen the backward pass."""
        return sum(one.seconds for one in self.inline)

    @property
    def iteration_s(self) -> float:
        """Seconds from the start of the backward pass to the end of the next forward pass
        (equation 12)."""
        return self.forward_end_s[-1]


UNHINDERED = Pace((), 1.0)
"""The pace of a model beside which no lane is busy."""


def backward_ends(profile: Profile) -> list[float]:
    """The second at which each layer's gradients are ready, in forward order (equation 2)."""
    return list(accumulate(layer.backward_s for layer in reversed(profile.layers)))[::-1]


def forward_times(
    forward_s: Sequence[float], may_start_s: Sequence[float], pace: Pace = UNHINDERED
) -> tuple[list[float], list[float]]:
    """Starts and ends, in seconds, of forward computations one after the other (equation 11)."""
    starts_s, ends_s, now_s = [], [], 0.0
    for duration_s, earliest_s in zip(forward_s, may_start_s, strict=True):
        start_s = max(now_s, earliest_s)
        now_s = pace.end_s(start_s, duration_s)
        starts_s.append(start_s)
        ends_s.append(now_s)
    return starts_s, ends_s


def run_on_clock(plan: Plan, profile: Profile, cluster: Cluster) -> Timing:
    """Carries ``plan`` out on the virtual clock, for a rank that stands for all.

    Raises ``InvalidSetting`` for a plan that is not sound for the profile, or that uses an exchange
    that cannot be made or looks at values.
    """
    demand = Demand.of(plan, profile)
    encoding = Encoding.of(demand, cluster)
    backward_end_s = encoding.backward_ends([layer.backward_s for layer in profile.layers])
    start_s, end_s, spans, carried_s = _messages(demand, encoding, backward_end_s, cluster)
    pace = Pace.of(spans, cluster.beside)
    lane_s = sum(span.duration_s for span in spans if span.lane == "compute")
    computing_s = backward_end_s[0] + profile.forward_s + lane_s
    backward_end_s = [pace.end_s(0.0, alone_s) for alone_s in backward_end_s]
    forward_start_s, forward_end_s = forward_times(
        [layer.forward_s for layer in profile.layers],
        demand.forward_may_start_s(backward_end_s, end_s),
        pace,
    )
    late_s = missing_s(forward_end_s[-1], computing_s, carried_s, cluster)
    # Only sums are known: the next forward pass stands for whatever of it waits for cores.
    forward_start_s, forward_end_s = (
        [one_s + late_s for one_s in times_s] for times_s in (forward_start_s, forward_end_s)
    )
    return Timing(
        backward_start_s=[*backward_end_s[1:], 0.0],
        backward_end_s=backward_end_s,
        message_start_s=start_s,
        message_end_s=end_s,
        message_bytes=demand.num_bytes,
        message_layers=demand.layers,
        ready_s=demand.ready_s(backward_end_s),
        forward_start_s=forward_start_s,
        forward_end_s=forward_end_s,
        inline=encoding.inline,
        early_s=sum(one.work.seconds for own in encoding.early for one in own),
        spans=spans,
    )


def _messages(
    demand: Demand, encoding: Encoding, backward_end_s: list[float], cluster: Cluster
) -> tuple[list[float], list[float], Sequence[Span], float]:
    """Starts and ends of messages, their spans, and seconds in which cores carry them.

    ``backward_end_s`` are those of a backward pass that no lane slows down.
    """
    ready_s, credit = demand.ready_s(backward_end_s), demand.plan.credit
    if demand.is_dense:
        carried = carry(
            FixedOrder(ready_s, demand.after()),
            [cluster.parts_s("all_reduce", size) for size in demand.num_bytes],
            credit,
        )
        carried_s = sum(cluster.busy_s(cluster.wire_bytes(size)) for size in demand.num_bytes)
        return carried.start_s, carried.end_s, (), carried_s
    supersteps = supersteps_of_one(demand, cluster)
    early = encoding.early_from(backward_end_s)
    labels, after = demand.labels(), demand.after()
    played = play(
        Traffic([supersteps], [ready_s], labels, credit, after, [early], beside=cluster.beside)
    )
    return played.start_s[0], played.end_s[0], played.spans, carrying_s(supersteps, cluster)
