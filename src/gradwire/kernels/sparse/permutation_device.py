"""The permutation as a Triton kernel.

Importing this file needs triton. ``constants`` holds ``Permutation.constants`` as
int32: numel, mask, shift, then multiplier, addend and inverse of three rounds.
"""

# Triton's compiler reads these functions; what they take and give has no type in
# Python.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

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
def permute(indices, constants, places, num_entries, BLOCK: tl.constexpr):
    """Writes the places (int32) of a list of indices (int32), all below numel."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_entries
    index = tl.load(indices + i, mask=inside, other=0)
    numel = tl.load(constants).to(tl.uint32, bitcast=True)
    mask = tl.load(constants + 1).to(tl.uint32, bitcast=True)
    shift = tl.load(constants + 2).to(tl.uint32, bitcast=True)
    x = _once(index.to(tl.uint32, bitcast=True), constants, mask, shift)
    left = tl.max((x >= numel).to(tl.int32), 0)
    while left > 0:
        x = tl.where(x >= numel, _once(x, constants, mask, shift), x)
        left = tl.max((x >= numel).to(tl.int32), 0)
    tl.store(places + i, x.to(tl.int32, bitcast=True), mask=inside)
