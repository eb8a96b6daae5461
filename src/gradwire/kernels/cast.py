"""cast16: a gradient in fp16 or bf16, scaled before and after the conversion.

Legend: N elements. With c = grad + residual, out = round(c * prescale) to the nearest
16-bit value, ties to even, as ``Tensor.to`` does; what is too large for fp16 becomes
inf. Decoded is out / prescale. Scales are applied in float32.
"""

import math

import torch

from ..errors import invalid
from .libraries import check_floating, check_vector, loader

_load_cast = loader("cast")

_DTYPES = (torch.float16, torch.bfloat16)


def cast16_encode(
    grad_N: torch.Tensor,
    out_N: torch.Tensor,
    prescale: float = 1.0,
    residual_N: torch.Tensor | None = None,
) -> None:
    """Fills ``out_N`` (fp16, bf16) with ``grad_N`` (+ ``residual_N``) * ``prescale``.

    ``residual_N`` (the gradient's dtype) then holds c - decoded; where that is not
    finite (inf, NaN, overflow of fp16) it keeps its old value.
    """
    check_floating("grad_N", grad_N)
    check_vector("out_N", out_N, grad_N.numel(), *_DTYPES)
    check_vector("residual_N", residual_N, grad_N.numel(), grad_N.dtype)
    if not (math.isfinite(prescale) and prescale > 0):
        raise invalid(
            "prescale", prescale, "a positive finite number", "1.0 leaves it unscaled"
        )
    library = _load_cast(grad_N, residual_N)
    if library is None:
        c_N = grad_N if residual_N is None else grad_N + residual_N
        out_N.copy_(c_N * prescale)
        if residual_N is not None:
            left_N = c_N - out_N.to(c_N.dtype) * (1.0 / prescale)
            residual_N.copy_(torch.where(left_N.isfinite(), left_N, residual_N))
        return
    library.gw_cast16_encode(
        grad_N,
        residual_N,
        out_N,
        grad_N.numel(),
        int(out_N.dtype == torch.bfloat16),
        prescale,
        1.0 / prescale,
    )


def cast16_decode(
    in_N: torch.Tensor, out_N: torch.Tensor, scale: float = 1.0, *, add: bool = False
) -> None:
    """Overwrites ``out_N`` with scale * ``in_N`` (fp16 or bf16).

    With ``add`` it is added instead.
    """
    check_floating("out_N", out_N)
    check_vector("in_N", in_N, out_N.numel(), *_DTYPES)
    library = _load_cast(out_N)
    if library is None:
        scaled_N = in_N.float() * scale
        out_N.copy_(out_N + scaled_N if add else scaled_N)
        return
    is_bf16 = int(in_N.dtype == torch.bfloat16)
    library.gw_cast16_decode(in_N, out_N, out_N.numel(), is_bf16, scale, int(add))
