"""The clock of planners that choose where gradients are encoded: backward pass, lane and link.

It is the simulator's timeline of one rank at credit 1, but for one thing: what is computed behind a
transfer counts as a part of it, and never waits for the lane. So it takes microseconds a message,
and planners that try thousands of choices judge them by it. ``price.py`` has the last word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import ExchangeSetting, Plan, PlannedMessage
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from gradwire.planning.fusion import Arrival, chunks_in
from gradwire.planning.simulation.clock import run_on_clock


class TimedMessage(NamedTuple):
    """A message as the lanes see it; layers are counted in backward order."""

    last: int
    """The layer whose gradients are ready last, of this message and of those before it."""
    works: tuple[tuple[int, float], ...]
    """Encodes on the compute lane: the layer that each waits for, and its seconds."""
    carry_s: float
    """Seconds from the first transfer to the end."""


def ready_times(backward_s: Iterable[float], inline_s: Iterable[float]) -> list[float]:
    """When the gradients of each layer are there, in backward order, encodes inline among it."""
    return list(accumulate(own + more for own, more in zip(backward_s, inline_s, strict=True)))


def link_times(
    ready_s: Sequence[float], messages: Iterable[TimedMessage]
) -> tuple[list[float], list[float]]:
    """When each message has the link, its starts and ends, one message at a time."""
    lane_s = link_s = 0.0
    starts_s, ends_s = [], []
    for last, works, carry_s in messages:
        start_s = ready_s[last]
        if works:
            for layer, seconds in works:
                begin_s = ready_s[layer]
                lane_s = (lane_s if lane_s > begin_s else begin_s) + seconds
            start_s = max(start_s, lane_s)
        link_s = (link_s if link_s > start_s else start_s) + carry_s
        starts_s.append(link_s - carry_s)
        ends_s.append(link_s)
    return starts_s, ends_s


def end_of(ready_s: Sequence[float], messages: Iterable[TimedMessage]) -> float:
    """When the backward pass and all messages have ended: the next forward pass may begin."""
    lane_s = link_s = 0.0
    for last, works, carry_s in messages:
        start_s = ready_s[last]
        for layer, seconds in works:
            begin_s = ready_s[layer]
            lane_s = (lane_s if lane_s > begin_s else begin_s) + seconds
        if works and lane_s > start_s:
            start_s = lane_s
        link_s = (link_s if link_s > start_s else start_s) + carry_s
    return max(link_s, ready_s[-1])


def carry_s(
    tensors: Sequence[ProfiledTensor], exchange: ExchangeSetting, cluster: Cluster
) -> float:
    """Seconds that a message takes by the simulator when it is alone and already encoded."""
    names = tuple(one.name for one in tensors)
    message = PlannedMessage(
        chunks=chunks_in(Arrival(one, 0.0) for one in tensors), exchange="own", inline=names
    )
    layer = Layer(name="layer", tensors=tuple(tensors), forward_s=0.0, backward_s=0.0)
    profile = Profile(model="alone", source="made up", batch_size=1, layers=(layer,))
    plan = Plan(planner="alone", model="alone", messages=(message,), exchanges={"own": exchange})
    timing = run_on_clock(plan, profile, cluster)
    return timing.message_end_s[0] - timing.message_start_s[0]
