"""The largest cosine coefficients of each chunk of a vector, and the vector that they stand for.

A vector is cut into chunks of ``side * side`` elements, each a matrix of ``side`` columns, and what
is left over at its end: a matrix of as many columns, or one row if it is shorter, filled up with
zeros to powers of two. A chunk's coefficients are its two-dimensional DCT-II, which is orthonormal.

Legend: N elements, K coefficients that are listed, C whole chunks, R rows and S columns of a chunk.
A coefficient's place counts chunk after chunk, and column after column in each.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from math import ceil, cos, pi, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import invalid
from .libraries import BITS, check_floating, check_vector, loader, serves_cpp

_load_cosines = loader("cosines")

MOST_SIDE = 64


class Cutting(NamedTuple):
    """How a vector of ``numel`` elements is cut; ``keep`` coefficients of each whole chunk are
    listed, and as large a share of those of the last one, rounded up."""

    numel: int
    side: int
    keep: int

    @property
    def num_whole(self) -> int:
        """Chunks of side x side elements."""
        return self.numel // self.side**2

    @property
    def last_shape(self) -> tuple[int, int]:
        """Rows and columns of the last chunk; (0, 0) where nothing is left over."""
        rest = self.numel % self.side**2
        if not rest:
            return 0, 0
        width = min(self.side, _power_from(rest))
        return _power_from(-(-rest // width)), width

    @property
    def last_keep(self) -> int:
        rows, width = self.last_shape
        return ceil(self.keep * rows * width / self.side**2)

    @property
    def num_places(self) -> int:
        """Coefficients of all chunks: the elements and what fills up the last chunk."""
        rows, width = self.last_shape
        return self.num_whole * self.side**2 + rows * width

    @property
    def num_listed(self) -> int:
        """How many coefficients are listed, K."""
        return self.num_whole * self.keep + self.last_keep


def encode_many(
    cuttings: Sequence[Cutting],
    vectors: Sequence[Tensor],
    places: Sequence[Tensor],
    values: Sequence[Tensor],
    residuals: Sequence[Tensor | None],
    *,
    wire: torch.dtype,
) -> None:
    """Lists the largest coefficients of each chunk of several vectors, in one call.

    ``places`` (int32, ascending) and ``values`` of each vector are K long; vectors, values and
    residuals have one working dtype. Coefficients rank as elements do in ``select``, and values are
    rounded to ``wire``, bfloat16 or float32. With a residual the sum of both is encoded, and the
    residual then holds what the listed coefficients lack of it, and 0 where that is not finite.
    """
    jobs = list(zip(cuttings, vectors, places, values, residuals, strict=True))
    for cutting, grad_N, places_K, values_K, residual_N in jobs:
        check_floating("vector", grad_N)
        check_vector("vector", grad_N, cutting.numel)
        check_vector("places_K", places_K, cutting.num_listed, torch.int32)
        check_vector("values_K", values_K, cutting.num_listed, grad_N.dtype)
        check_vector("residual_N", residual_N, cutting.numel, grad_N.dtype)
    on_host = all(serves_cpp(*job[1:2], *job[3:]) for job in jobs)
    library = _load_cosines() if on_host else None
    if library is None:
        for job in jobs:
            _reference_encode(*job, wire)
        return
    words = array("Q")
    for cutting, grad_N, places_K, values_K, residual_N in jobs:
        kept = 0 if residual_N is None else residual_N.data_ptr()
        words.extend((grad_N.data_ptr(), kept, *cutting))
        words.extend((places_K.data_ptr(), values_K.data_ptr()))
    tasks, narrow = words.buffer_info()[0], int(wire == torch.bfloat16)
    if library.gw_cosines_encode(tasks, len(jobs), narrow, _table()):
        raise MemoryError("cosine coefficients: no memory to select them in")


def decode(
    cutting: Cutting,
    places_LK: Tensor,
    values_LK: Tensor,
    out_N: Tensor,
    *,
    scale: float = 1.0,
    add: bool = False,
) -> None:
    """Writes ``scale`` times what L lists stand for together into ``out_N``, or adds it there.

    Lists are added up, in order, before they are transformed. Values and ``out_N`` have one working
    dtype. Raises InvalidSetting for a place that is not in its entry's chunk.
    """
    num_lists, count = places_LK.shape
    check_floating("out_N", out_N)
    check_vector("out_N", out_N, cutting.numel)
    check_vector("places_LK", places_LK.view(-1), num_lists * cutting.num_listed, torch.int32)
    check_vector("values_LK", values_LK.view(-1), places_LK.numel(), out_N.dtype)
    library = _load_cosines() if serves_cpp(out_N) else None
    if library is None:
        bad = _reference_decode(cutting, places_LK, values_LK, out_N, scale, add)
    else:
        bad = library.gw_cosines_decode(
            places_LK, values_LK, num_lists, count, out_N, *cutting, scale, int(add), _table()
        )
    if bad >= 0:
        given, accepted = places_LK[:, bad].tolist(), f"{cutting.keep} places in each chunk"
        raise invalid(f"entry {bad} of {count}", given, accepted, "give every rank one setting")


def _power_from(number: int) -> int:
    return 1 << (number - 1).bit_length()


@lru_cache(maxsize=4)
def _table(dtype: torch.dtype = torch.float32) -> Tensor:
    """1 / (2 cos((i + 1/2) pi / n)) for i < n / 2, for n = 2, 4, ... one behind the other."""
    sizes = [2**p for p in range(1, MOST_SIDE.bit_length())]
    found = [0.5 / cos((i + 0.5) * pi / n) for n in sizes for i in range(n // 2)]
    return torch.tensor(found, dtype=dtype)


def _factors(chunks: Tensor) -> Tensor:
    def of(n: int) -> Tensor:
        found = chunks.new_full((n,), sqrt(2 / n))
        found[0] = sqrt(1 / n)
        return found

    return of(chunks.shape[1])[:, None] * of(chunks.shape[2])[None, :]


def _forward(columns: Tensor) -> Tensor:
    """DCT-II along the second dimension, without factors: Lee's recursion."""
    num = columns.shape[1]
    if num == 1:
        return columns
    half = num // 2
    table = _table(columns.dtype)[half - 1 : num - 1].to(columns.device)[:, None]
    above, below = columns[:, :half], columns[:, half:].flip(1)
    even, odd = _forward(above + below), _forward((above - below) * table)
    found = torch.empty_like(columns, memory_format=torch.contiguous_format)
    found[:, ::2], found[:, 1::2] = even, odd
    found[:, 1:-1:2] = odd[:, :-1] + odd[:, 1:]
    return found


def _inverse(columns: Tensor) -> Tensor:
    """DCT-III along the second dimension, without factors."""
    num = columns.shape[1]
    if num == 1:
        return columns
    half = num // 2
    table = _table(columns.dtype)[half - 1 : num - 1].to(columns.device)[:, None]
    odd = columns[:, 1::2].clone()
    odd[:, 1:] = columns[:, 1:-1:2] + columns[:, 3::2]
    even, odd = _inverse(columns[:, ::2]), _inverse(odd) * table
    return torch.cat([even + odd, (even - odd).flip(1)], 1)


def spectrum_of(chunks_CRS: Tensor) -> Tensor:
    """The coefficients (C, S, R) of chunks, each transposed."""
    turned = _forward(_forward(chunks_CRS).mT)
    return turned * _factors(turned)


def chunks_of(spectrum_CSR: Tensor) -> Tensor:
    """The chunks (C, R, S) that coefficients stand for."""
    return _inverse(_inverse(spectrum_CSR * _factors(spectrum_CSR)).mT)


class _Part(NamedTuple):
    """Chunks of one shape: their number, rows and columns, their elements, places and entries."""

    shape: tuple[int, int, int]
    elements: slice
    places: slice
    entries: slice


def _parts(cutting: Cutting) -> list[_Part]:
    whole, num = cutting.side**2, cutting.num_whole
    rows, width = cutting.last_shape
    listed = num * cutting.keep
    first = num * whole
    found = [
        _Part((num, cutting.side, cutting.side), slice(first), slice(first), slice(listed)),
        _Part(
            (1, rows, width),
            slice(first, cutting.numel),
            slice(first, cutting.num_places),
            slice(listed, cutting.num_listed),
        ),
    ]
    return [part for part in found if part.shape[0] and part.shape[1]]


def _reference_encode(
    cutting: Cutting,
    grad_N: Tensor,
    places_K: Tensor,
    values_K: Tensor,
    residual_N: Tensor | None,
    wire: torch.dtype,
) -> None:
    whole_N = grad_N if residual_N is None else residual_N.add_(grad_N)
    for part in _parts(cutting):
        num, rows, width = part.shape
        padded = whole_N.new_zeros(num * rows * width)
        own = whole_N[part.elements]
        padded[: own.numel()] = own
        flat = spectrum_of(padded.view(part.shape)).reshape(num, -1)
        keys = flat.abs().contiguous().view(BITS[flat.element_size()])
        count = (part.entries.stop - (part.entries.start or 0)) // num
        order = keys.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(1).values
        starts = torch.arange(num, device=flat.device)[:, None] * rows * width
        places_K[part.entries] = (order + starts + (part.places.start or 0)).view(-1).int()
        taken = flat.gather(1, order)
        values_K[part.entries] = taken.to(wire).view(-1)
    if residual_N is not None:
        sent_N = torch.empty_like(residual_N)
        _reference_decode(cutting, places_K[None], values_K[None], sent_N, 1.0, False)
        residual_N.sub_(sent_N).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _reference_decode(
    cutting: Cutting,
    places_LK: Tensor,
    values_LK: Tensor,
    out_N: Tensor,
    scale: float,
    add: bool,
) -> int:
    for part in _parts(cutting):
        num, rows, width = part.shape
        size, first, entry = rows * width, part.places.start or 0, part.entries.start or 0
        at_LCE = places_LK[:, part.entries].long().view(len(places_LK), num, -1) - first
        own_C1 = torch.arange(num, device=out_N.device)[:, None]
        wrong = (at_LCE // size != own_C1).any(0).view(-1).nonzero()
        if wrong.numel():
            return entry + int(wrong[0])
        spectrum = out_N.new_zeros(num * size)
        for at_CE, values_K in zip(at_LCE, values_LK[:, part.entries], strict=True):
            spectrum[at_CE.view(-1)] += values_K
        found_N = chunks_of(spectrum.view(num, width, rows)).reshape(-1)
        own_N = out_N[part.elements]
        decoded_N = found_N[: own_N.numel()] * scale
        own_N.copy_(own_N + decoded_N if add else decoded_N)
    return -1
