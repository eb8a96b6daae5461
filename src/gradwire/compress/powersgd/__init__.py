"""powersgd: every matrix as the product of two thin ones, found by one step of the power iteration.

Source: Vogels, Karimireddy and Jaggi, PowerSGD, NeurIPS 2019, algorithms 1 and 2; HiPress 4.4.
Differences from the paper:
    - All P of a message travel in one all-reduce and all Q in the other, with what stays dense.
    - P is orthogonalised by Householder's QR, each matrix by itself, without an epsilon: zeros stay
      zeros, a rank below ``rank`` is no division by zero, and a direction that died comes back.
    - Q's columns are scaled to a largest element of 1 between steps, so that factors neither grow
      nor fade; it is the space they span that is warm about a warm start. P is a sum of m * W
      elements, and overflows if that does, where the mean need not.
    - A tensor is factorised where (n + m) * rank < n * m; others (vectors, small or thin matrices)
      would be no shorter. It must not be cut among messages: a range of it is no matrix.
    - Every rank orthogonalises for itself, as in the paper, so the mean has the same bits on all
      ranks where they run on processors of one kind, with as many threads each: LAPACK cuts a tall
      P by their number. ``attach`` holds ranks to the second.
Default: rank 4, the largest of the paper. 200 steps of ``gradwire bench train --optimizer sgd`` end
    at 1.08 (task convnet) and 1.02 (lstm, gpt) of the dense loss, with rank 8 at 0.98 and 1.00.
Wire: two all-reduces, one after the other, each 2(W-1)/W of its bytes a rank: D dense elements and
    every P, D + sum of n * rank; then every Q, sum of m * rank (none: not sent). In the working
    dtype -> 4 bytes an element, 8 for float64.
State: basis_T, for every tensor the m x rank matrix Q of the last step (empty where dense); the
    same on all ranks.
Contributed: P Q_w^T where Q_w is this rank's own Q: its gradient, seen from the columns of P.

Letters: T tensors of a message, B adjacent ones of one shape; a matrix has N rows (n, the tensor's
first dimension) and M columns (m, all its others), its factors P and Q have R columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...bounds import MOST_SEED, check_whole
from ...contract import Exchange, Layout, Member, State, Traits, synchronise_alone
from ...dsl.library.matrix import matmul, orthogonal
from ...spec import TensorSpec, working_dtype
from ...travel import bytes_sent
from ...verbs import AllReduce, Compute, Steps
from . import factors


class PowerState(NamedTuple):
    """The layout of a message, which follows from the spec, and every tensor's Q."""

    layout: factors.FactorLayout
    basis_T: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class powersgd(Exchange):
    """Averages matrices by way of two factors of ``rank`` columns, a whole number from 1.

    ``seed`` draws the Q that the first step starts from.

    >>> from gradwire.exchange import run_local
    >>> rows = torch.outer(torch.arange(1.0, 9.0), torch.arange(1.0, 9.0))
    >>> grads = [rows.flatten(), 3 * rows.flatten()]  # of rank 1, as their mean is
    >>> spec = TensorSpec("fc.weight", 64, shapes=((8, 8),))
    >>> exchange = powersgd(rank=1)
    >>> mean = run_local(exchange, grads, [exchange.init(spec, 2)] * 2)[0][0]
    >>> torch.allclose(mean, 2 * grads[0]), exchange.wire_bytes(spec, 2), spec.size_bytes
    (True, [64, 64], 256)
    """

    rank: int = 4
    seed: int = 0
    traits: ClassVar[Traits] = Traits(
        layout=Layout.LOW_RANK,
        contraction=True,
        error_feedback=True,
        whole_tensors=True,
        same_threads=True,
    )

    def __post_init__(self) -> None:
        check_whole("powersgd rank", self.rank, "leave it out")
        check_whole("powersgd seed", self.seed, "leave it out", least=0, most=MOST_SEED)

    def init(self, spec: TensorSpec, world: int) -> PowerState:
        layout = factors.layout_of(spec, self.rank)
        dtype = working_dtype(spec.dtype)
        # What a tensor starts from follows from its shape alone, so fusing changes nothing.
        draws = [torch.Generator().manual_seed(self.seed) for _ in layout.basis_shapes]
        bases = [torch.empty(shape, dtype=dtype) for shape in layout.basis_shapes]
        return PowerState(
            layout, tuple(b.normal_(generator=draw) for b, draw in zip(bases, draws, strict=True))
        )

    def synchronise(
        self,
        me: Member,
        state: PowerState,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None = None,
    ) -> Steps[State]:
        if me.world == 1:
            yield from synchronise_alone(grad_N, out_N, residual_N)
            return state
        held = factors.StepTensors(me, state.layout, grad_N, out_N, residual_N)

        def project() -> None:  # P = M Q
            for m in held.gather(state.basis_T):
                matmul(m.whole_BNM, m.right_BMR, out=m.left_BNR)

        def refine() -> None:  # P orthogonal, Q = M^T P
            for m in held.batches:
                orthogonal(m.left_BNR, out=m.left_BNR)
                matmul(m.whole_BNM.mT, m.left_BNR, out=m.right_BMR)
            held.keep_own()

        def rebuild() -> None:  # mean = P Q^T
            for m in held.subtract_sent():
                matmul(m.left_BNR, m.right_BMR.mT, out=m.mean_BNM)
            held.scatter(state.basis_T)

        yield Compute("encode", project, grad_N.numel())
        yield AllReduce(held.first)
        if held.batches:
            yield Compute("encode", refine, grad_N.numel())
            yield AllReduce(held.second)
        yield Compute("decode", rebuild, grad_N.numel())
        return state

    def wire_bytes(self, spec: TensorSpec, world: int) -> list[int]:
        layout = factors.layout_of(spec, self.rank)
        item = working_dtype(spec.dtype).itemsize
        sizes = (item * layout.first_numel, item * layout.second_numel)
        return [sum(bytes_sent("all_reduce", size, world) for size in sizes)] * world


EXAMPLES = (powersgd(), powersgd(rank=1), powersgd(rank=2, seed=1))
