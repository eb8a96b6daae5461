"""Encodes that a plan does elsewhere than on the compute lane at a message's launch, on the clock.

``PlannedMessage.inline`` are encodes in the backward pass: all gradients behind them come later.
``PlannedMessage.early`` are encodes on the compute lane (offloaded too), one for each as it comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ..data.cluster import Cluster
from ..data.fit import LineFit
from .demand import Demand
from .supersteps import NOT_MEASURED, Superstep, Work


class Inline(NamedTuple):
    """An encode that the backward pass waits for, behind a layer's own computation."""

    layer: int
    message: int
    name: str
    seconds: float


class Early(NamedTuple):
    """An encode on the compute lane that begins when a layer's backward has ended."""

    layer: int
    work: Work


@dataclass(frozen=True)
class Encoding:
    """The encodes of a plan that are inline or early; seconds of what is not measured are 0."""

    inline: list[Inline]
    """In backward order, and within a layer in issue order."""
    early: list[list[Early]]
    """The early encodes of each message."""

    @classmethod
    def of(cls, demand: Demand, cluster: Cluster) -> Encoding:
        """The encodes of a demand on a cluster; among one rank nothing is encoded."""
        messages = demand.plan.messages if cluster.num_ranks > 1 else ()
        inline = [
            one for number in range(len(messages)) for one in _inline(demand, number, cluster)
        ]
        early = [_early(demand, number, cluster) for number in range(len(messages))]
        return cls(sorted(inline, key=lambda one: -one.layer), early)

    def backward_ends(self, backward_s: list[float]) -> list[float]:
        """The second at which each layer's gradients are ready and encoded inline.

        ``backward_s`` are seconds of layers' backward; both are in forward order.
        """
        added_s = self.added_s(len(backward_s))
        both = zip(reversed(backward_s), reversed(added_s), strict=True)
        return list(accumulate(own_s + more_s for own_s, more_s in both))[::-1]

    def early_from(self, backward_end_s: list[float]) -> list[list[tuple[float, Work]]]:
        """The early encodes of each message, with the second from which on each may begin."""
        return [[(backward_end_s[one.layer], one.work) for one in own] for own in self.early]

    def added_s(self, num_layers: int) -> list[float]:
        """Seconds of inline encodes behind each layer's backward, in forward order."""
        found_s = [0.0] * num_layers
        for one in self.inline:
            found_s[one.layer] += one.seconds
        return found_s


def without_encodes(
    every: list[tuple[Superstep, ...]], demand: Demand
) -> list[tuple[Superstep, ...]]:
    """The supersteps of each message of one rank, less the encodes that are inline or early."""
    return [
        _without_encode(supersteps) if message.inline or message.early else supersteps
        for message, supersteps in zip(demand.plan.messages, every, strict=True)
    ]


def _without_encode(supersteps: tuple[Superstep, ...]) -> tuple[Superstep, ...]:
    """The supersteps less the encodes before the first verb for the network."""
    found: list[Superstep] = []
    for place, superstep in enumerate(supersteps):
        if superstep.wire:
            return (*found, *supersteps[place:])
        works = tuple(work for work in superstep.works if not work.name.startswith("encode"))
        if works:
            found.append(superstep._replace(works=works))
    return tuple(found)


def _inline(demand: Demand, number: int, cluster: Cluster) -> list[Inline]:
    message = demand.plan.messages[number]
    if not message.inline:
        return []
    exchange = demand.plan.exchanges[message.exchange]
    line = cluster.inline_line(exchange.encoder)
    if exchange.sparsifier is None:
        # Launched when the gradients of all messages before it are ready too.
        layer = min(min(own) for own in demand.layers[: number + 1])
        numel = sum(chunk.numel for chunk in message.chunks)
        label = f"encode {demand.labels()[number]}"
        return [Inline(layer, number, *_work(label, line, numel))]
    return [
        Inline(demand.layer_of(c.tensor), number, *_work(f"encode {c.tensor}", line, c.numel))
        for c in message.chunks
        if c.tensor in message.inline
    ]


def _early(demand: Demand, number: int, cluster: Cluster) -> list[Early]:
    message = demand.plan.messages[number]
    if not message.early:
        return []
    codec = cluster.codecs.get(demand.plan.exchanges[message.exchange].encoder)
    line = None if codec is None else codec.encode
    return [
        Early(demand.layer_of(c.tensor), _work(f"encode {c.tensor}", line, c.numel))
        for c in message.chunks
        if c.tensor in message.early
    ]


def _work(name: str, line: LineFit | None, numel: int) -> Work:
    return (
        Work(f"{name} ({NOT_MEASURED})", 0.0) if line is None else Work(name, line.seconds(numel))
    )
