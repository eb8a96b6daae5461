"""Scalars of the whole gradient, made in stages that run before its blocks are visited.

    sample(G, share)   some elements, drawn at random      whole(b, f)       a value a block,
    sort(S, order)     them, or all elements, in order                       combined over all
    pick(S, fraction)  the element at that part of it

A trace records its stages in order; the scalar that each gives is a value a call, of which later
stages and the program itself make what they like.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from . import ir
from .ir import BOOL, FLOAT32, Buffer, Extent, Fold, Node, Op
from .simplify import substitute
from .symbols import Number, Scalar, Symbol, Vector, fold_by, refuse, working

RESULT_NAME = r"stage\d+\w*"
"""The pattern of the names of stages' buffers, which are numbered."""


@dataclass(frozen=True)
class Draw:
    """A sample of ``share`` of all elements, at least ``least``, drawn from a stream of its own.

    With replacement; but a sample that would be as large as the gradient is the gradient itself,
    each element once. ``stream`` is None where all elements were asked for, and nothing is drawn.
    """

    share: float
    least: int
    stream: int | None

    def count(self, numel: int) -> int:
        """How many of ``numel`` elements are in it."""
        return min(max(math.ceil(self.share * numel), self.least), numel)


@dataclass(frozen=True)
class Pick:
    """The element at ``fraction`` of a sorted sample, by ``key`` if they are not the keys."""

    draw: Draw
    descending: bool
    fraction: float
    key: Node | None = None

    def place(self, numel: int) -> int:
        """The place of the one picked in the sorted sample of ``numel`` elements."""
        count = self.draw.count(numel)
        return min(int(self.fraction * count), count - 1)


@dataclass(frozen=True)
class Stage:
    """One scalar of the whole gradient, known before the main kernel runs.

    ``value`` is an expression of an element to sample (``how``: Pick), or of a block to combine
    with the others' (``how``: Fold).
    """

    result: Buffer
    value: Node
    how: Pick | Fold


class Recording:
    """The notes of a trace beside its expressions: stages, and the number of random streams."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._num_streams = 0

    def stream(self) -> int:
        """The number of a random stream that nothing else draws from."""
        self._num_streams += 1
        return self._num_streams - 1

    def stage(self, value: Node, how: Pick | Fold) -> Scalar:
        """The scalar that this stage makes; an equal stage makes no other."""
        equal = (s.result for s in self.stages if s.value is value and s.how == how)
        result = next(equal, None)
        if result is None:
            result = Buffer(f"stage{len(self.stages)}", value.dtype, Extent.CALL)
            self.stages.append(Stage(result, value, how))
        return Scalar(ir.load_buffer(result))


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextmanager
def recording() -> Iterator[Recording]:
    """Inside the block, which is an encode's, programs may draw numbers and have stages."""
    made = Recording()
    token = _recording.set(made)
    try:
        yield made
    finally:
        _recording.reset(token)


def recorded(operator: str) -> Recording:
    """The recording under way; refuses ``operator`` in a decode, which has none."""
    found = _recording.get()
    if found is None:
        refuse(f"{operator} in decode", "do it in encode and send what decode needs")
    return found


class Sample(Symbol):
    """Some elements, drawn at random with replacement, or all; in order once sorted."""

    __slots__ = ("descending", "draw", "key", "node")

    def __init__(
        self, node: Node, draw: Draw, descending: bool | None = None, key: Node | None = None
    ) -> None:
        self.node = node
        self.draw = draw
        self.descending = descending
        self.key = key


def sample(vector: Vector, share: float, least: int = 1) -> Sample:
    """``share`` of the whole gradient's elements, rounded up, and not fewer than ``least``.

    Drawn with replacement, other ones in each call, unless they would be as many as there are: then
    each is in it once. Element by element, a map of the gradient is computed of those drawn only.
    """
    recording = recorded("sample()")
    value = _drawn_from("sample", vector)
    if not isinstance(share, float | int) or not 0 < share <= 1:
        refuse(f"sample of a share of {share!r}", "give a number in (0, 1]: 0.001 for 0.1 %")
    _check_anywhere("sample of", value)
    return Sample(value, Draw(share, int(least), recording.stream()))


def sort(elements: Sample | Vector, udf: Callable[[Any, Any], Number]) -> Sample:
    """A sample, or the whole gradient's elements, in the order that ``udf`` of two of them says.

    ``smaller`` or ``greater`` comes first; or ``udf`` is an order of one's own, a comparison by
    ``<`` or ``>`` of one expression of either: ``lambda a, b: abs(a) > abs(b)``. Equal ones keep
    the order of their places. NaN ranks above infinity.
    """
    if isinstance(elements, Vector):
        recorded("sort()")
        elements = Sample(_drawn_from("sort", elements), Draw(1.0, 1, None))
    if not isinstance(elements, Sample):
        refuse("sort of what is no vector", "sort(v, smaller) or sort(sample(v, share), smaller)")
    value, draw = elements.node, elements.draw
    first, second = (Scalar(ir.node(Op.ARG, dtype=FLOAT32, arg=i)) for i in (0, 1))
    said = udf(first, second)
    if isinstance(said, Scalar) and said.node.dtype is BOOL:
        argument, descending = _order(said.node, first.node, second.node)
        (key,) = substitute((argument,), {first.node: value})
        if draw.stream is not None:
            _check_anywhere("sort of a sample by", key)
        return Sample(value, draw, descending, None if key is value else key)
    found = said.node if isinstance(said, Scalar) else value
    both = {*found.sources} == {first.node, second.node}
    if not both or found.op not in (Op.SMALLER, Op.GREATER):
        refuse("sort by a function that is no order", _ORDERS)
    return Sample(value, draw, found.op is Op.GREATER)


_ORDERS = "sort by smaller, greater, or as lambda a, b: abs(a) > abs(b), one expression of either"


def _order(said: Node, first: Node, second: Node) -> tuple[Node, bool]:
    """The key of an order as an expression of ``first``, and whether the greatest is first.

    So what is sorted by is an order for certain: no comparison contradicts another.
    """
    if said.op is not Op.LESS:
        refuse("sort by a condition that is no order by < or >", _ORDERS)
    left, right = said.sources
    descending = second in ir.walk([left])
    key, other = (right, left) if descending else (left, right)
    if first not in ir.walk([key]) or substitute((key,), {first: second})[0] is not other:
        refuse("sort by a comparison of two different expressions", _ORDERS)
    return key, descending


def _drawn_from(operator: str, vector: Vector) -> Node:
    """The element of a vector that a sample may hold."""
    if not isinstance(vector, Vector) or vector.keep is not None:
        refuse(f"{operator} of something other than a vector of all elements", _BEFORE[operator])
    value = working(Scalar(vector.node))
    if value.dtype is not FLOAT32:
        refuse(f"{operator} of {value.dtype!r}", f"{operator} float32 values: map(v, float32)")
    return value


_BEFORE = {"sample": "sample, then filter", "sort": "sort, pick, then filter by what was picked"}


def _check_anywhere(what: str, value: Node) -> None:
    """Refuses an element that is not the same wherever it is computed."""
    if any(n.extent is Extent.BLOCK or n.op in (Op.PLACE, Op.RANDOM) for n in ir.walk([value])):
        remedy = "take the gradient, or a map of it by captured values and whole-gradient scalars"
        refuse(f"{what} what depends on an element's block or place", remedy)


def pick(drawn: Sample, fraction: float) -> Scalar:
    """The element at floor(fraction * count) of what was sorted, the last of it for 1."""
    if not isinstance(drawn, Sample) or drawn.descending is None:
        refuse("pick from what is not in order", "pick(sort(sample(v, share), smaller), fraction)")
    if not isinstance(fraction, float | int) or not 0 <= fraction <= 1:
        refuse(f"pick at {fraction!r}", "give a number in [0, 1]: 0.5 for the median")
    how = Pick(drawn.draw, drawn.descending, fraction, drawn.key)
    return recorded("pick()").stage(drawn.node, how)


def whole(
    value: Scalar, udf: Callable[[Any, Any], Number], start: float | int | None = None
) -> Scalar:
    """A block's value combined over all blocks: ``whole(reduce(v, f), f)`` reduces everything.

    ``udf`` and ``start`` are those of ``reduce``; sums of floats are rounded once a block and then
    once more.
    """
    recording = recorded("whole()")
    if not isinstance(value, Scalar):
        refuse("whole of something that is not a block's value", "whole(reduce(v, f), f)")
    if value.node.extent is not Extent.BLOCK:
        known = value.node.extent is Extent.CALL
        what = "known of the whole gradient already" if known else "one element's"
        refuse(f"whole of a value that is {what}", "whole(reduce(v, f), f)")
    partial = working(value)
    return recording.stage(partial, fold_by(udf, partial, start))
