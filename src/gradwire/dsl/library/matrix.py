"""Matrix operators of the library (HiPress, table 4): what low-rank algorithms are written with.

They are called directly, the first of the two ways that the paper gives (section 4.3): a product of
matrices has a library that is as fast as the machine, and generating another would gain nothing.

    matmul(G0, G1)   their product             orthogonal(P)   an orthonormal basis of P's columns
    decomp(G, Q)     P, Q with P Q^T near G

All take batches: B matrices of one shape, each treated by itself. Letters: B matrices, N rows, M
columns, K inner, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor


def matmul(left_BNK: Tensor, right_BKM: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The products of two batches of matrices, one dtype; into ``out`` where one is given."""
    return torch.bmm(left_BNK, right_BKM, out=out)


def orthogonal(matrix_BNR: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Orthonormal columns that span the columns of each matrix (N >= R, float32 or float64).

    By Householder's QR, which needs no epsilon: where columns depend on each other, or are zero,
    others that are orthogonal to the rest stand in for them. What is not finite makes its matrix
    not finite and no other. ``out`` may be the matrix itself.

    >>> orthogonal(torch.zeros(1, 3, 2)).abs().squeeze().tolist()
    [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    """
    basis_BNR, _ = torch.linalg.qr(matrix_BNR)
    return basis_BNR if out is None else out.copy_(basis_BNR)


def decomp(matrix_BNM: Tensor, start_BMR: Tensor) -> tuple[Tensor, Tensor]:
    """P_BNR with orthonormal columns and Q_BMR, such that P Q^T is near the matrix.

    One step of subspace iteration (Halko et al. 2011, section 4) from ``start``: exact if the
    matrix has rank R or less and ``start`` misses none of it; repeated from Q it comes to the best
    approximation of rank R.

    >>> rows = torch.tensor([[[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]])
    >>> P, Q = decomp(rows, torch.tensor([[[1.0], [0.0]]]))
    >>> matmul(P, Q.mT).squeeze().round(decimals=3).tolist()
    [[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]
    """
    left_BNR = orthogonal(matmul(matrix_BNM, start_BMR))
    return left_BNR, matmul(matrix_BNM.mT, left_BNR)
