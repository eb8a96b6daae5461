"""Programs of matrices: a mean of gradients by way of two thin factors that all ranks
hold.

    matmul(G0, G1)    their product
    orthogonal(P)     an orthonormal basis of P's columns
    decomp(G, start)  P and Q with P Q^T near G: orthogonal(matmul(G, start)),
                      matmul(G.T, P)

``encode(self, gradient, start)`` returns factors, and ``decode`` makes the mean of
them. Matrices are symbols with N rows, M columns and R, the rank. ``gradient`` is the
mean over ranks, which no rank holds; but its product with a matrix that all ranks hold
is the mean of the ranks' own. So such a product travels, in an all-reduce with the
others of its round, and is held by all from then on. ``start`` is the last of what
encode returned in the step before.

What decode ends with is checked to be a projection of the gradient: ``matmul(P, Q.T)``
with P orthogonal and ``Q = matmul(gradient.T, P)``, or the same with columns for rows.
It is linear in what travels last, so a rank's own part of the mean is known; it is
never longer than the gradient, so error feedback may stand around it; and it is made of
what all ranks hold, so it has the same bits on all of them. Torch carries it out
(``lowrank``): its BLAS is as fast as the machine, and no C++ or Triton text is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, NoReturn

from gradwire.dsl.symbols import Symbol, count_operation, refuse, tracing
from gradwire.errors import invalid


class FactorKind(Enum):
    """The way a factor comes about."""

    GIVEN = "given"
    START = "start"
    PRODUCT = "product"  # of the gradient: it travels
    BASIS = "basis"
    MEAN = "mean"


class Operand(NamedTuple):
    """A factor, or its transpose."""

    factor: Factor
    turned: bool


@dataclass(frozen=True, eq=False)
class Factor:
    """One matrix of a program; ``round`` is how many all-reduces it takes until all
    hold it.
    """

    made: FactorKind
    dims: str
    """The letters of its two dimensions."""
    round: int = 0
    sources: tuple[Operand, ...] = ()


_ELSE = "matmul, orthogonal, decomp and .T are what there is of matrices"


class Matrix(Symbol):
    """A symbolic matrix."""

    __slots__ = ("factor", "turned")
    __hash__ = Symbol.__hash__

    def __init__(self, factor: Factor, turned: bool = False) -> None:
        self.factor = factor
        self.turned = turned

    @property
    def T(self) -> Matrix:  # torch's name
        """The transpose, which costs nothing."""
        return Matrix(self.factor, not self.turned)

    @property
    def dims(self) -> str:
        """The letters of its two dimensions."""
        if self.turned:
            return self.factor.dims[::-1]
        return self.factor.dims

    def __repr__(self) -> str:
        return " x ".join(self.dims)

    def _arithmetic(self, *_: object) -> NoReturn:
        refuse("arithmetic on matrices", _ELSE)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = (
        _arithmetic
    )
    __matmul__ = __rmatmul__ = __neg__ = __pow__ = _arithmetic


def matmul(left: Matrix, right: Matrix) -> Matrix:
    """The product of two matrices, of which one at most is the gradient."""
    _check("matmul", left, right)
    if left.dims[1] != right.dims[0]:
        refuse(
            f"matmul of {left!r} and {right!r}",
            "let inner dimensions be alike: .T turns one",
        )
    are_given = [m.factor.made is FactorKind.GIVEN for m in (left, right)]
    if all(are_given):
        refuse(
            "matmul of the gradient and itself",
            "no rank holds it: begin with matmul by start",
        )
    made = FactorKind.PRODUCT if any(are_given) else FactorKind.MEAN
    sources = tuple(Operand(m.factor, m.turned) for m in (left, right))
    known = max(source.factor.round for source in sources)
    return Matrix(
        Factor(made, left.dims[0] + right.dims[1], known + any(are_given), sources)
    )


def orthogonal(matrix: Matrix) -> Matrix:
    """Orthonormal columns that span those of a tall matrix that all ranks hold."""
    _check("orthogonal", matrix)
    if matrix.factor.made is FactorKind.GIVEN:
        refuse(
            "orthogonal of the gradient",
            "no rank holds it: orthogonal(matmul(gradient, start))",
        )
    if matrix.factor.made is FactorKind.BASIS or matrix.turned or matrix.dims[1] != "R":
        refuse(
            f"orthogonal of {matrix!r}",
            "give it columns, R of them, that are not yet so",
        )
    source = Operand(matrix.factor, False)
    return Matrix(Factor(FactorKind.BASIS, matrix.dims, matrix.factor.round, (source,)))


def decomp(gradient: Matrix, start: Matrix) -> tuple[Matrix, Matrix]:
    """P with orthonormal columns and Q, such that P Q^T is near the gradient.

    One step of subspace iteration (Halko et al. 2011, section 4): exact if the gradient
    has rank R or less and ``start`` misses none of it; repeated from Q it comes to the
    best approximation.
    """
    _check("decomp", gradient, start)
    left = orthogonal(matmul(gradient, start))
    return left, matmul(gradient.T, left)


def _check(operator: str, *matrices: object) -> None:
    count_operation()
    for matrix in matrices:
        if not isinstance(matrix, Matrix):
            refuse(
                f"{operator} of {type(matrix).__name__.lower()}",
                f"{operator} takes matrices",
            )
        if matrix.factor.made is FactorKind.MEAN:
            what = "a product of matrices that all ranks hold"
            refuse(
                f"{operator} of {what}",
                "it is what decode ends with: multiply the gradient",
            )


class FactorRound(NamedTuple):
    """The work before an all-reduce: the bases that it needs, then the products that
    travel.
    """

    bases: tuple[Factor, ...]
    products: tuple[Factor, ...]


@dataclass(frozen=True, eq=False)
class LowRank:
    """A program as its rounds: the mean is the product of ``result``'s two operands."""

    gradient: Factor
    start: Factor
    rounds: tuple[FactorRound, ...]
    result: tuple[Operand, ...]
    kept: Factor
    """The start of the next step."""

    @property
    def last(self) -> Factor:
        """The product that travels last, in which the mean is linear."""
        return next(
            s.factor for s in self.result if s.factor.made is FactorKind.PRODUCT
        )

    @property
    def products(self) -> list[Factor]:
        """All that travels, in order."""
        return [product for round_ in self.rounds for product in round_.products]

    def needs_mean(self, product: Factor) -> bool:
        """Whether more than its columns' directions count: else the ranks' sum will
        do.
        """
        return all(
            product is not one.sources[0].factor for r in self.rounds for one in r.bases
        )


def trace_matrices(program: Any) -> LowRank:
    """Runs a program's two functions on symbols; refuses what is no projection, with
    the line.
    """
    name = type(program).__name__
    gradient = Factor(FactorKind.GIVEN, "NM")
    start = Factor(FactorKind.START, "MR")
    with tracing(f"encode of {name}"):
        sent = program.encode(Matrix(gradient), Matrix(start))
        if (
            not isinstance(sent, tuple)
            or not all(isinstance(m, Matrix) for m in sent)
            or not sent
        ):
            what = f"what encode of {name} returns"
            raise invalid(
                what, sent, "a tuple of factors", "return decomp(gradient, start)"
            )
    with tracing(f"decode of {name}"):
        mean = program.decode(*sent)
        if (
            not isinstance(mean, Matrix)
            or mean.dims != "NM"
            or not _projects(mean, gradient)
        ):
            remedy = (
                "return matmul(P, Q.T), P of orthogonal and Q = matmul(gradient.T, P)"
            )
            what = f"what decode of {name} returns"
            raise invalid(what, mean, "a projection of the gradient", remedy)
        result = mean.factor.sources
        if mean.turned:
            result = tuple(Operand(s.factor, not s.turned) for s in reversed(result))
        order = [*_walk([s.factor for s in result])]
        kept = sent[-1]
        if kept.dims != "MR" or kept.turned or kept.factor not in {*order, start}:
            accepted = "M x R, and used by decode, as the next step starts from it"
            what = f"the last that encode of {name} returns"
            raise invalid(
                what, kept, accepted, "return (P, Q), Q = matmul(gradient.T, P)"
            )
        _check_kept(name, order, kept.factor, result)
        if gradient not in {*_walk([kept.factor])}:
            accepted = (
                "made of the gradient: what lies outside of a fixed basis would "
                "never arrive"
            )
            what = f"the last that encode of {name} returns"
            raise invalid(
                what, kept, accepted, "return (P, Q), Q = matmul(gradient.T, P)"
            )
    count = max(factor.round for factor in order)
    rounds = (
        FactorRound(
            tuple(
                f for f in order if f.made is FactorKind.BASIS and f.round == number - 1
            ),
            tuple(
                f for f in order if f.made is FactorKind.PRODUCT and f.round == number
            ),
        )
        for number in range(1, count + 1)
    )
    return LowRank(gradient, start, tuple(rounds), result, kept.factor)


def _projects(mean: Matrix, gradient: Factor) -> bool:
    """Whether this is P Q^T with P orthogonal and Q the gradient's product with P."""
    if mean.factor.made is not FactorKind.MEAN:
        return False
    both = {source.factor.made: source.factor for source in mean.factor.sources}
    product = both.get(FactorKind.PRODUCT)
    basis = both.get(FactorKind.BASIS)
    if product is None or basis is None:
        return False
    return {source.factor for source in product.sources} == {gradient, basis}


def _check_kept(
    name: str, order: list[Factor], kept: Factor, result: Iterable[Operand]
) -> None:
    """Refuses what is needed as it was once a basis has taken its place."""
    for basis in order:
        if basis.made is not FactorKind.BASIS:
            continue
        before = basis.sources[0].factor
        users = [
            f
            for f in order
            if f is not basis and any(s.factor is before for s in f.sources)
        ]
        if users or kept is before or any(s.factor is before for s in result):
            what = f"a matrix of {name} that orthogonal takes"
            remedy = "use what orthogonal gives"
            raise invalid(what, Matrix(before), "used by nothing else", remedy)


def _walk(roots: Iterable[Factor]) -> Iterator[Factor]:
    """Every factor that these are made of once, sources before what uses them."""
    seen: dict[Factor, None] = {}

    def visit(factor: Factor) -> None:
        for source in factor.sources:
            visit(source.factor)
        seen.setdefault(factor)

    for root in roots:
        visit(root)
    yield from seen
