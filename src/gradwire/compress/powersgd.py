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
"""

from __future__ import annotations

from ..dsl.lowrank import MatrixProgram
from ..dsl.matrices import Matrix, decomp, matmul


class powersgd(MatrixProgram):
    """Averages matrices by way of two factors of ``rank`` columns, a whole number from 1.

    ``seed`` draws the Q that the first step starts from.

    >>> import torch
    >>> from gradwire.exchange.by_name import run_local
    >>> from gradwire.contract.spec import TensorSpec
    >>> rows = torch.outer(torch.arange(1.0, 9.0), torch.arange(1.0, 9.0))
    >>> grads = [rows.flatten(), 3 * rows.flatten()]  # of rank 1, as their mean is
    >>> spec = TensorSpec("fc.weight", 64, shapes=((8, 8),))
    >>> exchange = powersgd(rank=1)
    >>> mean = run_local(exchange, grads, [exchange.init(spec, 2)] * 2)[0][0]
    >>> torch.allclose(mean, 2 * grads[0]), exchange.wire_bytes(spec, 2), spec.size_bytes
    (True, [64, 64], 256)
    """

    def encode(self, gradient: Matrix, start: Matrix) -> tuple[Matrix, Matrix]:
        return decomp(gradient, start)

    def decode(self, left: Matrix, right: Matrix) -> Matrix:
        return matmul(left, right.T)


EXAMPLES = (powersgd(), powersgd(rank=1), powersgd(rank=2, seed=1))
