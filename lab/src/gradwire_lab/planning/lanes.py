"""The clock of planners that choose where gradients are encoded: backward pass, lane
and link.

It is the simulator's timeline of one rank at credit 1, but for one thing: what is
computed beside a transfer, or behind it where a message's ``parts`` are not given,
counts as a part of it, and never waits for the lane. So it takes microseconds a
message, and planners that try thousands of choices judge them by it. ``price.py`` has
the last word.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import ExchangeSetting, Plan, PlannedMessage
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from gradwire.planning.simulation.clock import run_on_clock
from gradwire.planning.simulation.closed_form import Lane

from .sparse_fusion import MOST_ELEMENTS, Arrival, chunks_in


class TimedMessage(NamedTuple):
    """A message as the lanes see it; layers are counted in backward order."""

    last: int
    """The layer whose gradients are ready last, of this message and of those before
    it.
    """
    works: tuple[tuple[int, float], ...]
    """Encodes on the compute lane: the layer that each waits for, and its seconds."""
    carry_s: float
    """Seconds from the first transfer to the end."""
    parts: tuple[tuple[float, float], ...] = ()
    """``carry_s`` cut into seconds on the link and those on the compute lane behind
    them; () where nothing is computed, or where such computations are taken to wait for
    none.
    """


@dataclass
class BackwardOrder:
    """A model's tensors and its layers' seconds, in backward order."""

    tensors: list[ProfiledTensor]
    """All that hold elements."""
    layers: list[int]
    """The layer of each tensor, counted in backward order."""
    backward_s: list[float]
    """Seconds of each layer."""


def backward_order(profile: Profile) -> BackwardOrder:
    """The backward order of a model."""
    backward = list(reversed(profile.layers))
    placed = [
        (tensor, place)
        for place, layer in enumerate(backward)
        for tensor in reversed(layer.tensors)
        if tensor.numel
    ]
    return BackwardOrder(
        tensors=[tensor for tensor, _ in placed],
        layers=[place for _, place in placed],
        backward_s=[layer.backward_s for layer in backward],
    )


def ready_times(backward_s: Iterable[float], inline_s: Iterable[float]) -> list[float]:
    """When the gradients of each layer are there, in backward order, encodes inline
    among it.
    """
    return list(
        accumulate(own + more for own, more in zip(backward_s, inline_s, strict=True))
    )


def link_ends(
    ready_s: Sequence[float], messages: Iterable[TimedMessage]
) -> Iterator[float]:
    """When each message leaves the link, one message at a time.

    The lane takes encodes in the order of their messages. A computation behind a
    transfer comes before the encodes of later messages, and waits for one that is under
    way.
    """
    every = list(messages)
    lane = Lane()
    link = Lane()
    encodes = deque(
        (place, ready_s[layer], seconds)
        for place, message in enumerate(every)
        for layer, seconds in message.works
    )
    start_s = [ready_s[message.last] for message in every]

    def encode() -> None:
        place, from_s, seconds = encodes.popleft()
        start_s[place] = max(start_s[place], lane.take(from_s, seconds))

    for place, message in enumerate(every):
        while encodes and encodes[0][0] <= place:
            encode()
        if not message.parts:
            yield link.take(start_s[place], message.carry_s)
            continue
        now_s = max(start_s[place], link.free_s)
        for wire_s, lane_s in message.parts:
            now_s += wire_s
            while lane_s and encodes and max(encodes[0][1], lane.free_s) < now_s:
                encode()
            if lane_s:
                now_s = lane.take(now_s, lane_s)
        yield link.take(now_s, 0.0)


def end_of(ready_s: Sequence[float], messages: Iterable[TimedMessage]) -> float:
    """When the backward pass and all messages have ended: the next forward pass may
    begin.
    """
    return max((ready_s[-1], *link_ends(ready_s, messages)))


def carry_parts(
    tensors: Sequence[ProfiledTensor],
    exchange: ExchangeSetting,
    cluster: Cluster,
    *,
    is_encoded: bool = True,
) -> tuple[tuple[float, float], ...]:
    """Seconds of a message alone by the simulator: on the link, and of what is computed
    behind each transfer.

    Where the message is not encoded yet, a part without a transfer may come first: the
    encode. Infinite where it holds more elements than are sparsified together.
    """
    if sum(tensor.numel for tensor in tensors) > MOST_ELEMENTS:
        return ((inf, 0.0),)
    names = tuple(tensor.name for tensor in tensors if is_encoded)
    message = PlannedMessage(
        chunks=chunks_in(Arrival(tensor, 0.0) for tensor in tensors),
        exchange="own",
        inline=names,
    )
    layer = Layer(name="layer", tensors=tuple(tensors), forward_s=0.0, backward_s=0.0)
    profile = Profile(model="alone", source="made up", batch_size=1, layers=(layer,))
    plan = Plan(
        planner="alone", model="alone", messages=(message,), exchanges={"own": exchange}
    )
    timing = run_on_clock(plan, profile, cluster)
    sent = sorted(
        (s.start_s, s.end_s) for s in timing.spans if s.lane == "communication"
    )
    until_s, *later = timing.message_start_s[0], *sent, (timing.message_end_s[0],)
    parts = []
    wire_s = 0.0
    for from_s, *ends_s in later:
        if from_s > until_s:
            parts.append((wire_s, from_s - until_s))
            wire_s = 0.0
        for until_s in ends_s:
            wire_s += until_s - from_s
    if wire_s:
        return (*parts, (wire_s, 0.0))
    return tuple(parts)
