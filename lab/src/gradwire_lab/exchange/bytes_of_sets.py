"""Bytes that schemes for sparse payloads send, by formula, of the very elements that
ranks take.

Benchmarks state them beside what was sent, and a law holds every scheme to its formula.
Codecs are those whose payloads are indices and values.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.collective.allgather_sparse import allgather_sparse
from gradwire.collective.steps.ordered_sums import value_dtype
from gradwire.collective.steps.push_pull import Cut, MergeCounts, PushPull
from gradwire.collective.steps.sizes import SIZE_BYTES
from gradwire.contract import Compressor
from gradwire.contract.collective import Collective
from gradwire.contract.payload import Format
from gradwire.contract.spec import TensorSpec
from gradwire.kernels.distinct import count_distinct
from gradwire.kernels.sparse.entries import part_length
from gradwire.kernels.sparse.formats.coo import coo

from ..collective.omnireduce import omnireduce
from ..collective.sparcml import groups, sparcml
from ..collective.sparse_ps_broadcast import broadcast_bytes, sparse_ps_broadcast


def bytes_of(
    scheme: Collective, codec: Compressor, spec: TensorSpec, taken: Sequence[Tensor]
) -> list[int] | None:
    """Bytes that each rank sends if the ranks take the units ``taken`` (int32,
    ascending).

    None for collectives that know nothing of entries.
    """
    match scheme:
        case allgather_sparse():
            world = len(taken)
            dtype = value_dtype(codec, spec)
            counts = (indices_K.numel() for indices_K in taken)
            slot = max(
                coo().layout(k, spec.numel, codec.width, dtype).slot_bytes
                for k in counts
            )
            announced = 0 if codec.traits.exact_size else SIZE_BYTES
            return [(world - 1) * (announced + slot)] * world
        case sparcml():
            return _doubled(scheme, codec, spec, taken)
        case PushPull():
            return _pushed_and_pulled(scheme, codec, spec, taken)
    return None


def volumes(
    scheme: PushPull, codec: Compressor, spec: TensorSpec, taken: Sequence[Tensor]
) -> tuple[list[int], list[int]]:
    """Bytes of what each rank pushes, its own part included, and of each rank's
    pull.
    """
    pushed_WW, pulled_W = _payloads(scheme, codec, spec, taken)
    pushes = [sum(payload.size_bytes for payload in payloads) for payloads in pushed_WW]
    return pushes, [payload.size_bytes for payload in pulled_W]


def _pushed_and_pulled(
    scheme: PushPull, codec: Compressor, spec: TensorSpec, taken: Sequence[Tensor]
) -> list[int]:
    pushed_WW, pulled_W = _payloads(scheme, codec, spec, taken)
    world = len(taken)
    announced = (world - 1) * SIZE_BYTES * (1 + len(MergeCounts._fields))
    slots = [payload.slot_bytes for payload in pulled_W]
    is_broadcast = isinstance(scheme, sparse_ps_broadcast)
    sent = []
    for rank, payloads in enumerate(pushed_WW):
        pushed = sum(payload.slot_bytes for payload in payloads)
        pushed -= payloads[rank].slot_bytes
        if is_broadcast:
            pulled = broadcast_bytes(slots, rank)
        else:
            pulled = (world - 1) * max(slots)
        sent.append(announced + pulled + pushed)
    return sent


def _payloads(
    scheme: PushPull, codec: Compressor, spec: TensorSpec, taken: Sequence[Tensor]
) -> tuple[list[list[Format]], list[Format]]:
    """The payloads that each rank pushes to each server, and the one that each rank's
    pull is.
    """
    cut = scheme.cut(codec, spec, len(taken))
    sets = list(taken)
    if isinstance(scheme, omnireduce):
        block = scheme.units_a_block(codec.width)
        sets = [torch.unique(indices // block) for indices in taken]
    is_taken = torch.zeros(cut.num_units, dtype=torch.bool)
    for indices_K in sets:
        is_taken[indices_K.long()] = True
    union = is_taken.nonzero()[:, 0].to(torch.int32)
    pushed_WW = []
    for indices_K in sets:
        pushed_W = []
        for to, k in enumerate(_by_part(cut, indices_K)):
            form = scheme.push_format(cut, to, k)
            pushed_W.append(cut.pushed(form, to, k))
        pushed_WW.append(pushed_W)
    pulled_W = []
    for at, k in enumerate(_by_part(cut, union)):
        form = scheme.pull_format(cut, at, k)
        pulled_W.append(cut.pulled(form, at, k))
    return pushed_WW, pulled_W


def _by_part(cut: Cut, indices_K: Tensor) -> list[int]:
    """How many of these units lie in each part."""
    places_K = indices_K
    if cut.permutation is not None:
        places_K = cut.permutation.places(indices_K)
    world = len(cut.parts)
    length = max(1, part_length(cut.num_units, world))
    counts: list[int] = (places_K // length).bincount(minlength=world).tolist()
    return counts


def _doubled(
    scheme: sparcml, codec: Compressor, spec: TensorSpec, taken: Sequence[Tensor]
) -> list[int]:
    """By the units that each of ``groups`` took together."""
    whole = scheme.whole(codec, spec)
    world = len(taken)

    def message(ranks: Sequence[int]) -> int:
        count = count_distinct([taken[rank] for rank in ranks], whole.num_units)
        return SIZE_BYTES + whole.slot_bytes(count)

    alone, *levels = groups(world)
    below = len(levels[0])
    sent = []
    for rank in range(world):
        if rank >= below:
            sent.append(message(alone[rank]))
            continue
        size_bytes = sum(message(level[rank]) for level in levels[:-1])
        if rank < world - below:
            size_bytes += message(levels[-1][rank])
        sent.append(size_bytes)
    return sent
