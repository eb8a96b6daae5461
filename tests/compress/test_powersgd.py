"""powersgd against the paper's algorithm written out slowly, and traps that others fell
into.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import gradwire as gw
from gradwire.exchange.by_name import exchange_for
from gradwire_lab.laws.tolerance import same_bits
from tests.compress.test_support import Shapes, draw, spec_of
from tests.each import each

powersgd = gw.compress.powersgd
Matrix = NDArray[np.float64]

MODEL: Shapes = (
    (16, 3, 3, 3),
    (16,),
    (12, 20),
    (12, 20),
    (12, 20),
    (12,),
    (3, 5),
    (30, 8),
)
"""A convolution, equal matrices side by side, one that is too small for rank 2,
vectors.
"""


def cut(flat_N: Tensor, spec: gw.TensorSpec) -> list[Tensor]:
    """The tensors that lie in a flat one, matrices as matrices."""
    parts = flat_N.split([prod(shape) for shape in spec.shapes])
    return [
        part.reshape(shape[0], -1) if len(shape) > 1 else part
        for part, shape in zip(parts, spec.shapes, strict=True)
    ]


def means(
    exchange: gw.Exchange, spec: gw.TensorSpec, steps: Sequence[list[Tensor]]
) -> tuple[list[Tensor], list[Any]]:
    """Rank 0's mean of every step, and all ranks' last states."""
    states: list[Any] = [exchange.init(spec, len(steps[0])) for _ in steps[0]]
    found = []
    for grads in steps:
        results = gw.run_local(exchange, grads, states)
        states = [state for _, _, state in results]
        assert all(same_bits(mean_N, results[0][0]) for mean_N, _, _ in results)
        found.append(results[0][0])
    return found, states


def gram_schmidt(p_NR: Matrix) -> Matrix:
    basis: list[Matrix] = []
    for column in p_NR.T:
        for done in basis:
            column = column - (done @ column) * done
        basis.append(column / np.sqrt(column @ column))
    return np.stack(basis, axis=1)


def by_the_paper(
    grads: list[Matrix], errors: list[Matrix], q_MR: Matrix
) -> tuple[Matrix, list[Matrix], Matrix]:
    """Algorithms 1 and 2 for one matrix: (mean, new errors, new Q)."""
    sent = [grad + error for grad, error in zip(grads, errors, strict=True)]
    p_NR = gram_schmidt(sum(m @ q_MR for m in sent) / len(sent))
    own = [m.T @ p_NR for m in sent]
    q_MR = sum(own) / len(own)
    return p_NR @ q_MR.T, [m - p_NR @ q.T for m, q in zip(sent, own, strict=True)], q_MR


@each("world", [2, 3])
@each("rank", [1, 2])
def test_it_is_the_papers_algorithm(world: int, rank: int) -> None:
    spec = spec_of(MODEL, torch.float64)
    steps = [draw(spec, world, seed) for seed in range(4)]
    exchange = exchange_for(powersgd(rank=rank))
    got, states = means(exchange, spec, steps)
    start = exchange.init(spec, world).inner.basis_T
    left = [cut(state.residual_N, spec) for state in states]
    for place, shape in enumerate(spec.shapes):
        grads = [
            [cut(grad_N, spec)[place].numpy() for grad_N in step] for step in steps
        ]
        errors = [np.zeros_like(grad) for grad in grads[0]]
        q_MR = start[place].numpy()
        for step, own in enumerate(grads):
            if start[place].numel():
                mean, errors, q_MR = by_the_paper(own, errors, q_MR)
            else:
                mean = sum(own) / world
            np.testing.assert_allclose(cut(got[step], spec)[place], mean, atol=1e-9)
        for error, residual in zip(errors, left, strict=True):
            np.testing.assert_allclose(
                residual[place], error, atol=1e-9, err_msg=str(shape)
            )


def test_what_pays_is_factorised_and_the_rest_is_exact() -> None:
    """(n + m) * rank < n * m, at one element's difference."""
    shapes: Shapes = ((4, 4), (3, 6), (3, 7), (2, 2, 3), (9,), (1, 50), (50, 1))
    state = powersgd(rank=2).init(spec_of(shapes), 2)
    assert [basis.numel() for basis in state.basis_T] == [0, 0, 14, 0, 0, 0, 0]
    spec = spec_of((*shapes[:2], *shapes[3:]))
    grads = draw(spec, 3)
    [mean_N], _ = means(powersgd(rank=2), spec, [grads])
    [dense_N], _ = means(exchange_for(gw.compress.none()), spec, [grads])
    assert torch.equal(mean_N, dense_N)


@each("spoil", [float("nan"), float("inf")])
def test_a_spoilt_matrix_spoils_no_other_and_no_later_step(spoil: float) -> None:
    spec = spec_of(((8, 9),) * 3)
    good, bad = draw(spec, 2, seed=1), draw(spec, 2, seed=2)
    bad[1][72 + 5] = spoil
    exchange = exchange_for(powersgd(rank=2))
    found, states = means(exchange, spec, [good, bad, good])
    first, spoilt, last = cut(found[1], spec)
    assert bool(first.isfinite().all())
    assert bool(last.isfinite().all())
    assert not bool(spoilt.isfinite().any())
    assert bool(found[2].isfinite().all())
    for state in states:
        assert all(bool(basis.isfinite().all()) for basis in state.inner.basis_T)
        assert bool(state.residual_N.isfinite().all())
