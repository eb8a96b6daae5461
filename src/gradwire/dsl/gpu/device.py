"""Parts of generated Triton kernels: casts, reductions, packing, Philox.

The counterpart of csrc/compll.h; the definitions are interp.py and philox.py. Importing
this file needs triton; ``build`` does so when the first kernel is built.

Legend: B rows a program, which are blocks or pieces of them, T elements of each row a
tile, both powers of two. A value a block has shape (B, 1), one an element (B, T).
``start`` (B, 1) is where a row begins in the gradient, ``at`` where the tile begins in
the row and ``n`` (B, 1) the row's length; tiles begin at multiples of 64, so packed
codes of a tile begin with a byte of their own.
"""

# Triton's compiler reads these functions; what they take and give has no type in
# Python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

_ROUNDS = tl.constexpr(7)

# ---- several tensors in one launch ---------------------------------------------------


@triton.jit
def tensor_of(table, num_tensors, WORDS: tl.constexpr):
    """The program's number in its tensor, and where the tensor's words begin.

    ``table`` (int64) has the number of the first program of each tensor, rising, then
    ``WORDS`` words of each: addresses and numbers.
    """
    program = tl.program_id(0)
    begun = 0
    for at in range(0, num_tensors, 128):
        i = at + tl.arange(0, 128)
        first = tl.load(table + i, mask=i < num_tensors, other=2147483647)
        begun += tl.sum((first <= program).to(tl.int32), 0)
    before = tl.load(table + begun - 1).to(tl.int32)
    return program - before, table + num_tensors + (begun - 1) * WORDS


@triton.jit
def memory(words, place, kind: tl.constexpr, ALIGN: tl.constexpr):
    """The memory whose address is a word: a multiple of ``4 * ALIGN`` bytes, unless
    that is 1.
    """
    bytes: tl.constexpr = 4 * ALIGN if ALIGN > 1 else 1
    return tl.multiple_of(tl.load(words + place).to(tl.pointer_type(kind)), bytes)


# ---- scalar functions ----------------------------------------------------------------


@triton.jit
def smaller(a, b):
    """The smaller of two; NaN if one is."""
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def greater(a, b):
    """The greater of two; NaN if one is."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def rounded(x):
    """The nearest whole number, halves to even, by adding 2^23 and taking it away."""
    magnitude = tl.abs(x)
    whole = (magnitude + 8388608.0) - 8388608.0
    sign = x.to(tl.int32, bitcast=True) & -2147483648  # that of a zero too
    signed = (whole.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(magnitude < 8388608.0, signed, x)


@triton.jit
def floored(x):
    """The next whole number below.

    Triton's own takes the smallest negative numbers for zeros.
    """
    whole = rounded(x)
    return tl.where(whole > x, whole - 1.0, whole)


@triton.jit
def finite(x):
    """Whether x is neither infinite nor NaN."""
    return tl.abs(x) <= 3.4028234663852886e38


@triton.jit
def canonical(x):
    """``x`` with one zero and one NaN."""
    return tl.where(x == x, x + 0.0, float("nan"))


@triton.jit
def to_uint(x, TOP: tl.constexpr):
    """Towards zero, saturating at 0 and TOP, NaN to 0; an int32."""
    if x.dtype == tl.float32:
        x = tl.where(x > 0.0, x, 0.0)
        x = tl.where(x < TOP, x, TOP * 1.0)
    elif x.dtype == tl.int32:
        x = tl.minimum(tl.maximum(x, 0), TOP)
    return x.to(tl.int32)


@triton.jit
def to_int(x):
    """Towards zero, saturating, NaN to 0; an int32."""
    if x.dtype == tl.float32:
        high = 2147483520.0  # the last float32 below 2^31
        inside = tl.where(x > -2147483648.0, tl.where(x < high, x, high), -2147483648.0)
        whole = tl.where(x == x, inside, 0.0).to(tl.int32)
        x = tl.where(x >= 2147483648.0, 2147483647, whole)
    return x.to(tl.int32)


# ---- reductions: (B, T) partial results to (B, 1) ------------------------------------


@triton.jit
def total(lanes):
    """The sum; doubles are rounded once, to a float32."""
    added = tl.sum(lanes, 1, keep_dims=True)
    if added.dtype == tl.float64:
        added = canonical(added.to(tl.float32))
    return added


@triton.jit
def least(lanes):
    """The smallest; NaN if one is."""
    if lanes.dtype == tl.float32:
        result = canonical(-most(-lanes))
    else:
        result = tl.min(lanes, 1, keep_dims=True)
    return result


@triton.jit
def most(lanes):
    """The greatest; NaN if one is."""
    if lanes.dtype == tl.float32:
        number = lanes == lanes
        result = tl.max(tl.where(number, lanes, float("-inf")), 1, keep_dims=True)
        numbers = tl.min(number.to(tl.int32), 1, keep_dims=True)
        result = tl.where(numbers == 1, result + 0.0, float("nan"))
    else:
        result = tl.max(lanes, 1, keep_dims=True)
    return result


@triton.jit
def halves(lanes):
    """The first and the second half of the lanes: shapes (B, T / 2)."""
    half: tl.constexpr = lanes.shape[1] // 2
    pairs = tl.permute(tl.reshape(lanes, (lanes.shape[0], 2, half)), (0, 2, 1))
    return tl.split(pairs)


# ---- kept elements -------------------------------------------------------------------


@triton.jit
def places(kept, before):
    """The place of each kept element of a tile, behind ``before`` (B, 1) earlier ones,
    and how many are kept up to the tile's end.
    """
    rank = tl.cumsum(kept.to(tl.int32), 1)
    return before + rank - 1, before + tl.max(rank, 1, keep_dims=True)


# ---- packed codes --------------------------------------------------------------------


@triton.jit
def store_codes(memory, codes, start, at, n, BITS: tl.constexpr):
    """Packs a tile's codes of BITS bits, the first lowest, and stores whole bytes."""
    PER: tl.constexpr = 8 // BITS
    rows = tl.reshape(codes, (codes.shape[0], codes.shape[1] // PER, PER))
    packed = tl.sum(rows << (tl.arange(0, PER) * BITS)[None, None, :], 2)
    byte = at // PER + tl.arange(0, codes.shape[1] // PER)[None, :]
    tl.store(memory + (start // PER + byte), packed.to(tl.uint8), mask=byte * PER < n)


@triton.jit
def load_codes(memory, start, at, n, BITS: tl.constexpr, TILE: tl.constexpr):
    """A tile's codes of BITS bits as int32; 0 behind the row's end."""
    PER: tl.constexpr = 8 // BITS
    byte = at // PER + tl.arange(0, TILE // PER)[None, :]
    packed = tl.load(memory + (start // PER + byte), mask=byte * PER < n, other=0).to(
        tl.int32
    )
    rows = packed[:, :, None] >> (tl.arange(0, PER) * BITS)[None, None, :]
    return tl.reshape(rows & (2**BITS - 1), (packed.shape[0], TILE))


@triton.jit
def _power_of_3(i):
    return tl.where(i == 4, 81, tl.where(i == 3, 27, tl.where(i == 2, 9, 2 * i + 1)))


@triton.jit
def store_codes_by_five(memory, codes, start, at, n):
    """Packs a tile's codes 0 to 2.

    Byte b of a group of 64 is the sum of code[b + 13 i] * 3^i.
    """
    GROUPS: tl.constexpr = codes.shape[1] // 64
    rows = tl.reshape(codes, (codes.shape[0], GROUPS, 64))
    byte = tl.arange(0, 16)[None, None, :] + tl.zeros(
        (codes.shape[0], GROUPS, 16), tl.int32
    )
    packed = tl.zeros((codes.shape[0], GROUPS, 16), tl.int32)
    for i in tl.static_range(5):
        place = byte + 13 * i
        digit = tl.gather(rows, tl.minimum(place, 63), 2)
        packed += tl.where(place < 64, digit, 0) * 3**i
    group = at // 64 + tl.arange(0, GROUPS)[None, :, None]
    left = n[:, :, None] - group * 64
    here = memory + ((start[:, :, None] // 64 + group) * 13 + byte)
    tl.store(here, packed.to(tl.uint8), mask=(byte < 13) & (byte < left))


@triton.jit
def load_codes_by_five(memory, start, at, n, TILE: tl.constexpr):
    """A tile's codes 0 to 2 as int32; 0 behind the row's end."""
    j = at + tl.arange(0, TILE)[None, :]
    place = j % 64
    here = memory + ((start + j) // 64 * 13 + place % 13)
    packed = tl.load(here, mask=j < n, other=0).to(tl.int32)
    return packed // _power_of_3(place // 13) % 3


# ---- random numbers ------------------------------------------------------------------


@triton.jit
def words(key_low, key_high, step, first, STREAM: tl.constexpr, TILE: tl.constexpr):
    """The 32 random bits (uint32) of each element of a tile from ``first`` (B, 1)."""
    group = first[:, :, None] // 64 + tl.arange(0, TILE // 64)[None, :, None]
    counter = group * 16 + tl.arange(0, 16)[None, None, :]
    a, b, c, d = tl.philox_impl(
        counter.to(tl.uint32),
        (counter >> 32).to(tl.uint32),
        step.to(tl.uint32, bitcast=True),
        tl.full((), STREAM, tl.uint32),
        key_low.to(tl.uint32, bitcast=True),
        key_high.to(tl.uint32, bitcast=True),
        _ROUNDS,
    )
    # Word w of counter c is element 16 w + c of its group.
    drawn = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 1, 3, 4, 2))
    return tl.reshape(drawn, (first.shape[0], TILE))


@triton.jit
def uniform(word):
    """A multiple of 2^-24 in [0, 1)."""
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def below(word, bound):
    """A whole number in [0, bound): the 32 bits times the bound, shifted."""
    return tl.umulhi(word, bound.to(tl.uint32)).to(tl.int32)
