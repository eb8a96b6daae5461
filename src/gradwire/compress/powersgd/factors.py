"""The places of a message's matrices and of their factors: powersgd's plumbing, and no algorithm.

Letters as in powersgd.py: T tensors, B adjacent ones of one shape, N rows, M columns, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ...contract import Member
from ...spec import TensorSpec, working_dtype


class MatrixBatch(NamedTuple):
    """Adjacent matrices of one shape: which tensors they are, and where they, P and Q lie."""

    tensors: slice
    shape_BNM: tuple[int, int, int]
    whole: slice
    left: slice
    right: slice


@dataclass(frozen=True)
class FactorLayout:
    """The places of everything in a message's gradient and in the buffers of its two all-reduces.

    The first holds, in the order of the tensors, what stays dense and every batch's P, the second
    every batch's Q. ``dense`` are ranges of the gradient and their places in the first.
    """

    rank: int
    basis_shapes: tuple[tuple[int, ...], ...]
    dense: tuple[tuple[slice, slice], ...]
    batches: tuple[MatrixBatch, ...]
    first_numel: int
    second_numel: int


class Factors(NamedTuple):
    """Views of one batch: M and what is to become P, Q, the own part of Q, and the mean P Q^T."""

    whole_BNM: Tensor
    left_BNR: Tensor
    right_BMR: Tensor
    own_BMR: Tensor
    mean_BNM: Tensor


def as_matrix(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Rows and columns of what is worth two factors of ``rank`` columns; None stays dense.

    >>> as_matrix((64, 3, 3, 3), 4), as_matrix((64, 3, 1, 1), 4), as_matrix((4096,), 4)
    ((64, 27), None, None)
    """
    if len(shape) < 2:
        return None
    rows, columns = shape[0], prod(shape[1:])
    return (rows, columns) if (rows + columns) * rank < rows * columns else None


@lru_cache(maxsize=4096)
def layout_of(spec: TensorSpec, rank: int) -> FactorLayout:
    """The layout of what a message carries; a spec without shapes is one vector, and dense."""
    shapes = spec.shapes or ((spec.numel,),)
    forms = [as_matrix(shape, rank) for shape in shapes]
    ends = [0, *accumulate(map(prod, shapes))]
    dense: list[tuple[slice, slice]] = []
    batches: list[MatrixBatch] = []
    first = second = 0
    for form, run in groupby(range(len(shapes)), key=forms.__getitem__):
        members = list(run)
        tensors = slice(members[0], members[-1] + 1)
        whole = slice(ends[tensors.start], ends[tensors.stop])
        if form is None:
            left = slice(first, first + whole.stop - whole.start)
            dense.append((whole, left))
        else:
            rows, columns = form
            left = slice(first, first + len(members) * rows * rank)
            right = slice(second, second + len(members) * columns * rank)
            batches.append(MatrixBatch(tensors, (len(members), rows, columns), whole, left, right))
            second = right.stop
        first = left.stop
    basis_shapes = tuple((0,) if form is None else (form[1], rank) for form in forms)
    return FactorLayout(rank, basis_shapes, tuple(dense), tuple(batches), first, second)


class StepTensors:
    """One rank's tensors during a step, in buffers that it keeps between steps.

    ``whole_N`` is what is sent, and ``mean_N`` is where its mean is to lie. Both are of the working
    dtype, and wherever possible they are the caller's own tensors.
    """

    def __init__(
        self,
        me: Member,
        layout: FactorLayout,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None,
    ) -> None:
        self.layout, self.world = layout, me.world
        self.grad_N, self.out_N, self.residual_N = grad_N, out_N, residual_N
        dtype = working_dtype(grad_N.dtype)

        def scratch(name: str, numel: int) -> Tensor:
            return me.scratch(name, numel, grad_N, dtype)

        def suits(tensor: Tensor) -> bool:
            return tensor.dtype == dtype and tensor.is_contiguous()

        self.first = scratch("first", layout.first_numel)
        self.second = scratch("second", layout.second_numel)
        self.own = self.second if residual_N is None else scratch("own", layout.second_numel)
        if residual_N is not None:
            self.whole_N = residual_N
        else:
            self.whole_N = grad_N if suits(grad_N) else scratch("whole", grad_N.numel())
        if suits(out_N):
            self.mean_N = out_N
        else:
            self.mean_N = scratch("mean" if residual_N is not None else "whole", out_N.numel())
        self.batches = [self._views(batch) for batch in layout.batches]

    def _views(self, batch: MatrixBatch) -> Factors:
        count, rows, columns = batch.shape_BNM
        return Factors(
            self.whole_N[batch.whole].view(batch.shape_BNM),
            self.first[batch.left].view(count, rows, self.layout.rank),
            self.second[batch.right].view(count, columns, self.layout.rank),
            self.own[batch.right].view(count, columns, self.layout.rank),
            self.mean_N[batch.whole].view(batch.shape_BNM),
        )

    def gather(self, basis_T: Sequence[Tensor]) -> list[Factors]:
        """Adds gradient and residual, fills every Q, and puts what stays dense into the first.

        That is divided by W before it is summed, as DDP does, so that a sum cannot overflow where
        the mean does not. Returns the batches.
        """
        if self.residual_N is not None:
            self.residual_N.add_(self.grad_N)
        elif self.whole_N is not self.grad_N:
            self.whole_N.copy_(self.grad_N)
        for batch, factors in zip(self.layout.batches, self.batches, strict=True):
            torch._foreach_copy_(list(factors.right_BMR), list(basis_T[batch.tensors]))
        for whole, place in self.layout.dense:
            torch.mul(self.whole_N[whole], 1 / self.world, out=self.first[place])
            if self.residual_N is not None:
                self.residual_N[whole].sub_(self.first[place], alpha=self.world)
        return self.batches

    def keep_own(self) -> None:
        """Notes the own part of every Q before it is summed; the residual is worked out from it."""
        if self.residual_N is not None:
            self.own.copy_(self.second)

    def subtract_sent(self) -> list[Factors]:
        """Takes P and the own Q^T off the residual, divides the sum of all Q by W.

        Before the means are written, which may be where the gradient was. Returns the batches.
        """
        self.second.mul_(1 / self.world)
        if self.residual_N is not None:
            for m in self.batches:
                m.whole_BNM.baddbmm_(m.left_BNR, m.own_BMR.mT, alpha=-1)
            torch.nan_to_num_(self.residual_N, nan=0.0, posinf=0.0, neginf=0.0)
        return self.batches

    def scatter(self, basis_T: Sequence[Tensor]) -> None:
        """Puts what came dense where it belongs, rounds the mean to its dtype, keeps every Q."""
        for whole, place in self.layout.dense:
            self.mean_N[whole].copy_(self.first[place])
        if self.mean_N is not self.out_N:
            self.out_N.copy_(self.mean_N)
        self._keep(basis_T)

    def _keep(self, basis_T: Sequence[Tensor]) -> None:
        """Keeps every Q for the next step, each column scaled to a largest element of 1.

        One that is zero stays zero, and one that is not finite becomes so: the next step's
        orthogonalisation puts another direction in its place.
        """
        for batch, factors in zip(self.layout.batches, self.batches, strict=True):
            right_BMR = factors.right_BMR
            peak_B1R = torch.linalg.vector_norm(right_BMR, torch.inf, dim=1, keepdim=True)
            right_BMR.div_(peak_B1R.clamp_min_(torch.finfo(right_BMR.dtype).tiny))
            torch.nan_to_num_(right_BMR, nan=0.0, posinf=0.0, neginf=0.0)
            torch._foreach_copy_(list(basis_T[batch.tensors]), list(right_BMR))
