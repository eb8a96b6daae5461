"""Triton kernels of the partition: h0 as a permutation, and the two passes.

Importing this file needs triton. ``constants`` holds ``Permutation.constants`` as int32: numel,
mask, shift, then multiplier, addend and inverse of three rounds.

Legend: I entries of a program, W parts (a power of two, of which the last may be empty).
"""

# Triton's compiler reads these functions; what they take and give has no type in Python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _once(x, constants, mask, shift):
    for number in tl.static_range(3):
        multiplier = tl.load(constants + 3 + 3 * number).to(tl.uint32, bitcast=True)
        addend = tl.load(constants + 4 + 3 * number).to(tl.uint32, bitcast=True)
        x = x ^ (x >> shift)
        x = (x * multiplier + addend) & mask
    return x


@triton.jit
def places_of(indices, constants):
    """The permutation: int32 indices below numel to int32 places."""
    numel = tl.load(constants).to(tl.uint32, bitcast=True)
    mask = tl.load(constants + 1).to(tl.uint32, bitcast=True)
    shift = tl.load(constants + 2).to(tl.uint32, bitcast=True)
    x = _once(indices.to(tl.uint32, bitcast=True), constants, mask, shift)
    left = tl.max((x >= numel).to(tl.int32), 0)
    while left > 0:
        x = tl.where(x >= numel, _once(x, constants, mask, shift), x)
        left = tl.max((x >= numel).to(tl.int32), 0)
    return x.to(tl.int32, bitcast=True)


@triton.jit
def permute(indices, constants, places, num_entries, BLOCK: tl.constexpr):
    """Writes the places of a list of indices."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_entries
    index = tl.load(indices + i, mask=inside, other=0)
    tl.store(places + i, places_of(index, constants), mask=inside)


# ---- two passes --------------------------------------------------------------------------------


@triton.jit
def _membership(places, num_entries, length, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """(entry numbers I, whether there is such an entry I, places I, (I, W) whose part it is in)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_entries
    place = tl.load(places + i, mask=inside, other=0)
    own = (place // length)[:, None] == tl.arange(0, WORLD)[None, :]
    return i, inside, place, own & inside[:, None]


@triton.jit
def count(
    places, counts, num_entries, num_blocks, length, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    """Pass one: counts each block's entries in part w into ``counts[w * num_blocks + block]``."""
    _, _, _, own = _membership(places, num_entries, length, WORLD, BLOCK)
    at = tl.arange(0, WORLD) * num_blocks + tl.program_id(0)
    tl.store(counts + at, tl.sum(own.to(tl.int32), 0))


@triton.jit
def move(
    places,
    starts,
    local,
    order,
    num_entries,
    num_blocks,
    length,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pass two: writes local places and entry numbers from ``starts`` on, in the list's order."""
    i, inside, place, own = _membership(places, num_entries, length, WORLD, BLOCK)
    start = tl.load(starts + tl.arange(0, WORLD) * num_blocks + tl.program_id(0))
    rank = tl.cumsum(own.to(tl.int32), 0) - 1 + start[None, :]
    at = tl.sum(tl.where(own, rank, 0), 1)
    tl.store(local + at, place % length, mask=inside)
    tl.store(order + at, i, mask=inside)
