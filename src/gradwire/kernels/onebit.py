"""onebit: a sign bit an element and, for each block, the means of the two signs.

Source: Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; HiPress (2021), section 5.
Legend: N elements, B = ceil(N / block) blocks, U = ceil(N / 8) bytes.

With c = grad + residual, bit i of byte j is c[8j + i] >= 0 (so a NaN counts as negative, -0.0 as
not) and the bits past the end are 0. scales[b] = (mean of c < 0, mean of c >= 0) over block b,
summed in double precision and 0 where there is no such element. A decoded element is one of its
block's two scales.
"""

from __future__ import annotations

import ctypes

import torch

from ..errors import invalid
from ._build import load_library
from ._operands import address, check_floating, check_vector, serves_cpp

BLOCK = 65536


def encode(
    grad_N: torch.Tensor,
    scales_B2: torch.Tensor,
    bits_U: torch.Tensor,
    residual_N: torch.Tensor | None = None,
    *,
    block: int = BLOCK,
) -> None:
    """Fills ``scales_B2`` (float32) and ``bits_U`` (uint8) from ``grad_N`` (+ ``residual_N``).

    ``residual_N`` (the gradient's dtype) then holds c - decoded, except in a block with an inf or
    a NaN: there the scales carry it and the residual keeps its old bits. ``block`` is a multiple
    of 8. One pass over memory: 4 bytes an element read, 12 moved with a residual.
    """
    num_elements = grad_N.numel()
    check_floating("grad_N", grad_N)
    _check_payload(scales_B2, bits_U, num_elements, block)
    if residual_N is not None:
        check_vector("residual_N", residual_N, num_elements, grad_N.dtype)
    library = load_library("onebit") if serves_cpp(grad_N, residual_N, scales_B2) else None
    if library is None:
        _reference_encode(grad_N, scales_B2, bits_U, residual_N, block)
        return
    library.gw_onebit_encode(
        address(grad_N),
        address(residual_N),
        ctypes.c_int64(num_elements),
        ctypes.c_int64(block),
        address(scales_B2),
        address(bits_U),
        torch.get_num_threads(),
    )


def decode(
    scales_B2: torch.Tensor,
    bits_U: torch.Tensor,
    out_N: torch.Tensor,
    *,
    block: int = BLOCK,
    scale: float = 1.0,
) -> None:
    """Overwrites ``out_N`` with scale * decoded."""
    check_floating("out_N", out_N)
    _check_payload(scales_B2, bits_U, out_N.numel(), block)
    library = load_library("onebit") if serves_cpp(out_N, scales_B2) else None
    if library is None:
        out_N.copy_(_reference_decode(scales_B2 * scale, bits_U, out_N.numel(), block))
        return
    library.gw_onebit_decode(
        address(scales_B2),
        address(bits_U),
        address(out_N),
        ctypes.c_int64(out_N.numel()),
        ctypes.c_int64(block),
        ctypes.c_float(scale),
        torch.get_num_threads(),
    )


def decode_add(
    scales_B2: torch.Tensor, bits_U: torch.Tensor, sum_N: torch.Tensor, *, block: int = BLOCK
) -> None:
    """Adds the decoded elements to ``sum_N``."""
    check_floating("sum_N", sum_N)
    _check_payload(scales_B2, bits_U, sum_N.numel(), block)
    library = load_library("onebit") if serves_cpp(sum_N, scales_B2) else None
    if library is None:
        sum_N.add_(_reference_decode(scales_B2, bits_U, sum_N.numel(), block))
        return
    library.gw_onebit_decode_add(
        address(scales_B2),
        address(bits_U),
        address(sum_N),
        ctypes.c_int64(sum_N.numel()),
        ctypes.c_int64(block),
        torch.get_num_threads(),
    )


def _check_payload(
    scales_B2: torch.Tensor, bits_U: torch.Tensor, num_elements: int, block: int
) -> None:
    if block < 8 or block % 8:
        raise invalid("block", block, "a positive multiple of 8", f"use the default {BLOCK}")
    shape = (-(-num_elements // block), 2)
    if (
        tuple(scales_B2.shape) != shape
        or scales_B2.dtype != torch.float32
        or not scales_B2.is_contiguous()
    ):
        raise invalid(
            "scales_B2",
            f"shape {tuple(scales_B2.shape)}, {scales_B2.dtype}",
            f"contiguous float32 of shape {shape}",
            "allocate one row for each block",
        )
    check_vector("bits_U", bits_U, -(-num_elements // 8), torch.uint8)


def _reference_encode(
    grad_N: torch.Tensor,
    scales_B2: torch.Tensor,
    bits_U: torch.Tensor,
    residual_N: torch.Tensor | None,
    block: int,
) -> None:
    c_N = grad_N.clone() if residual_N is None else grad_N + residual_N
    positive_N = c_N >= 0
    for index, start in enumerate(range(0, c_N.numel(), block)):
        part, positive = c_N[start : start + block], positive_N[start : start + block]
        for column, chosen in enumerate((part[~positive], part[positive])):
            mean = chosen.double().sum() / max(chosen.numel(), 1)
            scales_B2[index, column] = mean.float()
        if residual_N is not None and scales_B2[index].isfinite().all():
            low, high = scales_B2[index].to(c_N.dtype)
            residual_N[start : start + block] = part - torch.where(positive, high, low)
    bits_U.copy_(_packed(positive_N))


def _packed(positive_N: torch.Tensor) -> torch.Tensor:
    padded = positive_N.new_zeros(-(-positive_N.numel() // 8) * 8)
    padded[: positive_N.numel()] = positive_N
    weights = 2 ** torch.arange(8, device=positive_N.device)
    return (padded.view(-1, 8) * weights).sum(1).to(torch.uint8)


def _reference_decode(
    scales_B2: torch.Tensor, bits_U: torch.Tensor, num_elements: int, block: int
) -> torch.Tensor:
    index = torch.arange(num_elements, device=bits_U.device)
    bit_N = (bits_U[index // 8] >> (index % 8).to(torch.uint8)) & 1
    return scales_B2[index // block, bit_N.long()]
