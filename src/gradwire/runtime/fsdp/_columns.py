"""Columns: the parameters of one ``fully_shard``, as FSDP lays their shards out."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...collective.casync_ps import casync_ps
from ...collective.steps.chunks import Chunks
from ...contract import Compressor, Member
from ...contract.spec import TensorSpec, working_dtype
from ...contract.state import leaves
from ...contract.tensorwise import tensorwise
from ...contract.verbs import Steps
from ..failure.membership import Membership
from ..step.messages import Slot

WAY = casync_ps()


class Column(NamedTuple):
    """One parameter, and where its shard lies in what every rank holds of its module."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The elements of a shard, with what it is padded by."""
        return self.stop - self.start


class KeptOfColumns(NamedTuple):
    """The state of columns: that of each rank's codec, and what was not sent yet."""

    codecs: tuple[Any, ...]
    residual_N: Tensor | None


class ColumnsOfCodec:
    """The columns of one ``fully_shard`` that one codec encodes, and what is kept of them.

    To checkpoints it is a message whose ``slots`` are every rank's shard of every column.
    """

    chooser = None
    """No codec of columns chooses its settings."""

    def __init__(
        self,
        codec: Compressor,
        columns: list[Column],
        dtype: torch.dtype,
        who: Membership,
    ) -> None:
        world, self.exchange, self.columns, self.dtype = who.world, codec, columns, dtype
        self.key, self.me = "", Member(who.rank, world)
        self.numel = numel = sum(one.size for one in columns)
        whole = tensorwise(codec, tuple(one.size for one in columns) * world)
        mine, self._anyones = whole.for_world(world, who.rank), whole.for_world(world)
        bounds = tuple((r * numel, (r + 1) * numel) for r in range(world))
        codecs = tuple(mine.chunk(a, b) for a, b in bounds)
        first = columns[0].name  # streams of random numbers follow from names
        specs = tuple(TensorSpec(f"{first}[{a}:{b}]", numel, dtype) for a, b in bounds)
        formats = tuple(one.format(spec) for one, spec in zip(codecs, specs, strict=True))
        self._chunks = Chunks(bounds, codecs, specs, formats)
        ends = accumulate((one.size for one in columns), initial=0)
        self._placed = [*zip(ends, columns, strict=False)]
        self.slots: list[Slot] = []
        self._padding: list[slice] = []
        for place, one in self._placed:
            for rank in range(world):
                start, left = rank * numel + place, prod(one.shape) - rank * one.size
                stop = start + min(max(left, 0), one.size)
                self.slots.append(Slot(one.name, rank * one.size, start, stop, False))
                self._padding.append(slice(stop, start + one.size))
        self.state = self.first_state()
        self._sent_N = torch.empty(world * numel, dtype=dtype, device="cpu")
        self._mean_C = torch.empty(numel, dtype=dtype, device="cpu")

    def text(self, given_N: Tensor, out_C: Tensor) -> Steps[None]:
        """One reduce-scatter of these columns; what a module hands in is a row for each rank."""
        rows, own_rows = given_N.view(self.me.world, -1), self._sent_N.view(self.me.world, -1)
        for place, one in self._placed:
            own_rows[:, place : place + one.size] = rows[:, one.start : one.stop]
        codecs, residual_N = self.state
        text = WAY.reduce_scatter(
            self.me, self._chunks, codecs, self._sent_N, self._mean_C, residual_N
        )
        self.state = KeptOfColumns(tuple((yield from text)), residual_N)
        for place, one in self._placed:
            out_C[one.start : one.stop] = self._mean_C[place : place + one.size]
        if residual_N is not None:
            for padding in self._padding:
                residual_N[padding] = 0  # no saved state has it

    def first_state(self) -> KeptOfColumns:
        """The state that training begins with."""
        pairs, residual_N = zip(self._chunks.bounds, self._chunks.specs, strict=True), None
        states = tuple(self._anyones.chunk(*own).init(spec) for own, spec in pairs)
        if self.exchange.traits.error_feedback:
            whole = self.me.world * self.numel
            residual_N = torch.zeros(whole, dtype=working_dtype(self.dtype), device="cpu")
        return KeptOfColumns(states, residual_N)

    def kept_range(self, slot: Slot) -> tuple[int, int]:
        """The range of a slot's parameter that this rank keeps state of: all that it sends."""
        return slot.first, slot.last

    def state_of(self, slot: Slot, state: KeptOfColumns | None = None) -> dict[str, Tensor]:
        """The part of ``state`` (None: the own one) that one rank's shard of one column has."""
        residual_N = (state or self.state).residual_N
        return {} if residual_N is None else {"residual_N": self.part(slot, residual_N)}

    def part(self, slot: Slot, residual_N: Tensor) -> Tensor:
        """The residual of one rank's shard of one column."""
        return residual_N[slot.start : slot.stop]

    def range_of(self, slot: Slot, held: Tensor) -> tuple[int, int]:
        """The elements of its parameter that a slot is of."""
        return slot.first, slot.last

    def rest_of_state(self, state: KeptOfColumns | None = None) -> dict[str, Tensor]:
        """The tensors of ``state`` (None: the own one) beside residuals."""
        return dict(leaves((state or self.state).codecs))
