"""KeptState: the state that an exchange keeps from step to step, by parameter.

The state belongs to a message, but its parts are named by parameter. So they can be
saved, and loaded into messages that are fused and cut in another way. Fields of state
that end in ``_N`` hold one element for each gradient element, of the message or of this
rank's share. They are cut by parameter. Fields that end in ``_T`` hold one tensor for
each of the spec's shapes, and so for each parameter.

On hosts of several ranks each rank exchanges a share of the message with other hosts,
and keeps state of that share alone.

**Undo.** A state can be put back as it was before, as a whole or by parameter: see
`backup`. Survivors repeat a pass, and a scaler skips steps, whose means never reach
parameters. A parameter that no rank used gets no mean, and its state is put back too
(``take_back``).
"""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...contract import Exchange, State
from ...contract.state import leaves
from ...exchange.error_feedback import Chooser, chooser_of
from ..device.devices import kept_on
from .backup import Backup
from .layout import MessageLayout, Slot

if TYPE_CHECKING:
    from ...collective.steps.shares import Shares


class KeptState:
    """The state of one exchange, whose gradients lie as ``layout`` says."""

    def __init__(
        self,
        exchange: Exchange,
        layout: MessageLayout,
        device: torch.device,
        world: int,
    ) -> None:
        self.exchange = exchange
        self.slots = layout.slots
        self.names = layout.names
        self.spec = layout.spec
        self.device = device
        """Where gradients are encoded, and where the state lies."""
        self._world = world
        self._shares: Shares | None = None
        self._place = 0
        """This rank's place on its host."""
        if world > 1 and exchange.ranks_per_host > 1:
            from ...collective.steps.shares import shares_of

            count = exchange.ranks_per_host
            self._shares = shares_of(
                self.spec.shapes, count, exchange.declared.whole_tensors
            )
            self._place = self.spec.rank % count
        self._set_aside: dict[Slot, dict[str, Tensor]] = {}
        self.chooser: Chooser | None = chooser_of(exchange)
        """The part of the exchange that chooses settings after a step, if any."""
        self.state: State = self.first_state()
        self.backup = Backup(self, self.names)
        """The state as it was before, by which steps are undone."""

    def first_state(self) -> State:
        """The state that training begins with.

        It is made of plain tensors, also where the caller is in inference mode or has
        another default device.
        """
        with kept_on(self.device), torch.inference_mode(False):
            return self.exchange.init(self.spec, self._world)

    @property
    def key(self) -> str:
        """The name in a saved state for fields that belong to no slot."""
        return ",".join(str(slot) for slot in self.slots)

    def set_aside(self, slots: Iterable[Slot]) -> None:
        """Copies the state of slots without a gradient in this pass."""
        self._set_aside = {slot: self.own_state(slot) for slot in slots}

    def take_back(self, name: str) -> None:
        """Undoes the last pass for a parameter that no rank used.

        Some codecs decode zeros to something else, and a residual would arrive where
        plain training has no gradient. So the parameter's mean is not delivered, and
        its state is put back as it was before the pass.
        """
        for slot, kept in self._set_aside.items():
            if slot.name == name:
                for path, tensor in self.state_of(slot).items():
                    tensor.copy_(kept[path])

    def state_of(self, slot: Slot, state: State = None) -> dict[str, Tensor]:
        """Views of one slot's part of ``state`` (None: the own one), by path."""
        found = [*self._leaves(state)]
        counts = Counter(field_of(path) for path, _ in found)
        own = {}
        for path, tensor in found:
            if not self._is_by_parameter(path, tensor):
                continue
            field = field_of(path)
            if path.endswith("_N"):
                own[path] = self.part(slot, tensor)
            elif tensor.numel():
                number = self._number_of(slot, counts[field])
                if path == f"{field}.{number}":
                    own[field] = tensor
        return own

    def own_state(self, slot: Slot) -> dict[str, Tensor]:
        """Copies of one slot's part of the state, by path."""
        return {path: tensor.clone() for path, tensor in self.state_of(slot).items()}

    def rest_of_state(self, state: State = None) -> dict[str, Tensor]:
        """The tensors of ``state`` (None: the own one) that no slot has, by path."""
        parts = self._leaves(state)
        return {
            path: part for path, part in parts if not self._is_by_parameter(path, part)
        }

    @property
    def own_numel(self) -> int:
        """Elements that this rank exchanges: all of the message, or of its share."""
        if self._shares is None:
            return self.spec.numel
        return self._shares.numels[self._place]

    def part(self, slot: Slot, tensor_N: Tensor) -> Tensor:
        """One slot's part of a tensor with a value for each element, or a share's."""
        if self._shares is None:
            return tensor_N[slot.start : slot.stop]
        held = self._shares.ranges(self._place)[self.slots.index(slot)]
        return tensor_N[held.place : held.place + held.stop - held.start]

    def range_of(self, slot: Slot, part: Tensor) -> tuple[int, int]:
        """The range of a slot's parameter that a part of its state is about."""
        if part.numel() == slot.stop - slot.start:
            return slot.first, slot.last
        return self.kept_range(slot)

    def kept_range(self, slot: Slot) -> tuple[int, int]:
        """The range of a slot's parameter whose elements this rank exchanges itself."""
        if self._shares is None:
            return slot.first, slot.last
        held = self._shares.ranges(self._place)[self.slots.index(slot)]
        offset = slot.first - slot.start
        return held.start + offset, held.stop + offset

    def _number_of(self, slot: Slot, count: int) -> int:
        """The number of a slot's tensor in a field that holds ``count`` tensors.

        It is -1 where this rank's share has no part of the tensor.
        """
        place = self.slots.index(slot)
        if self._shares is None or count == len(self.spec.shapes):
            return place
        held = self._shares.tensors[self._place]
        return held.index(place) if place in held else -1

    def _leaves(self, state: State) -> Iterable[tuple[str, Tensor]]:
        """The tensors of ``state`` (None: the own one).

        On hosts the paths are the same.
        """
        state = self.state if state is None else state
        if self._shares is not None:
            from ...exchange.two_level import without_hosts

            state = without_hosts(state)
        return leaves(state)

    def _is_by_parameter(self, path: str, tensor: Tensor) -> bool:
        """Whether a tensor of the state can be told apart by parameter.

        A codec's own ``_N`` field cannot be told apart where its collective cuts
        messages into chunks: then it has the length of a chunk.
        """
        if path.endswith("_N"):
            return tensor.numel() in (self.spec.numel, self.own_numel)
        return field_of(path).endswith("_T")


def field_of(path: str) -> str:
    """The path of a tensor's field: without the tensor's number for a ``_T`` field.

    >>> field_of("inner.basis_T.3"), field_of("inner.3")
    ('inner.basis_T', 'inner.3')
    """
    field, _, _ = path.rpartition(".")
    return field if field.endswith("_T") else path
