"""Kept elements become a payload, and a payload a gradient again.

Kernels append what they keep to memory that has room for all; once its number is known it is cut to
the largest, if there are too many, and put where the payload's size lets it lie.

Legend: N elements of the gradient, C that a filter kept, K of them sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..contract.payload import Payload
from ..kernels import select
from .build import Call
from .interp import Draws
from .ir import FLOAT32, Extent, Kernel, Op
from .layout import MEMORY, most_kept, program_format
from .rewrite import OUT, RANKED, Traced, unpacked
from .steps import Kernels, placed, run_forms, scratch


def encode_kept(
    made: Kernels, calls: Sequence[Call], buffers: Sequence[Tensor | None]
) -> list[Payload]:
    """The payloads, in the front of ``buffers`` where they are given; residuals are updated."""
    memory = _memory(made.traced, calls)
    heads = [_head(made.traced, call, buffer) for call, buffer in zip(calls, buffers, strict=True)]
    keeping = [
        call._replace(operands={**call.operands, **own}, payload=head)
        for call, own, head in zip(calls, memory, heads, strict=True)
    ]
    counts = run_forms(made.built, made.encode, made.encode_with_residual, keeping)
    kept = [
        {name: full[:count] for name, full in own.items()}
        for own, count in zip(memory, counts, strict=True)
    ]
    sent = _cut(made.traced, kept, [most_kept(made.traced, call.numel) for call in calls])
    rows = zip(keeping, sent, buffers, strict=True)
    return [_payload(made, call, own, buffer) for call, own, buffer in rows]


def _memory(program: Traced, calls: Sequence[Call]) -> list[dict[str, Tensor]]:
    """The memory of each call's kept elements, by buffer name."""
    if not calls:
        return []
    device = calls[0].operands["gradient"].device
    lengths = [call.numel for call in calls]
    kept = (*program.kept, *program.extra)
    columns = [scratch(b.name, MEMORY.get(b.dtype, torch.uint8), lengths, device) for b in kept]
    return [
        {b.name: own for b, own in zip(kept, row, strict=True)}
        for row in zip(*columns, strict=True)
    ]


def _head(program: Traced, call: Call, buffer: Tensor | None) -> Payload:
    """The fields that lie before the kept ones, in the front of ``buffer`` or in a new one."""
    format = program_format(program, call.numel, 0)
    front = None if buffer is None else buffer[: format.size_bytes]
    return Payload.empty(format, front, call.operands["gradient"].device)


def _payload(made: Kernels, call: Call, kept: dict[str, Tensor], buffer: Tensor | None) -> Payload:
    """The payload of these elements, which are no more than may be sent."""
    program, head = made.traced, call.payload
    assert head is not None
    assert head.buffer is not None
    count = kept[program.indices.name].numel()
    format = program_format(program, call.numel, count)
    front = None if buffer is None else buffer[: format.size_bytes]
    payload = placed(format, front, head.buffer.device)
    if head.size_bytes and buffer is None:
        assert payload.buffer is not None
        payload.buffer[: head.size_bytes].copy_(head.buffer)
    _fill(made, payload, kept, count)
    residual_N = call.operands.get("residual")
    if made.taken is not None and residual_N is not None and count:
        taken_K = _of_entries(made, made.taken, payload, {RANKED.name: kept[program.ranked.name]})
        select.scatter_add(payload[program.indices.name], taken_K, residual_N, -1.0)
    return payload


def _cut(
    program: Traced, kept: list[dict[str, Tensor]], mosts: Sequence[int]
) -> list[dict[str, Tensor]]:
    """The largest of what each call kept, or all of it where that is no more than may be sent."""
    over = [i for i, most in enumerate(mosts) if kept[i][program.indices.name].numel() > most]
    ranked = [kept[i][program.ranked.name] for i in over]
    largest = [torch.empty_like(own_C[: mosts[i]]) for i, own_C in zip(over, ranked, strict=True)]
    places = [torch.empty_like(own_K, dtype=torch.int32) for own_K in largest]
    select.topk_many(ranked, places, largest, [None] * len(over))
    for i, places_K, largest_K in zip(over, places, largest, strict=True):
        sent = {
            name: largest_K if name == program.ranked.name else memory.index_select(0, places_K)
            for name, memory in kept[i].items()
        }
        kept[i] = sent
    return kept


def _fill(made: Kernels, payload: Payload, kept: Mapping[str, Tensor], count: int) -> None:
    """Puts the kept fields where they belong, codes packed."""
    codes: dict[str, Tensor] = {}
    for field in made.traced.kept:
        if field in made.traced.packed:
            codes[unpacked(field).name] = kept[field.name]
        else:
            payload[field.name].copy_(kept[field.name])
    if made.pack is not None and count:
        made.built.run_many(made.pack, (Call(codes, count, Draws(), payload),))


def merge_kept(made: Kernels, payload: Payload, sum_N: Tensor, scale: float) -> None:
    """Adds ``scale`` times each kept value at its place; ``sum_N`` is contiguous float32."""
    indices_K = payload[made.traced.indices.name]
    select.scatter_add(indices_K, _values(made, payload), sum_N, scale)


def entries_kept(made: Kernels, payload: Payload) -> tuple[Tensor, Tensor]:
    """Indices of the kept elements, and what they decode to (a buffer that is reused)."""
    indices_K = payload[made.traced.indices.name]
    if not indices_K.numel():
        return indices_K, indices_K.to(torch.float32)
    return indices_K, _values(made, payload)


def _values(made: Kernels, payload: Payload) -> Tensor:
    """The values that the kept elements decode to."""
    decoded = made.decode.stores[0].sources[0]
    if decoded.op is Op.LOAD and decoded.dtype is FLOAT32 and decoded.arg.extent is Extent.ELEMENT:
        return payload[decoded.arg.name]
    return _of_entries(made, made.decode, payload, {})


def _of_entries(
    made: Kernels, kernel: Kernel, payload: Payload, operands: Mapping[str, Tensor]
) -> Tensor:
    """The output of a kernel whose elements are those of the payload."""
    assert payload.buffer is not None
    count = payload[made.traced.indices.name].numel()
    (out_K,) = scratch("out", torch.float32, [count], payload.buffer.device)
    call = Call({OUT.name: out_K, **operands}, count, Draws(), payload)
    made.built.run_many(kernel, (call,))
    return out_K
