"""Tensorwise: the tensors that travel in one message, each encoded by itself.

Elements of a block share a scale or a mean. A block that reached from an embedding into
a norm would serve neither, so where a codec declares ``shared_scale``, blocks restart
at every tensor. HiPress compresses each layer by itself too, and calls one kernel for
several (section 3.2).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby, islice, pairwise
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ...contract import Compressor, Memory, Residual, State
from ...contract.payload import Field, Format, Payload, slot_bytes
from ...contract.spec import TensorSpec
from ...errors import RanksDiffer, invalid
from .size_only import Delegating, SizeOnlyCompressor


def tensorwise(codec: Compressor, sizes: tuple[int, ...]) -> Compressor:
    """The codec for a message of tensors of ``sizes`` elements in a row.

    It is ``codec`` itself where elements share no scale, or where there is only one
    tensor.
    """
    if not codec.traits.shared_scale or len(sizes) < 2:
        return codec
    if isinstance(codec, SizeOnlyCompressor):
        return SizeOnlyCompressor(Tensorwise(codec.codec, sizes))
    return Tensorwise(codec, sizes)


def tensor_sizes(spec: TensorSpec) -> tuple[int, ...]:
    """Elements of each tensor that lies in a message; empty ones are left out."""
    return tuple(size for size in map(prod, spec.shapes) if size) or (spec.numel,)


@dataclass(frozen=True)
class Joined(Format):
    """The layout of several tensors' payloads as one.

    ``dtype`` is that of their gradients.

    ``num_entries`` is how many indices these payloads have together, where their
    layouts are known.
    """

    dtype: torch.dtype = torch.float32
    num_entries: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Tensorwise(Delegating):
    """A codec that encodes the tensors of a flat gradient apart, in one payload.

    ``sizes`` are the tensors' numbers of elements, in order. The payload holds theirs
    one behind the other, each rounded up to 8 bytes. Where sizes of payloads vary,
    theirs in bytes go before them, an int64 for each tensor.
    """

    sizes: tuple[int, ...]

    @property
    def codecs(self) -> tuple[Compressor, ...]:
        """The codec of each tensor; ``codec``, or variants of it."""
        return (self.codec,) * len(self.sizes)

    def for_world(self, world: int, rank: int = 0) -> Compressor:
        return Tensorwise(self.codec.for_world(world, rank), self.sizes)

    def chunk(self, start: int, stop: int) -> Compressor:
        return tensorwise(self.codec, tuple(filter(None, self.inside(start, stop))))

    def init(self, spec: TensorSpec) -> State:
        each = zip(self.codecs, self._bounds(), strict=True)
        return tuple(codec.init(spec.chunk(a, b)) for codec, (a, b) in each)

    def format(self, spec: TensorSpec) -> Joined:
        form = self._forms.get(spec.dtype)
        if form is None:
            form = self.joined(spec.dtype, self.largest(spec.dtype))
            self._forms[spec.dtype] = form
        return form

    @cached_property
    def _forms(self) -> dict[torch.dtype, Joined]:
        """The layouts of all tensors' largest payloads as one, by dtype."""
        return {}

    @cached_property
    def _largest(self) -> dict[torch.dtype, tuple[Format, ...]]:
        """The layouts that ``largest`` has made."""
        return {}

    def typical(self, spec: TensorSpec) -> Joined:
        each = zip(self.codecs, self.sizes, strict=True)
        forms = tuple(
            codec.typical(TensorSpec("", size, spec.dtype)) for codec, size in each
        )
        return self.joined(spec.dtype, forms)

    def received(self, spec: TensorSpec, size_bytes: int) -> Format:
        if self.traits.exact_size:
            return super().received(spec, size_bytes)
        room_bytes = size_bytes - self._first
        most_bytes = sum(form.slot_bytes for form in self.largest(spec.dtype))
        if not 0 <= room_bytes <= most_bytes or room_bytes % slot_bytes(1):
            raise self.no_such_size(spec, size_bytes)
        return self._announcing(spec.dtype, room_bytes)

    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Residual = None,
        buffer: Memory = None,
    ) -> tuple[Payload, State]:
        (encoded,) = encode_each((self,), (state,), (grad_N,), (residual_N,), (buffer,))
        return encoded

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        for codec, parts, outs in _batches(_jobs_of(self, payload, out_N)):
            codec.decode_many(parts, outs, scale=scale)
        return out_N

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        for codec, parts, sums in _batches(_jobs_of(self, payload, sum_N)):
            codec.merge_many(parts, sums, scale=scale)

    def merge_all(
        self, payloads: Sequence[Payload], sum_N: Tensor, *, scale: float = 1.0
    ) -> None:
        of_tensors = zip(*map(self.parts, payloads), strict=True)
        for codec, tensor_payloads, part_N in zip(
            self.codecs, of_tensors, self.cut(sum_N), strict=True
        ):
            codec.merge_all(tensor_payloads, part_N, scale=scale)

    def entries(self, payload: Payload) -> tuple[Tensor, Tensor]:
        indices = []
        values = []
        each = zip(self.codecs, self._bounds(), self.parts(payload), strict=True)
        for codec, (start, _), part in each:
            indices_K, values_K = codec.entries(part)
            indices.append(indices_K + start // self.width)
            # it may lie in a buffer that the next tensor's takes
            values.append(values_K.clone())
        return torch.cat(indices), torch.cat(values)

    def cut(self, flat_N: Tensor) -> tuple[Tensor, ...]:
        """The tensors of a flat gradient, residual or mean, as views of it."""
        if flat_N.numel() != sum(self.sizes):
            raise invalid(
                "elements of a message",
                flat_N.numel(),
                f"{sum(self.sizes)}, the sum over its tensors",
                "pass all of them",
            )
        return flat_N.split_with_sizes(self.sizes)

    def parts(self, payload: Payload) -> list[Payload]:
        """The payload of each tensor, as views.

        ``RanksDiffer`` if sizes announced are none.
        """
        form = payload.format
        buffer = payload.buffer
        if not isinstance(form, Joined) or buffer is None:
            raise invalid(
                "payload", payload, f"one by {self!r}", "decode what it encoded"
            )
        forms = (
            self.largest(form.dtype)
            if self.traits.exact_size
            else self._announced(payload, form)
        )
        return list(map(Payload, forms, self._rooms(forms, buffer)))

    def rooms(self, dtype: torch.dtype, buffer: Tensor) -> list[Tensor]:
        """The room of each tensor's payload in the one of all.

        Bytes between them become zeros.
        """
        forms = self.largest(dtype)
        ends = accumulate([form.slot_bytes for form in forms])
        for end, form in zip(ends, forms, strict=True):
            if form.size_bytes < form.slot_bytes:
                buffer[end - form.slot_bytes + form.size_bytes : end] = 0
        return self._rooms(forms, buffer)

    def announced(
        self, payloads: Sequence[Payload], dtype: torch.dtype, buffer: Memory
    ) -> Payload:
        """The payload of all tensors from each tensor's payload, where sizes vary."""
        forms = [payload.format for payload in payloads]
        form = self.joined(dtype, forms)
        contents = [payload.content for payload in payloads]
        front = None if buffer is None else buffer[: form.size_bytes]
        joined = Payload.empty(form, front, contents[0].device)
        joined["sizes"].copy_(
            torch.tensor([payload.size_bytes for payload in payloads])
        )
        joined["payloads"].zero_()
        rooms = self._rooms(forms, joined.content)
        torch._foreach_copy_(rooms, contents)
        return joined

    def joined(self, dtype: torch.dtype, forms: Sequence[Format]) -> Joined:
        """The layout of all tensors' payloads from that of each."""
        slots = [form.slot_bytes for form in forms]
        entries = sum(form.num_entries or 0 for form in forms)
        if not self.traits.exact_size:
            return self._announcing(dtype, sum(slots), entries)
        fields = (
            Field(f"tensor {i}", torch.uint8, slot) for i, slot in enumerate(slots)
        )
        return Joined(tuple(fields), dtype=dtype, num_entries=entries)

    def largest(self, dtype: torch.dtype) -> tuple[Format, ...]:
        """The layout of each tensor's largest payload."""
        forms = self._largest.get(dtype)
        if forms is None:
            each = zip(self.codecs, self.sizes, strict=True)
            forms = tuple(
                codec.format(TensorSpec("", size, dtype)) for codec, size in each
            )
            self._largest[dtype] = forms
        return forms

    def inside(self, start: int, stop: int) -> list[int]:
        """How many elements of each tensor lie in a range of the message."""
        shared = ((max(a, start), min(b, stop)) for a, b in self._bounds())
        return [max(0, last - first) for first, last in shared]

    def _bounds(self) -> list[tuple[int, int]]:
        return list(pairwise(accumulate(self.sizes, initial=0)))

    @property
    def _first(self) -> int:
        """The byte at which the first tensor's payload begins."""
        return 0 if self.traits.exact_size else torch.int64.itemsize * len(self.sizes)

    def _rooms(self, forms: Sequence[Format], buffer: Tensor) -> list[Tensor]:
        starts = accumulate([form.slot_bytes for form in forms], initial=self._first)
        return [
            buffer[at : at + form.size_bytes]
            for at, form in zip(starts, forms, strict=False)
        ]

    def _announced(self, payload: Payload, form: Joined) -> tuple[Format, ...]:
        """The layouts that the sizes announced in a payload stand for."""
        announced: list[int] = payload["sizes"].tolist()
        limits = [each.size_bytes for each in self.largest(form.dtype)]
        fits = all(
            0 <= size <= limit for size, limit in zip(announced, limits, strict=True)
        )
        if not fits or sum(map(slot_bytes, announced)) != payload["payloads"].numel():
            raise RanksDiffer(
                f"a payload of {payload.size_bytes} bytes announces tensors of "
                f"{announced} bytes, which may have {limits}; give every rank the same "
                "model, compressor and settings"
            )
        specs = (TensorSpec("", size, form.dtype) for size in self.sizes)
        each = zip(self.codecs, specs, announced, strict=True)
        return tuple(
            codec.received(spec, size_bytes) for codec, spec, size_bytes in each
        )

    def _announcing(
        self, dtype: torch.dtype, room_bytes: int, num_entries: int | None = None
    ) -> Joined:
        """The layout where sizes vary, of payloads that take ``room_bytes`` in all."""
        announced = Field("sizes", torch.int64, len(self.sizes))
        room = Field("payloads", torch.uint8, room_bytes)
        return Joined((announced, room), dtype=dtype, num_entries=num_entries)


def encode_each(
    codecs: Sequence[Compressor],
    states: Sequence[State],
    grads: Sequence[Tensor],
    residuals: Sequence[Tensor | None],
    buffers: Sequence[Tensor | None],
) -> list[tuple[Payload, State]]:
    """``encode`` of several gradients, each by its own chunk of one codec.

    Tensors that one codec encodes are one call of it. Other operands are as in
    ``encode_many``.
    """
    operands = zip(codecs, states, grads, residuals, buffers, strict=True)
    jobs = [_Job(*row) for row in operands]
    encoded = []
    for codec, *parts in _batches(
        [(part_codec, *part) for job in jobs for part_codec, part in job.each()]
    ):
        encoded += codec.encode_many(*parts)
    made = iter(encoded)
    return [job.joined(list(islice(made, len(job.parts)))) for job in jobs]


def decode_each(
    codecs: Sequence[Compressor], payloads: Sequence[Payload], outs: Sequence[Tensor]
) -> None:
    """``decode`` of several payloads by their own chunks of one codec, in one call."""
    each = zip(codecs, payloads, outs, strict=True)
    for codec, parts, tensors in _batches(
        [job for row in each for job in _jobs_of(*row)]
    ):
        codec.decode_many(parts, tensors)


def _jobs_of(
    codec: Compressor, payload: Payload, flat_N: Tensor
) -> Iterable[tuple[Compressor, Payload, Tensor]]:
    """The codec, the payload and the part of a flat gradient of each tensor."""
    if not isinstance(codec, Tensorwise):
        return ((codec, payload, flat_N),)
    return zip(codec.codecs, codec.parts(payload), codec.cut(flat_N), strict=True)


def _batches(jobs: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """Neighbours of one codec: it, and each other operand of all.

    The codec comes first in a job.
    """
    for codec, run in groupby(jobs, key=itemgetter(0)):
        _, *operands = zip(*run, strict=True)
        yield codec, *operands


class _Job:
    """One gradient to encode.

    ``parts`` are (state, gradient, residual, buffer) of its tensors.
    """

    def __init__(
        self,
        codec: Compressor,
        state: State,
        grad_N: Tensor,
        residual_N: Residual,
        buffer: Memory,
    ) -> None:
        self.codec = codec
        self.dtype = grad_N.dtype
        self.buffer = buffer
        self.parts: list[tuple[Any, ...]] = [(state, grad_N, residual_N, buffer)]
        if not isinstance(codec, Tensorwise):
            return
        grads = codec.cut(grad_N)
        nothing: Sequence[Any] = (None,) * len(grads)
        residuals = rooms = nothing
        if residual_N is not None:
            residuals = codec.cut(residual_N)
        if codec.traits.exact_size:
            form = codec.format(TensorSpec.of(grad_N))
            self.buffer = Payload.empty(form, buffer, grad_N.device).content
            rooms = codec.rooms(grad_N.dtype, self.buffer)
        self.parts = list(zip(state or nothing, grads, residuals, rooms, strict=True))

    def each(self) -> Iterable[tuple[Compressor, tuple[Any, ...]]]:
        """The codec of each part, and the part."""
        codecs = (
            self.codec.codecs if isinstance(self.codec, Tensorwise) else (self.codec,)
        )
        return zip(codecs, self.parts, strict=True)

    def joined(self, encoded: list[tuple[Payload, State]]) -> tuple[Payload, State]:
        """The payload and the state of the gradient, from its tensors' own."""
        if not isinstance(self.codec, Tensorwise):
            return encoded[0]
        payloads, states = zip(*encoded, strict=True)
        if not self.codec.traits.exact_size:
            return self.codec.announced(payloads, self.dtype, self.buffer), states
        numel = sum(self.codec.sizes)
        return Payload(
            self.codec.format(TensorSpec("", numel, self.dtype)), self.buffer
        ), states
