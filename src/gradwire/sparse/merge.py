"""Entries of all ranks added up over one part, and emitted in the format that travels on.

Source: ZEN (OSDI 2025), section 2.2: incremental aggregation at the server of a part.
Differences: a sum for each place and a bit that says whether it was touched, instead of a table.
    Entries are added rank by rank in the order of the calls, so sums have the same bits whoever
    sends first; a place's sum starts at zero, as a dense sum's does.

Only the bits are cleared between steps (one for each place: L / 8 bytes), and a sum is defined only
where its bit is set: buffers may hold anything before.
Legend: K entries, L places, B bytes.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..errors import invalid
from ..kernels._build import load_library
from ..kernels._operands import address, serves_cpp
from ..payload import Payload
from .entries import Entries, check_entries
from .formats import _bits
from .formats._types import SparseFormat
from .formats.bitmap import bitmap
from .formats.coo import coo
from .formats.dense import dense
from .formats.hash_bitmap import hash_bitmap
from .scatter import out_of_part

_WORD_BYTES = 8


def touched_bytes(num_places: int) -> int:
    """Length of an accumulator's ``touched``: a bit for each place, in whole words of 8 bytes."""
    return -(-num_places // (8 * _WORD_BYTES)) * _WORD_BYTES


class Accumulator:
    """Sums over a part of ``num_places`` places.

    ``sums`` (num_places * width elements of the dtype that is summed in) and ``touched`` (uint8,
    ``touched_bytes(num_places)`` long) are the caller's, to be used again in the next step; without
    them new ones are made.

    >>> total = Accumulator(4)
    >>> total.add(Entries(torch.tensor([3, 1], dtype=torch.int32), torch.tensor([1.0, 2.0])))
    >>> total.add(Entries(torch.tensor([3], dtype=torch.int32), torch.tensor([5.0])))
    >>> total.count, total.entries().values
    (2, tensor([2., 6.]))
    """

    def __init__(
        self,
        num_places: int,
        width: int = 1,
        dtype: torch.dtype = torch.float32,
        *,
        sums: Tensor | None = None,
        touched: Tensor | None = None,
    ) -> None:
        device = None if sums is None else sums.device
        self.num_places, self.width = num_places, width
        self.sums = torch.empty(num_places * width, dtype=dtype) if sums is None else sums
        num_bytes = touched_bytes(num_places)
        self.touched = (
            torch.empty(num_bytes, dtype=torch.uint8, device=device) if touched is None else touched
        )
        for name, given, numel in (
            ("sums", self.sums, num_places * width),
            ("touched", self.touched, num_bytes),
        ):
            if given.numel() != numel or not given.is_contiguous():
                accepted = f"a contiguous vector of {numel}"
                raise invalid(name, given.numel(), accepted, "make it for this part")
        self.clear()

    def clear(self) -> None:
        """Forgets all that was added: the start of a step."""
        self.touched.zero_()

    @property
    def count(self) -> int:
        """How many places were touched: the entries that ``encode`` will write."""
        return _bits.count(self.touched, self.num_places)

    def add(self, entries: Entries) -> None:
        """Adds one rank's entries, which hold local places, in any order, duplicates included.

        Raises InvalidSetting where a place is not in [0, num_places); nothing is added then.
        """
        check_entries(entries)
        if entries.width != self.width:
            raise invalid("width", entries.width, f"{self.width}", "use one width everywhere")
        places_K, values, _ = entries
        library = load_library("bits") if serves_cpp(values, self.sums) else None
        if library is None:
            bad = self._reference_add(entries)
        else:
            library.gw_bits_add.restype = ctypes.c_int64
            bad = library.gw_bits_add(
                address(self.touched),
                address(self.sums),
                ctypes.c_int64(self.num_places),
                ctypes.c_int64(self.width),
                address(places_K),
                address(values),
                ctypes.c_int64(entries.num),
                torch.get_num_threads(),
            )
        if bad >= 0:
            raise out_of_part(bad, int(places_K[bad]), self.num_places)

    def entries(self) -> Entries:
        """The sums of the touched places, ascending; new tensors."""
        count = self.count
        places_K = torch.empty(count, dtype=torch.int32, device=self.sums.device)
        values = self.sums.new_empty(count * self.width)
        self._gather(places_K, values)
        return Entries(places_K, values, self.width)

    def size_bytes(self, format: SparseFormat) -> int:
        """Of what ``encode`` would write."""
        count = self.count
        if not isinstance(format, coo | dense | bitmap | hash_bitmap):
            count = format.count(self.entries(), self.num_places)
        return format.size_bytes(count, self.num_places, self.width, self.sums.dtype)

    def encode(self, format: SparseFormat, buffer: Tensor | None = None) -> Payload:
        """What ``format.encode(self.entries(), num_places, buffer)`` gives, without a detour."""
        if not isinstance(format, coo | bitmap | hash_bitmap):
            return format.encode(self.entries(), self.num_places, buffer)
        form = format.layout(self.count, self.num_places, self.width, self.sums.dtype)
        payload = Payload.empty(form, buffer, self.sums.device)
        if isinstance(format, coo):
            self._gather(payload["indices"], payload["values"])
        else:
            payload["bits"].copy_(self.touched[: _bits.num_bytes(self.num_places)])
            self._gather(None, payload["values"])
        return payload

    def _gather(self, places_K: Tensor | None, values: Tensor) -> None:
        """Writes the touched places, and what was summed there."""
        library = load_library("bits") if serves_cpp(values, self.sums) else None
        if library is None:
            set_K = _bits.flags(self.touched).nonzero().squeeze(1)
            values.copy_(self.sums.view(-1, self.width)[set_K].reshape(-1))
            if places_K is not None:
                places_K.copy_(set_K)
            return
        library.gw_bits_gather.restype = ctypes.c_int64
        found = library.gw_bits_gather(
            address(self.touched),
            ctypes.c_int64(self.num_places),
            address(self.sums),
            ctypes.c_int64(self.width),
            address(places_K),
            address(values),
            torch.get_num_threads(),
        )
        _bits.check_found(found, values.numel() // self.width, self.num_places)

    def _reference_add(self, entries: Entries) -> int:
        """The definition: returns the position of the first place that is none, or -1."""
        places_K = entries.indices_K.long()
        bad = ((places_K < 0) | (places_K >= self.num_places)).nonzero()
        if bad.numel():
            return int(bad[0])
        sums, flags_L = self.sums.view(-1, self.width), _bits.flags(self.touched)
        sums[~flags_L[: self.num_places]] = 0.0
        sums.index_add_(0, places_K, entries.values.view(-1, self.width).to(sums.dtype))
        flags_L[places_K] = True
        _bits.write(flags_L.nonzero().squeeze(1).int(), flags_L.numel(), self.touched)
        return -1
