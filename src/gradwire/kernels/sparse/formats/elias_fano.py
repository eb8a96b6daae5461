"""elias_fano: ascending places in little more than the fewest bits possible.

Source: Elias (J. ACM 1974) and Fano (MIT, 1971), as inverted indices use their code.
    ZEN has no such format: where a share d of a part's places is taken, its hash bitmap
    spends 1 / d bits on an entry and coordinates 32. This code spends about 2 + log2(1
    / d); the entropy is 1.44 + log2(1 / d) where d is small. Above d = 1/4 or so the
    bitmap is the smaller one.
Differences: the number of low bits is the one that makes the code shortest; it follows
    from the count.
Wire: values (K * width), low, high -> K * width * itemsize + ceil(K b / 8) + ceil((K +
    floor((L - 1) / 2^b)) / 8) bytes, with b = floor(log2((L - 1) / K)), or 0 where that
    is negative. The lowest b bits of each place lie one behind the other. Entry i sets
    bit i + h of the high bits, where h is what is above the place's low bits. Without
    entries there are no bits.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ....contract.payload import Field, Format, Payload
from ....errors import InvalidSetting, invalid
from ...libraries import loader
from .. import bits
from ..entries import Entries, first_wrong
from ..format import SparseFormat

_load_elias = loader("elias")


@dataclass(frozen=True, kw_only=True)
class elias_fano(SparseFormat):
    """Values by ascending place, then the code of the places; keeps duplicates.

    >>> elias_fano().size_bytes(100, 1_250)
    470
    """

    def layout(
        self,
        count: int,
        num_units: int,
        width: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> Format:
        values = Field("values", dtype, count * width)
        return Format((values, *place_fields(count, num_units)))

    def encode(
        self, entries: Entries, num_units: int, buffer: Tensor | None = None
    ) -> Payload:
        payload = self.with_values(entries, num_units, buffer)
        write_places(payload, entries.indices_K, num_units)
        return payload

    def decode(
        self,
        payload: Payload,
        num_units: int,
        width: int = 1,
        *,
        room: Tensor | None = None,
    ) -> Entries:
        values = payload["values"]
        places_K = read_places(payload, values.numel() // width, num_units, room)
        return Entries(places_K, values, width)


def place_fields(count: int, num_units: int) -> tuple[Field, Field]:
    """The fields of the places of ``count`` entries, "low" and "high"."""
    low = bits.num_bytes(count * low_bits(count, num_units))
    high = bits.num_bytes(high_bits(count, num_units))
    return Field("low", torch.uint8, low), Field("high", torch.uint8, high)


def write_places(payload: Payload, places_K: Tensor, num_units: int) -> None:
    """Writes ascending places (int32) to the fields of a payload."""
    count = places_K.numel()
    low = payload["low"]
    high = payload["high"]
    num_low = low_bits(count, num_units)
    num_high = high_bits(count, num_units)
    library = _load_elias() if places_K.device.type == "cpu" else None
    if library is None:
        bad = first_wrong(places_K, num_units)
        if bad < 0 and count:
            _reference_encode(places_K, num_low, low, high)
    else:
        bad = library.gw_elias_encode(
            places_K, count, num_units, num_low, low, high, num_high
        )
    if bad >= 0:
        raise InvalidSetting(
            f"entry {bad} of an elias_fano payload of {num_units} units has index "
            f"{int(places_K[bad])}; indices must ascend from 0 to less than that"
        )


def read_places(
    payload: Payload, count: int, num_units: int, room: Tensor | None = None
) -> Tensor:
    """The places that ``write_places`` wrote, int32, in ``room`` or a new tensor."""
    low = payload["low"]
    high = payload["high"]
    places_K = low.new_empty(count, dtype=torch.int32) if room is None else room[:count]
    num_low = low_bits(count, num_units)
    num_high = high_bits(count, num_units)
    library = _load_elias() if places_K.device.type == "cpu" else None
    if library is None:
        set_K = bits.read(high, num_high, count)
        places_K.copy_(_reference_decode(set_K, num_low, low))
        bad = first_wrong(places_K, num_units)
    else:
        wrong = ctypes.c_int64()
        num_set = library.gw_elias_decode(
            low,
            high,
            num_high,
            count,
            num_units,
            num_low,
            places_K,
            ctypes.byref(wrong),
        )
        bits.check_found(num_set, count, num_high)
        bad = wrong.value
    if bad >= 0:
        raise invalid(
            "elias_fano",
            f"place {int(places_K[bad])} for entry {bad} of {count}",
            f"ascending places in [0, {num_units})",
            "give every rank the same vector, world and permutation",
        )
    return places_K


def low_bits(count: int, num_units: int) -> int:
    """The number of low bits, b: one more costs a bit an entry and saves fewer.

    >>> low_bits(100, 1_250)
    3
    """
    return max(0, ((num_units - 1) // count).bit_length() - 1) if count else 0


def high_bits(count: int, num_units: int) -> int:
    """The number of bits that the upper parts of the places take."""
    return count + ((num_units - 1) >> low_bits(count, num_units)) if count else 0


def _reference_encode(
    places_K: Tensor, num_low: int, low: Tensor, high: Tensor
) -> None:
    """Writes both fields of bits by their definition."""
    shifts = torch.arange(num_low, device=places_K.device)
    lowest = places_K[:, None] >> shifts & 1
    bits.pack(lowest.view(-1).bool(), low)
    numbers_K = torch.arange(places_K.numel(), device=places_K.device)
    bits.set_places((places_K >> num_low) + numbers_K, high)


def _reference_decode(set_K: Tensor, num_low: int, low: Tensor) -> Tensor:
    count = set_K.numel()
    weights = 1 << torch.arange(num_low, device=low.device)
    lowest = bits.flags(low)[: count * num_low].view(count, num_low)
    lowest_K = (lowest * weights).sum(1)
    return (set_K - torch.arange(count, device=low.device) << num_low) + lowest_K


EXAMPLES = (elias_fano(),)
