"""Steps between kernels: stages' scalars are made, and payloads filled.

Legend: N elements of the gradient, S of a sample, B blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ..contract.payload import Format, Payload
from ..contract.scratch import passing
from .build import Built, Call
from .coders import Coding, coding
from .ir import Kernel
from .layout import MEMORY, program_format
from .rewrite import KEYS, StageKernels, Traced, partials
from .stages import Pick


@dataclass(frozen=True, eq=False)
class Kernels:
    """The forms of a program under given settings, and what runs them.

    Of kept elements ``decode`` and ``merge`` are one kernel, which gives their values.
    """

    traced: Traced
    encode: Kernel
    encode_with_residual: Kernel
    decode: Kernel
    merge: Kernel
    stages: tuple[StageKernels, ...]
    pack: Kernel | None
    taken: Kernel | None
    built: Built

    @cached_property
    def draws(self) -> bool:
        """Whether encoding needs random numbers."""
        return self.encode.draws or any(stage.plain.draws for stage in self.stages)


def scratch(
    name: str, dtype: torch.dtype, lengths: Sequence[int], device: torch.device
) -> list[Tensor]:
    """Undefined vectors that the next call with this name overwrites: see `scratch.passing`."""
    whole, stops = passing(f"compll {name}", sum(lengths), dtype, device), accumulate(lengths)
    return [whole[stop - numel : stop] for numel, stop in zip(lengths, stops, strict=True)]


def run_forms(
    built: Built, plain: Kernel, with_residual: Kernel, calls: Sequence[Call]
) -> list[int]:
    """One run for the calls that have a residual, and one for the others.

    Returns how many elements each call kept; nothing is run for an empty gradient.
    """
    kept = [0] * len(calls)
    live = [(i, "residual" in call.operands) for i, call in enumerate(calls) if call.numel]
    for kernel, has_residual in ((plain, False), (with_residual, True)):
        places = [i for i, has in live if has is has_residual]
        if places:
            counts = built.run_many(kernel, [calls[i] for i in places])
            for place, count in zip(places, counts, strict=True):
                kept[place] = count
    return kept


# ---- stages ------------------------------------------------------------------------------------


def with_scalars(made: Kernels, calls: Sequence[Call]) -> list[Call]:
    """The calls with what the stages make of their gradients; an empty one needs nothing."""
    known = [call for call in calls if call.numel]
    for stage in made.stages if known else ():
        found = (_picked if stage.fold is None else _combined)(made.built, stage, known)
        known = [
            call._replace(operands={**call.operands, **scalars})
            for call, scalars in zip(known, found, strict=True)
        ]
    each = iter(known)
    return [next(each) if call.numel else call for call in calls]


def _picked(built: Built, made: StageKernels, calls: Sequence[Call]) -> list[dict[str, Tensor]]:
    picks = {stage.result.name: stage.how for stage in made.stages if isinstance(stage.how, Pick)}
    how = next(iter(picks.values()))
    counts = [how.draw.count(call.numel) for call in calls]
    device = calls[0].operands["gradient"].device
    samples = scratch("sample", torch.float32, counts, device)
    keys = samples
    if how.key is not None:
        keys = scratch(KEYS, MEMORY[how.key.dtype], counts, device)
    drawing = [
        call._replace(
            numel=count,
            operands={
                **call.operands,
                "population": _number(call.numel, device),
                "num_drawn": _number(count, device),
                "sample": sample_S,
                KEYS: key_S,
            },
        )
        for call, count, sample_S, key_S in zip(calls, counts, samples, keys, strict=True)
    ]
    run_forms(built, made.plain, made.with_residual, drawing)
    return [
        {name: _sorted_at(sample_S, key_S, how, call.numel) for name, how in picks.items()}
        for call, sample_S, key_S in zip(calls, samples, keys, strict=True)
    ]


def _sorted_at(sample_S: Tensor, key_S: Tensor, how: Pick, numel: int) -> Tensor:
    """The element that is picked, as a vector of one; equal keys stay in the order of places."""
    place = how.place(numel)
    key = _nth_smallest(key_S, key_S.numel() - 1 - place if how.descending else place)
    if key_S is sample_S:
        return key
    first_S, then_S = (key, key_S) if how.descending else (key_S, key)
    before_S = (first_S < then_S) | (then_S.isnan() & ~first_S.isnan())
    alike_S = (key_S == key) | (key_S.isnan() & key.isnan())
    return sample_S[alike_S.nonzero()[place - int(before_S.sum())]]


def _nth_smallest(vector_S: Tensor, rank: int) -> Tensor:
    """The element of this rank, from 0, as a vector of one; NaN ranks above infinity."""
    if vector_S.is_cpu:  # numpy's selection takes a fifth of the time of torch's
        return torch.from_numpy(np.partition(vector_S.numpy(), rank)[rank : rank + 1])
    return vector_S.kthvalue(rank + 1).values.view(1)


@lru_cache(maxsize=4096)
def _number(value: int, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=torch.int32, device=device)  # waits for no device


def _combined(built: Built, made: StageKernels, calls: Sequence[Call]) -> list[dict[str, Tensor]]:
    fold = made.fold
    assert fold is not None
    of_blocks = [partials(stage) for stage in made.stages]
    results = [stage.result.name for stage in made.stages]
    counts = [-(-call.numel // made.plain.block) for call in calls]
    values = [_vectors(made, count, call) for count, call in zip(counts, calls, strict=True)]
    filling = [
        call._replace(operands={**call.operands, **dict(zip(of_blocks, own, strict=True))})
        for call, own in zip(calls, values, strict=True)
    ]
    run_forms(built, made.plain, made.with_residual, filling)
    names = (*of_blocks, *results)
    while left := [i for i, count in enumerate(counts) if count > 1]:  # one value is its own fold
        folding = []
        for i in left:
            length, counts[i] = counts[i], -(-counts[i] // fold.block)
            old, values[i] = values[i], _vectors(made, counts[i], calls[i])
            folding.append(Call(dict(zip(names, (*old, *values[i]), strict=True)), length))
        built.run_many(fold, folding)
    return [dict(zip(results, own, strict=True)) for own in values]


def _vectors(made: StageKernels, count: int, call: Call) -> list[Tensor]:
    """Room for ``count`` values of each stage."""
    device = call.operands["gradient"].device
    kinds = (MEMORY[stage.result.dtype] for stage in made.stages)
    return [torch.empty(count, dtype=kind, device=device) for kind in kinds]


# ---- payloads ----------------------------------------------------------------------------------


def encode_dense(
    made: Kernels, calls: Sequence[Call], buffers: Sequence[Tensor | None]
) -> list[Payload]:
    """The payloads, in ``buffers`` where they are given; residuals are updated."""
    code, payloads = coding(made.traced), list[Payload]()
    for call, buffer in zip(calls, buffers, strict=True):
        format = program_format(made.traced, call.numel, 0)
        own = buffer if code is None else None
        payloads.append(placed(format, own, call.operands["gradient"].device))
    filling = [
        call._replace(payload=payload) for call, payload in zip(calls, payloads, strict=True)
    ]
    run_forms(made.built, made.encode, made.encode_with_residual, filling)
    if code is None:
        return payloads
    pairs = zip(payloads, buffers, strict=True)
    return [_coded(code, payload, buffer) for payload, buffer in pairs]


def _coded(code: Coding, plain: Payload, buffer: Tensor | None) -> Payload:
    """The payload that travels in place of ``plain``, in the front of ``buffer`` if it is given."""
    assert plain.buffer is not None
    return code.encode(plain, placed(code.format(plain.format), buffer, plain.buffer.device))


def placed(format: Format, buffer: Tensor | None, device: torch.device) -> Payload:
    """A payload of this format in ``buffer`` or in a new one; what no field fills is zero."""
    payload = Payload.empty(format, buffer, device)
    if buffer is not None:
        for start, stop in format.gaps:
            buffer[start:stop] = 0
    return payload
