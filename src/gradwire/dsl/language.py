"""The language: the operators a program is written with (HiPress, table 4).

A program's functions are ordinary Python, run once on symbolic values; captured values
and settings are plain numbers. A map leaves no node behind: a vector *is* the
expression of its element.

    map(G, f)            f of every element
    filter(G, f)         the elements f is true of
    reduce(G, f, start)  one value for each block
    size(G)              the number of elements
    random(a, b)         a random number for each element
    where(c, a, b)       a where c holds, else b
    concat(n=v, ...)     the payload, by field
    extract(payload)     its fields, in order

Of the whole gradient, known before its blocks are visited:

    sample(G, share)     elements drawn at random
    sort(S, order)       a sample, or the gradient, in order
    pick(S, part)        the element at a part of it
    whole(b, f, start)   a block's value over all blocks

Of the elements that a filter kept, to be sent as a list:

    top(K, share)        the largest of them
    indices(K)           their places
    scatter(I, K)        the decoded gradient, 0 elsewhere
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import ir
from .ir import BOOL, FLOAT32, INT32, UNSIGNED, DType, Extent, Node, Op
from .rewrite import GRADIENT, pick, recorded, sample, sort, whole
from .symbols import (
    Coded,
    Number,
    Scalar,
    Symbol,
    Vector,
    alike,
    cast,
    fold_by,
    lifted,
    made,
    operated,
    refuse,
    working,
)

# ---- Kept elements: a filtered gradient that travels as a list of places and values --
#
# A payload's kept fields have one entry for each kept element, by rising place. They
# lie behind its other fields, so that the payload's size alone tells how many there
# are.


@dataclass(eq=False, repr=False)
class Scattered(Symbol):
    """A whole gradient: values at the places in ``indices``, zeros elsewhere."""

    indices: Node
    node: Node


def top(kept: Vector, share: float) -> Vector:
    """The largest by magnitude that a filter kept, at most ``share`` of the gradient.

    That is max(1, round(share * N)) of N elements: all that were kept if they are no
    more than that. Ties go to the lowest place; NaN ranks above infinity, and that
    above all numbers.
    """
    if not isinstance(kept, Vector) or kept.keep is None or kept.top is not None:
        refuse(
            "top of something that no filter kept",
            "filter first, then cut: top(kept, share)",
        )
    if kept.node is not ir.load_buffer(GRADIENT):
        refuse(
            "top of a mapped vector", "cut the gradient's own values, map what is left"
        )
    if not isinstance(share, float | int) or not 0 < share <= 1:
        refuse(f"top of a share of {share!r}", "give a number in (0, 1]: 0.01 for 1 %")
    return Vector(kept.node, kept.keep, share)


def indices(kept: Vector) -> Vector:
    """The place in the gradient of each kept element, an int32."""
    if not isinstance(kept, Vector) or kept.keep is None:
        refuse(
            "indices of what no filter kept",
            "every element is there: leave its place out",
        )
    return Vector(ir.node(Op.PLACE), kept.keep, kept.top)


def scatter(places: Vector, values: Vector) -> Scattered:
    """The decoded gradient: ``values`` at ``places``, else 0.

    Both are kept fields or a map of one.
    """
    if not (isinstance(places, Vector) and places.node.extent is Extent.KEPT):
        refuse(
            "scatter to something that is no field of kept elements",
            "send indices(kept)",
        )
    if places.node.op is not Op.LOAD or places.node.dtype is not INT32:
        refuse(
            "scatter to computed places",
            "scatter to the field that indices(kept) filled",
        )
    if not isinstance(values, Vector):
        refuse("scatter of something that is not a vector", "scatter(indices, values)")
    number = cast(working(Scalar(values.node)), FLOAT32)
    extents = {found.extent for found in ir.walk([number])}
    if extents & {Extent.BLOCK, Extent.ELEMENT}:
        refuse(
            "scatter of values that depend on a block or on every element",
            "send one value a kept element, or whole(...) of the blocks' values",
        )
    return Scattered(places.node, number)


__all__ = ["Compressed", "Scalar", "Scattered", "Type", "Vector"]
__all__ += ["float32", "int32", "uint", "uint1", "uint2", "uint4", "uint8", "uint_3"]
__all__ += ["finite", "floor", "greater", "random", "round", "smaller", "sqrt", "where"]
__all__ += ["add", "concat", "extract", "filter", "map", "reduce", "size"]
__all__ += ["indices", "pick", "sample", "scatter", "sort", "top", "whole"]


# ---- the operators -------------------------------------------------------------------


class Type:
    """A type of the language.

    Called, it converts: saturating, towards zero, NaN to 0.
    """

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype

    def __call__(self, value: Number) -> Scalar:
        if not isinstance(value, Scalar) and self.dtype in UNSIGNED:
            if not 0 <= value <= self.dtype.top:
                refuse(
                    f"{value} does not fit {self}",
                    f"{self} holds 0 to {self.dtype.top}",
                )
            value = int(value)
        return Scalar(cast(lifted(value, self.dtype), self.dtype))

    def __repr__(self) -> str:
        return self.dtype.label


uint1, uint2, uint4, uint8, uint_3 = (
    Type(dtype) for dtype in DType if dtype in UNSIGNED
)
int32 = Type(INT32)
float32 = Type(FLOAT32)


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
    return operated(Op.SMALLER, a, b)


def greater(a: Number, b: Number) -> Scalar:
    """The greater of two; NaN if one is."""
    return operated(Op.GREATER, a, b)


def floor(x: Number) -> Scalar:
    """The next whole number below, as a float32."""
    return operated(Op.FLOOR, x)


def round(x: Number) -> Scalar:
    """The nearest whole number, halves to even, as a float32."""
    return operated(Op.ROUND, x)


def sqrt(x: Number) -> Scalar:
    """The square root, correctly rounded."""
    return operated(Op.SQRT, x)


def finite(x: Number) -> Scalar:
    """Whether x is neither infinite nor NaN."""
    return operated(Op.FINITE, x)


def random(low: Number = 0.0, high: Number = 1.0) -> Scalar:
    """A float in [low, high), another one for each element, call and step."""
    draw = Scalar(made(Op.RANDOM, arg=recorded("random()").stream()))
    if isinstance(low, Scalar) or isinstance(high, Scalar) or (low, high) != (0, 1):
        return low + (high - low) * draw
    return draw


def map(vectors: Vector | tuple[Vector, ...], udf: Callable[..., Number]) -> Vector:
    """``udf`` of each element, or of each tuple of several vectors' elements."""
    inputs = vectors if isinstance(vectors, tuple) else (vectors,)
    for vector in inputs:
        _check_vector("map", vector)
    if len({(vector.keep, vector.top) for vector in inputs}) > 1:
        refuse(
            "map over vectors that were filtered differently", "map first, then filter"
        )
    if len({vector.node.extent is Extent.KEPT for vector in inputs}) > 1:
        refuse(
            "map over kept elements and all elements",
            "scatter is what decode ends with",
        )
    result = udf(*(Scalar(vector.node) for vector in inputs))
    return Vector(lifted(result), inputs[0].keep, inputs[0].top)


def filter(vector: Vector, udf: Callable[[Scalar], Scalar]) -> Vector:
    """The elements that ``udf`` is true of."""
    _check_uncut("filter", vector)
    condition = udf(Scalar(vector.node))
    if not isinstance(condition, Scalar) or condition.node.dtype is not BOOL:
        refuse(
            "filter by something that is not a condition", "compare: lambda x: x > 0"
        )
    if vector.keep is None:
        return Vector(vector.node, condition.node)
    return Vector(vector.node, made(Op.AND, vector.keep, condition.node))


def reduce(
    vector: Vector, udf: Callable[[Any, Any], Number], start: float | int | None = None
) -> Scalar:
    """All elements combined by ``udf``, an associative function of two; ``start`` if
    there are none.

    Sums (``lambda a, b: a + b``) of floats are made in double precision and rounded
    once. ``start`` follows for sums, ``smaller`` and ``greater``; other functions need
    it.
    """
    _check_uncut("reduce", vector)
    value = working(Scalar(vector.node))
    fold = fold_by(udf, value, start)
    keep = vector.keep or ir.const(True, BOOL)
    return Scalar(made(Op.REDUCE, value, keep, dtype=value.dtype, arg=fold))


def add(a: Scalar, b: Scalar) -> Scalar:
    """a + b, to reduce by."""
    return a + b


def size(vector: Vector) -> Scalar:
    """How many elements a vector has in this block, an int32."""
    _check_uncut("size", vector)
    if vector.keep is None:
        return Scalar(made(Op.SIZE))
    return reduce(Vector(ir.const(1, INT32), vector.keep), add)


@dataclass(frozen=True)
class Compressed:
    """The payload: its fields by name, in the order in which they lie."""

    fields: Mapping[str, Scalar | Vector | Coded]


def concat(**fields: Scalar | Vector | Coded) -> Compressed:
    """The payload of these fields: scalars are one a block (or one a call), vectors one
    an element, packed, or one a kept element. The kinds lie in this order.
    """
    for name, value in fields.items():
        if not isinstance(value, Scalar | Vector | Coded):
            refuse(
                f"field {name} is {value!r}", "send what depends on the gradient only"
            )
        if value.node.dtype is BOOL:
            refuse(f"field {name} holds conditions", "pack them: uint1(condition)")
        if isinstance(value, Scalar) and value.node.extent is Extent.ELEMENT:
            refuse(f"field {name} is one element's value", "make it a vector with map")
    _check_kept([value for value in fields.values() if isinstance(value, Vector)])
    _check_coded([*fields.values()])
    return Compressed(fields)


def _check_kept(vectors: list[Vector]) -> None:
    """Refuses kept fields that decode could not use."""
    kept = [vector for vector in vectors if vector.keep is not None]
    if not kept:
        return
    if len(kept) < len(vectors):
        refuse(
            "fields a kept element beside fields an element",
            "send either; map with where",
        )
    if len({(vector.keep, vector.top) for vector in kept}) > 1:
        refuse("kept fields of two different filters", "filter once, map what it kept")
    if all(vector.node.op is not Op.PLACE for vector in kept):
        refuse(
            "kept elements without their places",
            "send indices=indices(kept) beside them",
        )


def extract(compressed: Compressed) -> tuple[Any, ...]:
    """The fields of a payload, in the order of ``concat``."""
    if not isinstance(compressed, Compressed):
        refuse(f"extract from {compressed!r}", "extract takes what decode is given")
    return tuple(compressed.fields.values())


def _check_coded(values: list[Scalar | Vector | Coded]) -> None:
    """Refuses open lengths of coded fields, as only the last one's is known."""
    coded = [value for value in values if isinstance(value, Coded)]
    if len(coded) > 1:
        refuse(
            "two fields that are coded",
            "code one of them: the payload tells one length",
        )
    if coded and any(
        isinstance(value, Vector) and value.keep is not None for value in values
    ):
        refuse(
            "a coded field beside kept elements",
            "send either: the payload tells one length",
        )


def _check_uncut(operator: str, value: Vector) -> None:
    """A vector whose elements are known while blocks are visited."""
    _check_vector(operator, value)
    if value.top is not None:
        refuse(f"{operator} of what top cut", f"{operator} before top")
    if value.node.extent is Extent.KEPT:
        refuse(
            f"{operator} of a kept field in decode",
            f"{operator} in encode, and send that",
        )


def _check_vector(operator: str, value: object) -> None:
    if not isinstance(value, Vector):
        refuse(
            f"{operator} of something that is not a vector",
            f"{operator} takes a vector first",
        )
