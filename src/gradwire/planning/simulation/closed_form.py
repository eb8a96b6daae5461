"""The closed form of the clock: of backward pass, lanes and link, where no events are needed.

Source: US-Byte, equations 2, 3, 9, 11 and 12, for any plan; several messages at once are not in
that model. Here they share the bandwidth equally (processor sharing). Their latencies overlap, but
for the host's share of them, during which the link waits for the host. ``Plan`` says which
messages may be under way at once.
Differences from the paper: none at credit 1; blocks of any size cost what their bytes cost, so its
    delta t (equation 8) is not needed.

Planners decide by these functions. The simulator uses them wherever all messages are all-reduces
of one rank that stands for all, and ``events.py`` agrees with them everywhere else.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ..data.profile import Profile

NEVER = float("inf")


def backward_ends(profile: Profile) -> list[float]:
    """The second at which each layer's gradients are ready, in forward order (equation 2)."""
    return list(accumulate(layer.backward_s for layer in reversed(profile.layers)))[::-1]


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
        """Does something that takes so long, and returns the second at which it ends."""
        self.free_s = (self.free_s if self.free_s > ready_s else ready_s) + seconds
        return self.free_s


class Carried(NamedTuple):
    """Messages in the order in which they started, and when each started and ended."""

    order: list[int]
    start_s: list[float]
    end_s: list[float]


def carry(
    ready_s: Sequence[float],
    parts_s: Sequence[tuple[float, float]],
    credit: int = 1,
    *,
    after: Sequence[Sequence[int]] = (),
    urgency: Sequence[int] | None = None,
) -> Carried:
    """Carries messages on a link: each waits for its latency and then shares the link's work.

    ``parts_s`` holds both for each message. There are ``credit`` channels, which messages take in
    turn: a message starts when the one that started ``credit`` places before it has ended, and
    all in its ``after`` have. Messages start in their order, or, with ``urgency``, the one of the
    smallest number first among those that are ready.
    """
    order, start_s, end_s = list[int](), [0.0] * len(parts_s), [NEVER] * len(parts_s)
    if credit == 1 and urgency is None:
        link = Lane()
        for place, (latency_s, work_s) in enumerate(parts_s):
            start_s[place] = link.start_s(ready_s[place])
            end_s[place] = link.take(ready_s[place], latency_s + work_s)
        return Carried(list(range(len(parts_s))), start_s, end_s)
    if urgency is None:  # the head of the line waits, and all behind it do
        ready_s, urgency = list(accumulate(ready_s, max)), range(len(parts_s))
    coming = sorted(range(len(ready_s)), key=lambda one: (ready_s[one], one), reverse=True)
    ready: list[tuple[int, int]] = []  # a heap of (urgency, message)
    latent: list[tuple[float, int]] = []  # a heap of (end of its latency, message)
    sharing: list[tuple[float, int]] = []  # a heap of (served_s at which it ends, message)
    now_s = served_s = 0.0  # the work done for each sharing message, whenever it joined
    while now_s < NEVER:
        while coming and ready_s[coming[-1]] <= now_s:
            heapq.heappush(ready, (urgency[coming[-1]], coming.pop()))
        while (
            ready
            and (len(order) < credit or end_s[order[-credit]] < NEVER)
            and not (after and any(end_s[other] == NEVER for other in after[ready[0][1]]))
        ):
            message = heapq.heappop(ready)[1]
            order.append(message)
            start_s[message] = now_s
            heapq.heappush(latent, (now_s + parts_s[message][0], message))
        while latent and latent[0][0] <= now_s:
            message = heapq.heappop(latent)[1]
            heapq.heappush(sharing, (served_s + parts_s[message][1], message))
        until_s = min(ready_s[coming[-1]] if coming else NEVER, latent[0][0] if latent else NEVER)
        if sharing:  # rounding may have served a hair more than the work there was
            ended_s = now_s + max(0.0, sharing[0][0] - served_s) * len(sharing)
            if ended_s <= until_s:
                served_s, message = heapq.heappop(sharing)
                end_s[message] = now_s = ended_s
                continue
            served_s += (until_s - now_s) / len(sharing)
        now_s = until_s
    return Carried(order, start_s, end_s)


def forward_times(
    forward_s: Sequence[float], may_start_s: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Starts and ends, in seconds, of forward computations one after the other (equation 11)."""
    starts_s, ends_s, now_s = [], [], 0.0
    for duration_s, earliest_s in zip(forward_s, may_start_s, strict=True):
        starts_s.append(max(now_s, earliest_s))
        now_s = starts_s[-1] + duration_s
        ends_s.append(now_s)
    return starts_s, ends_s
