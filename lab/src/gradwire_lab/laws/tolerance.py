"""How a law speaks: what must hold, how near results have to be, what makes them the
same bits.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import LawBroken

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def must(holds: bool, otherwise: str) -> None:
    """Raises ``LawBroken`` with what was found, unless it holds.

    Laws are for algorithms of the user's, so they hold under ``python -O`` too.
    """
    if not holds:
        raise LawBroken(otherwise)


def laws_in(module: Mapping[str, Any]) -> tuple[Callable[..., Any], ...]:
    """The laws that a module defines or imports, by name: its ``globals()``."""
    return tuple(law for name, law in sorted(module.items()) if name.startswith("law_"))


def coarser(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The one of two dtypes that rounds more coarsely; the first of equal ones."""
    return max(dtype, other, key=lambda each: torch.finfo(each).eps)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether shape, dtype and bits are equal; a NaN equals itself, and -0.0 is not
    0.0.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = _BITS[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def all_same_bits(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether as many tensors have the same bits, in turn."""
    return all(same_bits(a, b) for a, b in zip(tensors, others, strict=True))


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is an inf or NaN."""
    return bool(tensor.isfinite().all())


def largest(*tensors: Tensor) -> float:
    """The largest magnitude among all elements; 0 if there are none."""
    return max(
        (float(t.double().abs().max()) for t in tensors if t.numel()), default=0.0
    )


def assert_near(
    got: Tensor,
    want: Tensor,
    dtype: torch.dtype,
    *,
    magnitude: float,
    terms: float,
    what: str,
) -> None:
    """Fails unless both agree to ``terms`` roundings of numbers of this magnitude in
    ``dtype``.
    """
    must(
        got.shape == want.shape,
        f"{what}: {tuple(got.shape)} is not {tuple(want.shape)}",
    )
    info = torch.finfo(dtype)
    # Below the smallest normal number a rounding is of that number's last place.
    allowed = terms * info.eps * max(magnitude, info.tiny)
    off_N = (got.double() - want.double()).abs()
    worst = 0.0
    if off_N.numel():
        worst = float(off_N.nan_to_num(nan=float("inf")).max())
    must(worst <= allowed, f"{what}: off by {worst:.3g}, allowed {allowed:.3g}")


def tame(grad_N: Tensor) -> bool:
    """Finite, and far from the end of every dtype's range."""
    return is_finite(grad_N) and largest(grad_N) <= 1e4
