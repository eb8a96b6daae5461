"""The closed form of the clock: backward pass, lanes and link without events.

Source: US-Byte, equations 2, 3, 9, 11 and 12, for any plan; several messages at once
are not in that model. Here they share the bandwidth equally (processor sharing). Their
latencies overlap, but for the host's share of them, during which the link waits for the
host. ``Plan`` says which messages may be under way at once. Differences from the paper:
none at credit 1; blocks of any size cost what their bytes cost, so its
    delta t (equation 8) is not needed.

Planners decide by these functions. The simulator uses them wherever all messages are
all-reduces of one rank that stands for all, and ``events.py`` agrees with them
everywhere else.
"""

import heapq
from collections.abc import Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

from ..data.cluster import Cluster
from ..data.profile import Profile

NEVER = float("inf")


def backward_ends(
    profile: Profile, cluster: Cluster, added_s: Sequence[float] = ()
) -> list[float]:
    """Seconds when each layer's gradients are ready, in forward order (equation 2).

    A step's own work is among them: that of each gradient, and the rest with the last
    one. ``added_s`` are more seconds for each layer. Empty: none.
    """
    line = cluster.step_line
    seconds = [
        layer.backward_s + line.per_unit_s * len(layer.tensors)
        for layer in profile.layers
    ]
    seconds[0] += line.alpha_s
    if added_s:
        seconds = list(map(add, seconds, added_s))
    return list(accumulate(reversed(seconds)))[::-1]


class Lane:
    """A lane or a link that does one thing after another."""

    __slots__ = ("free_s",)

    def __init__(self) -> None:
        self.free_s = 0.0
        """The second at which all that it was given has ended."""

    def start_s(self, ready_s: float) -> float:
        """The second at which something could begin that is ready then."""
        return self.free_s if self.free_s > ready_s else ready_s

    def take(self, ready_s: float, seconds: float) -> float:
        """Does something that takes so long, and returns the second of its end."""
        self.free_s = (self.free_s if self.free_s > ready_s else ready_s) + seconds
        return self.free_s


class CarriedMessages(NamedTuple):
    """Messages in the order in which they started, and when each started and ended."""

    order: list[int]
    start_s: list[float]
    end_s: list[float]


class SharedLink:
    """A link whose messages wait for their latency, and then share its work equally."""

    __slots__ = ("_latent", "_served_s", "_sharing", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        # The work done for each sharing message, whenever it joined.
        self._served_s = 0.0
        # Heaps of (end of the latency, work, message) and of (served work at the end,
        # message).
        self._latent: list[tuple[float, int, float]] = []
        self._sharing: list[tuple[float, int]] = []

    def start(self, message: int, latency_s: float, work_s: float) -> None:
        """Starts a message now."""
        heapq.heappush(self._latent, (self.now_s + latency_s, message, work_s))

    def advance(self, until_s: float) -> int | None:
        """Moves on to the next end of a latency or a message, at most to ``until_s``.

        Returns the message that has ended, if one has.
        """
        while self._latent and self._latent[0][0] <= self.now_s:
            _, message, work_s = heapq.heappop(self._latent)
            heapq.heappush(self._sharing, (self._served_s + work_s, message))
        if self._latent:
            until_s = min(until_s, self._latent[0][0])
        if self._sharing:
            # Rounding may have served a hair more than the work there was.
            left_s = max(0.0, self._sharing[0][0] - self._served_s)
            ended_s = self.now_s + left_s * len(self._sharing)
            if ended_s <= until_s:
                self._served_s, message = heapq.heappop(self._sharing)
                self.now_s = ended_s
                return message
            self._served_s += (until_s - self.now_s) / len(self._sharing)
        self.now_s = until_s
        return None


def carry(
    ready_s: Sequence[float],
    parts_s: Sequence[tuple[float, float]],
    credit: int = 1,
    *,
    after: Sequence[Sequence[int]] = (),
    urgency: Sequence[int] | None = None,
) -> CarriedMessages:
    """Carries messages on a link: each waits its latency, then shares the link's work.

    There are ``credit`` channels, which messages take in turn: a message starts when
    the one that started ``credit`` places before it has ended, and all in its ``after``
    have.

    Args:
        ready_s: The second at which each message is ready.
        parts_s: The seconds of latency and of work of each message.
        credit: The messages that travel at once.
        after: The messages that must end before each message starts. Empty: none.
        urgency: A number for each message. Of messages that are ready the one with the
            smallest number starts first. None: messages start in their order.

    Returns:
        The order in which messages started, and the seconds at which they started and
        ended.
    """
    if credit == 1 and urgency is None:
        return _carry_in_turn(ready_s, parts_s)
    if urgency is None:
        # The head of the line waits, and all messages behind it do.
        ready_s = list(accumulate(ready_s, max))
        urgency = range(len(parts_s))
    return _carry_by_urgency(ready_s, parts_s, credit, after, urgency)


def _carry_in_turn(
    ready_s: Sequence[float], parts_s: Sequence[tuple[float, float]]
) -> CarriedMessages:
    """Carries one message after the other, in their order."""
    link = Lane()
    start_s = []
    end_s = []
    for message_ready_s, (latency_s, work_s) in zip(ready_s, parts_s, strict=True):
        start_s.append(link.start_s(message_ready_s))
        end_s.append(link.take(message_ready_s, latency_s + work_s))
    return CarriedMessages(list(range(len(parts_s))), start_s, end_s)


def _carry_by_urgency(
    ready_s: Sequence[float],
    parts_s: Sequence[tuple[float, float]],
    credit: int,
    after: Sequence[Sequence[int]],
    urgency: Sequence[int],
) -> CarriedMessages:
    """Carries several messages at once; of the ready ones the most urgent starts."""
    order: list[int] = []
    start_s = [0.0] * len(parts_s)
    end_s = [NEVER] * len(parts_s)
    coming = sorted(
        range(len(ready_s)), key=lambda one: (ready_s[one], one), reverse=True
    )
    ready: list[tuple[int, int]] = []  # a heap of (urgency, message)
    link = SharedLink()

    def may_start(message: int) -> bool:
        if len(order) >= credit and end_s[order[-credit]] == NEVER:
            return False
        return not after or all(end_s[other] < NEVER for other in after[message])

    while link.now_s < NEVER:
        while coming and ready_s[coming[-1]] <= link.now_s:
            message = coming.pop()
            heapq.heappush(ready, (urgency[message], message))
        while ready and may_start(ready[0][1]):
            message = heapq.heappop(ready)[1]
            order.append(message)
            start_s[message] = link.now_s
            link.start(message, *parts_s[message])
        ended = link.advance(ready_s[coming[-1]] if coming else NEVER)
        if ended is not None:
            end_s[ended] = link.now_s
    return CarriedMessages(order, start_s, end_s)


def forward_times(
    forward_s: Sequence[float], may_start_s: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Starts and ends in seconds of successive forward computations (equation 11)."""
    starts_s = []
    ends_s = []
    now_s = 0.0
    for duration_s, earliest_s in zip(forward_s, may_start_s, strict=True):
        starts_s.append(max(now_s, earliest_s))
        now_s = starts_s[-1] + duration_s
        ends_s.append(now_s)
    return starts_s, ends_s
