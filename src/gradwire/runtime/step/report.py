"""StepReport: each rank's record of a step, which travels beside the gradients.

It says which parameters the rank used and, in some steps, the digests of its
parameters. A step of dense messages needs no record of used parameters: flags travel in
the last message.

If a step must count on all ranks or on none (``on_failure="shrink"``), the record is
sent again once the rank has all means. The second record confirms the step, and no rank
goes on before it has all of them. Otherwise a rank that dies might leave some ranks
with all means and others without. A rank that fails meanwhile knows that no other rank
has gone on, or that all could have.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ...contract.spec import NamedParam
from ...contract.verbs import Compute, Steps
from ...exchange.error_feedback import residuals
from ..device.streams import Streams
from ..engine.engine import rows_of_all
from .figures import norm_over_all
from .integrity import digests_of, refuse_other_bits
from .messages import Message

NORM_EVERY = 64
"""Steps between two norms that ranks report, after the first norms."""
_FIGURES = "<dqqq"


Equal = Callable[[Collection[str] | None], list[NamedParam]]
"""A function of the names of a step's parameters (None: all). It returns tensors, with
names, that have the same bits on all ranks when the step begins.
"""


@dataclass(eq=False)
class Check:
    """Compares tensors that are ``equal`` on all ranks, in each ``every``-th step.

    With None it compares them in no step.
    """

    every: int | None
    equal: Equal
    trains: bool = True
    """Whether this rank steps its parameters; not once its data have ended."""
    _own: dict[str, int] = field(default_factory=dict)
    _own_step: int = -1

    def look(self, own_step: int, names: Collection[str] | None = None) -> None:
        """Takes the digests, once, for step ``own_step`` of the parameters.

        Ranks may change their parameters between backward passes that accumulate. So
        this is called when the first of these passes begins.
        """
        if self.every is None or (own_step + 1) % self.every:
            return
        if self._own_step == own_step:
            return
        named = dict(self.equal(names))
        digests = digests_of([*named.values()]) if self.trains else [0] * len(named)
        self._own = dict(zip(named, digests, strict=True))
        self._own_step = own_step

    def forget(self) -> None:
        """Drops the digests of a step not made, as others may not have begun it."""
        self._own_step = -1

    def taken(self, own_step: int) -> dict[str, int]:
        """The digests for step ``own_step``, at the first call; else empty."""
        taken = self._own if self._own_step == own_step else {}
        self.forget()
        return taken


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
    """For each parameter, in order: 1 if the rank has a gradient of it, else 0."""

    def packed(self) -> bytes:
        """The record as bytes, whose number is the same on every rank."""
        # No flip of a single bit turns "trains" into "does not train".
        figures = struct.pack(_FIGURES, *self[:3], -self.trains)
        digests = struct.pack(f"<{len(self.digests)}q", *self.digests)
        return figures + digests + self.used

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
        self.check = check
        self.confirms = False
        self.look: Callable[[], int] = lambda: 0
        """The number of the newcomer that waits, as this rank sees it, or 0."""
        self.restart(world)

    def restart(self, world: int) -> None:
        """Begins anew among ``world`` ranks."""
        self.records = [Record()] * world
        self._own = Record()

    @property
    def newcomer(self) -> int:
        """The newcomer that rank 0 saw as the last step was confirmed, on all alike."""
        return self.records[0].newcomer

    @property
    def used(self) -> list[bool]:
        """For each parameter whether any rank used it in the last step."""
        return [
            any(flags)
            for flags in zip(*(record.used for record in self.records), strict=True)
        ]

    def steps(self, step: int, used: bytes, digests: Mapping[str, int]) -> Steps[None]:
        """The steps by which ranks exchange their records of a step.

        Raises ``RankFailed``, on every rank alike, if digests differ.
        """
        own = self._own._replace(
            trains=self.check.trains, digests=tuple(digests.values()), used=used
        )
        own_B = torch.frombuffer(bytearray(own.packed()), dtype=torch.uint8)
        rows = yield from rows_of_all(len(self.records), own_B)
        self.records = [Record.of(bytes(row.numpy()), len(digests)) for row in rows]
        if digests:
            reported = [one.digests if one.trains else None for one in self.records]
            refuse_other_bits(step, [*digests], reported)

    def confirmation(
        self, step: int, used: bytes, messages: Sequence[Message], streams: Streams
    ) -> Steps[None]:
        """The steps by which ranks confirm that they have all means of a step.

        The norm is taken anew after the first step among these ranks, and after 1, 2, 4
        and so on to 64, 128, 192 and so on.
        """
        num_steps = step + 1
        early = num_steps < NORM_EVERY and num_steps.bit_count() == 1
        if not self._own.num_steps or num_steps % NORM_EVERY == 0 or early:

            def note() -> None:
                owed = [
                    own for one in messages for own in residuals(one.state).values()
                ]
                with streams.beside():
                    norm = norm_over_all(owed)
                self._own = self._own._replace(norm=norm, num_steps=num_steps)

            yield Compute("norm", note)
        self._own = self._own._replace(newcomer=self.look())
        yield from self.steps(step, used, {})
