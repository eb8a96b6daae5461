"""Commit: a step counts on every rank, or it can be undone on every rank.

Without it a rank that dies in a step may leave some ranks with all means of the step and others
without. So ranks confirm to each other that they have all means, and none goes on before all have.
Whoever fails meanwhile knows that no other rank has gone on, or that all could have. The state of
exchanges is copied before each step, as a step that does not count must leave no trace in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ...contract import State
from ...contract.state import leaves
from ...contract.verbs import AllToAll, Compute, Steps
from ...exchange.error_feedback import residuals
from ..device.streams import Streams
from ..step.figures import norm_over_all
from ..step.messages import Message

NORM_EVERY = 64
"""Steps between two norms that ranks tell each other, but for the first ones."""


class ToldNorm(NamedTuple):
    """The norm of a rank's residuals after ``num_steps`` steps."""

    norm: float
    num_steps: int


class Commit:
    """The copies and the confirmations of one rank's steps among ``world`` ranks.

    A copy takes as much memory as the state, and is made on the compute lane before the message is
    gathered. Tensors that are encoded ahead of their message need theirs before the step.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self.look: Callable[[], int] = lambda: 0
        """The number of the newcomer that waits, as this rank sees it; 0 without one."""
        self._kept: dict[int, list[Tensor]] = {}
        self._before: dict[int, tuple[Message, State]] = {}
        self._own_W3 = torch.zeros(world, 3, dtype=torch.float64, device="cpu")
        self._told_W3 = torch.zeros(world, 3, dtype=torch.float64, device="cpu")

    def begin(self, messages: Iterable[Message]) -> None:
        """Opens a step."""
        self._before = {}
        for message in messages:
            if message.lanes:
                self._copy(message)

    def keeping(self, message: Message, text: Steps[None]) -> Steps[None]:
        """A message's text behind the copy of its state."""
        if message.index not in self._before and any(leaves(message.state)):
            yield Compute("keep", lambda: self._copy(message), message.spec.numel)
        yield from text

    def text(self, num_steps: int, messages: Iterable[Message], streams: Streams) -> Steps[None]:
        """The text by which ranks confirm that they have all means: 24 bytes to each other one.

        These are the norm of this rank's residuals, anew after the first step among these
        ranks and after ``num_steps`` of 1, 2, 4 and so on to 64, 128, 192 and so on, the number of
        steps that it was taken after, and the number of the newcomer that it has seen.
        """
        is_first, early = not self._own_W3[0, 1], num_steps < NORM_EVERY
        if is_first or num_steps % NORM_EVERY == 0 or (early and num_steps.bit_count() == 1):
            yield Compute("norm", lambda: self._note_norm(num_steps, messages, streams))
        self._own_W3[:, 2] = self.look()
        sizes = (3,) * self._world
        yield AllToAll(self._told_W3.view(-1), self._own_W3.view(-1), sizes, sizes)

    def settle(self) -> None:
        """Ends a step that counts, which nothing undoes any more."""
        self._before = {}
        if self._world == 1:  # nobody to confirm it to
            self._told_W3[0, 2] = self.look()

    @property
    def kept_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(tensor.nbytes for kept in self._kept.values() for tensor in kept)

    def norm_of(self, rank: int) -> ToldNorm:
        """The norm that a rank told last; zeros before the first step has ended."""
        norm, num_steps, _ = self._told_W3[rank].tolist()
        return ToldNorm(norm, int(num_steps))

    @property
    def newcomer(self) -> int:
        """The newcomer that rank 0 had seen when the last step was confirmed, the same on all."""
        return int(self._told_W3[0, 2])

    def undo(self) -> None:
        """Puts back the state of all messages that the open step has begun."""
        for index, (message, state) in self._before.items():
            for (_, tensor), kept in zip(leaves(state), self._kept[index], strict=True):
                tensor.copy_(kept)
            message.state = state
        self._before = {}

    def _copy(self, message: Message) -> None:
        tensors = [tensor for _, tensor in leaves(message.state)]
        kept = self._kept.get(message.index, [])
        if [one.shape for one in kept] != [one.shape for one in tensors]:
            kept = [torch.empty_like(tensor) for tensor in tensors]
        for into, tensor in zip(kept, tensors, strict=True):
            into.copy_(tensor)
        self._kept[message.index] = kept
        self._before[message.index] = message, message.state

    def _note_norm(self, num_steps: int, messages: Iterable[Message], streams: Streams) -> None:
        owed = [tensor for one in messages for tensor in residuals(one.state).values()]
        with streams.beside():
            self._own_W3[:, 0], self._own_W3[:, 1] = norm_over_all(owed), num_steps
