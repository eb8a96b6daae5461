"""Message: gradients that travel together, in one flat buffer.

A message keeps one flat buffer, on the device of its gradients or, where those are not encoded
there, on the host. Its text gathers ranges of gradients into it and exchanges
them; ``scatter`` puts the mean back. A whole gradient that travels alone may be lent instead: it is
the buffer of its step itself, and nothing is copied. State is kept by the message but named by
parameter, so it can be loaded into messages that are fused and cut in another way. Fields that end
in ``_N`` hold one element for each gradient element, or for each of this rank's share, and are cut
by parameter. Fields that end in ``_T`` hold one tensor for each of the spec's shapes, and so for
each parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...contract import Copies, Exchange, Member, State
from ...contract.spec import TensorSpec
from ...contract.state import leaves
from ...contract.verbs import Compute, Steps
from ..device.devices import home_of, kept_on
from ..device.streams import Copying
from .scaling import copy_scaled, travels_scaled, unscaling_factor
from .slots import KeptBuffer, Slot, range_in

if TYPE_CHECKING:
    from ...collective.steps.shares import Shares
    from ..failure.guard import Compare, Missed

Grads = dict[str, Tensor | None]
"""Gradients of one step by parameter name; None where a parameter took no part."""


class ParamRange(NamedTuple):
    """Elements ``first`` up to, not including, ``last`` of a parameter's flat gradient."""

    name: str
    param: Tensor
    first: int
    last: int

    @classmethod
    def whole(cls, name: str, param: Tensor) -> ParamRange:
        return cls(name, param, 0, param.numel())


class Message:
    """Gradients of one dtype that are exchanged together.

    ``turn`` is that of the message's member. ``after`` are indices of messages that must have ended
    before this one goes on the wire. ``lanes`` names, by tensor, the lanes of what is not to be
    encoded on the compute lane when the message is launched: all or none, where the exchange
    encodes the message as one. Behind the gradients the message has room for ``num_flags`` more
    elements, which the exchange averages with them.
    """

    compare: Compare | None = None
    """The comparison of the mean with the dense one, in steps that have one; see `guard`."""
    missed: Missed | None = None
    """How far the mean was from the dense one in the last step that had a ``compare``."""

    def __init__(
        self,
        index: int,
        ranges: Sequence[ParamRange],
        exchange: Exchange,
        rank: int,
        world: int,
        *,
        turn: int = 0,
        after: Sequence[int] = (),
        lanes: Mapping[str, str] | None = None,
        num_flags: int = 0,
    ) -> None:
        self.index, self.exchange, self.after = index, exchange, tuple(after)
        self.device = home_of((one.param for one in ranges), host_only=exchange.host_only)
        """Where the gradients are encoded, and where the buffer and the state lie."""
        self.slots, shapes = _laid_out(ranges)
        end = self.slots[-1].stop
        if num_flags:
            shapes.append((num_flags,))
        dtype = ranges[0].param.dtype
        numel, device = end + num_flags, self.device.type
        self.spec = TensorSpec(f"message {index}", numel, dtype, tuple(shapes), device)
        self._buffer: KeptBuffer | None = None
        self._lent_N: Tensor | None = None
        self.names = list(dict.fromkeys(slot.name for slot in self.slots))
        self.member = Member(rank, world, turn)
        self._places = {self.slots[place].name: place for place in exchange.apart(self.spec)}
        self.is_inline = bool(lanes) and not self._places
        """Whether the backward pass waits at the launch while the whole message is encoded."""
        self.lanes = dict(lanes or {}) if self._places and world > 1 else {}
        """The lanes of tensors that are encoded each by itself as they come, by name."""
        if self.lanes or len(self.slots) > 1 or num_flags:
            self._buffer = self._new_buffer()  # threads may need it at the same time
        self.flags_F = self._kept.flat_N[end:] if num_flags else None
        """The elements behind the gradients; gathering and scattering leave them as they are."""
        if self.flags_F is not None:
            self.flags_F.fill_(1)
        self._shares: Shares | None = None
        if world > 1 and exchange.ranks_per_host > 1:
            from ...collective.steps.shares import shares_of

            self._shares = shares_of(self.spec.shapes, exchange.ranks_per_host)
        self._is_unscaled = not travels_scaled(exchange)
        self._scale = 1.0
        self._set_aside: dict[Slot, dict[str, Tensor]] = {}
        self.notes_norms = False
        self.norms: list[float] = []
        """The norm of each slot's own gradient in the last step that noted norms."""
        self.state: State = self.first_state()

    @property
    def _kept(self) -> KeptBuffer:
        """The kept buffer. For one gradient it is made in the first step that cannot borrow it."""
        if self._buffer is None:
            self._buffer = self._new_buffer()
        return self._buffer

    def _new_buffer(self) -> KeptBuffer:
        with kept_on(self.device):
            return KeptBuffer(self.spec, self.slots)

    @property
    def flat_N(self) -> Tensor:
        return self._kept.flat_N

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the kept buffer; 0 where every gradient so far was lent."""
        return 0 if self._buffer is None else self._buffer.flat_N.nbytes

    @property
    def scale(self) -> float:
        """The factor on gradients that is taken off before the exchange; see `scaling`."""
        return self._scale

    @scale.setter
    def scale(self, scale: float) -> None:
        self._scale = scale if self._is_unscaled else 1.0

    def first_state(self) -> State:
        """The state that training begins with.

        What has a value for each element lies where the buffer does. It is made of plain tensors,
        also where the caller is in inference mode or has another default device.
        """
        with kept_on(self.device), torch.inference_mode(False):
            return self.exchange.init(self.spec, self.member.world)

    @property
    def own_numel(self) -> int:
        """Elements that this rank exchanges itself: the message's, or those of its share."""
        return self.spec.numel if self._shares is None else self._shares.numel

    def copy_mean(self, name: str, into: Tensor) -> None:
        """Writes this message's part of a parameter's mean into ``into``.

        ``into`` has the shape of the whole parameter.
        """
        for slot, view in zip(self.slots, self._kept.views, strict=True):
            if slot.name == name:
                copy_scaled([range_in(into, slot)], [view], self._scale)

    def can_borrow(self, grads: Grads) -> bool:
        """Whether this step's gradient can be the buffer itself.

        Whoever asks knows that nobody else looks at the gradient, or at memory that it shares,
        until the message has ended.
        """
        grad = grads[self.slots[0].name]
        return (
            len(self.slots) == 1
            and self.flags_F is None
            and self.slots[0].is_whole
            and not self.lanes
            and self._scale == 1.0
            and grad.__class__ is Tensor
            and grad.device == self.device
            and grad.layout == torch.strided
            and grad.dtype == self.spec.dtype
            and grad.is_contiguous()
            and not grad.requires_grad
        )

    def text(
        self, grads: Grads, copying: Copying = nullcontext, *, borrows: bool = False
    ) -> Steps[None]:
        """The text that gathers and exchanges; gradients that are None count as zero.

        If it ``borrows`` the gradient, the mean is there at its end, and ``scatter`` is not called.
        """
        self.member.selection = None  # each step's own
        lent = grads[self.slots[0].name] if borrows else None
        self._lent_N = None if lent is None else lent.detach().view(-1)
        yield Compute("gather", lambda: self._gather(grads, copying), self.spec.numel)
        grad_N = self.flat_N if self._lent_N is None else self._lent_N
        text = self.exchange.synchronise(self.member, self.state, grad_N, grad_N)
        if self.compare is not None:
            self.state, self.missed = yield from self.compare(self.member, grad_N, text)
        else:
            self.state = yield from text
        self._lent_N = None

    @torch.no_grad()
    def encode_ahead(self, name: str, grads: Grads, copying: Copying) -> None:
        """Gathers and encodes the tensor ``name``, whose gradient is there, before the others."""
        place = self._places[name]
        self._copy_in([place], grads, copying)
        self.exchange.encode_ahead(self.member, self.state, place, self.flat_N)

    def encode_on_host(self, name: str, grads: Grads, copying: Copying) -> Copies:
        """``encode_ahead`` on a device, as a text whose copies the host encodes; see `offload`."""
        place = self._places[name]
        self._copy_in([place], grads, copying)
        yield from self.exchange.encode_on_host(self.member, self.state, place, self.flat_N)

    @torch.no_grad()
    def _gather(self, grads: Grads, copying: Copying) -> None:
        """Gathers all gradients but those that were encoded ahead, which are in the buffer."""
        ahead, places = self.member.ahead, [*range(len(self.slots))]
        if ahead:
            places = [place for place in places if place not in ahead]
        self._set_aside = {}
        if self._lent_N is not None:
            with copying():  # it is waited for, and stays where it is
                pass
        elif self._copy_in(places, grads, copying) < len(places):
            absent = [place for place in places if grads[self.slots[place].name] is None]
            torch._foreach_zero_([self._kept.views[place] for place in absent])
            slots = [self.slots[place] for place in absent]
            self._set_aside = {slot: self.own_state(slot) for slot in slots}
        if self.notes_norms:
            views = self._kept.views if self._lent_N is None else [self._lent_N]
            self.norms = [float(norm) for norm in torch._foreach_norm(views)]

    def _copy_in(self, places: Iterable[int], grads: Grads, copying: Copying) -> int:
        """Copies gradients of slots into the buffer; returns how many, as those of None are not."""
        views, ranges = self._present(places, grads)
        if ranges:
            with copying():
                copy_scaled(views, ranges, unscaling_factor(self._scale))
        return len(ranges)

    @torch.no_grad()
    def scatter(self, grads: Grads, copying: Copying = nullcontext) -> None:
        """Puts the mean into the gradients that took part."""
        views, ranges = self._present(range(len(self.slots)), grads)
        if ranges:
            with copying():
                copy_scaled(ranges, views, self._scale)

    def _present(self, places: Iterable[int], grads: Grads) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the buffer, and the ranges of gradients that belong there, of slots."""
        views, ranges = [], []
        for place in places:
            slot = self.slots[place]
            grad = grads[slot.name]
            if grad is not None:
                views.append(self._kept.views[place])
                ranges.append(range_in(grad, slot))
        return views, ranges

    def take_back(self, name: str) -> None:
        """Undoes the last step for a parameter that no rank used: its mean is not delivered.

        Some codecs decode zeros to something else, and a residual would arrive where plain training
        has no gradient. So the parameter's state is put back as it was before the step.
        """
        for slot, fields in self._set_aside.items():
            if slot.name == name:
                own = self.state_of(slot)
                for path, tensor in fields.items():
                    own[path].copy_(tensor)

    def state_of(self, slot: Slot, state: State = None) -> dict[str, Tensor]:
        """Views of one slot's part of ``state`` (None: the message's own), by path."""
        index, own = self.slots.index(slot), {}
        for path, tensor in self._leaves(state):
            field = field_of(path)
            if not self._is_by_parameter(path, tensor):
                continue
            if path.endswith("_N"):
                own[path] = self.part(slot, tensor)
            elif path == f"{field}.{index}" and tensor.numel():
                own[field] = tensor
        return own

    def part(self, slot: Slot, tensor: Tensor) -> Tensor:
        """One slot's part of a tensor with a value for each element, or for each of a share."""
        if tensor.numel() == self.spec.numel or self._shares is None:
            return tensor[slot.start : slot.stop]
        start, stop, place = self._held(slot)
        return tensor[place : place + stop - start]

    def range_of(self, slot: Slot, part: Tensor) -> tuple[int, int]:
        """The range of a slot's parameter whose elements a part of its state is about."""
        if part.numel() == slot.stop - slot.start:
            return slot.first, slot.last
        return self.kept_range(slot)

    def kept_range(self, slot: Slot) -> tuple[int, int]:
        """The range of a slot's parameter whose elements this rank exchanges itself."""
        start, stop, _ = self._held(slot)
        return slot.first + start - slot.start, slot.first + stop - slot.start

    def _held(self, slot: Slot) -> tuple[int, int, int]:
        if self._shares is None:
            return slot.start, slot.stop, slot.start
        return self._shares.ranges(self.member.rank % self._shares.count)[self.slots.index(slot)]

    def _leaves(self, state: State) -> Iterable[tuple[str, Tensor]]:
        """The tensors of ``state`` (None: the message's own); on hosts the paths are no others."""
        state = self.state if state is None else state
        return leaves(state if self._shares is None else state.inner)

    def rest_of_state(self, state: State = None) -> dict[str, Tensor]:
        """The tensors of ``state`` (None: the message's own) that belong to no slot, by path."""
        parts = self._leaves(state)
        return {path: part for path, part in parts if not self._is_by_parameter(path, part)}

    def _is_by_parameter(self, path: str, tensor: Tensor) -> bool:
        """Whether a tensor of the state can be told apart by parameter.

        A codec's own ``_N`` field cannot be told apart where its collective cuts messages into
        chunks: then it has the length of a chunk.
        """
        if path.endswith("_N"):
            return tensor.numel() in (self.spec.numel, self.own_numel)
        return field_of(path).endswith("_T")

    def own_state(self, slot: Slot) -> dict[str, Tensor]:
        """Copies of one slot's part of the message's state, by path."""
        return {path: tensor.clone() for path, tensor in self.state_of(slot).items()}

    @property
    def key(self) -> str:
        """The message's name in a saved state, for fields that belong to no slot."""
        return ",".join(str(slot) for slot in self.slots)


def _laid_out(ranges: Iterable[ParamRange]) -> tuple[list[Slot], list[tuple[int, ...]]]:
    """Where ranges lie one behind the other, and their shapes.

    A range of a parameter is a vector, whatever the shape of the whole.
    """
    slots: list[Slot] = []
    shapes: list[tuple[int, ...]] = []
    end = 0
    for one in ranges:
        stop = end + one.last - one.first
        is_whole = stop - end == one.param.numel()
        slots.append(Slot(one.name, one.first, end, stop, is_whole))
        shapes.append(tuple(one.param.shape) if is_whole else (stop - end,))
        end = stop
    return slots, shapes


def field_of(path: str) -> str:
    """The path of a tensor's field: for a tensor of a ``_T`` field, without the tensor's number.

    >>> field_of("inner.basis_T.3"), field_of("inner.3")
    ('inner.basis_T', 'inner.3')
    """
    field, _, _ = path.rpartition(".")
    return field if field.endswith("_T") else path
