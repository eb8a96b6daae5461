"""The largest cosine coefficients of a vector's chunks, and the vector from them.

A vector is cut into chunks of ``side * side`` elements, each a matrix of ``side``
columns, and what is left over at its end: a matrix of as many columns, or one row if it
is shorter, whose last row is filled up with zeros. A chunk's coefficients are its
two-dimensional DCT-II, which is orthonormal: its product with a matrix of cosines on
either side.

Legend: N elements, K coefficients that are listed, C chunks of one shape, R rows and S
columns of a chunk. A coefficient's place counts chunk after chunk, and row after row in
each.
"""

from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import cos, pi, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.errors import invalid
from gradwire.kernels.libraries import BITS, check_floating, check_vector, loader

from ._reaching import SOURCES

_load_cosines = loader("cosines", SOURCES)

MOST_SIDE = 64


class Cutting(NamedTuple):
    """How a vector of ``numel`` elements is cut; ``keep`` coefficients of each whole
    chunk are listed, and as large a share of those of the last one, rounded up.
    """

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
        columns = min(self.side, rest)
        if not rest:
            return (0, 0)
        return (-(-rest // columns), columns)

    @property
    def last_keep(self) -> int:
        rows, columns = self.last_shape
        return -(-self.keep * rows * columns // self.side**2)

    @property
    def num_places(self) -> int:
        """Coefficients of all chunks: the elements and what fills up the last chunk."""
        rows, columns = self.last_shape
        return self.num_whole * self.side**2 + rows * columns

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

    ``places`` (int32, ascending) and ``values`` of each vector are K long; vectors,
    values and residuals have one working dtype. Coefficients rank as elements do in
    ``select``, and values are rounded to ``wire``, bfloat16 or float32. With a residual
    the sum of both is encoded, and the residual then holds what the listed coefficients
    lack of it, and 0 where that is not finite.
    """
    jobs = list(zip(cuttings, vectors, places, values, residuals, strict=True))
    for cutting, grad_N, places_K, values_K, residual_N in jobs:
        check_floating("vector", grad_N)
        check_vector("vector", grad_N, cutting.numel)
        check_vector("places_K", places_K, cutting.num_listed, torch.int32)
        check_vector("values_K", values_K, cutting.num_listed, grad_N.dtype)
        check_vector("residual_N", residual_N, cutting.numel, grad_N.dtype)
    library = _load_cosines(*vectors, *values, *residuals)
    if library is None:
        for job in jobs:
            _reference_encode(*job, wire)
        return
    words = array("Q")
    for cutting, grad_N, places_K, values_K, residual_N in jobs:
        words.extend(_task(cutting, grad_N, residual_N, places_K, values_K))
    tasks = words.buffer_info()[0]
    narrow = int(wire == torch.bfloat16)
    if library.gw_cosines_encode(tasks, len(jobs), narrow):
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
    """Writes ``scale`` times what L lists stand for into ``out_N``, or adds it there.

    Lists are added up, in order, before they are transformed. Values and ``out_N`` have
    one working dtype. Raises InvalidSetting for a place that is not in its entry's
    chunk.
    """
    num_lists, count = places_LK.shape
    check_floating("out_N", out_N)
    check_vector("out_N", out_N, cutting.numel)
    check_vector(
        "places_LK", places_LK.view(-1), num_lists * cutting.num_listed, torch.int32
    )
    check_vector("values_LK", values_LK.view(-1), places_LK.numel(), out_N.dtype)
    library = _load_cosines(out_N)
    if library is None:
        bad = _reference_decode(cutting, places_LK, values_LK, out_N, scale, add)
    else:
        words = array("Q", _task(cutting, None, None, places_LK, values_LK))
        task = words.buffer_info()[0]
        bad = library.gw_cosines_decode(task, num_lists, count, out_N, scale, int(add))
    if bad >= 0:
        given = places_LK[:, bad].tolist()
        raise invalid(
            f"entry {bad} of {count}",
            given,
            f"{cutting.keep} places in each chunk",
            "give every rank one setting",
        )


def _task(cutting: Cutting, *tensors: Tensor | None) -> list[int]:
    """A task's words for the C++: addresses, the cutting, addresses of bases."""
    bases = [_padded(num).data_ptr() for num in (cutting.side, *cutting.last_shape)]
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return [*addresses, *cutting, *bases]


# ---- the transform -------------------------------------------------------------------


@lru_cache(maxsize=MOST_SIDE + 1)
def basis(num: int) -> Tensor:
    """The orthonormal DCT-II of ``num`` numbers (float64): row k is the k-th cosine."""
    rows = [
        [cos(pi / num * (i + 0.5) * k) * sqrt(2 / num) for i in range(num)]
        for k in range(num)
    ]
    matrix = torch.tensor(rows, dtype=torch.float64, device="cpu").view(num, num)
    matrix[:1] *= sqrt(0.5)
    return matrix


@lru_cache(maxsize=MOST_SIDE + 1)
def _padded(num: int) -> Tensor:
    """The basis and its transpose, filled up to 64 x 64, as the C++ reads them."""
    bases = torch.zeros(2, MOST_SIDE, MOST_SIDE, device="cpu")
    bases[0, :num, :num] = basis(num)
    bases[1, :num, :num] = basis(num).T
    return bases


def spectrum_of(chunks_CRS: Tensor, *, back: bool = False) -> Tensor:
    """The coefficients of chunks, or with ``back`` the chunks of coefficients."""
    _, num_rows, num_columns = chunks_CRS.shape
    left = basis(num_rows).to(chunks_CRS)
    right = basis(num_columns).to(chunks_CRS)
    if back:
        return _product(_product(left.T, chunks_CRS), right)
    return _product(_product(left, chunks_CRS), right.T)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product with terms added in order: the same bits on every processor.

    On a GPU it is the device's own product, of the same bits on devices of one kind.
    """
    if a.is_cuda:
        return a @ b
    total = (a[..., :1] * b[..., :1, :]).zero_()
    for k in range(a.shape[-1]):
        total += a[..., k : k + 1] * b[..., k : k + 1, :]
    return total


# ---- the reference -------------------------------------------------------------------


class _Part(NamedTuple):
    """Chunks of one shape: number, rows and columns, elements, places and entries."""

    shape: tuple[int, int, int]
    elements: slice
    places: slice
    entries: slice


def _parts(cutting: Cutting) -> Iterator[_Part]:
    side = cutting.side
    num = cutting.num_whole
    first = num * side**2
    listed = num * cutting.keep
    if num:
        yield _Part(
            (num, side, side), slice(0, first), slice(0, first), slice(0, listed)
        )
    if first < cutting.numel:
        elements = slice(first, cutting.numel)
        places = slice(first, cutting.num_places)
        entries = slice(listed, cutting.num_listed)
        yield _Part((1, *cutting.last_shape), elements, places, entries)


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
        num, rows, columns = part.shape
        size = rows * columns
        padded = whole_N.new_zeros(num * size)
        part_N = whole_N[part.elements]
        padded[: part_N.numel()] = part_N
        flat = spectrum_of(padded.view(part.shape)).reshape(num, -1)
        keys = flat.abs().view(BITS[flat.element_size()])
        count = (part.entries.stop - part.entries.start) // num
        falling = keys.sort(dim=1, descending=True, stable=True).indices
        order = falling[:, :count].sort(1).values
        starts = torch.arange(num, device=flat.device)[:, None] * size
        places = order + starts + part.places.start
        places_K[part.entries] = places.view(-1).int()
        values = flat.gather(1, order)
        values_K[part.entries] = values.to(wire).view(-1)
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
        num, rows, columns = part.shape
        size = rows * columns
        first = part.places.start
        listed = places_LK[:, part.entries].long()
        at_LCE = listed.view(len(places_LK), num, -1) - first
        own_C1 = torch.arange(num, device=out_N.device)[:, None]
        is_wrong_LCE = at_LCE // size != own_C1
        wrong = is_wrong_LCE.any(0).view(-1).nonzero()
        if wrong.numel():
            return int(part.entries.start + wrong[0])
        spectrum = out_N.new_zeros(num * size)
        for at_CE, values_K in zip(at_LCE, values_LK[:, part.entries], strict=True):
            spectrum[at_CE.view(-1)] += values_K
        found = spectrum_of(spectrum.view(part.shape), back=True)
        own_N = out_N[part.elements]
        decoded_N = found.reshape(-1)[: own_N.numel()] * scale
        if add:
            decoded_N = own_N + decoded_N
        own_N.copy_(decoded_N)
    return -1
