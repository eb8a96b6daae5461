"""Report: one record that each rank sends to all others once a step, beside the gradients.

It tells which parameters the rank used and, in some steps, the digests of its parameters. A step of
dense messages needs no record for the first: flags travel in the last message.

Where a step must count on all ranks or on none (``on_failure="shrink"``) the record is sent again
once the rank has all means. That confirms the step, and no rank goes on before it has all of these
records. Otherwise a rank that dies might leave some ranks with all means and others without. A rank
that fails meanwhile knows that no other has gone on, or that all could have.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from ...contract.verbs import Compute, Steps
from ...exchange.error_feedback import residuals
from ..device.streams import Streams
from ..failure.integrity import Check, refuse_other_bits
from .engine import rows_of_all
from .figures import norm_over_all
from .messages import Message

NORM_EVERY = 64
"""Steps between two norms that ranks report, but for the first ones."""
_FIGURES = "<dqqq"


class Record(NamedTuple):
    """The record of one rank in one step."""

    norm: float = 0.0
    """The norm of the rank's residuals after ``num_steps`` steps."""
    num_steps: int = 0
    newcomer: int = 0
    """The number of the newcomer that waits, as the rank sees it; 0 without one."""
    trains: bool = True
    digests: tuple[int, ...] = ()
    used: bytes = b""
    """For each parameter in order 1 where the rank has a gradient of it, else 0."""

    def packed(self) -> bytes:
        """The record as bytes, as many on every rank."""
        # No flip of one bit makes a rank that trains one that does not.
        figures = struct.pack(_FIGURES, *self[:3], -self.trains)
        return figures + struct.pack(f"<{len(self.digests)}q", *self.digests) + self.used

    @classmethod
    def of(cls, data: bytes, num_digests: int) -> Record:
        """The record that was ``packed``."""
        first = struct.calcsize(_FIGURES)
        norm, num_steps, newcomer, trains = struct.unpack_from(_FIGURES, data)
        digests = struct.unpack_from(f"<{num_digests}q", data, first)
        used = data[first + 8 * num_digests :]
        return cls(norm, num_steps, newcomer, bool(trains), digests, used)


class StepReport:
    """The records of all ranks in the last step that had some.

    ``check`` takes the digests. Where the report ``confirms``, each step has one.
    """

    def __init__(self, check: Check, world: int) -> None:
        self.check, self.confirms = check, False
        self.restart(world)

    def restart(self, world: int) -> None:
        """Begins anew among ``world`` ranks."""
        self.records = [Record()] * world
        self.look: Callable[[], int] = lambda: 0
        """The number of the newcomer that waits, as this rank sees it; 0 without one."""
        self._norm, self._num_steps, self._newcomer = 0.0, 0, 0

    @property
    def newcomer(self) -> int:
        """The newcomer that rank 0 had seen when the last step was confirmed, the same on all."""
        return self.records[0].newcomer

    @property
    def used(self) -> list[bool]:
        """For each parameter whether any rank used it in the last step."""
        return [any(flags) for flags in zip(*(record.used for record in self.records), strict=True)]

    def text(self, step: int, used: bytes, digests: Mapping[str, int]) -> Steps[None]:
        """The text by which ranks exchange their records of a step.

        Raises ``RankFailed``, on every rank alike, if digests differ.
        """
        figures = self._norm, self._num_steps, self._newcomer, self.check.trains
        own = Record(*figures, tuple(digests.values()), used).packed()
        own_B = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        rows = yield from rows_of_all(len(self.records), own_B)
        self.records = [Record.of(bytes(row.numpy()), len(digests)) for row in rows]
        if digests:
            reported = [one.digests if one.trains else None for one in self.records]
            refuse_other_bits(step, [*digests], reported)

    def confirmation(
        self, step: int, used: bytes, messages: Sequence[Message], streams: Streams
    ) -> Steps[None]:
        """The text by which ranks confirm that they have all means of a step.

        The norm is taken anew after the first step among these ranks, and after 1, 2, 4 and so on
        to 64, 128, 192 and so on.
        """
        if self._is_norm_due(step + 1):

            def note() -> None:
                owed = [tensor for one in messages for tensor in residuals(one.state).values()]
                with streams.beside():
                    self._norm, self._num_steps = norm_over_all(owed), step + 1

            yield Compute("norm", note)
        self._newcomer = self.look()
        yield from self.text(step, used, {})

    def _is_norm_due(self, num_steps: int) -> bool:
        early = num_steps < NORM_EVERY and num_steps.bit_count() == 1
        return not self._num_steps or num_steps % NORM_EVERY == 0 or early
