"""zero_run: runs of zero bytes made one byte each, for codes that five lie in a byte.

Source: Lim, Andersen, Kaminsky, SysML 2019 ("3LC"), section 3.3: five codes of three values make a
    byte of 0 to 242, and the 13 bytes that are left over stand for runs of 2 to 14 zeros.
Differences: a byte of five zeros is 0 and not 121, as the code of zero is 0 and not 1; runs end
    with their block, so that blocks are coded and decoded in parallel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..coders import Coder
from ..language import uint_3
from ..operators import register

_LONGEST = 14
_BASE = 241  # the code of a run, less its length


def _encode(plain_U: Tensor, block_bytes: int) -> tuple[Tensor, Tensor]:
    place_U = torch.arange(plain_U.numel(), device=plain_U.device)
    zero_U, first_U = plain_U == 0, place_U % block_bytes == 0
    # Before a run stands a byte that is not zero, or the block's beginning.
    before_U = torch.where(zero_U & ~first_U, -1, place_U - (zero_U & first_U).long())
    run_U = place_U - before_U.cummax(0).values if plain_U.numel() else place_U
    length_U = (run_U - 1) % _LONGEST + 1
    goes_on_U = torch.zeros_like(zero_U)
    goes_on_U[:-1] = zero_U[1:] & ~first_U[1:]
    sent_U = ~zero_U | ~goes_on_U | (length_U == _LONGEST)
    run_code_U = torch.where(length_U == 1, 0, _BASE + length_U)
    code_U = torch.where(zero_U, run_code_U, plain_U.long())
    lengths_B = place_U.new_zeros(-(-plain_U.numel() // block_bytes))
    lengths_B.index_add_(0, place_U // block_bytes, sent_U.long())
    return lengths_B, code_U[sent_U].to(torch.uint8)


def _decode(lengths_B: Tensor, coded_C: Tensor, plain_U: Tensor, block_bytes: int) -> int:
    code_C, block_B = coded_C.long(), torch.arange(lengths_B.numel(), device=plain_U.device)
    step_C = torch.where(code_C > _BASE + 1, code_C - _BASE, 1)
    filled_B = torch.zeros_like(lengths_B)
    filled_B.index_add_(0, block_B.repeat_interleave(lengths_B), step_C)
    room_B = (plain_U.numel() - block_B * block_bytes).clamp(max=block_bytes)
    if not torch.equal(filled_B, room_B):
        return int((filled_B != room_B).int().argmax())
    literal_C = code_C <= _BASE + 1
    plain_U.zero_()
    plain_U[(step_C.cumsum(0) - step_C)[literal_C]] = coded_C[literal_C]
    return -1


zero_run = register(
    Coder(
        "zero_run",
        takes=(uint_3,),
        encode=_encode,
        decode=_decode,
        cpp_support='#include "zero_run.h"\nusing namespace gw;',
    )
)
"""The vector, to be sent with each run of 2 to 14 zero bytes in one byte."""
