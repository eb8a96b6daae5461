"""Scalars of the whole gradient, made in stages that run before its blocks are visited.

    sample(G, share)   some elements, drawn at random      whole(b, f)       a value a block,
    sort(S, smaller)   a sample in order                                     combined over all
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
from .ir import FLOAT32, Buffer, Extent, Fold, Node, Op
from .symbols import Number, Scalar, Symbol, Vector, fold_by, refuse, working

RESULT_NAME = r"stage\d+\w*"
"""The pattern of the names of stages' buffers, which are numbered."""


@dataclass(frozen=True)
class Draw:
    """A sample of ``share`` of all elements, at least ``least``, drawn from a stream of its own.

    With replacement; but a sample that would be as large as the gradient is the gradient itself,
    each element once.
    """

    share: float
    least: int
    stream: int

    def count(self, numel: int) -> int:
        """How many of ``numel`` elements are in it."""
        return min(max(math.ceil(self.share * numel), self.least), numel)


@dataclass(frozen=True)
class Pick:
    """The element at ``fraction`` of a sorted sample."""

    draw: Draw
    descending: bool
    fraction: float

    def rank(self, numel: int) -> int:
        """The place of the one picked in the sample of ``numel`` elements, in ascending order."""
        count = self.draw.count(numel)
        place = min(int(self.fraction * count), count - 1)
        return count - 1 - place if self.descending else place


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
    """Some elements, drawn at random with replacement; in order once sorted."""

    __slots__ = ("descending", "draw", "node")

    def __init__(self, node: Node, draw: Draw, descending: bool | None = None) -> None:
        self.node = node
        self.draw = draw
        self.descending = descending


def sample(vector: Vector, share: float, least: int = 1) -> Sample:
    """``share`` of the whole gradient's elements, rounded up, and not fewer than ``least``.

    Drawn with replacement, other ones in each call, unless they would be as many as there are: then
    each is in it once. Element by element, a map of the gradient is computed of those drawn only.
    """
    recording = recorded("sample()")
    if not isinstance(vector, Vector) or vector.keep is not None:
        refuse("sample of something other than a vector of all elements", "sample, then filter")
    if not isinstance(share, float | int) or not 0 < share <= 1:
        refuse(f"sample of a share of {share!r}", "give a number in (0, 1]: 0.001 for 0.1 %")
    value = working(Scalar(vector.node))
    if value.dtype is not FLOAT32:
        refuse(f"sample of {value.dtype!r}", "sample float32 values: map(v, float32)")
    if any(n.extent is Extent.BLOCK or n.op in (Op.PLACE, Op.RANDOM) for n in ir.walk([value])):
        remedy = "sample the gradient, or a map of it by captured values and whole-gradient scalars"
        refuse("sample of what depends on an element's block or place", remedy)
    return Sample(value, Draw(share, int(least), recording.stream()))


def sort(drawn: Sample, udf: Callable[[Any, Any], Number]) -> Sample:
    """A sample in order: ``smaller`` first or ``greater`` first; NaN ranks above infinity."""
    if not isinstance(drawn, Sample):
        refuse("sort of something that is no sample", "sort(sample(v, share), smaller)")
    fold = fold_by(udf, drawn.node, None)
    if fold.body.op not in (Op.SMALLER, Op.GREATER) or ir.neutral(fold.body) is None:
        refuse("sort by a function of your own", "sort by smaller or greater, sample a map")
    return Sample(drawn.node, drawn.draw, fold.body.op is Op.GREATER)


def pick(drawn: Sample, fraction: float) -> Scalar:
    """The element at floor(fraction * count) of a sorted sample, the last of it for 1."""
    if not isinstance(drawn, Sample) or drawn.descending is None:
        refuse("pick from what is not in order", "pick(sort(sample(v, share), smaller), fraction)")
    if not isinstance(fraction, float | int) or not 0 <= fraction <= 1:
        refuse(f"pick at {fraction!r}", "give a number in [0, 1]: 0.5 for the median")
    return recorded("pick()").stage(drawn.node, Pick(drawn.draw, drawn.descending, fraction))


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
