"""Message: gradients that travel together, in one flat buffer.

A message keeps one flat buffer, on the device of its gradients or, where those are not
encoded there, on the host. Its steps gather ranges of gradients into it and exchange
them; ``scatter`` puts the mean back. A whole gradient that travels alone may be lent
instead: it is the buffer of its step itself, and nothing is copied. State is kept by
the message but named by parameter, so it can be loaded into messages that are fused and
cut in another way. Fields that end in ``_N`` hold one element for each gradient
element, or for each of this rank's share, and are cut by parameter. Fields that end in
``_T`` hold one tensor for each of the spec's shapes, and so for each parameter.

**Complex parameters** travel as real views, real and imaginary parts in turn: a complex
matrix of n x m is a real one of n x 2m. So messages, plans, residuals and saved states
know real numbers only.

**Loss scaling.** A GradScaler multiplies the loss, and with it every gradient, by a
scale that changes during training. State that an exchange keeps for later steps would
have the scale of the step it comes from: a residual that was held back at 1024 and
arrives at 2048 counts half. So a message divides the gradients that it gathers by the
scale of its step, and multiplies the mean that it scatters. All between is in units of
the gradient: residuals, velocities, and settings such as a threshold or the norm to
clip to. A saved state has no scale, so it can be loaded under any. Ranks may even have
different scales, unless a message travels with its scale: ``attach`` refuses that.

Scales are powers of two unless the user says otherwise. Then division and
multiplication change no bit that ``GradScaler.unscale_`` would have kept. Gradients are
copied into the message and out of it anyway, and those copies multiply.

The alternative is to rescale state whenever the scale changes. It costs no less, as
both copies are made anyway. It must know which fields are in the gradient's unit, and
leaves thresholds wrong.

**Undo.** A message can put its state back as it was before, as a whole or by parameter:
see `backup`. Survivors repeat a pass, and a scaler skips steps, whose means never reach
parameters. A parameter that no rank used gets no mean, and its state is put back too
(``take_back``).

An exchange that sends the values themselves and keeps nothing takes scaled gradients: a
scale is there to bring values into the range of 16 bits, on the wire as in the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler

from ...contract import Copies, Exchange, Layout, Member, State
from ...contract.spec import NamedParam, TensorSpec
from ...contract.state import leaves
from ...contract.verbs import Compute, Steps
from ...errors import InvalidSetting, invalid
from ...exchange.error_feedback import Chooser, TensorEncoder, Wrapper, chooser_of
from ...exchange.pair import Pair
from ..device.devices import home_of, kept_on
from ..device.streams import Copying
from .backup import Backup

if TYPE_CHECKING:
    from ...collective.steps.shares import Shares
    from ...planning.data.cluster import Cluster
    from .guard import Compare, Missed

Grads = dict[str, Tensor | None]
"""Gradients of one step by parameter name; None where a parameter took no part."""


class ParamRange(NamedTuple):
    """Elements ``first`` up to, not including, ``last`` of a parameter's gradient."""

    name: str
    param: Tensor
    first: int
    last: int

    @classmethod
    def whole(cls, name: str, param: Tensor) -> ParamRange:
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


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A message's place: what it follows, where it is encoded, its flags.

    >>> Placement(after=[0]).num_flags
    0
    """

    order: int = 0
    """The order of the message's member."""
    after: Sequence[int] = ()
    """Indices of messages that must have ended before this one goes on the wire."""
    lanes: Mapping[str, str] = field(default_factory=dict)
    """By tensor, the lanes of what is not to be encoded on the compute lane when the
    message is launched. They are all or none where the exchange encodes the message as
    one.
    """
    num_flags: int = 0
    """The number of elements behind the gradients that are averaged with them."""


FIRST = Placement()
"""A message that follows none, and is encoded when it is launched."""


class Message:
    """Gradients of one dtype that are exchanged together."""

    compare: Compare | None = None
    """The comparison of the mean with the dense one, if there is one; see `guard`."""
    missed: Missed | None = None
    """The mean's distance from the dense one in the last step with a ``compare``."""

    is_of_rows = False
    """Whether the gradient comes as rows; see `row_message`."""
    scale = 1.0
    """The factor on gradients that is taken off before the exchange."""
    looks = False
    _keeps_step = _keeps_pass = False
    _extremes: Sequence[Tensor] = ()

    def __init__(
        self,
        index: int,
        ranges: Sequence[ParamRange],
        exchange: Exchange,
        rank: int,
        world: int,
        placement: Placement = FIRST,
    ) -> None:
        self.index = index
        self.exchange = exchange
        self.after = tuple(placement.after)
        num_flags = placement.num_flags
        self.device = home_of(
            (one.param for one in ranges), host_only=exchange.declared.host_only
        )
        """Where the gradients are encoded, and where the buffer and the state lie."""
        self.slots, shapes = _laid_out(ranges)
        end = self.slots[-1].stop
        if num_flags:
            shapes.append((num_flags,))
        dtype = ranges[0].param.dtype
        numel = end + num_flags
        device = self.device.type
        self.spec = TensorSpec(
            f"message {index}", numel, dtype, tuple(shapes), device, rank
        )
        self._lent_N: Tensor | None = None
        self.names = list(dict.fromkeys(slot.name for slot in self.slots))
        self.member = Member(rank, world, placement.order)
        self._encoder = TensorEncoder.of(exchange)
        apart = () if self._encoder is None else self._encoder.exchange.apart(self.spec)
        self._places = {self.slots[place].name: place for place in apart}
        self.is_inline = bool(placement.lanes) and not self._places
        """Whether the backward pass waits at launch until the message is encoded."""
        self.lanes = dict(placement.lanes) if self._places and world > 1 else {}
        """The lanes, by name, of tensors that are each encoded as they come."""
        if self.lanes or len(self.slots) > 1 or num_flags:
            _ = self._views  # made now: threads may need it at the same time
        self.flags_F = self.flat_N[end:].fill_(1) if num_flags else None
        """The elements behind the gradients; gathering and scattering skip them."""
        self._shares: Shares | None = None
        if world > 1 and exchange.ranks_per_host > 1:
            from ...collective.steps.shares import shares_of

            is_whole = exchange.declared.whole_tensors
            self._shares = shares_of(
                self.spec.shapes, exchange.ranks_per_host, is_whole
            )
        self._set_aside: dict[Slot, dict[str, Tensor]] = {}
        self.notes_norms = False
        self.norms: list[float] = []
        """The norm of each slot's own gradient in the last step that noted norms."""
        self.state: State = self.first_state()
        self.backup = Backup(self, self.names)
        """The state as it was before, by which steps are undone."""

    @cached_property
    def chooser(self) -> Chooser | None:
        """The part of the exchange that chooses settings after a step, if any."""
        return chooser_of(self.exchange)

    @cached_property
    def flat_N(self) -> Tensor:
        """The kept buffer.

        For one gradient it is made in the first step that cannot borrow it.
        """
        with kept_on(self.device):
            return torch.zeros(self.spec.numel, dtype=self.spec.dtype)

    @cached_property
    def _views(self) -> list[Tensor]:
        """The part of each slot in the buffer.

        The part of a whole gradient has its shape, as the gradient may have strides of
        its own.
        """
        shapes = zip(self.slots, self.spec.shapes, strict=False)  # flags have no slot
        return [
            self.flat_N[slot.start : slot.stop].view(shape) for slot, shape in shapes
        ]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the kept buffer; 0 where every gradient so far was lent."""
        return self.flat_N.nbytes if "flat_N" in vars(self) else 0

    def know(self, cluster: Cluster) -> None:
        """Has an exchange that chooses in each step choose for these ranks and links.

        A cluster of another number of ranks is scaled.
        """
        if cluster.num_ranks != self.member.world:
            cluster = cluster.scaled(num_ranks=self.member.world)
        self.member.cluster = cluster.flat
        if self._shares is not None:
            self.member.across(self.exchange.ranks_per_host).cluster = cluster.shares

    def take_scale(self, scale: float) -> None:
        """Notes the factor on gradients, taken off before the exchange if needed."""
        self.scale = 1.0 if travels_scaled(self.exchange) else scale

    def first_state(self) -> State:
        """The state that training begins with.

        What has a value for each element lies where the buffer does. It is made of
        plain tensors, also where the caller is in inference mode or has another default
        device.
        """
        with kept_on(self.device), torch.inference_mode(False):
            return self.exchange.init(self.spec, self.member.world)

    def begin_step(self, *, looks: bool, confirms: bool = True) -> None:
        """Opens a pass that may be undone, so the state is kept.

        If it ``looks`` at its mean, a scaler may skip the step of this pass, and
        ``infinite`` tells whether the mean is finite. If the ranks ``confirm`` it,
        ``end_step`` may undo the pass.
        """
        has_state = any(leaves(self.state))
        self._keeps_step = looks and has_state
        self._keeps_pass = confirms and has_state
        self.looks = looks
        self._extremes = ()
        if self.lanes:
            self._keep()

    @property
    def _keeps(self) -> bool:
        return self._keeps_step or self._keeps_pass

    def _keep(self) -> None:
        self.backup.keep(by_step=self._keeps_step, by_pass=self._keeps_pass)
        self._keeps_step = self._keeps_pass = False

    def end_step(self, *, undoes: bool = False) -> None:
        """Ends a pass.

        If it ``undoes`` it, the state is as before, if that had begun to change.
        """
        self._keeps_step = self._keeps_pass = False
        self.backup.end_pass(undoes=undoes)

    def infinite(self) -> set[str]:
        """The parameters whose last means have an inf or a NaN, if it looked."""
        if all(bool(one.isfinite()) for one in self._extremes):
            return set()
        if len(self.names) == 1:
            return {*self.names}
        views = zip(self.slots, self._views, strict=False)  # flags have no slot
        return {slot.name for slot, view in views if not bool(view.isfinite().all())}

    @property
    def own_numel(self) -> int:
        """Elements that this rank exchanges: the message's, or those of its share."""
        return (
            self.spec.numel
            if self._shares is None
            else self._shares.numels[self._place]
        )

    @property
    def _place(self) -> int:
        """This rank's place on its host."""
        return 0 if self._shares is None else self.member.rank % self._shares.count

    def copy_mean(self, name: str, into: Tensor) -> None:
        """Writes this message's part of a parameter's mean into ``into``.

        ``into`` has the shape of the whole parameter.
        """
        for place, slot in enumerate(self.slots):
            if slot.name == name:
                views, parts = self._paired(place, into)
                copy_scaled(parts, views, self.scale)

    def can_borrow(self, grads: Grads) -> bool:
        """Whether this step's gradient can be the buffer itself.

        Whoever asks knows that nobody else looks at the gradient, or at memory that it
        shares, until the message has ended.
        """
        if len(self.slots) != 1:
            return False
        grad = grads[self.slots[0].name]
        return (
            self.flags_F is None
            and self.slots[0].is_whole
            and not self.lanes
            and self.scale == 1.0
            and grad.__class__ is Tensor
            and grad.device == self.device
            and grad.layout == torch.strided
            and grad.dtype == self.spec.dtype
            and grad.is_contiguous()
            and not grad.requires_grad
        )

    def steps(
        self, grads: Grads, copying: Copying = nullcontext, *, borrows: bool = False
    ) -> Steps[None]:
        """The steps that gather and exchange; gradients that are None count as zero.

        If it ``borrows`` the gradient, the mean is there at its end, and ``scatter`` is
        not called.
        """
        self.member.selection = None  # each step's own
        lent = grads[self.slots[0].name] if borrows else None
        self._lent_N = None if lent is None else lent.detach().view(-1)
        if self._keeps:
            yield Compute("keep", self._keep, self.spec.numel)
        yield Compute("gather", lambda: self._gather(grads, copying), self.spec.numel)
        grad_N = self.flat_N if self._lent_N is None else self._lent_N
        steps = self.exchange.synchronise(self.member, self.state, grad_N, grad_N)
        if self.compare is not None:
            self.state, self.missed = yield from self.compare(
                self.member, grad_N, steps
            )
        else:
            self.state = yield from steps
        if self.looks:
            self._extremes = yield Compute(
                "look", lambda: _extremes(grad_N), self.spec.numel
            )
        self._lent_N = None

    @torch.no_grad()
    def encode_ahead(self, name: str, grads: Grads, copying: Copying) -> None:
        """Gathers and encodes the tensor ``name`` before the others."""
        place = self._places[name]
        self._copy_in([place], grads, copying)
        assert self._encoder is not None, "tensors are encoded apart"
        self._encoder.encode_ahead(self.member, self.state, place, self.flat_N)

    def encode_on_host(self, name: str, grads: Grads, copying: Copying) -> Copies:
        """``encode_ahead`` on a device.

        Steps whose copies the host encodes; see `Offload`.
        """
        place = self._places[name]
        self._copy_in([place], grads, copying)
        assert self._encoder is not None, "tensors are encoded apart"
        yield from self._encoder.encode_on_host(
            self.member, self.state, place, self.flat_N
        )

    @torch.no_grad()
    def _gather(self, grads: Grads, copying: Copying) -> None:
        """Gathers all gradients but those encoded ahead, which the buffer has."""
        ahead = self.member.ahead
        places = [*range(len(self.slots))]
        if ahead:
            places = [place for place in places if place not in ahead]
        self._set_aside = {}
        if self._lent_N is not None:
            with copying():  # it is waited for, and stays where it is
                pass
        else:
            self._copy_in(places, grads, copying)
        absent = [place for place in places if grads[self.slots[place].name] is None]
        if absent:
            torch._foreach_zero_([self._views[place] for place in absent])
            slots = [self.slots[place] for place in absent]
            if self.backup.before is None:
                self._set_aside = {slot: self.own_state(slot) for slot in slots}
        if self.notes_norms:
            views = self._views if self._lent_N is None else [self._lent_N]
            self.norms = [float(norm) for norm in torch._foreach_norm(views)]

    def _copy_in(self, places: Iterable[int], grads: Grads, copying: Copying) -> None:
        """Copies gradients of slots into the buffer, but for those of None."""
        views, ranges = self._present(places, grads)
        if ranges:
            with copying():
                copy_scaled(views, ranges, unscaling_factor(self.scale))

    @torch.no_grad()
    def scatter(self, grads: Grads, copying: Copying = nullcontext) -> None:
        """Puts the mean into the gradients that took part."""
        views, ranges = self._present(range(len(self.slots)), grads)
        if ranges:
            with copying():
                copy_scaled(ranges, views, self.scale)

    def _present(
        self, places: Iterable[int], grads: Grads
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the buffer, and the ranges of gradients that go there, by slot."""
        views: list[Tensor] = []
        ranges: list[Tensor] = []
        for place in places:
            grad = grads[self.slots[place].name]
            if grad is not None:
                own_views, own_ranges = self._paired(place, grad)
                views += own_views
                ranges += own_ranges
        return views, ranges

    def _paired(self, place: int, grad: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the buffer at one slot, and the gradient's parts that go there."""
        slot = self.slots[place]
        view = self._views[place]
        if slot.is_whole:
            return [view], [grad]
        parts = [*parts_of(grad, slot.first, slot.last)]
        cut = torch.split(view, [part.numel() for part in parts])
        return [v.view(part.shape) for v, part in zip(cut, parts, strict=True)], parts

    def take_back(self, name: str) -> None:
        """Undoes the last step for a parameter that no rank used.

        Its mean is not delivered.

        Some codecs decode zeros to something else, and a residual would arrive where
        plain training has no gradient. So the parameter's state is put back as it was
        before the step.
        """
        for slot in self.slots:
            if slot.name == name:
                kept = self._set_aside.get(slot, {})
                own = self.state_of(slot)
                if self.backup.before is not None:
                    kept = self.state_of(slot, self.backup.before)
                for path, tensor in kept.items():
                    own[path].copy_(tensor)

    def state_of(self, slot: Slot, state: State = None) -> dict[str, Tensor]:
        """Views of one slot's part of ``state`` (None: the message's own), by path."""
        place = self.slots.index(slot)
        own = {}
        found = [*self._leaves(state)]
        held = (
            self._shares.tensors[self._place] if self._shares is not None else (place,)
        )
        counts = Counter(field_of(path) for path, _ in found)
        for path, tensor in found:
            field = field_of(path)
            index = place
            if self._shares is not None and counts[field] < len(self.spec.shapes):
                index = (
                    held.index(place) if place in held else -1
                )  # a share has only its tensors
            if not self._is_by_parameter(path, tensor):
                continue
            if path.endswith("_N"):
                own[path] = self.part(slot, tensor)
            elif path == f"{field}.{index}" and tensor.numel():
                own[field] = tensor
        return own

    def part(self, slot: Slot, tensor: Tensor) -> Tensor:
        """One slot's part of a tensor with a value for each element, or a share's."""
        if self._shares is None:
            return tensor[slot.start : slot.stop]
        start, stop, place = self._held(slot)
        return tensor[place : place + stop - start]

    def range_of(self, slot: Slot, part: Tensor) -> tuple[int, int]:
        """The range of a slot's parameter that a part of its state is about."""
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
        return self._shares.ranges(self._place)[self.slots.index(slot)]

    def _leaves(self, state: State) -> Iterable[tuple[str, Tensor]]:
        """The tensors of ``state`` (None: the message's own).

        On hosts the paths are the same.
        """
        state = self.state if state is None else state
        if self._shares is not None:
            from ...exchange.two_level import without_hosts

            state = without_hosts(state)
        return leaves(state)

    def rest_of_state(self, state: State = None) -> dict[str, Tensor]:
        """The tensors of ``state`` (None: the own one) that no slot has, by path."""
        parts = self._leaves(state)
        return {
            path: part for path, part in parts if not self._is_by_parameter(path, part)
        }

    def _is_by_parameter(self, path: str, tensor: Tensor) -> bool:
        """Whether a tensor of the state can be told apart by parameter.

        A codec's own ``_N`` field cannot be told apart where its collective cuts
        messages into chunks: then it has the length of a chunk.
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


def _extremes(mean_N: Tensor) -> Sequence[Tensor]:
    """The least and the largest element (NaN where one is); none of an empty mean."""
    values = mean_N.values() if mean_N.is_sparse else mean_N
    return torch.aminmax(values) if values.numel() else ()


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
    """The path of a tensor's field: without the tensor's number for a ``_T`` field.

    >>> field_of("inner.basis_T.3"), field_of("inner.3")
    ('inner.basis_T', 'inner.3')
    """
    field, _, _ = path.rpartition(".")
    return field if field.endswith("_T") else path


def parts_of(tensor: Tensor, first: int, last: int) -> Iterator[Tensor]:
    """Views of a tensor with any strides, of flat elements ``first`` up to ``last``.

    >>> [part.tolist() for part in parts_of(torch.arange(6).view(2, 3).t(), 1, 5)]
    [[3], [[1, 4]], [2]]
    """
    if tensor.is_contiguous():
        yield tensor.view(-1)[first:last]
        return
    row = tensor.numel() // tensor.shape[0]
    (start, before) = divmod(first, row)
    (stop, behind) = divmod(last, row)
    if start == stop:
        yield from parts_of(tensor[start], before, behind)
        return
    if before:
        yield from parts_of(tensor[start], before, row)
    whole = tensor[start + bool(before) : stop]
    if whole.numel():
        yield whole
    if behind:
        yield from parts_of(tensor[stop], 0, behind)


def scale_of(scaler: GradScaler | None) -> float:
    """The factor on the gradients of the backward pass that runs now."""
    return 1.0 if scaler is None else float(scaler.get_scale())


def unscaling_factor(scale: float) -> float:
    """The factor that takes a scale off again.

    For a scale that has shrunk to 0 there is none: the factor is inf, and gradients
    become NaN.
    """
    return 1.0 / scale if scale else math.inf


def copy_scaled(into: Sequence[Tensor], given: Sequence[Tensor], factor: float) -> None:
    """Copies tensors times a factor, between any devices."""
    if factor == 1.0:
        # One call for all of them: a copy each from Python costs microseconds apiece.
        torch._foreach_copy_(list(into), list(given))
        return
    for to, tensor in zip(into, given, strict=True):
        if to.device == tensor.device and to.dtype == tensor.dtype:
            torch.mul(tensor, factor, out=to)
        else:
            to.copy_(tensor).mul_(factor)


def travels_scaled(exchange: Exchange) -> bool:
    """Whether an exchange sends the values themselves, or rows of them, and keeps
    nothing of them.

    >>> from gradwire.compress.cast16 import cast16
    >>> from gradwire.exchange.error_feedback import with_error_feedback
    >>> from gradwire.exchange.pair import pair
    >>> from gradwire.collective.allreduce import allreduce
    >>> plain = pair(cast16(dtype=torch.float16), allreduce())
    >>> travels_scaled(plain), travels_scaled(with_error_feedback(plain))
    (True, False)
    """
    if isinstance(exchange, Wrapper) and exchange.ranks_per_host > 1:  # TwoLevel
        exchange = exchange.inner
    if isinstance(exchange, Pair):
        return exchange.codec.traits.layout is Layout.DENSE
    return exchange.traits is not None and exchange.traits.lossless


def refuse_float16(messages: Sequence[Any], scaler: GradScaler | None) -> None:
    """Raises ``InvalidSetting`` where unscaled float16 would lose small elements."""
    for message in messages if scaler is not None else ():
        exchange = message.exchange
        if travels_scaled(exchange) or message.spec.dtype != torch.float16:
            continue
        raise InvalidSetting(
            f"scaler was given, and {message.names[0]} has gradients of float16, which "
            f"{exchange!r} takes without their scale: small ones would become 0; "
            "keep parameters "
            "in float32 and compute in autocast, as a GradScaler asks for, or "
            "exchange them by "
            "none or cast16"
        )


def refuse_grad_dtype(name: str, param: Tensor, given: torch.dtype | None) -> None:
    """Raises ``InvalidSetting`` unless a gradient has its parameter's dtype.

    Messages have that dtype, so the mean would be rounded to it. None allows any dtype,
    and a gradient shows which it has.
    """
    if given not in (None, param.dtype):
        remedy = (
            "leave grad_dtype as it is, or keep the parameter in that dtype and "
            "compute in autocast"
        )
        raise invalid(
            f"grad_dtype of parameter {name}", given, f"{param.dtype}, its own", remedy
        )


def refuse_complex(params: Iterable[NamedParam], what: str, remedy: str) -> None:
    """Raises ``InvalidSetting`` for complex parameters, as ``what`` knows none."""
    for name, param in params:
        if param.is_complex():
            given = str(param.dtype).removeprefix("torch.")
            raise invalid(
                f"dtype of parameter {name}", given, f"a real one {what}", remedy
            )
