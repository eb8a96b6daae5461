"""Demand: the messages that a plan asks the network to carry for one profile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...contract import Exchange
from ...contract.member import turns_of
from ...contract.spec import TensorSpec
from ...exchange.hosts import on_hosts
from ..check import check
from ..data.cluster import Cluster
from ..data.plan import DENSE, Plan, PlannedMessage
from ..data.profile import Profile
from ..exchanges import (
    exchanges_of,
    keeping_whole,
    planned_spec,
    refuse_cuts,
    refuse_encodes,
)


@dataclass(frozen=True)
class Demand:
    """The messages of a plan for a profile; lists have an entry for each, in issue order."""

    layers: list[set[int]]
    """The layers whose gradients each message carries, by their number in forward order."""
    num_bytes: list[int]
    plan: Plan
    profile: Profile

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
        )

    def layer_of(self, tensor: str) -> int:
        """The number, in forward order, of the layer that owns a tensor."""
        return self.layer_numbers[tensor]

    @cached_property
    def layer_numbers(self) -> dict[str, int]:
        """The number of the layer that owns each tensor, by the tensor's name."""
        return {t.name: i for i, la in enumerate(self.profile.layers) for t in la.tensors}

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
