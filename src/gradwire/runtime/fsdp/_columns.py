"""Columns: the parameters of one ``fully_shard``, as FSDP lays their shards out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...collective.casync_ps import casync_ps
from ...collective.steps.chunks import Chunks
from ...contract import Compressor, Member
from ...contract.spec import TensorSpec, working_dtype
from ...contract.tensorwise import tensorwise
from ...contract.verbs import Steps
from ..failure.membership import Membership

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


class ColumnsOfCodec:
    """The columns of one ``fully_shard`` that one codec encodes, and what is kept of them."""

    def __init__(
        self, codec: Compressor, columns: list[Column], dtype: torch.dtype, who: Membership
    ) -> None:
        world, self.columns, self.dtype = who.world, columns, dtype
        self.me, self.numel = Member(who.rank, world), sum(one.size for one in columns)
        sizes = tuple(one.size for one in columns) * world
        whole = tensorwise(codec, sizes)
        mine, anyones = whole.for_world(world, who.rank), whole.for_world(world)
        bounds = tuple((r * self.numel, (r + 1) * self.numel) for r in range(world))
        codecs = tuple(mine.chunk(a, b) for a, b in bounds)
        first = columns[0].name  # streams of random numbers follow from names
        specs = tuple(TensorSpec(f"{first}[{a}:{b}]", self.numel, dtype) for a, b in bounds)
        formats = tuple(one.format(spec) for one, spec in zip(codecs, specs, strict=True))
        self._chunks = Chunks(bounds, codecs, specs, formats)
        self.states: Any = tuple(
            anyones.chunk(a, b).init(spec) for (a, b), spec in zip(bounds, specs, strict=True)
        )
        self.residual_N: Tensor | None = None
        if codec.traits.error_feedback:
            self.residual_N = torch.zeros(
                world * self.numel, dtype=working_dtype(dtype), device="cpu"
            )
        self._sent_N = torch.empty(world * self.numel, dtype=dtype, device="cpu")
        self._mean_C = torch.empty(self.numel, dtype=dtype, device="cpu")

    def text(self, given_N: Tensor, out_C: Tensor) -> Steps[None]:
        """One reduce-scatter of these columns; what a module hands in is a row for each rank."""
        rows, own_rows = given_N.view(self.me.world, -1), self._sent_N.view(self.me.world, -1)
        for place, one in self._placed():
            own_rows[:, place : place + one.size] = rows[:, one.start : one.stop]
        text = WAY.reduce_scatter(
            self.me, self._chunks, self.states, self._sent_N, self._mean_C, self.residual_N
        )
        self.states = tuple((yield from text))
        for place, one in self._placed():
            out_C[one.start : one.stop] = self._mean_C[place : place + one.size]
        for _, padding in self._kept():
            padding.zero_()  # no saved state has it

    def _placed(self) -> Iterable[tuple[int, Column]]:
        """Each column, and its place among those of this part."""
        place = 0
        for one in self.columns:
            yield place, one
            place += one.size

    def _kept(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Residuals of every rank's shard of every column: of its elements, and of padding."""
        for place, one in self._placed() if self.residual_N is not None else ():
            for rank, row in enumerate(self.residual_N.view(self.me.world, -1)):  # type: ignore[union-attr]
                num_held = min(max(prod(one.shape) - rank * one.size, 0), one.size)
                yield row[place : place + num_held], row[place + num_held : place + one.size]

    def residuals(self) -> dict[str, Tensor]:
        """A copy of what is kept of each whole parameter, 1-D, in the working dtype."""
        kept, world = [held for held, _ in self._kept()], self.me.world
        rows = [kept[place : place + world] for place in range(0, len(kept), world)]
        return {one.name: torch.cat(row) for one, row in zip(self.columns, rows, strict=False)}

    def put(self, residuals: Mapping[str, Tensor]) -> None:
        """Puts in place what ``residuals`` has returned."""
        kept = iter(self._kept())
        for one in self.columns if self.residual_N is not None else ():
            rest_N = residuals[one.name]
            for _ in range(self.me.world):
                held, _ = next(kept)
                held.copy_(rest_N[: held.numel()])
                rest_N = rest_N[held.numel() :]
