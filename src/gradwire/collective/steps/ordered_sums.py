"""Entries in collectives of sparse payloads: read, added up, and written.

Values are multiplied by 1 / W before they are added, so that no sum of finite gradients
overflows where their mean does not. Ranks add in one order, so all of them hold the
same bits.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...contract import Compressor, Layout, Member, Selection
from ...contract.payload import Format, Payload
from ...contract.spec import TensorSpec, working_dtype
from ...kernels.distinct import count_distinct
from ...kernels.sparse.entries import Entries, Part, num_units
from ...kernels.sparse.format import SparseFormat
from ...kernels.sparse.merge import merge
from ...kernels.sparse.scatter import scatter_entries


def num_entries(form: Format) -> int:
    """How many indices a sparse payload of this layout has."""
    assert form.num_entries is not None, "asked of a payload that was received"
    return form.num_entries


def value_dtype(codec: Compressor, spec: TensorSpec) -> torch.dtype:
    """The dtype of a codec's values in transit: its payload's, else the working one."""
    dtypes = [part.dtype for part in codec.format(spec) if part.name == "values"]
    return dtypes[0] if dtypes else working_dtype(spec.dtype)


def expected_union(taken: float, total: int, world: int) -> float:
    """The expected number of ``total`` units that ``world`` ranks take together.

    Each takes ``taken``, independently.
    """
    return total * (1 - (1 - taken / total) ** world) if total else 0.0


def split(buffer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Views of the buffer's front, one behind the other."""
    return [buffer[a:b] for a, b in pairwise(accumulate(sizes, initial=0))]


@contextmanager
def summing_into(me: Member, out_N: Tensor) -> Iterator[Tensor]:
    """A vector of zeros in the working dtype to add to; then ``out_N`` is the sum."""
    sum_N = out_N
    dtype = working_dtype(out_N.dtype)
    if out_N.dtype != dtype:
        sum_N = me.thread_scratch("sum", out_N.numel(), out_N, dtype)
    yield sum_N.zero_()
    if sum_N is not out_N:
        out_N.copy_(sum_N)


def merged_entries(
    me: Member,
    ranks: Sequence[Entries],
    num_places: int,
    dtype: torch.dtype,
    scale: float = 1.0,
) -> Entries:
    """``scale`` times the ranks' sums, in the same member's buffers at every call."""
    most = sum(entries.num for entries in ranks)
    like = ranks[0].values
    places_K = me.scratch("merged places", most, like, torch.int32, varies=True)
    values = me.scratch(
        "merged values", most * ranks[0].width, like, dtype, varies=True
    )
    return merge(ranks, num_places, scale=scale, dtype=dtype, room=(places_K, values))


class Packed(NamedTuple):
    """Units of one part in a sparse format, as they came."""

    form: SparseFormat
    payload: Payload


def decoded(
    me: Member, messages: Sequence[Packed], lengths: Sequence[int], width: int
) -> list[Entries]:
    """The entries of messages; each is of a part of so many places.

    Valid until the next call.
    """
    counts = [message.payload["values"].numel() // width for message in messages]
    like = messages[0].payload["values"]
    rooms = split(me.thread_scratch("decoded", sum(counts), like, torch.int32), counts)
    return [
        form.decode(payload, length, width, room=room)
        for (form, payload), length, room in zip(messages, lengths, rooms, strict=True)
    ]


def cleared(
    me: Member, codec: Compressor, all_of: Payload | None, grad_N: Tensor, out_N: Tensor
) -> None:
    """Makes zeros of ``out_N``.

    Where that is the gradient, and ``all_of`` it is known, only what is not zero is
    written.
    """
    if all_of is not None and out_N.data_ptr() == grad_N.data_ptr():
        indices_K, _ = codec.entries(all_of)
        size = indices_K.numel() * codec.width
        if size * _LINE < out_N.numel():
            zeros = me.thread_scratch("zeros", size, out_N, out_N.dtype).zero_()
            part = Part(num_units(out_N.numel(), codec.width))
            scatter_entries(Entries(indices_K, zeros, codec.width), part, out_N)
            return
    out_N.zero_()


_LINE = 16
"""float32 in a line of memory: where more are there, all lines are written anyway."""


# ---- Notes of a sparse collective on each step ---------------------------------------
#
# How much was asked for, taken and averaged.
#
# The mean's density is what the union of all ranks' elements makes of the density that
# was asked for; DEFT (section 3.1) calls the growth gradient build-up.


def asked_of(codec: object, numel: int) -> float:
    """How many of ``numel`` elements a codec was asked for by its ``density``.

    NaN without one.
    """
    density = getattr(codec, "density", None)
    return math.nan if density is None else density * numel


def note_union(
    me: Member, codec: Compressor, payloads: Sequence[Payload], out_N: Tensor
) -> None:
    """Sets ``me.selection`` from all ranks' payloads, which are added up here.

    A codec whose payloads list no places selects nothing, and nothing is noted; nor is
    it where there is no content to count, as in predictions.
    """
    lists = [] if out_N.is_meta else [_indices(codec, payload) for payload in payloads]
    if out_N.is_meta or any(indices_K is None for indices_K in lists):
        me.selection = None
        return
    known = [indices_K for indices_K in lists if indices_K is not None]
    numel = out_N.numel()
    width = codec.width
    union = count_distinct(known, num_units(numel, width))
    # The last unit may be a part of one.
    taken, arrived = (
        min(count * width, numel) for count in (known[me.rank].numel(), union)
    )
    me.selection = Selection(asked_of(codec, numel), taken, arrived)


def _indices(codec: Compressor, payload: Payload) -> Tensor | None:
    """A sparse payload's ``indices``, or its entries' where they are no field.

    So it is where tensors are encoded apart. None for any other payload.
    """
    if "indices" in (part.name for part in payload.format):
        return payload["indices"]
    is_sparse = codec.traits.layout is Layout.SPARSE
    return codec.entries(payload)[0] if is_sparse else None
