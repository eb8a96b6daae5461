"""Conversion to and from the 8-bit float of four exponent bits and three of fraction.

Source: OCP, "8-bit Floating Point Specification", revision 1.0, 2023, section 5, and
    Micikevicius et al., arXiv 2209.05433: bias 7, no infinity, codes 0x7F and 0xFF are
    NaN, 448 is the largest.
Differences: none; of the two ways to treat what is too large the saturating one, for
    infinity too, and every NaN is sent as 0x7F, as signs of NaN differ between
    machines.

>>> import torch
>>> codes = to_e4m3.interp(torch.tensor([1.0, -0.3, 1000.0, torch.nan]))
>>> codes.tolist(), from_e4m3.interp(codes).tolist()
([56, 170, 126, 127], [1.0, -0.3125, 448.0, nan])
"""

import torch
from torch import Tensor

from .language import float32, int32, uint8
from .operators import Operator, register


def _to_codes(value: Tensor) -> Tensor:
    inside = value.clamp(-448, 448)  # not every torch saturates
    codes = inside.to(torch.float8_e4m3fn).view(torch.uint8).int()
    return torch.where(value.isnan(), 0x7F, codes)


def _from_codes(code: Tensor) -> Tensor:
    value = code.to(torch.uint8).view(torch.float8_e4m3fn).float()
    return torch.where(value.isnan(), torch.nan, value)


_TRITON = """\
@triton.jit
def to_e4m3(x):
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    inside = tl.minimum(magnitude, 0x43E00000)
    normal = ((inside + 0x7FFFF + ((inside >> 20) & 1)) >> 20) - 960
    shifted = inside.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(inside < 0x3C800000, small, normal) | sign
    return tl.where(magnitude > 0x7F800000, 0x7F, code)


@triton.jit
def from_e4m3(code):
    magnitude = code & 0x7F
    normal = (magnitude + 960) << 20
    small = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    bits = tl.where(magnitude < 8, small, normal) | ((code & 0x80) << 24)
    return tl.where(magnitude == 0x7F, 0x7FC00000, bits).to(tl.float32, bitcast=True)
"""

to_e4m3 = register(
    Operator(
        "to_e4m3",
        operands=(float32,),
        result=uint8,
        interp=_to_codes,
        cpp="gw::to_e4m3({})",
        cpp_support='#include "e4m3.h"',
        triton="to_e4m3({})",
        triton_support=_TRITON,
    )
)
"""The code of the nearest e4m3 number, ties to even.

Past 448, and for infinity, that of 448.
"""

from_e4m3 = register(
    Operator(
        "from_e4m3",
        operands=(int32,),
        result=float32,
        interp=_from_codes,
        cpp="gw::from_e4m3({})",
        cpp_support='#include "e4m3.h"',
        triton="from_e4m3({})",
        triton_support=_TRITON,
    )
)
"""The number that a code from 0 to 255 stands for."""
