"""Message: gradients that travel together, in one flat buffer.

A message keeps one flat host buffer. Its text gathers ranges of gradients into it and exchanges
them; ``scatter`` puts the mean back. State is kept by the message but named by parameter, so it
survives any other fusing and cutting: fields that end in ``_N`` hold one element for each gradient
element and are cut by parameter; fields that end in ``_T`` hold one tensor for each of the spec's
shapes, and so for each parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..collective._verbs import Compute, Steps
from ..contract import Exchange, Member, State
from ..exchange import synchronise
from ..spec import TensorSpec
from .streams import Copying

Grads = dict[str, Tensor | None]
"""Gradients of one step by parameter name; None where a parameter took no part."""


class Part(NamedTuple):
    """Elements ``first`` up to, not including, ``last`` of a parameter's flat gradient."""

    name: str
    param: Tensor
    first: int
    last: int

    @classmethod
    def whole(cls, name: str, param: Tensor) -> Part:
        return cls(name, param, 0, param.numel())


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a range of one parameter's gradient lies in its message.

    The range starts at ``first`` of the parameter and is ``start:stop`` of the message.
    """

    name: str
    first: int
    start: int
    stop: int
    is_whole: bool

    @property
    def last(self) -> int:
        return self.first + self.stop - self.start

    def __str__(self) -> str:
        return self.name if self.is_whole else f"{self.name}[{self.first}:{self.last}]"


class Message:
    """Gradients of one dtype that are exchanged together.

    ``after`` are indices of messages that must have ended before this one goes on the wire.
    """

    def __init__(
        self,
        index: int,
        parts: Sequence[Part],
        exchange: Exchange,
        rank: int,
        world: int,
        *,
        after: Sequence[int] = (),
    ) -> None:
        self.index, self.exchange, self.after = index, exchange, tuple(after)
        self.slots: list[Slot] = []
        end = 0
        for part in parts:
            stop = end + part.last - part.first
            is_whole = stop - end == part.param.numel()
            self.slots.append(Slot(part.name, part.first, end, stop, is_whole))
            end = stop
        # A range of a parameter is a vector, whatever the shape of the whole.
        shapes = [
            tuple(part.param.shape) if slot.is_whole else (slot.stop - slot.start,)
            for slot, part in zip(self.slots, parts, strict=True)
        ]
        dtype = parts[0].param.dtype
        self.spec = TensorSpec(f"message {index}", end, dtype, shapes=tuple(shapes))
        self.flat_N = torch.zeros(end, dtype=self.spec.dtype, device="cpu")
        # Whole gradients are copied in their own shape, as they may have strides of their own.
        self._views = [
            self.flat_N[slot.start : slot.stop].view(shape)
            for slot, shape in zip(self.slots, shapes, strict=True)
        ]
        self.names = list(dict.fromkeys(slot.name for slot in self.slots))
        self.member = Member(rank, world)
        self._set_aside: dict[Slot, dict[str, Tensor]] = {}
        self.state: State = self._first_state()

    def _first_state(self) -> State:
        """In host memory, as the buffer is, whatever torch.set_default_device says."""
        with torch.device("cpu"):
            return self.exchange.init(self.spec, self.member.world)

    def copy_mean(self, name: str, into: Tensor) -> None:
        """Writes this message's part of a parameter's mean into ``into``, of the whole's shape."""
        for slot, view in zip(self.slots, self._views, strict=True):
            if slot.name == name:
                _range(into, slot).copy_(view)

    def text(self, grads: Grads, copying: Copying = nullcontext) -> Steps[None]:
        """Gather and exchange. Gradients that are None count as zero."""
        self.member.selection = None  # each step's own
        yield Compute("gather", lambda: self._gather(grads, copying), self.spec.numel)
        self.state = yield from synchronise(
            self.exchange, self.member, self.state, self.flat_N, self.flat_N
        )

    @torch.no_grad()
    def _gather(self, grads: Grads, copying: Copying) -> None:
        views, ranges = self._present(grads)
        self._set_aside = {}
        if len(ranges) < len(self.slots):
            self.flat_N.zero_()
            absent = [slot for slot in self.slots if grads[slot.name] is None]
            self._set_aside = {slot: self.own_state(slot) for slot in absent}
        # One call for all parameters: a copy each from Python costs microseconds apiece.
        if ranges:
            with copying():
                torch._foreach_copy_(views, ranges)

    @torch.no_grad()
    def scatter(self, grads: Grads, copying: Copying = nullcontext) -> None:
        """Puts the mean into the gradients that took part."""
        views, ranges = self._present(grads)
        if ranges:
            with copying():
                torch._foreach_copy_(ranges, views)

    def _present(self, grads: Grads) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the buffer, and the ranges of gradients that belong there."""
        views, ranges = [], []
        for slot, view in zip(self.slots, self._views, strict=True):
            grad = grads[slot.name]
            if grad is not None:
                views.append(view)
                ranges.append(_range(grad, slot))
        return views, ranges

    def take_back(self, name: str) -> None:
        """Undoes the last step for a parameter that no rank used: its mean is not delivered.

        Some codecs decode zeros to something else, and a pending residual would arrive where
        plain training has no gradient; so state is as it was before the step.
        """
        for slot, fields in self._set_aside.items():
            if slot.name == name:
                own = self.state_of(slot)
                for path, tensor in fields.items():
                    own[path].copy_(tensor)

    def state_of(self, slot: Slot) -> dict[str, Tensor]:
        """Views of what of the state belongs to one slot, by path."""
        index, own = self.slots.index(slot), {}
        for path, tensor in leaves(self.state):
            field = field_of(path)
            if not self._is_by_parameter(path, tensor):
                continue
            if path.endswith("_N"):
                own[path] = tensor[slot.start : slot.stop]
            elif path == f"{field}.{index}" and tensor.numel():
                own[field] = tensor
        return own

    def _is_by_parameter(self, path: str, tensor: Tensor) -> bool:
        """Whether a tensor of the state can be told apart by parameter.

        A codec's own ``_N`` field cannot where its collective cuts messages into chunks: it has the
        length of a chunk.
        """
        if path.endswith("_N"):
            return tensor.numel() == self.spec.numel
        return field_of(path).endswith("_T")

    def own_state(self, slot: Slot) -> dict[str, Tensor]:
        """Copies of what of the state belongs to one slot, by path."""
        return {path: tensor.clone() for path, tensor in self.state_of(slot).items()}

    def rest_of_state(self) -> dict[str, Tensor]:
        """Copies of the state that belongs to no slot, by path."""
        return {
            path: tensor.clone()
            for path, tensor in leaves(self.state)
            if not self._is_by_parameter(path, tensor)
        }

    def restore(self, by_name: dict[str, dict[str, Tensor]], whole: dict[str, Tensor]) -> None:
        """Fills the state; absent entries have the values they have before the first step.

        ``by_name`` holds fields of whole parameters by path, ``whole`` what ``rest_of_state``
        returned.
        """
        self.state = self._first_state()
        for path, tensor in leaves(self.state):
            # Another number of ranks cuts other chunks: what is kept of a chunk starts afresh.
            fits = path in whole and whole[path].shape == tensor.shape
            if fits and not self._is_by_parameter(path, tensor):
                tensor.copy_(whole[path])
        for slot in self.slots:
            saved = by_name.get(slot.name, {})
            for path, own in self.state_of(slot).items():
                if path in saved:
                    is_cut = path.endswith("_N")
                    own.copy_(saved[path][slot.first : slot.last] if is_cut else saved[path])


def _range(grad: Tensor, slot: Slot) -> Tensor:
    """What of a gradient travels in a slot; the gradient is contiguous if it is cut."""
    return grad if slot.is_whole else grad.view(-1)[slot.first : slot.last]


def field_of(path: str) -> str:
    """The path of a field; that of one of a ``_T`` field's tensors without the tensor's number.

    >>> field_of("inner.basis_T.3"), field_of("inner.3")
    ('inner.basis_T', 'inner.3')
    """
    field, _, _ = path.rpartition(".")
    return field if field.endswith("_T") else path


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
