"""What collectives of sparse payloads do with entries: read them, add them up, write the sums.

Values are multiplied by 1 / W before they are added, so that no sum of finite gradients overflows
where their mean does not. Ranks add in one order, so all of them hold the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..contract import Compressor, Member
from ..payload import Format, Payload
from ..sparse.entries import Entries
from ..sparse.formats._types import SparseFormat
from ..sparse.merge import Accumulator, touched_bytes
from ..spec import TensorSpec, working_dtype


def num_entries(form: Format) -> int:
    """How many indices a sparse payload of this layout has."""
    return next(part.numel for part in form if part.name == "indices")


def value_dtype(codec: Compressor, spec: TensorSpec) -> torch.dtype:
    """In which a codec's values travel: its payload's own, else the working dtype."""
    dtypes = [part.dtype for part in codec.format(spec) if part.name == "values"]
    return dtypes[0] if dtypes else working_dtype(spec.dtype)


def expected_union(taken: float, total: int, world: int) -> float:
    """How many of ``total`` units ``world`` ranks take that take ``taken`` each, independently."""
    return total * (1 - (1 - taken / total) ** world) if total else 0.0


def split(buffer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Views of the buffer's front, one behind the other."""
    return [buffer[a:b] for a, b in pairwise(accumulate(sizes, initial=0))]


def accumulator(
    me: Member, num_places: int, width: int, dtype: torch.dtype, like: Tensor
) -> Accumulator:
    """An empty one in the member's buffers: the same ones at every call."""
    return Accumulator(
        num_places,
        width,
        dtype,
        sums=me.scratch("sums", num_places * width, like, dtype),
        touched=me.scratch("touched", touched_bytes(num_places), like, torch.uint8),
    )


def scaled(entries: Entries, factor: float, dtype: torch.dtype) -> Entries:
    """The entries with all values multiplied in ``dtype``; in place where they are of that."""
    values = entries.values
    own = values.mul_(factor) if values.dtype == dtype else values.to(dtype).mul_(factor)
    return entries._replace(values=own)


def encode_sums(
    total: Accumulator, form: SparseFormat, dtype: torch.dtype, payload: Payload
) -> None:
    """Writes what was added up into ``payload``, in ``dtype``."""
    if total.sums.dtype == dtype:
        total.encode(form, payload.buffer)
        return
    entries = total.entries()
    rounded = entries._replace(values=entries.values.to(dtype))
    form.encode(rounded, total.num_places, payload.buffer)
