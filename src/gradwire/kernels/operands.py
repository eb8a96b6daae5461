"""Checks of operands and their hand-over to C."""

from __future__ import annotations

import torch

from ..errors import invalid

INT32_MAX = 2**31 - 1


def check_vector(name: str, tensor: torch.Tensor, numel: int, *dtypes: torch.dtype) -> None:
    """Raises InvalidSetting unless this is a contiguous vector of ``numel`` and a listed dtype."""
    if tensor.dim() != 1 or tensor.numel() != numel or not tensor.is_contiguous():
        raise invalid(
            name,
            f"shape {tuple(tensor.shape)}, stride {tensor.stride()}",
            f"a contiguous vector of {numel} elements",
            "pass tensor.reshape(-1) or slice it to that length",
        )
    if dtypes and tensor.dtype not in dtypes:
        listed = " or ".join(str(dtype) for dtype in dtypes)
        raise invalid(name, tensor.dtype, f"of dtype {listed}", "convert it with .to()")


def check_floating(name: str, tensor: torch.Tensor) -> None:
    """Raises InvalidSetting unless ``tensor`` is a contiguous vector of floating point numbers."""
    check_vector(name, tensor, tensor.numel())
    if not tensor.dtype.is_floating_point:
        raise invalid(name, tensor.dtype, "of a floating point dtype", "convert it with .float()")


def serves_cpp(*tensors: torch.Tensor | None) -> bool:
    """Whether these floating operands are what the C++ takes: float32 on the CPU."""
    return all(
        tensor is None or (tensor.dtype == torch.float32 and tensor.device.type == "cpu")
        for tensor in tensors
    )


def address(tensor: torch.Tensor | None) -> int | None:
    """The address of a tensor's first element as a kernel takes it; None is NULL."""
    return None if tensor is None else tensor.data_ptr()
