"""Triton kernel of algorithm 1. Importing this file needs triton.

A table holds the number of an entry in the list, not its index: so the mark of an empty
cell is no index, and an index that occurs twice is kept twice.
"""

# Triton's compiler reads these functions; what they take and give has no type in
# Python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

EMPTY = tl.constexpr(-1)
_NEVER = tl.constexpr(-2)  # what no cell of a table ever holds


@triton.jit
def _hashed(x, number):
    """Hash function ``number`` of 32 bits: murmur3's finaliser over index and
    number.
    """
    x = x.to(tl.uint32, bitcast=True) ^ (number * 0x9E3779B9).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def hash_entries(
    indices,
    places,
    table,
    counters,
    spilled,
    num_entries,
    length,
    parallel,
    serial,
    last,
    REHASHES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Algorithm 1, lines 4 to 17: puts each entry into its part's memory.

    ``table`` has ``parallel + serial`` cells a part and, at ``last``, one that nobody
    gets. ``counters`` has the serial cells taken of each part, and behind them how many
    are ``spilled``.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    waiting = i < num_entries
    index = tl.load(indices + i, mask=waiting, other=0)
    part = tl.load(places + i, mask=waiting, other=0) // length  # h0
    base = part.to(tl.int64) * (parallel + serial)
    for number in tl.static_range(1, REHASHES + 1):
        bound = tl.full((BLOCK,), parallel, tl.uint32)
        cell = base + tl.umulhi(
            _hashed(index, tl.full((), number, tl.uint32)), bound
        ).to(tl.int64)
        expected = tl.where(waiting, EMPTY, _NEVER)
        found = tl.atomic_cas(table + tl.where(waiting, cell, last), expected, i)
        waiting = waiting & (found != EMPTY)
    taken = tl.atomic_add(counters + part, 1, mask=waiting)
    fits = waiting & (taken < serial)
    tl.store(table + base + parallel + taken, i, mask=fits)
    waiting = waiting & (taken >= serial)
    world = last // (parallel + serial)
    at = tl.atomic_add(counters + world + tl.zeros((BLOCK,), tl.int64), 1, mask=waiting)
    tl.store(spilled + at, i, mask=waiting)
