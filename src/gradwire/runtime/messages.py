"""Message: gradients that travel together, in one flat buffer.

A message keeps one flat host buffer. Its text gathers the gradients into it, exchanges them, and
scatters the mean back. State is kept by the message but named by parameter, so it survives any
other fusing: fields that end in ``_N`` hold one element for each gradient element and are cut by
parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..collective._verbs import Compute, Steps
from ..contract import Member, State
from ..exchange import Exchange, synchronise
from ..spec import TensorSpec

Grads = dict[str, Tensor | None]
"""Gradients of one step by parameter name; None where a parameter took no part."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter's gradient lies in its message."""

    name: str
    start: int
    stop: int


class Message:
    """Gradients of one dtype that are exchanged together."""

    def __init__(
        self,
        index: int,
        params: Sequence[tuple[str, Tensor]],
        exchange: Exchange,
        rank: int,
        world: int,
    ) -> None:
        self.index, self.exchange = index, exchange
        self.slots: list[Slot] = []
        end = 0
        for name, param in params:
            self.slots.append(Slot(name, end, end + param.numel()))
            end += param.numel()
        self.spec = TensorSpec(f"message {index}", end, params[0][1].dtype)
        self.flat_N = torch.zeros(end, dtype=self.spec.dtype)
        self._views = {
            slot.name: self.flat_N[slot.start : slot.stop].view(param.shape)
            for slot, (_, param) in zip(self.slots, params, strict=True)
        }
        self.member = Member(rank, world)
        self._set_aside: dict[str, dict[str, Tensor]] = {}
        self.state: State = exchange.init(self.spec, world)

    @property
    def names(self) -> list[str]:
        return [slot.name for slot in self.slots]

    def mean(self, name: str) -> Tensor:
        """This parameter's part of the mean, in its shape: a view that the next step overwrites."""
        return self._views[name]

    def text(self, grads: Grads) -> Steps[None]:
        """Gather, exchange, scatter. Gradients that are None count as zero and are not written."""
        yield Compute("gather", lambda: self._gather(grads), self.spec.numel)
        self.state = yield from synchronise(
            self.exchange, self.member, self.state, self.flat_N, self.flat_N
        )
        yield Compute("scatter", lambda: self._scatter(grads), self.spec.numel)

    @torch.no_grad()
    def _gather(self, grads: Grads) -> None:
        views, present = self._present(grads)
        self._set_aside = {}
        if len(present) < len(self._views):
            self.flat_N.zero_()
            absent = [slot for slot in self.slots if grads[slot.name] is None]
            self._set_aside = {slot.name: self._own_state(slot) for slot in absent}
        # One call for all parameters: a copy each from Python costs microseconds apiece.
        if present:
            torch._foreach_copy_(views, present)

    @torch.no_grad()
    def _scatter(self, grads: Grads) -> None:
        views, present = self._present(grads)
        if present:
            torch._foreach_copy_(present, views)

    def _present(self, grads: Grads) -> tuple[list[Tensor], list[Tensor]]:
        """Views and gradients of the parameters that took part, in the same order."""
        pairs = [(v, g) for name, v in self._views.items() if (g := grads[name]) is not None]
        return [view for view, _ in pairs], [grad for _, grad in pairs]

    def take_back(self, name: str) -> None:
        """Undoes the last step for a parameter that no rank used: its mean is not delivered.

        Some codecs decode zeros to something else, and a pending residual would arrive where
        plain training has no gradient; so state is as it was before the step.
        """
        self.restore({name: self._set_aside[name]}, {})

    def _own_state(self, slot: Slot) -> dict[str, Tensor]:
        """Copies of the per-element state of one parameter, by path."""
        return {
            path: tensor[slot.start : slot.stop].clone()
            for path, tensor in leaves(self.state)
            if path.endswith("_N")
        }

    def save(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
        """State cut by parameter name, and the rest of it by path."""
        by_name = {slot.name: self._own_state(slot) for slot in self.slots}
        rest = {p: tensor.clone() for p, tensor in leaves(self.state) if not p.endswith("_N")}
        return by_name, rest

    def restore(self, by_name: dict[str, dict[str, Tensor]], whole: dict[str, Tensor]) -> None:
        """Fills the state from what ``save`` returned; absent entries keep their first values."""
        for path, tensor in leaves(self.state):
            if path in whole and not path.endswith("_N"):
                tensor.copy_(whole[path])
            for slot in self.slots if path.endswith("_N") else ():
                part = by_name.get(slot.name, {}).get(path)
                if part is not None:
                    tensor[slot.start : slot.stop].copy_(part)


def leaves(state: State, path: str = "") -> Iterable[tuple[str, Tensor]]:
    """(path, tensor) of every tensor in a state.

    >>> from gradwire.exchange import FeedbackState
    >>> [path for path, _ in leaves(FeedbackState(torch.zeros(1), (torch.ones(1),)))]
    ['residual_N', 'inner.0']
    """
    if isinstance(state, Tensor):
        yield path, state
    elif isinstance(state, tuple):
        names: Iterable[Any] = getattr(state, "_fields", range(len(state)))
        for name, part in zip(names, state, strict=True):
            yield from leaves(part, f"{path}.{name}" if path else str(name))
