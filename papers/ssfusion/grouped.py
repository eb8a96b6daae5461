"""An exchange of a whole model by groups of its tensors, each group through an exchange
of its own.

``workloads.train`` trains on one message. With this a small model trains on the groups
that a planner makes: tensors that share a message there are selected from together
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.contract import Exchange, Member, Selection
from gradwire.contract.spec import TensorSpec
from gradwire.contract.verbs import Compute, Steps


@dataclass
class Group:
    """One rank's part in one group: the ranges of its tensors in the message, and its
    buffers.
    """

    spec: TensorSpec
    ranges: list[tuple[int, int]]
    member: Member | None = field(default=None)

    def gather(self, message_N: Tensor, into_N: Tensor) -> None:
        """Copies the group's tensors out of the message."""
        for (start, stop), part in zip(self.ranges, self._parts(into_N), strict=True):
            part.copy_(message_N[start:stop])

    def scatter(self, from_N: Tensor, message_N: Tensor) -> None:
        """Copies the group's tensors back into the message."""
        for (start, stop), part in zip(self.ranges, self._parts(from_N), strict=True):
            message_N[start:stop].copy_(part)

    def _parts(self, group_N: Tensor) -> Sequence[Tensor]:
        return torch.split(group_N, [stop - start for start, stop in self.ranges])


class GroupedState(NamedTuple):
    """The groups of one rank, and the state of each group's exchange."""

    groups: tuple[Group, ...]
    states: tuple[Any, ...]


@dataclass(frozen=True)
class Grouped(Exchange):
    """Averages each group of tensors through its exchange, one group after the other.

    ``parts`` are groups: the places of tensors in the message, and the exchange.
    """

    parts: tuple[tuple[tuple[int, ...], Exchange], ...]

    def init(self, spec: TensorSpec, world: int) -> GroupedState:
        borders = list(pairwise(accumulate(map(prod, spec.shapes), initial=0)))
        groups = []
        for places, _ in self.parts:
            ranges = [borders[place] for place in places]
            shapes = tuple(spec.shapes[place] for place in places)
            numel = sum(stop - start for start, stop in ranges)
            groups.append(Group(TensorSpec("group", numel, spec.dtype, shapes), ranges))
        pairs = zip(groups, self.parts, strict=True)
        states = tuple(
            exchange.init(group.spec, world) for group, (_, exchange) in pairs
        )
        return GroupedState(tuple(groups), states)

    def synchronise(
        self,
        me: Member,
        state: GroupedState,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None = None,
    ) -> Steps[GroupedState]:
        """One step. The groups' exchanges keep their residuals, so none is taken
        here.
        """
        assert residual_N is None, "the groups' exchanges keep their residuals"
        states = []
        chosen: list[Selection | None] = []
        for number, group in enumerate(state.groups):
            if group.member is None:
                group.member = Member(me.rank, me.world)
            own_N = group.member.scratch(
                "group", group.spec.numel, grad_N, grad_N.dtype
            )
            group.gather(grad_N, own_N)
            inner = self.parts[number][1]
            states.append(
                (
                    yield from inner.synchronise(
                        group.member, state.states[number], own_N, own_N
                    )
                )
            )
            yield Compute(
                "scatter", partial(group.scatter, own_N, out_N), group.spec.numel
            )
            chosen.append(group.member.selection)
        me.selection = _together(chosen, [group.spec.numel for group in state.groups])
        return GroupedState(state.groups, tuple(states))


def _together(chosen: Sequence[Selection | None], numels: Sequence[int]) -> Selection:
    """The selection of all groups; a group without one is sent whole."""
    every = [
        Selection(numel, numel, numel) if one is None else one
        for one, numel in zip(chosen, numels, strict=True)
    ]
    return Selection(*(sum(figures) for figures in zip(*every, strict=True)))
