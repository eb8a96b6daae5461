"""Demand: the messages that a plan asks the network to carry for one profile."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ...contract import Exchange
from ...contract.member import turns_of
from ...contract.spec import TensorSpec
from ...exchange.two_level import on_hosts
from ..check import check
from ..data.cluster import Cluster
from ..data.fit import LineFit
from ..data.plan import DENSE, Plan, PlannedMessage
from ..data.profile import Profile
from ..exchanges import (
    exchanges_of,
    keeping_whole,
    planned_spec,
    refuse_cuts,
    refuse_encodes,
)
from .supersteps import NOT_MEASURED, Superstep, Work

# ---- demand ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demand:
    """The messages of a plan for a profile; lists have an entry for each, in issue order."""

    layers: list[set[int]]
    """The layers whose gradients each message carries, by their number in forward order."""
    num_bytes: list[int]
    plan: Plan
    profile: Profile
    layer_of: dict[str, int]
    """The number of the layer that owns each tensor, by the tensor's name."""

    @classmethod
    def of(cls, plan: Plan, profile: Profile) -> Demand:
        """The demand of a plan; raises ``InvalidSetting`` if it is not sound for the profile."""
        check(plan, profile)
        refuse_cuts(plan, {t.name: t.numel for la in profile.layers for t in la.tensors})
        refuse_encodes(plan, {t.name: t for la in profile.layers for t in la.tensors})
        layer_of = {t.name: i for i, la in enumerate(profile.layers) for t in la.tensors}
        item_bytes = {
            t.name: t.size_bytes // t.numel for la in profile.layers for t in la.tensors if t.numel
        }
        return cls(
            layers=[{layer_of[c.tensor] for c in message.chunks} for message in plan.messages],
            num_bytes=[
                sum(c.numel * item_bytes[c.tensor] for c in m.chunks) for m in plan.messages
            ],
            plan=plan,
            profile=profile,
            layer_of=layer_of,
        )

    @property
    def is_dense(self) -> bool:
        """Whether every message is an all-reduce of plain gradients, whose cost is a formula."""
        return all(message.exchange == DENSE for message in self.plan.messages)

    def ready_s(self, backward_end_s: list[float]) -> list[float]:
        """The second at which each message's gradients are ready, from layers' backward ends."""
        # The smaller a layer's number, the later its backward ends.
        return [backward_end_s[min(own)] for own in self.layers]

    def forward_may_start_s(
        self, backward_end_s: list[float], message_end_s: list[float]
    ) -> list[float]:
        """The second at which each layer's parameters are up to date."""
        may_start_s = [backward_end_s[0]] * len(self.profile.layers)
        for own, end_s in zip(self.layers, message_end_s, strict=True):
            for layer in own if self.plan.overlap_forward else (0,):
                may_start_s[layer] = max(may_start_s[layer], end_s)
        return may_start_s

    def after(self) -> list[tuple[int, ...]]:
        """The numbers of the messages that must have ended before each message is launched."""
        return [message.after for message in self.plan.messages]

    def labels(self) -> list[str]:
        """The name of each message in pictures."""
        return [_label(message) for message in self.plan.messages]

    def parcels(self) -> list[tuple[str, TensorSpec]]:
        """The name of each message's exchange, and the spec of the gradient that it exchanges.

        A spec has shapes only where the exchange acts on whole tensors. Elsewhere it has none, so
        that messages of one size and dtype are priced only once.
        """
        tensors = {t.name: t for layer in self.profile.layers for t in layer.tensors}
        whole = keeping_whole(self.plan)
        return [
            (message.exchange, planned_spec(message, tensors, is_shaped=message.exchange in whole))
            for message in self.plan.messages
        ]

    def turns(self) -> list[int]:
        """The turn of each message among those of its exchange: see ``Member.turn``."""
        return turns_of(message.exchange for message in self.plan.messages)


def exchanges_on(plan: Plan, cluster: Cluster) -> dict[str, Exchange]:
    """The exchanges that a plan names, as a cluster's hosts carry them out."""
    return {n: on_hosts(made, cluster.ranks_per_host) for n, made in exchanges_of(plan).items()}


def _label(message: PlannedMessage) -> str:
    first, *others = message.chunks
    label = f"{first.tensor}[{first.start}:{first.stop}]"
    return f"{label} and {len(others)} more" if others else label


# ---- encodes elsewhere than on the compute lane at a message's launch --------------------------
#
# ``PlannedMessage.inline`` are encodes in the backward pass: all gradients behind them come later.
# ``PlannedMessage.early`` are encodes on the compute lane (offloaded too), one for each as it
# comes.


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
        Inline(demand.layer_of[c.tensor], number, *_work(f"encode {c.tensor}", line, c.numel))
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
        Early(demand.layer_of[c.tensor], _work(f"encode {c.tensor}", line, c.numel))
        for c in message.chunks
        if c.tensor in message.early
    ]


def _work(name: str, line: LineFit | None, numel: int) -> Work:
    return (
        Work(f"{name} ({NOT_MEASURED})", 0.0) if line is None else Work(name, line.seconds(numel))
    )
