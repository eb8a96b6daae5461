"""GradientBuffer: the flat buffer of a message, and the copies into it and out of it.

It lies on the device that encodes the message: the device of the gradients, or the
host. A whole gradient that travels alone may be lent: in that step the gradient itself
is the buffer, and nothing is copied.

**Loss scaling.** A GradScaler multiplies the loss, and with it every gradient, by a
scale that changes during training. State that an exchange keeps for later steps would
have the scale of its own step: a residual that was held back at a scale of 1024, and is
sent at 2048, would count half. So gradients are divided by the scale of their step as
they are gathered, and means are multiplied as they are scattered. All values in between
are in units of the gradient: residuals, velocities, and settings such as a threshold or
the norm to clip to. A saved state has no scale, so it can be loaded under any scale.
Ranks may even have different scales, unless a message travels with its scale: then
``attach`` refuses that.

Scales are powers of two unless the user says otherwise. Then division and
multiplication change no bit that ``GradScaler.unscale_`` would have kept. Gradients are
copied into the buffer and out of it anyway, and those copies multiply.

The alternative is to rescale state whenever the scale changes. It costs no less, as
both copies are made anyway. It must know which fields are in the gradient's unit, and
leaves thresholds wrong.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property

import torch
from torch import Tensor

from ..device.devices import kept_on
from ..device.streams import Copying
from .layout import MessageLayout
from .scaling import unscaling_factor

Grads = dict[str, Tensor | None]
"""Gradients of one step by parameter name; None where a parameter took no part."""


class GradientBuffer:
    """The buffer of the gradients in ``layout``, on ``device``.

    If some gradients are encoded ``ahead`` of the others, none can be lent: the buffer
    holds them before the others come.
    """

    is_of_rows = False
    """Whether gradients come as rows; see `row_message`."""
    scale = 1.0
    """The factor on gradients that is taken off before the exchange."""

    def __init__(
        self, layout: MessageLayout, device: torch.device, *, ahead: bool
    ) -> None:
        self._slots = layout.slots
        self._names = layout.names
        self._spec = layout.spec
        self._device = device
        self._lent_N: Tensor | None = None
        self._extremes: Sequence[Tensor] = ()
        is_alone = len(self._slots) == 1 and not layout.num_flags
        self._may_borrow = is_alone and self._slots[0].is_whole and not ahead
        if ahead or not is_alone:
            _ = self._views  # made now: threads may need it at the same time
        self.flags_F: Tensor | None = None
        """The elements behind the gradients; gathering and scattering skip them."""
        if layout.num_flags:
            self.flags_F = self.flat_N[-layout.num_flags :].fill_(1)

    @cached_property
    def flat_N(self) -> Tensor:
        """The kept buffer.

        For one gradient it is made in the first step that cannot borrow it.
        """
        with kept_on(self._device):
            return torch.zeros(self._spec.numel, dtype=self._spec.dtype)

    @cached_property
    def _views(self) -> list[Tensor]:
        """The part of each slot in the buffer.

        The part of a whole gradient has its shape, as the gradient may have strides of
        its own.
        """
        # flags have a shape and no slot
        shapes = zip(self._slots, self._spec.shapes, strict=False)
        return [
            self.flat_N[slot.start : slot.stop].view(shape) for slot, shape in shapes
        ]

    @property
    def grad_N(self) -> Tensor:
        """The gradients of this step, which the mean will replace."""
        return self.flat_N if self._lent_N is None else self._lent_N

    @property
    def size_bytes(self) -> int:
        """Bytes of the kept buffer; 0 where every gradient so far was lent."""
        return self.flat_N.nbytes if "flat_N" in vars(self) else 0

    def can_borrow(self, grads: Grads) -> bool:
        """Whether this step's gradient can be the buffer itself.

        The caller guarantees that no other code reads the gradient, or memory that it
        shares, until the message has ended.
        """
        if not self._may_borrow or self.scale != 1.0:
            return False
        grad = grads[self._slots[0].name]
        return (
            grad.__class__ is Tensor
            and grad.device == self._device
            and grad.layout == torch.strided
            and grad.dtype == self._spec.dtype
            and grad.is_contiguous()
            and not grad.requires_grad
        )

    def borrow(self, grads: Grads) -> None:
        """Takes this step's gradient for the buffer, until ``give_back``."""
        grad = grads[self._slots[0].name]
        assert grad is not None, "can_borrow has looked at it"
        self._lent_N = grad.detach().view(-1)

    def give_back(self) -> None:
        """Lets go of a gradient that was lent."""
        self._lent_N = None

    def gather(
        self, places: Sequence[int], grads: Grads, copying: Copying
    ) -> list[int]:
        """Copies gradients of slots into the buffer.

        Returns the places of gradients that are None, which count as zero.
        """
        if self._lent_N is not None:
            with copying():  # it is waited for, and stays where it is
                return []
        self.copy_in(places, grads, copying)
        absent = [at for at in places if grads[self._slots[at].name] is None]
        if absent:
            torch._foreach_zero_([self._views[at] for at in absent])
        return absent

    def copy_in(self, places: Iterable[int], grads: Grads, copying: Copying) -> None:
        """Copies gradients of slots into the buffer, except gradients that are None."""
        views, ranges = self._present(places, grads)
        if ranges:
            with copying():
                copy_scaled(views, ranges, unscaling_factor(self.scale))

    def scatter(self, grads: Grads, copying: Copying = nullcontext) -> None:
        """Puts the mean into the gradients that took part."""
        views, ranges = self._present(range(len(self._slots)), grads)
        if ranges:
            with copying():
                copy_scaled(ranges, views, self.scale)

    def put_mean(self, name: str, into: Tensor) -> Tensor:
        """Writes this message's part of a parameter's mean, and returns the mean.

        ``into`` has the shape of the whole parameter.
        """
        for place, slot in enumerate(self._slots):
            if slot.name == name:
                views, parts = self._present([place], {name: into})
                copy_scaled(parts, views, self.scale)
        return into

    def _present(
        self, places: Iterable[int], grads: Grads
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the buffer, and the ranges of gradients that go there, by slot."""
        views = []
        ranges = []
        for place in places:
            slot = self._slots[place]
            grad = grads[slot.name]
            if grad is None:
                continue
            if slot.is_whole:
                views.append(self._views[place])
                ranges.append(grad)
            else:
                own_views, own_ranges = self._cut(place, grad)
                views += own_views
                ranges += own_ranges
        return views, ranges

    def _cut(self, place: int, grad: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the buffer at one slot, and the gradient's parts that go there."""
        slot = self._slots[place]
        view = self._views[place]
        parts = [*parts_of(grad, slot.first, slot.last)]
        cut = torch.split(view, [part.numel() for part in parts])
        return [v.view(part.shape) for v, part in zip(cut, parts, strict=True)], parts

    def norms(self) -> list[float]:
        """The norm of each slot's own gradient, once all are gathered."""
        views = self._views if self._lent_N is None else [self._lent_N]
        return [float(norm) for norm in torch._foreach_norm(views)]

    def look(self) -> None:
        """Notes the least and the largest element of the mean; NaN where one is."""
        mean_N = self.grad_N
        values = mean_N.values() if mean_N.is_sparse else mean_N
        self._extremes = torch.aminmax(values) if values.numel() else ()

    def forget(self) -> None:
        """Drops what was noted of the last mean."""
        self._extremes = ()

    def infinite(self) -> set[str]:
        """The parameters whose last means have an inf or a NaN, if it looked."""
        if all(bool(one.isfinite()) for one in self._extremes):
            return set()
        if len(self._names) == 1:
            return {*self._names}
        views = zip(self._slots, self._views, strict=True)
        return {slot.name for slot, view in views if not bool(view.isfinite().all())}


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
