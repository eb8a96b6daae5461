"""The language: the operators a program is written with (HiPress, table 4).

A program's functions are ordinary Python, run once on symbolic values; captured values and settings
are plain numbers. A map leaves no node behind: a vector *is* the expression of its element.

    map(G, f)        f of every element           reduce(G, f, start)   one value a block
    filter(G, f)     the elements f is true of    size(G)               how many there are
    random(a, b)     a number an element          where(c, a, b)        a where c holds, else b
    concat(n=v, ...) the payload, by field        extract(payload)      its fields, in order
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import Any

from . import ir
from .ir import BOOL, FLOAT32, INT32, UNSIGNED, DType, Extent, Op
from .symbols import Number, Scalar, Vector, alike, cast, lifted, made, refuse, working

__all__ = [
    "Compressed",
    "Scalar",
    "Type",
    "Vector",
    "add",
    "concat",
    "extract",
    "filter",
    "finite",
    "float32",
    "floor",
    "greater",
    "int32",
    "map",
    "random",
    "reduce",
    "round",
    "size",
    "smaller",
    "sqrt",
    "uint",
    "uint1",
    "uint2",
    "uint4",
    "uint8",
    "where",
]


class Type:
    """A type of the language; called, it converts: saturating, towards zero, NaN to 0."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype

    def __call__(self, value: Number) -> Scalar:
        if not isinstance(value, Scalar) and self.dtype in UNSIGNED:
            if not 0 <= value <= self.dtype.top:
                refuse(f"{value} does not fit {self}", f"{self} holds 0 to {self.dtype.top}")
            value = int(value)
        return Scalar(cast(lifted(value, self.dtype), self.dtype))

    def __repr__(self) -> str:
        return self.dtype.label


uint1, uint2, uint4, uint8 = (Type(dtype) for dtype in DType if dtype in UNSIGNED)
int32, float32 = Type(INT32), Type(FLOAT32)


def uint(bits: int) -> Type:
    """The unsigned type of ``bits`` bits: for programs whose bit width is a setting."""
    for known in (uint1, uint2, uint4, uint8):
        if known.dtype.bits == bits:
            return known
    refuse(f"uint({bits})", "widths are 1, 2, 4 and 8")


def where(condition: Number, then: Number, otherwise: Number) -> Scalar:
    """``then`` where the condition holds, else ``otherwise``; both are computed."""
    a, b = alike(then, otherwise)
    return Scalar(made(Op.WHERE, lifted(condition), a, b))


def smaller(a: Number, b: Number) -> Scalar:
    """The smaller of two; NaN if one is."""
    return Scalar(made(Op.SMALLER, *alike(a, b)))


def greater(a: Number, b: Number) -> Scalar:
    """The greater of two; NaN if one is."""
    return Scalar(made(Op.GREATER, *alike(a, b)))


def floor(x: Number) -> Scalar:
    """The next whole number below, as a float32."""
    return Scalar(made(Op.FLOOR, *alike(x, floating=True)))


def round(x: Number) -> Scalar:
    """The nearest whole number, halves to even, as a float32."""
    return Scalar(made(Op.ROUND, *alike(x, floating=True)))


def sqrt(x: Number) -> Scalar:
    """The square root, correctly rounded."""
    return Scalar(made(Op.SQRT, *alike(x, floating=True)))


def finite(x: Number) -> Scalar:
    """Whether x is neither infinite nor NaN."""
    return Scalar(made(Op.FINITE, *alike(x, floating=True)))


_streams: ContextVar[Iterator[int] | None] = ContextVar("streams", default=None)


@contextmanager
def drawing() -> Iterator[None]:
    """Inside the block ``random`` may be called; its calls are numbered from 0."""
    token = _streams.set(count())
    try:
        yield
    finally:
        _streams.reset(token)


def random(low: Number = 0.0, high: Number = 1.0) -> Scalar:
    """A float in [low, high), another one for each element, call and step."""
    streams = _streams.get()
    if streams is None:
        refuse("random() in decode", "draw in encode and send what decode needs")
    draw = Scalar(made(Op.RANDOM, arg=next(streams)))
    return low + (high - low) * draw


def map(vectors: Vector | tuple[Vector, ...], udf: Callable[..., Number]) -> Vector:
    """``udf`` of each element, or of each tuple of elements of several vectors alike."""
    given = vectors if isinstance(vectors, tuple) else (vectors,)
    for vector in given:
        _check_vector("map", vector)
    keeps = {vector.keep for vector in given}
    if len(keeps) > 1:
        refuse("map over vectors that were filtered differently", "map first, then filter")
    result = udf(*(Scalar(vector.node) for vector in given))
    return Vector(lifted(result), given[0].keep)


def filter(vector: Vector, udf: Callable[[Scalar], Scalar]) -> Vector:
    """The elements that ``udf`` is true of."""
    _check_vector("filter", vector)
    found = udf(Scalar(vector.node))
    if not isinstance(found, Scalar) or found.node.dtype is not BOOL:
        refuse("filter by something that is not a condition", "compare: lambda x: x > 0")
    if vector.keep is None:
        return Vector(vector.node, found.node)
    return Vector(vector.node, made(Op.AND, vector.keep, found.node))


def reduce(
    vector: Vector, udf: Callable[[Any, Any], Number], start: float | int | None = None
) -> Scalar:
    """All elements combined by ``udf``, an associative function of two; ``start`` if there are
    none.

    Sums (``lambda a, b: a + b``) of floats are made in double precision and rounded once. ``start``
    follows for sums, ``smaller`` and ``greater``; other functions need it.
    """
    _check_vector("reduce", vector)
    value = working(Scalar(vector.node))
    args = (Scalar(ir.node(Op.ARG, dtype=value.dtype, arg=i)) for i in (0, 1))
    body = lifted(udf(*args), value.dtype)
    if body.dtype is not value.dtype:
        refuse(f"reduce of {value.dtype!r} by a function that gives {body.dtype!r}", "map first")
    if any(not n.sources and n.op not in (Op.ARG, Op.CONST) for n in ir.walk([body])):
        refuse("reduce by a function that uses other values", "map first, then combine")
    neutral = ir.neutral(body)
    first = neutral if start is None else start
    if first is None:
        refuse("reduce by a function of your own", "give start=, the value that changes nothing")
    if neutral is not None and neutral != first:
        refuse(f"reduce by {body.op.value} from {first}", "leave start out and add it afterwards")
    keep = vector.keep or ir.const(True, BOOL)
    return Scalar(made(Op.REDUCE, value, keep, dtype=value.dtype, arg=ir.Fold(body, first)))


def add(a: Scalar, b: Scalar) -> Scalar:
    """a + b, to reduce by."""
    return a + b


def size(vector: Vector) -> Scalar:
    """How many elements a vector has in this block, an int32."""
    _check_vector("size", vector)
    if vector.keep is None:
        return Scalar(made(Op.SIZE))
    return reduce(Vector(ir.const(1, INT32), vector.keep), add)


@dataclass(frozen=True)
class Compressed:
    """The payload: its fields by name, in the order in which they lie."""

    fields: dict[str, Scalar | Vector]


def concat(**fields: Scalar | Vector) -> Compressed:
    """The payload of these fields: scalars are one a block, vectors one an element, packed."""
    for name, value in fields.items():
        if not isinstance(value, Scalar | Vector):
            refuse(f"field {name} is {value!r}", "send what depends on the gradient only")
        if isinstance(value, Vector) and value.keep is not None:
            refuse(f"field {name} is a filtered vector", "reduce it, or map with where")
        if value.node.dtype is BOOL:
            refuse(f"field {name} holds conditions", "pack them: uint1(condition)")
        if isinstance(value, Scalar) and value.node.extent is Extent.ELEMENT:
            refuse(f"field {name} is one element's value", "make it a vector with map")
    return Compressed(fields)


def extract(compressed: Compressed) -> tuple[Any, ...]:
    """The fields of a payload, in the order of ``concat``."""
    if not isinstance(compressed, Compressed):
        refuse(f"extract from {compressed!r}", "extract takes what decode is given")
    return tuple(compressed.fields.values())


def _check_vector(operator: str, value: object) -> None:
    if not isinstance(value, Vector):
        refuse(f"{operator} of something that is not a vector", f"{operator} takes a vector first")
