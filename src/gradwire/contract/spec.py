"""Descriptions of what is communicated: tensor specs and chunks, without values."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import isqrt, prod

import torch
from torch import Tensor

from ..errors import invalid

CHUNK_ALIGNMENT = 8
"""Chunks start at multiples of 8 elements, so that bits fill whole bytes."""


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes that gradients may have."""

DTYPE_NAMES = "float32, bfloat16, float16 or float64"

NamedParam = tuple[str, Tensor]
"""A parameter, or a tensor of its shape, and its name."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, number of elements and dtype of one flat gradient.

    Specs that differ in device or rank alone are equal.

    Args:
        name: The gradient's name.
        numel: The number of its elements, from 0.
        dtype: ``torch.float32`` (the default), ``torch.bfloat16``, ``torch.float16`` or
            ``torch.float64``.
        shapes: The shapes of its tensors, in order, for algorithms that act on
            matrices. They have ``numel`` elements in all. Default: none, and the
            gradient is one vector.
        device: The type of the device that encodes it, as in ``Tensor.device.type``;
            default "cpu".
        rank: The rank that encodes it; default 0. On hosts of several ranks it decides
            which tensors a rank keeps state for.

    >>> TensorSpec("fc.weight", 1000, shapes=((20, 50),)).size_bytes
    4000
    """

    name: str
    numel: int
    dtype: torch.dtype = torch.float32
    shapes: tuple[tuple[int, ...], ...] = ()
    device: str = field(default="cpu", compare=False)
    rank: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if self.numel < 0:
            raise invalid(
                "numel", self.numel, "0 or more", "count the tensor's elements"
            )
        if self.shapes and sum(map(prod, self.shapes)) != self.numel:
            raise invalid(
                "shapes",
                self.shapes,
                f"shapes with {self.numel} elements in all",
                "give every tensor's shape",
            )
        if self.dtype not in DTYPES:
            raise invalid(
                "dtype", self.dtype, DTYPE_NAMES, "gradients are real floating point"
            )

    @classmethod
    def of(cls, vector_N: torch.Tensor) -> TensorSpec:
        """The nameless spec of a vector, with or without values, on any device.

        Args:
            vector_N: The vector.

        Returns:
            The spec.

        >>> TensorSpec.of(torch.zeros(3)).size_bytes
        12
        """
        return _nameless(vector_N.numel(), vector_N.dtype, "cpu")

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def tensor_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each tensor; one vector where no shapes are known."""
        return self.shapes or ((self.numel,),)

    def chunk(self, start: int, stop: int) -> TensorSpec:
        """The spec of a range of elements: a vector.

        Args:
            start: The first element.
            stop: The element behind the last.

        Returns:
            The spec.

        >>> TensorSpec("bias", 10).chunk(2, 6).name
        'bias[2:6]'
        """
        name = f"{self.name}[{start}:{stop}]"
        return TensorSpec(name, stop - start, self.dtype, device=self.device)


def check_gradient(grad_N: object) -> None:
    """Refuses what cannot be read as one flat gradient.

    It is a vector with a value at each place, of one of ``DTYPES``, and no part of a
    graph. It need not be contiguous.
    """
    if not isinstance(grad_N, torch.Tensor):
        raise invalid("gradient", grad_N, "a tensor", "pass param.grad.flatten()")
    if grad_N.layout is not torch.strided or grad_N.is_meta:
        raise invalid(
            "gradient",
            f"a tensor {'on meta' if grad_N.is_meta else f'of layout {grad_N.layout}'}",
            "a dense tensor with values",
            "pass grad.to_dense()",
        )
    if grad_N.dtype not in DTYPES:
        remedy = (
            "average the real and the imaginary part, "
            "torch.view_as_real(grad).flatten()"
        )
        if not grad_N.dtype.is_complex:
            remedy = "convert it with .float()"
        raise invalid("dtype of the gradient", grad_N.dtype, DTYPE_NAMES, remedy)
    if grad_N.dim() != 1:
        raise invalid(
            "gradient", tuple(grad_N.shape), "one-dimensional", "pass grad.flatten()"
        )
    if grad_N.requires_grad:
        raise invalid(
            "gradient",
            "a tensor that requires a gradient",
            "detached from the graph",
            "pass param.grad, or grad.detach()",
        )


def clear_not_finite(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, with zeros in place of infinities and NaN."""
    return torch.nan_to_num_(tensor, nan=0.0, posinf=0.0, neginf=0.0)


def squarest(numel: int, count: int = 1) -> tuple[tuple[int, ...], ...]:
    """Shapes for a gradient of no model: square matrices, and the rest as a vector.

    ``count`` is the number of matrices, for example one for each rank of a host.

    >>> squarest(1000), squarest(1000, 2)
    (((31, 31), (39,)), ((22, 22), (22, 22), (32,)))
    """
    side = isqrt(numel // count)
    rest = numel - count * side * side
    matrices = ((side, side),) * count
    return (*matrices, (rest,)) if rest else matrices


@lru_cache(maxsize=4096)
def chunk_bounds(numel: int, num_chunks: int) -> tuple[tuple[int, int], ...]:
    """Cuts ``numel`` elements into ``num_chunks`` flat ranges of equal, aligned length.

    The first chunk is never shorter than a later one; trailing chunks may be empty.

    >>> chunk_bounds(20, 3)
    ((0, 8), (8, 16), (16, 20))
    """
    length = -(-numel // num_chunks)
    length = -(-length // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
    edges = [min(i * length, numel) for i in range(num_chunks + 1)]
    return tuple(pairwise(edges))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and residuals: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def spec_of(grad_N: torch.Tensor) -> TensorSpec:
    """The nameless spec of a flat gradient; refuses what is none."""
    check_gradient(grad_N)
    return _nameless(grad_N.numel(), grad_N.dtype, grad_N.device.type)


@lru_cache(maxsize=4096)
def _nameless(numel: int, dtype: torch.dtype, device: str) -> TensorSpec:
    """One spec for all steps, which ask for it many times each."""
    return TensorSpec("", numel, dtype, device=device)
