"""Chunks: a message cut into as many parts as there are ranks, each encoded by itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..contract import Compressor, State
from ..payload import Format, Payload
from ..spec import TensorSpec, chunk_bounds


@dataclass(frozen=True)
class Chunks:
    """Bounds of the chunks, each one's codec and spec, and the format of its largest payload."""

    bounds: tuple[tuple[int, int], ...]
    codecs: tuple[Compressor, ...]
    specs: tuple[TensorSpec, ...]
    formats: tuple[Format, ...]

    def of(self, flat_N: Tensor) -> list[Tensor]:
        """The chunks of a flat gradient, residual or mean, as views."""
        return list(torch.split(flat_N, [stop - start for start, stop in self.bounds]))

    def payload(self, chunk: int, buffer: Tensor, size_bytes: int) -> Payload:
        """The payload of a chunk that lies at the front of ``buffer``."""
        form = self.formats[chunk]
        if size_bytes != form.size_bytes:
            form = self.codecs[chunk].received(self.specs[chunk], size_bytes)
        return Payload(form, buffer[:size_bytes])


@lru_cache(maxsize=4096)
def chunks_of(codec: Compressor, numel: int, dtype: torch.dtype, world: int) -> Chunks:
    """The chunks of a gradient of ``numel`` elements among ``world`` ranks."""
    bounds = chunk_bounds(numel, world)
    codecs = tuple(codec.chunk(a, b) for a, b in bounds)
    specs = tuple(TensorSpec("", b - a, dtype) for a, b in bounds)
    formats = tuple(each.format(spec) for each, spec in zip(codecs, specs, strict=True))
    return Chunks(bounds, codecs, specs, formats)


def first_states(codec: Compressor, spec: TensorSpec, world: int) -> tuple[State, ...]:
    """The codec's state for each chunk, before the first step."""
    codec, bounds = codec.for_world(world), chunk_bounds(spec.numel, world)
    return tuple(codec.chunk(a, b).init(spec.chunk(a, b)) for a, b in bounds)
