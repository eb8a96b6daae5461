"""Notes of a sparse collective on each step: how much was asked for, taken and averaged.

The mean's density is what the union of all ranks' elements makes of the density that was asked for;
DEFT (section 3.1) calls the growth gradient build-up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...contract import Compressor, Layout, Member, Selection
from ...contract.payload import Payload
from ...contract.tensorwise import Joined
from ...kernels.distinct import count_distinct
from ...kernels.sparse.entries import num_units


def asked_of(codec: object, numel: int) -> float:
    """How many of ``numel`` elements a codec was asked for by its ``density``; NaN without one."""
    density = getattr(codec, "density", None)
    return math.nan if density is None else density * numel


def note_union(me: Member, codec: Compressor, payloads: Sequence[Payload], out_N: Tensor) -> None:
    """Sets ``me.selection`` from the payloads of all ranks, of which every one is added up here.

    A codec whose payloads list no places selects nothing, and nothing is noted; nor is it where
    there is no content to count, as in predictions.
    """
    lists = [] if out_N.is_meta else [_indices(codec, payload) for payload in payloads]
    if out_N.is_meta or any(indices_K is None for indices_K in lists):
        me.selection = None
        return
    known = [indices_K for indices_K in lists if indices_K is not None]
    numel, width = out_N.numel(), codec.width
    union = count_distinct(known, num_units(numel, width))
    # The last unit may be a part of one.
    taken, arrived = (min(count * width, numel) for count in (known[me.rank].numel(), union))
    me.selection = Selection(asked_of(codec, numel), taken, arrived)


def _indices(codec: Compressor, payload: Payload) -> Tensor | None:
    """A sparse payload's field ``indices``, or its entries' where that counts within chunks.

    So it is where tensors are encoded apart. None where a payload has no such field.
    """
    dtypes = {part.name: part.dtype for part in payload.format}
    is_joined = isinstance(payload.format, Joined) and codec.traits.layout is Layout.SPARSE
    if is_joined or dtypes.get("indices") == torch.int16:
        return codec.entries(payload)[0]
    return payload["indices"] if "indices" in dtypes else None
