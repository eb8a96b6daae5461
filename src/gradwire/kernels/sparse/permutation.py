"""A seeded bijection of [0, numel): the hash h0 that says which rank serves an index.

Source: ZEN (OSDI 2025), section 3.2: "the same first-level hashing function to all
workers".
Differences: the paper takes a universal hash, for which every rank stores the index set
    of each server (4 |G| bytes). Here it is a permutation, whose inverse is as cheap as
    itself, so nothing is stored, parts are equally large and no two indices ever meet.

A round acts on words of b bits, the bits of numel - 1: x ^= x >> ceil(b / 2), then x =
(x m + a) mod 2^b with an odd m. Both are bijections, so three rounds are one too. A
word at or above numel is sent through again until it is below (cycle walking), in less
than two turns on average. The shift by half a word brings high bits down, and the
product brings low bits up. Parts are told apart by the high bits, which every bit of
the index reaches in each round.

Every implementation has the same bits: this one, csrc/permutation.h and
permutation_device.py.
Legend: K indices.
"""

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InvalidSetting, invalid
from ..libraries import INT32_MAX, first_outside, has_triton, loader

_load_partition = loader("partition")

ROUNDS = 3
_PROGRAM = 1024
"""Indices of a program on a GPU."""
_WORD = 2**64 - 1


class Round(NamedTuple):
    """x = (x * multiplier + addend) mod 2^bits; back: x = (x - addend) * inverse."""

    multiplier: int
    addend: int
    inverse: int


@dataclass(frozen=True)
class Permutation:
    """The bijection number ``seed`` of whole numbers below ``numel`` (0 to 2^31 - 1).

    >>> shuffled = Permutation(10, seed=3)
    >>> places = shuffled.places(torch.arange(10, dtype=torch.int32))
    >>> sorted(places.tolist()) == list(range(10))
    True
    >>> shuffled.indices(places).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    numel: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.numel <= INT32_MAX:
            raise invalid(
                "numel of a permutation",
                self.numel,
                f"0 to {INT32_MAX}, which int32 indices can address",
                "cut it into chunks",
            )

    @cached_property
    def bits(self) -> int:
        """The number of bits of the words that rounds act on; at least 1."""
        return max(1, (self.numel - 1).bit_length())

    @property
    def shift(self) -> int:
        """The shift of a round in bits: at least half a word, so that a shift and
        exclusive or undoes itself.
        """
        return (self.bits + 1) // 2

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The constants of each round."""
        size = 1 << self.bits
        constants = []
        for number in range(ROUNDS):
            drawn = _mixed(2 * number + 1, self.seed), _mixed(2 * number + 2, self.seed)
            multiplier = drawn[0] >> (64 - self.bits) | 1
            inverse = pow(multiplier, -1, size)
            constants.append(Round(multiplier, drawn[1] >> (64 - self.bits), inverse))
        return tuple(constants)

    @cached_property
    def constants(self) -> ctypes.Array[ctypes.c_uint32]:
        """The constants that the C++ needs: numel, mask, shift, and each round's."""
        rounds = (constant for step in self.rounds for constant in step)
        words = (self.numel, (1 << self.bits) - 1, self.shift, *rounds)
        return (ctypes.c_uint32 * len(words))(*words)

    def places(self, indices_K: Tensor, out: Tensor | None = None) -> Tensor:
        """The place of each index.

        Indices and places are int32, and ``out`` may be ``indices_K``.

        Raises InvalidSetting where an index is not in [0, numel).
        """
        return self._mapped(indices_K, out, inverse=False)

    def indices(self, places_K: Tensor, out: Tensor | None = None) -> Tensor:
        """The index at each place: the inverse of ``places``."""
        return self._mapped(places_K, out, inverse=True)

    def _mapped(self, given_K: Tensor, out: Tensor | None, *, inverse: bool) -> Tensor:
        if given_K.dtype != torch.int32:
            raise invalid("indices", given_K.dtype, "int32", "convert them with .int()")
        mapped = torch.empty_like(given_K) if out is None else out
        library = _load_partition() if given_K.device.type == "cpu" else None
        if library is None or not given_K.is_contiguous() or not mapped.is_contiguous():
            bad = self._reference(given_K, mapped, inverse=inverse)
        else:
            bad = library.gw_permute(
                given_K, given_K.numel(), self.constants, int(inverse), mapped
            )
        if bad >= 0:
            raise InvalidSetting(
                f"index {bad} must lie in [0, {self.numel}), got {int(given_K[bad])}; "
                "it belongs to a vector of another length"
            )
        return mapped

    def _reference(self, given_K: Tensor, out: Tensor, *, inverse: bool) -> int:
        bad = first_outside(given_K, self.numel)
        if bad >= 0:
            return bad
        if out.is_cuda and out.is_contiguous() and not inverse and has_triton():
            places_on_gpu(given_K.contiguous(), self, out)
            return -1
        once = self._undone if inverse else self._done
        x_K = once(given_K.long())
        while bool((x_K >= self.numel).any()):
            x_K = torch.where(x_K >= self.numel, once(x_K), x_K)
        out.copy_(x_K)
        return -1

    def _done(self, x_K: Tensor) -> Tensor:
        mask = (1 << self.bits) - 1
        for step in self.rounds:
            x_K = x_K ^ (x_K >> self.shift)
            x_K = (x_K * step.multiplier + step.addend) & mask
        return x_K

    def _undone(self, x_K: Tensor) -> Tensor:
        mask = (1 << self.bits) - 1
        for step in reversed(self.rounds):
            x_K = ((x_K - step.addend) * step.inverse) & mask
            x_K = x_K ^ (x_K >> self.shift)
        return x_K


def places_on_gpu(indices_K: Tensor, permutation: Permutation, out_K: Tensor) -> None:
    """The places of indices in range, by one launch of Triton.

    Both vectors are contiguous.
    """
    from .permutation_device import permute

    words = torch.tensor(list(permutation.constants), dtype=torch.int64, device="cpu")
    constants = words.to(torch.int32).to(indices_K.device)
    programs = max(1, -(-indices_K.numel() // _PROGRAM))
    permute[(programs,)](indices_K, constants, out_K, indices_K.numel(), BLOCK=_PROGRAM)


def _mixed(counter: int, seed: int) -> int:
    """Word ``counter`` of a seed's stream (splitmix64: Steele, Lea and Flood, 2014)."""
    x = (seed * 0xD1342543DE82EF95 + counter * 0x9E3779B97F4A7C15) & _WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _WORD
    return x ^ (x >> 31)
