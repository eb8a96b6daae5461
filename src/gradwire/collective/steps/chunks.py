"""Chunks: a message cut into a part for each rank, each encoded by itself.

A message of fewer partitions than ranks is served by some of the ranks. The ranks
behind them serve the next message with the same exchange, so ranks take turns. Chunks
of other ranks are empty. If only the last ranks serve, these take turns.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from ...contract import Compressor, Member, State
from ...contract.bounds import check_whole
from ...contract.payload import Format, Payload
from ...contract.spec import TensorSpec, chunk_bounds
from ...errors import invalid

T = TypeVar("T")


@dataclass(frozen=True)
class Chunks:
    """Bounds of the chunk that each rank serves, each one's codec and spec, and the
    format of its largest payload.
    """

    bounds: tuple[tuple[int, int], ...]
    codecs: tuple[Compressor, ...]
    specs: tuple[TensorSpec, ...]
    formats: tuple[Format, ...]

    def of(self, flat_N: Tensor) -> list[Tensor]:
        """The chunks of a flat gradient, residual or mean, as views."""
        return [flat_N[start:stop] for start, stop in self.bounds]

    @cached_property
    def servers(self) -> list[int]:
        """The ranks whose chunk is not empty."""
        return [rank for rank, (start, stop) in enumerate(self.bounds) if start < stop]

    @cached_property
    def usual_bytes(self) -> int:
        """The room of the largest chunk's payload of usual size.

        A simulation knows no other.
        """
        each = zip(self.codecs, self.specs, strict=True)
        return max(codec.typical(spec).slot_bytes for codec, spec in each)

    def payload(self, chunk: int, buffer: Tensor, size_bytes: int) -> Payload:
        """The payload of a chunk that lies at the front of ``buffer``."""
        form = self.formats[chunk]
        if size_bytes != form.size_bytes:
            form = self.codecs[chunk].received(self.specs[chunk], size_bytes)
        return Payload(form, buffer[:size_bytes])


@lru_cache(maxsize=4096)
def chunks_of(
    codec: Compressor,
    numel: int,
    dtype: torch.dtype,
    world: int,
    partitions: int | None = None,
    first: int = 0,
) -> Chunks:
    """The chunks of a gradient of ``numel`` elements among ``world`` ranks.

    Rank ``first`` serves the first one, and the ranks behind it the others.
    """
    bounds = rotated(partition_bounds(numel, world, partitions), first)
    codecs = tuple(codec.chunk(a, b) for a, b in bounds)
    specs = tuple(TensorSpec("", b - a, dtype) for a, b in bounds)
    formats = tuple(each.format(spec) for each, spec in zip(codecs, specs, strict=True))
    return Chunks(bounds, codecs, specs, formats)


def first_states(
    codec: Compressor, spec: TensorSpec, world: int, partitions: int | None = None
) -> tuple[State, ...]:
    """The codec's state before the first step for each chunk, by order of elements."""
    codec = codec.for_world(world)
    bounds = partition_bounds(spec.numel, world, partitions)
    return tuple(codec.chunk(a, b).init(spec.chunk(a, b)) for a, b in bounds)


def partition_bounds(
    numel: int, world: int, partitions: int | None
) -> tuple[tuple[int, int], ...]:
    """Cuts ``numel`` elements into so many partitions (None: one a rank), and empty
    ones to ``world``.

    Raises ``InvalidSetting`` for more partitions than ranks. A rank that is alone has
    one.

    >>> partition_bounds(20, 4, 2)
    ((0, 16), (16, 20), (20, 20), (20, 20))
    """
    count = world if partitions is None or world == 1 else partitions
    if count > world:
        raise invalid(
            "partitions",
            partitions,
            f"at most one for each of {world} ranks",
            "leave it out for one a rank, or cut the gradient into several messages",
        )
    return chunk_bounds(numel, count) + ((numel, numel),) * (world - count)


def check_partitions(partitions: int | None) -> None:
    """Raises ``InvalidSetting`` unless None or a valid number of partitions."""
    if partitions is not None:
        check_whole("partitions", partitions, "leave it out for one a rank")


def first_server(me: Member, partitions: int | None, servers: int | None = None) -> int:
    """The rank that serves a message's first partition, after the last message's.

    If only the last ``servers`` ranks serve, it is one of them.
    """
    turn = me.order * (partitions or 0)
    if servers is None:
        return turn % me.world
    last = servers - (partitions or servers)
    return me.world - servers + min(turn % servers, last)


def rotated(items: tuple[T, ...], by: int) -> tuple[T, ...]:
    """The items, moved by ``by`` places, modulo their number.

    >>> rotated(("a", "b", "c"), 1), rotated(("c", "a", "b"), -1)
    (('c', 'a', 'b'), ('a', 'b', 'c'))
    """
    cut = -by % len(items)
    return items[cut:] + items[:cut]
