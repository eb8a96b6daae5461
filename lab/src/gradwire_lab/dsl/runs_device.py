"""Triton kernels of coders of runs: a program for each block, tile after tile.

Importing this file needs triton. ``runs.py`` launches them. Lengths and places are
int64, so that no coded length, however wrong, runs over.

Legend: T bytes a tile. A run goes from left to right in pieces of up to ``MOST`` bytes;
the last byte of each piece is the one that is sent.
"""

# Triton's compiler reads these functions; what they take and give has no type in
# Python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _block(number, num_bytes, block_bytes):
    """(where a block of bytes begins, how many it has)."""
    start = number.to(tl.int64) * block_bytes
    return start, tl.minimum(num_bytes - start, block_bytes).to(tl.int32)


@triton.jit
def _cut(plain, start, n, at, before, single, run, OF, MOST, TILE: tl.constexpr):
    """(codes T, which are sent T, the last place up to the tile's end that is no
    ``OF``).
    """
    i = at + tl.arange(0, TILE)
    inside = i < n
    has_next = i + 1 < n
    here = plain + start + i
    byte = tl.load(here, mask=inside, other=OF).to(tl.int32)
    after = tl.load(here + 1, mask=has_next, other=OF).to(tl.int32)
    alike = byte == OF
    unlike = tl.where(alike, -1, i)
    latest = tl.associative_scan(unlike, 0, _later)
    other = tl.maximum(latest, before)
    length = (i - other - 1) % MOST + 1
    goes_on = (after == OF) & has_next
    ends = ~alike | (length == MOST) | ~goes_on
    sent = inside & ends
    of_run = tl.load(run + length, mask=inside & alike, other=0)
    of_byte = tl.load(single + byte, mask=inside & ~alike, other=0)
    return tl.where(alike, of_run, of_byte), sent, tl.max(other, 0)


@triton.jit
def count_runs(
    plain,
    num_bytes,
    block_bytes,
    single,
    run,
    lengths,
    OF: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
):
    """The coded bytes of each block."""
    start, n = _block(tl.program_id(0), num_bytes, block_bytes)
    before = -1
    count = tl.zeros((), tl.int32)
    for at in range(0, n, TILE):
        _, sent, before = _cut(plain, start, n, at, before, single, run, OF, MOST, TILE)
        count += tl.sum(sent.to(tl.int32), 0)
    tl.store(lengths + tl.program_id(0), count.to(tl.int64))


@triton.jit
def write_runs(
    plain,
    num_bytes,
    block_bytes,
    single,
    run,
    starts,
    coded,
    OF: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
):
    """The codes of each block, from its place in ``starts`` on."""
    start, n = _block(tl.program_id(0), num_bytes, block_bytes)
    to = tl.load(starts + tl.program_id(0))
    before = -1
    for at in range(0, n, TILE):
        codes, sent, before = _cut(
            plain, start, n, at, before, single, run, OF, MOST, TILE
        )
        rank = tl.cumsum(sent.to(tl.int32), 0)
        tl.store(coded + to + rank - 1, codes.to(tl.uint8), mask=sent)
        to += tl.max(rank, 0)


@triton.jit
def read_runs(
    coded,
    lengths,
    starts,
    plain,
    num_bytes,
    block_bytes,
    byte,
    times,
    wrong,
    OF: tl.constexpr,
    TILE: tl.constexpr,
):
    """The bytes of each block that are not ``OF``; ``wrong`` is 1 where codes do not
    fill it.
    """
    start, n = _block(tl.program_id(0), num_bytes, block_bytes)
    length = tl.load(lengths + tl.program_id(0))
    source = tl.load(starts + tl.program_id(0))
    filled = tl.zeros((), tl.int64)
    for at in range(0, length, TILE):
        i = at + tl.arange(0, TILE)
        inside = i < length
        code = tl.load(coded + source + i, mask=inside, other=0).to(tl.int32)
        lasts = tl.where(inside, tl.load(times + code), 0)
        ends = tl.cumsum(lasts, 0) + filled
        place = ends - lasts
        value = tl.load(byte + code)
        tl.store(
            plain + start + place,
            value.to(tl.uint8),
            mask=inside & (place < n) & (value != OF),
        )
        filled = tl.max(ends, 0)
    tl.store(wrong + tl.program_id(0), (filled != n).to(tl.int64))
