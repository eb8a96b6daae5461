"""Message: gradients that travel together, in one flat buffer.

A message gathers ranges of gradients into its buffer and exchanges them. Then the
buffer scatters the mean to the gradients. Three parts have files of their own:

* `layout`: where each gradient lies in the message.
* `buffer`: the copies in and out, and the loss scale, which is taken off there.
* `kept_state`: what the exchange keeps from step to step, by parameter.

**Complex parameters** travel as real views with real and imaginary parts alternating: a
complex matrix of n x m is a real one of n x 2m. So messages, plans, residuals and saved
states know real numbers only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ...contract import Copies, EncodesTensors, Exchange, Member
from ...contract.verbs import Compute, Steps
from ...exchange.error_feedback import encoder_state, tensor_encoder
from ..device.devices import home_of
from ..device.streams import Copying
from .buffer import GradientBuffer, Grads
from .kept_state import KeptState
from .layout import MessageLayout, ParamRange
from .scaling import travels_scaled

if TYPE_CHECKING:
    from ...planning.data.cluster import Cluster
    from .guard import Compare, Missed


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A message's place: the messages before it, the lanes that encode it, its flags.

    >>> Placement(after=[0]).num_flags
    0
    """

    order: int = 0
    """The message's number among the messages of its exchange: see ``Member.order``."""
    after: Sequence[int] = ()
    """Indices of messages that must have ended before this one goes on the wire."""
    lanes: Mapping[str, str] = field(default_factory=dict)
    """The lane that encodes each tensor, by the tensor's name. A tensor without a lane
    is encoded on the compute lane, once the message is launched. If the exchange
    encodes the message as one, either all tensors have a lane or none has.
    """
    num_flags: int = 0
    """The number of flags behind the gradients, which say the parameters in use."""


FIRST = Placement()
"""A message that follows none, and is encoded when it is launched."""


class Message(KeptState):
    """Gradients of one dtype that are exchanged together."""

    kind_of_buffer: type[GradientBuffer] = GradientBuffer
    compare: Compare | None = None
    """The comparison of the mean with the dense one, if there is one; see `guard`."""
    missed: Missed | None = None
    """The mean's distance from the dense one in the last step with a ``compare``."""
    looks = False
    """Whether the message checks that its mean is finite."""
    notes_norms = False
    """Whether the message notes the norm of each gradient in this step."""

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
        self.after = tuple(placement.after)
        self.member = Member(rank, world, placement.order)
        device = home_of(
            (one.param for one in ranges), host_only=exchange.declared.host_only
        )
        layout = MessageLayout(
            f"message {index}",
            ranges,
            num_flags=placement.num_flags,
            device=device.type,
            rank=rank,
        )
        self._encoder = tensor_encoder(exchange)
        self._places: dict[str, int] = {}
        """The places of tensors that can be encoded before the others."""
        if self._encoder is not None:
            apart = self._encoder.apart(layout.spec)
            self._places = {layout.slots[place].name: place for place in apart}
        self.is_inline = bool(placement.lanes) and not self._places
        """Whether the backward pass waits at launch until the message is encoded."""
        self.lanes: dict[str, str] = {}
        """The lanes, by name, of tensors that are each encoded as they come."""
        if self._places and world > 1:
            self.lanes = dict(placement.lanes)
        self.buffer = self.kind_of_buffer(layout, device, ahead=bool(self.lanes))
        self.norms: list[float] = []
        """The norm of each slot's own gradient in the last step that noted norms."""
        super().__init__(exchange, layout, device, world)

    def know(self, cluster: Cluster) -> None:
        """Sets the cluster, by which an exchange may choose a scheme in each step.

        A cluster of another number of ranks is scaled to the number here.
        """
        if cluster.num_ranks != self.member.world:
            cluster = cluster.scaled(num_ranks=self.member.world)
        self.member.cluster = cluster.flat
        if self._shares is not None:
            self.member.across(self.exchange.ranks_per_host).cluster = cluster.shares

    def take_scale(self, scale: float) -> None:
        """Sets the loss scale, by which the buffer divides if the exchange needs it."""
        self.buffer.scale = 1.0 if travels_scaled(self.exchange) else scale

    def begin_step(self, *, looks: bool, confirms: bool = True) -> None:
        """Opens a pass that may be undone, and keeps a copy of the state for that.

        With ``looks`` a scaler may skip the step of this pass, so the buffer checks
        whether the mean is finite. With ``confirms`` the ranks confirm the pass, and
        ``Backup.end_pass`` may undo it.
        """
        self.looks = looks
        self.buffer.forget()
        self.backup.begin(by_step=looks, by_pass=confirms)
        if self.lanes:
            self.backup.keep()

    def steps(
        self, grads: Grads, copying: Copying = nullcontext, *, borrows: bool = False
    ) -> Steps[None]:
        """The steps that gather and exchange; gradients that are None count as zero.

        If the message ``borrows``, its one gradient serves as the buffer. The exchange
        then writes the mean into the gradient itself, and nothing is scattered.
        """
        numel = self.spec.numel
        self.member.selection = None  # each step's own
        if borrows:
            self.buffer.borrow(grads)
        if self.backup.is_due:
            yield Compute("keep", self.backup.keep, numel)
        yield Compute("gather", lambda: self._gather(grads, copying), numel)
        grad_N = self.buffer.grad_N
        steps = self.exchange.synchronise(self.member, self.state, grad_N, grad_N)
        if self.compare is not None:
            self.state, self.missed = yield from self.compare(
                self.member, grad_N, steps
            )
        else:
            self.state = yield from steps
        if self.looks:
            yield Compute("look", self.buffer.look, numel)
        self.buffer.give_back()

    def _gather(self, grads: Grads, copying: Copying) -> None:
        """Gathers the gradients that were not encoded ahead; the others are there."""
        ahead = self.member.ahead
        places: Sequence[int] = range(len(self.slots))
        if ahead:
            places = [at for at in places if at not in ahead]
        absent = self.buffer.gather(places, grads, copying)
        self.set_aside([self.slots[at] for at in absent])
        if self.notes_norms:
            self.norms = self.buffer.norms()

    @torch.no_grad()
    def encode_ahead(self, name: str, grads: Grads, copying: Copying) -> None:
        """Gathers and encodes the tensor ``name`` before the others."""
        encoder, place = self._gathered_ahead(name, grads, copying)
        state, residual_N = encoder_state(self.state)
        encoder.encode_ahead(self.member, state, place, self.buffer.flat_N, residual_N)

    def encode_on_host(self, name: str, grads: Grads, copying: Copying) -> Copies:
        """``encode_ahead`` of a gradient on a device, by the host; see `Offload`.

        It yields tensors to copy from the device to the host, and back.
        """
        encoder, place = self._gathered_ahead(name, grads, copying)
        state, residual_N = encoder_state(self.state)
        yield from encoder.encode_on_host(
            self.member, state, place, self.buffer.flat_N, residual_N
        )

    def _gathered_ahead(
        self, name: str, grads: Grads, copying: Copying
    ) -> tuple[EncodesTensors, int]:
        """Gathers one tensor; returns its encoder and its place."""
        place = self._places[name]
        self.buffer.copy_in([place], grads, copying)
        assert self._encoder is not None, "tensors are encoded apart"
        return self._encoder, place
