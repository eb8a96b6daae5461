"""Programs of matrices: what they come to, the laws they keep, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradwire.compress.powersgd import powersgd
from gradwire.contract.spec import TensorSpec
from gradwire.errors import InvalidSetting
from gradwire.exchange.by_name import exchange_for, run_local
from gradwire_lab.compll_text.compile import compile_text
from gradwire_lab.dsl.lowrank import MatrixProgram, low_rank
from gradwire_lab.dsl.matrices import Matrix, decomp, matmul, orthogonal
from gradwire_lab.laws.subjects import check, held_to
from gradwire_lab.laws.tolerance import same_bits
from tests.each import each

Pair = tuple[Matrix, Matrix]


class twice(MatrixProgram):
    """Two steps of subspace iteration, in four all-reduces."""

    def encode(self, gradient: Matrix, start: Matrix) -> Pair:
        return decomp(gradient, decomp(gradient, start)[1])

    def decode(self, left: Matrix, right: Matrix) -> Matrix:
        return matmul(left, right.T)


class by_columns(MatrixProgram):
    """The projection on a basis of columns, so that what travels last is N x R."""

    def encode(self, gradient: Matrix, start: Matrix) -> Pair:
        basis = orthogonal(decomp(gradient, start)[1])
        return matmul(gradient, basis), basis

    def decode(self, left: Matrix, basis: Matrix) -> Matrix:
        return matmul(basis, left.T).T


PROGRAMS = {
    # the rounds, and the basis that the mean gradient is projected on: of rows, or of
    # columns
    twice: (4, lambda G, start: (span(G @ G.T @ span(G @ start)), True)),
    by_columns: (3, lambda G, start: (span(G.T @ span(G @ start)), False)),
}


def span(matrix: Any) -> Any:
    return np.linalg.qr(matrix)[0]


@pytest.mark.smoke
@each("world", [2, 3])
@each("kind", PROGRAMS)
def test_the_mean_is_the_projection_of_the_mean(
    kind: type[MatrixProgram], world: int
) -> None:
    num_rounds, basis_of = PROGRAMS[kind]
    shapes = ((9, 14), (9, 14), (5,), (14, 9))
    spec = TensorSpec("message", 9 * 14 * 3 + 5, torch.float64, shapes)
    exchange = exchange_for(kind(rank=2))
    states: list[Any] = [exchange.init(spec, world) for _ in range(world)]
    assert len(kind(rank=2).traced().rounds) == num_rounds
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        grads = [
            torch.randn(spec.numel, generator=generator).double() for _ in range(world)
        ]
        starts = [basis.numpy().copy() for basis in states[0].inner.basis_T]
        pending = [g + s.residual_N for g, s in zip(grads, states, strict=True)]
        results = run_local(exchange, grads, states)
        states = [state for _, _, state in results]
        assert all(same_bits(mean_N, results[0][0]) for mean_N, _, _ in results)
        mean_N = torch.stack(pending).mean(0)
        first = 0
        for shape, start in zip(shapes, starts, strict=True):
            stop = first + int(np.prod(shape))
            want = mean_N[first:stop].reshape(shape).numpy()
            if start.size:
                basis, of_rows = basis_of(want, start)
                want = basis @ basis.T @ want if of_rows else want @ basis @ basis.T
            got = results[0][0][first:stop].reshape(shape).numpy()
            np.testing.assert_allclose(got, want, atol=1e-9)
            first = stop
        left_N = torch.stack([state.residual_N for state in states]).sum(0)
        np.testing.assert_allclose(
            world * results[0][0] + left_N, world * mean_N, atol=1e-9
        )


def test_programs_keep_the_laws_of_exchanges() -> None:
    for held in held_to(by_columns(rank=2)):
        assert [verdict for verdict in check(held) if verdict.found] == []


# ---- what is refused -----------------------------------------------------------------


def both(left: Matrix, right: Matrix) -> Matrix:
    return matmul(left, right.T)


def power(gradient: Matrix, start: Matrix) -> Pair:
    left = matmul(gradient, start)
    return left, matmul(gradient.T, left)


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "a sum": (
        lambda g, s: g + g,
        both,
        "arithmetic on matrices; matmul, orthogonal, decomp",
    ),
    "torch": (lambda g, s: torch.matmul(g, s), both, "a function of torch"),
    "a branch": (lambda g, s: decomp(g, s) if g else None, both, "a branch on a value"),
    "inner dimensions": (
        lambda g, s: matmul(s, g),
        both,
        "matmul of M x R and N x M; let inner",
    ),
    "its square": (
        lambda g, s: matmul(g.T, g),
        both,
        "no rank holds it: begin with matmul",
    ),
    "a number": (
        lambda g, s: matmul(g, 2),
        both,
        "matmul of int; matmul takes matrices",
    ),
    "a basis of all": (
        lambda g, s: orthogonal(g),
        both,
        "orthogonal(matmul(gradient, start))",
    ),
    "a basis twice": (
        lambda g, s: orthogonal(orthogonal(s)),
        both,
        "that are not yet so",
    ),
    "a basis of rows": (
        lambda g, s: orthogonal(s.T),
        both,
        "orthogonal of R x M; give it columns",
    ),
    "nothing": (lambda g, s: None, both, "return decomp(gradient, start)"),
    "a product of what all hold": (
        lambda g, s: orthogonal(matmul(matmul(g, s), s.T)),
        both,
        "it is what decode ends with",
    ),
    "no projection": (power, both, "P of orthogonal and Q = matmul(gradient.T, P)"),
    "one factor": (
        decomp,
        lambda left, right: left,
        "must be a projection of the gradient, got",
    ),
    "another basis": (
        lambda g, s: (orthogonal(matmul(g, s)), decomp(g, s)[1]),
        both,
        "must be a projection of the gradient, got",
    ),
    "rows for a start": (
        lambda g, s: decomp(g, s)[::-1],
        lambda q, p: both(p, q),
        "and used by decode",
    ),
    "a start that decode leaves out": (
        lambda g, s: (*decomp(g, s), matmul(g.T, matmul(g, s))),
        lambda p, q, other: both(p, q),
        "and used by decode, as the next step starts from it",
    ),
    "a basis drawn once": (
        lambda g, s: ((basis := orthogonal(s)), matmul(g, basis))[::-1],
        lambda left, basis: both(left, basis),
        "what lies outside of a fixed basis would never arrive",
    ),
    "a start as it was": (
        lambda g, s: ((basis := orthogonal(s)), matmul(g, basis), s),
        lambda basis, left, start: both(left, basis),
        "use what orthogonal gives",
    ),
}


@each("case", REFUSED)
def test_what_is_no_projection_is_refused_with_line_and_remedy(case: str) -> None:
    encode, decode, remedy = REFUSED[case]
    methods = {
        "encode": lambda self, gradient, start: encode(gradient, start),
        "decode": lambda self, *factors: decode(*factors),
    }
    with pytest.raises(InvalidSetting) as caught:
        type("attempt", (MatrixProgram,), methods)()
    assert remedy in str(caught.value)


def test_the_line_is_that_of_the_mistake() -> None:
    class wrong(MatrixProgram):
        def encode(self, gradient: Matrix, start: Matrix) -> Pair:
            return decomp(start, gradient)

        def decode(self, left: Matrix, right: Matrix) -> Matrix:
            return matmul(left, right.T)

    line = wrong.encode.__code__.co_firstlineno + 1
    with pytest.raises(
        InvalidSetting, match=rf"test_matrices\.py:{line}: matmul of M x R and N x M"
    ):
        wrong()


# ---- in the paper's form -------------------------------------------------------------

TEXT = Path(__file__).with_name("powersgd.compll")


def test_powersgd_as_a_program_and_as_a_text_has_the_bits_of_powersgd() -> None:
    made = compile_text(TEXT)
    assert made().rank == 4
    spec = TensorSpec("message", 600, shapes=((20, 30),))
    found = []
    for exchange in map(
        exchange_for, (powersgd(rank=2), made(rank=2), low_rank(rank=2))
    ):
        states: list[Any] = [exchange.init(spec, 2) for _ in range(2)]
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            grads = [torch.randn(600, generator=generator) for _ in range(2)]
            results = run_local(exchange, grads, states)
            states = [state for _, _, state in results]
        found.append((results[0][0], states[0].residual_N))
    for ours in found[1:]:
        assert all(same_bits(*pair) for pair in zip(found[0], ours, strict=True))


MISTAKES = {
    "a matrix as an array": (
        "float** left, right",
        "float* left, right",
        "a matrix where float*",
    ),
    "an array as a matrix": ("concat(left, right)", "left", "where uint8* is declared"),
    "not turned": (
        "transposed(right)",
        "right",
        "matmul of N x R and M x R; let inner dimensions",
    ),
    "decomp's value": (
        "decomp(gradient, start, left, right);",
        "left = decomp(gradient, start);",
        "write decomp(gradient, start, P, Q); by itself",
    ),
    "decomp of three": ("start, left, right)", "left, right)", "decomp of 3 values"),
    "a number": ("transposed(right)", "transposed(2)", "transposed takes a float**"),
    "into an expression": (
        "start, left, right)",
        "start, left, 2)",
        "name a variable for each",
    ),
    "a basis of the gradient": (
        "decomp(gradient, start, left, right);",
        "left = orthogonal(gradient);",
        "no rank holds it",
    ),
    "two forms": (
        "uint8* compressed, float** gradient",
        "uint8* compressed, float* gradient",
        "takes",
    ),
}


@each("case", MISTAKES)
def test_a_mistake_in_a_text_is_shown_in_its_place(case: str) -> None:
    before, after, message = MISTAKES[case]
    text = TEXT.read_text()
    assert before in text
    with pytest.raises(InvalidSetting) as caught:
        compile_text(text.replace(before, after))()
    assert message in str(caught.value)
    assert str(caught.value).startswith("<text>:")
