"""powersgd: every matrix as the product of two thin ones, by a power iteration.

Source: Vogels, Karimireddy and Jaggi, PowerSGD, NeurIPS 2019, algorithms 1 and 2;
HiPress 4.4. Differences from the paper:
    - All P of a message travel in one all-reduce and all Q in the other, with what
      stays dense.
    - P is orthogonalised by Householder's QR, each matrix by itself, without an
      epsilon: zeros stay zeros, a rank below ``rank`` is no division by zero, and a
      direction that died comes back.
    - Q's columns are scaled to a largest element of 1 between steps, so that factors
      neither grow nor fade. A warm start needs only the space that they span. P is a
      sum of m * W elements, so it may overflow where the mean does not.
    - A tensor is factorised where (n + m) * rank < n * m; others (vectors, small or
      thin matrices) would be no shorter. It must not be cut among messages: a range of
      it is no matrix.
    - Every rank orthogonalises for itself, as in the paper. So the mean has the same
      bits on all ranks only if their processors are of one kind, and their numbers of
      threads are equal: LAPACK cuts a tall P by this number. ``attach`` compares the
      numbers of threads.
Default: rank 4, the largest of the paper. 200 steps of
    ``gradwire bench train --optimizer sgd`` end at 1.08 (task convnet) and 1.02 (lstm,
    gpt) of the dense loss, with rank 8 at 0.98 and 1.00.
Wire: two all-reduces, one after the other, each 2(W-1)/W of its bytes a rank: D dense
    elements and every P, D + sum of n * rank; then every Q, sum of m * rank (none: not
    sent). In the working dtype -> 4 bytes an element, 8 for float64.
State: basis_T, for every tensor the m x rank matrix Q of the last step (empty where
    dense); the same on all ranks.
Contributed: P Q_w^T where Q_w is this rank's own Q: its gradient, seen from the columns
of P.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, groupby
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import (
    Exchange,
    Layout,
    Member,
    Residual,
    State,
    Traits,
    synchronise_alone,
)
from ..contract.bounds import MOST_SEED, check_whole
from ..contract.spec import TensorSpec, clear_not_finite, working_dtype
from ..contract.verbs import AllReduce, Steps

# Letters: T tensors of a message, B adjacent ones of one shape and rank; a matrix has N
# rows (n, the tensor's first dimension) and M columns (m, all its others), its factors
# have R columns.


class MatrixBatch(NamedTuple):
    """Adjacent matrices of one shape and rank: which tensors, and where they lie."""

    tensors: slice
    whole: slice
    """All their elements in the message."""
    left: slice
    """Every P in the first all-reduce."""
    right: slice
    """Every Q in the second."""
    shape_BNMR: tuple[int, int, int, int]


@dataclass(frozen=True)
class FactorLayout:
    """The places of everything in a message's gradient and in its all-reduces' buffers.

    In the order of the tensors, the first all-reduce holds dense tensors and every P,
    and the second holds every Q. ``dense`` are ranges of the gradient and of the first.
    """

    basis_shapes: tuple[tuple[int, ...], ...]
    dense: tuple[tuple[slice, slice], ...]
    batches: tuple[MatrixBatch, ...]
    round_numels: tuple[int, ...]


class MatrixState(NamedTuple):
    """The layout of a message, from its spec, and every tensor's next start."""

    layout: FactorLayout
    basis_T: tuple[Tensor, ...]


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor.

    A vector is one column, so factors are never worth it.

    >>> as_matrix((64, 3, 3, 3)), as_matrix((4096,))
    ((64, 27), (4096, 1))
    """
    return shape[0] if shape else 1, prod(shape[1:])


def sent_numel(shape: Sequence[int], rank: int) -> int:
    """Elements that a tensor sends: its factors', or its own if they are fewer."""
    return min(sum(as_matrix(shape)) * rank, prod(shape))


@lru_cache(maxsize=4096)
def layout_of(spec: TensorSpec, ranks: tuple[int, ...]) -> FactorLayout:
    """The layout of a message, with a rank for each tensor."""
    forms = [
        (*as_matrix(shape), rank)
        if sent_numel(shape, rank) < prod(shape)
        else (0, 0, 0)
        for shape, rank in zip(spec.tensor_shapes, ranks, strict=True)
    ]
    ends = [0, *accumulate(map(prod, spec.tensor_shapes))]
    dense = []
    batches = []
    first = 0
    second = 0
    for (n, m, r), run in groupby(range(len(forms)), key=forms.__getitem__):
        members = list(run)
        tensors = slice(members[0], members[-1] + 1)
        count = len(members)
        whole = slice(ends[tensors.start], ends[tensors.stop])
        left = slice(first, first + (count * n * r if r else whole.stop - whole.start))
        right = slice(second, second + count * m * r)
        first = left.stop
        second = right.stop
        if r:
            batches.append(MatrixBatch(tensors, whole, left, right, (count, n, m, r)))
        else:
            dense.append((whole, left))
    basis_shapes = tuple((m, r) if r else (0,) for _, m, r in forms)
    return FactorLayout(basis_shapes, tuple(dense), tuple(batches), (first, second))


def first_bases(
    shapes: Sequence[tuple[int, ...]], seed: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """First starts: each follows from its shape alone, so fusing changes nothing."""
    made = [torch.empty(shape, dtype=working_dtype(dtype)) for shape in shapes]
    return tuple(
        basis.normal_(generator=torch.Generator().manual_seed(seed)) for basis in made
    )


def orthonormal(matrix_BNR: Tensor, out: Tensor) -> None:
    """Fills ``out`` with orthonormal columns that span the columns.

    ``out`` may be the matrix itself.

    Householder's QR (N >= R) needs no epsilon: columns that depend on others, or are
    zero, are replaced by columns that are orthogonal to the rest. A matrix with an
    element that is not finite becomes not finite, and no other matrix does.

    >>> columns = torch.zeros(1, 3, 2)
    >>> orthonormal(columns, columns)
    >>> columns.abs().squeeze().tolist()
    [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    """
    out.copy_(torch.linalg.qr(matrix_BNR).Q)


class FactorStep(ABC):
    """One rank's tensors during a step of factors, in buffers kept between steps.

    ``whole_N`` is the gradient that is sent, and ``mean_N`` receives its mean. Both are
    of the working dtype, and wherever possible they are the caller's own tensors.
    ``state`` has a layout of dense tensors, batches and rounds, and the next starts.
    """

    def __init__(
        self,
        me: Member,
        state: Any,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> None:
        self.me = me
        self.layout = state.layout
        self.basis_T = state.basis_T
        self.world = me.world
        self.grad_N = grad_N
        self.out_N = out_N
        self.residual_N = residual_N
        self.rounds = [
            self.scratch(f"round {number}", numel)
            for number, numel in enumerate(self.layout.round_numels)
        ]
        if residual_N is None:
            self.whole_N = self._own_or_scratch(grad_N, "whole")
            self.mean_N = self._own_or_scratch(out_N, "whole")
        else:
            self.whole_N = residual_N
            self.mean_N = self._own_or_scratch(out_N, "mean")

    def scratch(self, name: str, numel: int) -> Tensor:
        """A buffer of the step in the working dtype."""
        dtype = working_dtype(self.grad_N.dtype)
        return self.me.scratch(name, numel, self.grad_N, dtype)

    def _own_or_scratch(self, tensor: Tensor, name: str) -> Tensor:
        is_working = tensor.dtype == working_dtype(tensor.dtype)
        if is_working and tensor.is_contiguous():
            return tensor
        return self.scratch(name, tensor.numel())

    @abstractmethod
    def encode(self, number: int) -> None:
        """Makes the content of a round."""

    @abstractmethod
    def decode(self) -> None:
        """Writes the mean, maybe where the gradient was, and keeps the next start."""

    def steps(self) -> Steps[None]:
        """All rounds, each with its all-reduce, and the mean."""
        numel = self.grad_N.numel()
        for number, buffer in enumerate(self.rounds):
            if number and not self.layout.batches:
                break
            yield self.me.sized("encode", partial(self.encode, number), numel)
            yield AllReduce(buffer)
        yield self.me.sized("decode", self.decode, numel)

    def gather(self) -> None:
        """Adds gradient and residual; the dense part goes into the first all-reduce.

        That is divided by W before it is summed, as DDP does, so that a sum cannot
        overflow where the mean does not.
        """
        if self.residual_N is not None:
            self.residual_N.add_(self.grad_N)
        elif self.whole_N is not self.grad_N:
            self.whole_N.copy_(self.grad_N)
        for whole, place in self.layout.dense:
            sent = self.rounds[0][place]
            torch.mul(self.whole_N[whole], 1 / self.world, out=sent)
            if self.residual_N is not None:
                self.residual_N[whole].sub_(sent, alpha=self.world)

    def give(self) -> None:
        """Writes the dense means, and the whole mean where the caller wants it."""
        for whole, place in self.layout.dense:
            self.mean_N[whole].copy_(self.rounds[0][place])
        if self.mean_N is not self.out_N:
            self.out_N.copy_(self.mean_N)

    def keep(self, tensors: slice, right_BMR: Tensor) -> None:
        """Keeps the next start, each column scaled to a largest element of 1.

        A column of zeros stays zero, and a column that is not finite becomes zero: the
        next step's orthogonalisation puts another direction in its place.
        """
        peak_B1R = torch.linalg.vector_norm(right_BMR, torch.inf, dim=1, keepdim=True)
        right_BMR.div_(peak_B1R.clamp_min_(torch.finfo(right_BMR.dtype).tiny))
        clear_not_finite(right_BMR)
        torch._foreach_copy_(list(self.basis_T[tensors]), list(right_BMR))


class MatrixStep(FactorStep):
    """A step of power iteration: P of every matrix, then Q."""

    def encode(self, number: int) -> None:
        """Makes the content of a round: P of every matrix, then Q.

        With Q this rank's part of the mean is known, and is taken off the residual.
        """
        if number == 0:
            self.gather()
        for m in self.layout.batches:
            whole_BNM, left_BNR, right_BMR = self.factors(m)
            if number == 0:
                torch._foreach_copy_(list(right_BMR), list(self.basis_T[m.tensors]))
                torch.bmm(whole_BNM, right_BMR, out=left_BNR)
                continue
            orthonormal(left_BNR, left_BNR)
            torch.bmm(whole_BNM.mT, left_BNR, out=right_BMR)
            if self.residual_N is not None:
                whole_BNM.baddbmm_(left_BNR, right_BMR.mT, alpha=-1)

    def factors(self, m: MatrixBatch) -> tuple[Tensor, Tensor, Tensor]:
        """A batch's matrices, their P and their Q."""
        b, rows, columns, rank = m.shape_BNMR
        whole_BNM = self.whole_N[m.whole].view(b, rows, columns)
        left_BNR = self.rounds[0][m.left].view(b, rows, rank)
        return whole_BNM, left_BNR, self.rounds[1][m.right].view(b, columns, rank)

    def decode(self) -> None:
        if self.residual_N is not None:
            clear_not_finite(self.residual_N)
        self.rounds[1].mul_(1 / self.world)
        for m in self.layout.batches:
            _, left_BNR, right_BMR = self.factors(m)
            mean_BNM = self.mean_N[m.whole].view(m.shape_BNMR[:3])
            torch.bmm(left_BNR, right_BMR.mT, out=mean_BNM)
            self.keep(m.tensors, right_BMR)
        self.give()


@dataclass(frozen=True, kw_only=True)
class powersgd(Exchange):
    """Averages each matrix as the product of two thin matrices, P and Q.

    Vectors, and matrices that the factors would not make shorter, are sent
    uncompressed.

    Args:
        rank: The number of columns of P and Q, a whole number from 1; default 4. The
            bytes of an n x m matrix grow with ``rank`` * (n + m). A larger rank loses
            less and takes longer.
        seed: The seed of the random matrices Q that the first step begins with, from 0
            to 2**64 - 1; default 0. All ranks pass the same. Later steps begin with the
            Q of the step before.

    >>> import torch
    >>> from gradwire.exchange.by_name import run_local
    >>> from gradwire.contract.spec import TensorSpec
    >>> from gradwire.exchange.without_data import wire_bytes
    >>> rows = torch.outer(torch.arange(1.0, 9.0), torch.arange(1.0, 9.0))
    >>> grads = [rows.flatten(), 3 * rows.flatten()]  # of rank 1, as their mean is
    >>> spec = TensorSpec("fc.weight", 64, shapes=((8, 8),))
    >>> exchange = powersgd(rank=1)
    >>> mean = run_local(exchange, grads, [exchange.init(spec, 2)] * 2)[0][0]
    >>> torch.allclose(mean, 2 * grads[0])
    True
    >>> wire_bytes(exchange, spec, 2), spec.size_bytes
    ([64, 64], 256)
    """

    rank: int = 4
    seed: int = 0
    traits: ClassVar[Traits] = Traits(
        layout=Layout.LOW_RANK,
        nonexpansive=True,
        error_feedback=True,
        whole_tensors=True,
        same_threads=True,
    )

    def __post_init__(self) -> None:
        """Refuses settings that mean nothing."""
        name = type(self).__name__
        check_whole(f"{name} rank", self.rank, "leave it out")
        check_whole(f"{name} seed", self.seed, "leave it out", least=0, most=MOST_SEED)

    def init(self, spec: TensorSpec, world: int) -> MatrixState:
        return self.started(spec, (self.rank,) * len(spec.tensor_shapes))

    def started(self, spec: TensorSpec, ranks: tuple[int, ...]) -> MatrixState:
        """State before the first step, with a rank for each tensor."""
        layout = layout_of(spec, ranks)
        return MatrixState(
            layout, first_bases(layout.basis_shapes, self.seed, spec.dtype)
        )

    def synchronise(
        self,
        me: Member,
        state: MatrixState,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Residual = None,
    ) -> Steps[State]:
        if me.world == 1:
            yield from synchronise_alone(grad_N, out_N, residual_N)
            return state
        yield from MatrixStep(me, state, grad_N, out_N, residual_N).steps()
        return state


EXAMPLES = (powersgd(), powersgd(rank=1), powersgd(rank=2, seed=1))
