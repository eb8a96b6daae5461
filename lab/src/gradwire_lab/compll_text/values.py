"""Rules of C for values, where Python has others: declared types, conversions, whole
division.

Numbers that are known (settings and literals) stay plain Python numbers; everything
else is a Scalar or a Vector of the language, whose own operators these are.
"""

import inspect
import operator
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from gradwire.dsl import language
from gradwire.dsl.ir import BOOL, FLOAT32, UNSIGNED, Op
from gradwire.dsl.language import Compressed, Scalar, Type, Vector
from gradwire.dsl.symbols import Symbol, refuse
from gradwire_lab.dsl.coders import repeat, runs
from gradwire_lab.dsl.matrices import Matrix, matmul, orthogonal

from .tree import Kind

Value: TypeAlias = Any
"""A plain number, a Scalar, a Vector, a Matrix, a Compressed, or a function of
elements.
"""

TYPES: dict[str, Type] = {
    Kind.of(repr(value)).name: value
    for value in vars(language).values()
    if isinstance(value, Type)
}
"""The type that each declared type converts to; "bool" is a condition, and not among
them.
"""


def _divided(a: Value, b: Value) -> Value:
    """C's division: of whole numbers it is whole, which symbols are not divided by."""
    if not (_is_whole(a) and _is_whole(b)):
        return a / b
    if isinstance(a, Scalar) or isinstance(b, Scalar):
        refuse(
            "whole numbers divided",
            "C drops the fraction; write float(a) / b to keep it",
        )
    whole = abs(a) // abs(b)
    if (a < 0) == (b < 0):
        return whole
    return -whole


def _shifted(by: Callable[[Any, Any], Value]) -> Callable[[Value, Value], Value]:
    """A shift; of known numbers by fewer bits than C's longest has, as more are no
    number.
    """

    def shift(a: Value, b: Value) -> Value:
        if isinstance(b, int) and not 0 <= b < 64:
            refuse(f"a shift by {b} bits", "shift by 0 to 63")
        return by(a, b)

    return shift


def _remainder(a: Value, b: Value) -> Value:
    """C's remainder, which has the sign of ``a``; of symbols by powers of two."""
    if not (_is_whole(a) and _is_whole(b)):
        refuse("% of floats", "write a - floor(a / b) * b")
    if isinstance(b, Scalar) or (isinstance(a, Scalar) and (b < 1 or b & (b - 1))):
        refuse("% by what is no power of two", "write a - int(floor(float(a) / b)) * b")
    if not isinstance(a, Scalar):
        return a - b * _divided(a, b)
    if a.node.op is Op.SIZE or a.node.dtype in UNSIGNED:
        return a & (b - 1)
    return language.where(a < 0, -(-a & (b - 1)), a & (b - 1))


BINARY: dict[str, Callable[[Any, Any], Value]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divided,
    "%": _remainder,
    "<<": _shifted(operator.lshift),
    ">>": _shifted(operator.rshift),
    "&": operator.and_,
    "|": operator.or_,
    "^": lambda a, b: (a | b) - (a & b),
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
UNARY: dict[str, Callable[[Any], Value]] = {
    "+": lambda a: a,
    "-": operator.neg,
    "~": lambda a: -a - 1,
    "!": lambda a: _inverse(truth(a)),
}


def _map(*values: Value) -> Vector:
    """C has no tuples: map(a, b, f); runs gives two vectors."""
    *vectors, udf = values
    apart = (vector if isinstance(vector, tuple) else (vector,) for vector in vectors)
    return language.map(tuple(chain.from_iterable(apart)), udf)


def _filter(vector: Vector, udf: Callable[[Scalar], Value]) -> Vector:
    """C's conditions are numbers: a uint1 will do."""
    return language.filter(vector, lambda x: truth(udf(x)))


def _transposed(matrix: Matrix) -> Matrix:
    """C has no members of matrices."""
    if not isinstance(matrix, Matrix):
        refuse("transposed of what is no matrix", "transposed takes a float**")
    return matrix.T


OPERATORS: dict[str, Callable[..., Value]] = {
    **{n: f for n in language.__all__ if inspect.isfunction(f := getattr(language, n))},
    "abs": abs,
    "map": _map,
    "filter": _filter,
    "matmul": matmul,
    "orthogonal": orthogonal,
    "repeat": repeat,
    "runs": runs,
    "transposed": _transposed,
}
"""The functions that a text may call, beside its own, concat, extract and decomp."""


def _is_whole(value: Value) -> bool:
    if isinstance(value, Scalar):
        return value.node.dtype is not FLOAT32
    return isinstance(value, int)


def truth(value: Value) -> Value:
    """A number as C's condition: whether it is not 0."""
    if isinstance(value, Scalar) and value.node.dtype is BOOL:
        return value
    return value != 0


def _inverse(condition: Value) -> Value:
    if isinstance(condition, bool):
        return not condition
    return ~condition


def apply_function(
    name: str, function: Callable[..., Value], values: Sequence[Value]
) -> Value:
    """``function`` of these values; refuses another number than it takes."""
    try:
        inspect.signature(function).bind(*values)
    except TypeError as error:
        refuse(f"{name}: {error}", "see docs/compll.md for what operators take")
    return function(*values)


def typed(kind: Kind | None, value: Value) -> Value:
    """A plain number as a Scalar of its declared type."""
    if isinstance(value, int | float) and kind is not None and kind.name in TYPES:
        return TYPES[kind.name](value)
    return value


def converted(kind: Kind, value: Value) -> Value:
    """``value`` as C converts it at an assignment; arrays must be of the declared
    type.
    """
    if isinstance(value, Matrix) or kind.num_stars == 2:
        return _as_matrix(kind, value)
    if kind.num_stars:
        return _as_array(kind, value)
    if not isinstance(value, Scalar | int | float):
        refuse(
            f"an array where a {kind} is declared",
            f"declare it {kind}*, or reduce it first",
        )
    if kind.name == "bool":
        return truth(value)
    if kind.name not in TYPES:
        refuse(f"a value of type {kind}", f"types are bool, {', '.join(TYPES)}")
    to = TYPES[kind.name]
    if isinstance(value, Scalar):
        return to(value)
    if to.dtype is FLOAT32:
        with np.errstate(over="ignore"):
            return float(np.float32(value))
    whole = int(value)
    to(whole)  # refuses what does not fit
    return whole


def _as_matrix(kind: Kind, value: Value) -> Matrix:
    if not isinstance(value, Matrix) or str(kind) != "float**":
        matrix = (
            "a matrix" if isinstance(value, Matrix) else type(value).__name__.lower()
        )
        refuse(
            f"{matrix} where {kind} is declared",
            "matrices are float**, and nothing else is",
        )
    return value


def _as_array(kind: Kind, value: Value) -> Value:
    if isinstance(value, Compressed) and str(kind) == "uint8*":
        return value
    if isinstance(value, Scalar | Compressed) or not isinstance(value, Symbol):
        refuse(
            f"{type(value).__name__.lower()} where {kind} is declared",
            "map gives arrays",
        )
    node = getattr(value, "node", None)
    if node is not None and node.dtype is not TYPES[kind.name].dtype:
        refuse(
            f"an array of {node.dtype!r} where {kind} is declared",
            f"declare it {node.dtype!r}*, or map by a function that returns "
            f"{kind.name}",
        )
    return value
