"""The exponent of a float32, and the power of two that has it.

Source: HiPress, section 4.4: operators that later algorithms need are registered; logb
    and ldexp of C are the models. Bits are moved and nothing is computed, so all forms
    are exact.
Differences from C: whole numbers in and out, and what is below the least normal number
    (2**-126) counts as 0, whose exponent is -127.

>>> import torch
>>> exponents = exponent.interp(torch.tensor([1.0, -0.3, 0.0, torch.inf]))
>>> exponents.tolist(), exp2.interp(exponents).tolist()
([0, -2, -127, 128], [1.0, 0.25, 0.0, inf])
"""

import torch
from torch import Tensor

from gradwire.dsl.language import float32, int32
from gradwire.dsl.operators import Operator, register

LEAST = -127
MOST = 128
"""The exponent of 0, and that of what is not finite."""


def _exponent(value: Tensor) -> Tensor:
    return (value.contiguous().view(torch.int32) >> 23 & 0xFF) + LEAST


def _exp2(power: Tensor) -> Tensor:
    return (power.clamp(LEAST, MOST) - LEAST << 23).view(torch.float32)


_CPP = """\
namespace gw {

inline int32_t exponent(float x) { return (bits_of(x) >> 23 & 0xFF) - 127; }

inline float exp2(int32_t n) {
  const int32_t inside = n < -127 ? -127 : n > 128 ? 128 : n;
  return float_of((inside + 127) << 23);
}

}  // namespace gw"""

_TRITON = """\
@triton.jit
def exponent_of(x):
    return ((x.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127


@triton.jit
def power_of_two(n):
    biased = tl.minimum(tl.maximum(n, -127), 128) + 127
    return (biased << 23).to(tl.float32, bitcast=True)
"""

exponent = register(
    Operator(
        "exponent",
        operands=(float32,),
        result=int32,
        interp=_exponent,
        cpp="gw::exponent({})",
        cpp_support=_CPP,
        triton="exponent_of({})",
        triton_support=_TRITON,
    )
)
"""The n of 2**n <= abs(x) < 2**(n + 1); -127 below 2**-126, and 128 for infinity and
NaN.
"""

exp2 = register(
    Operator(
        "exp2",
        operands=(int32,),
        result=float32,
        interp=_exp2,
        cpp="gw::exp2({})",
        cpp_support=_CPP,
        triton="power_of_two({})",
        triton_support=_TRITON,
    )
)
"""2**n for a whole n from -126 to 127; 0 below, infinity above."""
