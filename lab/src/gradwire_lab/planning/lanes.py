"""The clock of planners that choose where gradients are encoded: backward pass, lane and link.

It is the simulator's timeline of one rank at credit 1, but for one thing: what is computed behind a
transfer counts as a part of it, and never waits for the lane. So it takes microseconds a message,
and planners that try thousands of choices judge them by it. ``price.py`` has the last word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import ExchangeSetting, Plan, PlannedMessage
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from gradwire.planning.fusion import MOST_ELEMENTS, Arrival, chunks_in
from gradwire.planning.simulation.clock import run_on_clock
from gradwire.planning.simulation.closed_form import Lane


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


def link_ends(ready_s: Sequence[float], messages: Iterable[TimedMessage]) -> Iterator[float]:
    """When each message leaves the link, one message at a time."""
    lane, link = Lane(), Lane()
    for last, works, carry_s in messages:
        start_s = ready_s[last]
        for layer, seconds in works:
            start_s = max(start_s, lane.take(ready_s[layer], seconds))
        yield link.take(start_s, carry_s)


def end_of(ready_s: Sequence[float], messages: Iterable[TimedMessage]) -> float:
    """When the backward pass and all messages have ended: the next forward pass may begin."""
    return max((ready_s[-1], *link_ends(ready_s, messages)))


def carry_s(
    tensors: Sequence[ProfiledTensor], exchange: ExchangeSetting, cluster: Cluster
) -> float:
    """Seconds that a message takes by the simulator when it is alone and already encoded.

    Hosts of several ranks cannot have encoded it, so there the encode is among these. Infinite
    where it holds more elements than are sparsified together.
    """
    if sum(one.numel for one in tensors) > MOST_ELEMENTS:
        return inf
    names = tuple(one.name for one in tensors)
    message = PlannedMessage(
        chunks=chunks_in(Arrival(one, 0.0) for one in tensors), exchange="own", inline=names
    )
    layer = Layer(name="layer", tensors=tuple(tensors), forward_s=0.0, backward_s=0.0)
    profile = Profile(model="alone", source="made up", batch_size=1, layers=(layer,))
    plan = Plan(planner="alone", model="alone", messages=(message,), exchanges={"own": exchange})
    timing = run_on_clock(plan, profile, cluster)
    return timing.message_end_s[0] - timing.message_start_s[0]
