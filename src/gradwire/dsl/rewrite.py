"""Rewrites: a program's two traces become a compressor's kernels of one pass each.

``encode`` and ``decode`` are expressions, so fusing them is substitution: the residual
form puts what ``encode`` sends where ``decode`` reads it (what is packed and unpacked
is itself again), and merge adds what decode writes. Nothing is materialised between
them. Kept elements are decoded one by one, by a kernel whose elements they are; what
scatters them is no kernel. A stage's kernels are made by the same substitutions.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from . import interp, ir
from .ir import (
    BOOL,
    FLOAT32,
    INT32,
    Buffer,
    Extent,
    Fold,
    Kernel,
    Node,
    Op,
    const,
    load_buffer,
    node,
    rule,
    store,
    walk,
)
from .symbols import Number, Scalar, Symbol, Vector, fold_by, refuse, working

# ---- Expressions with parts replaced, or simplified: the same bits result ------------


def substitute(roots: tuple[Node, ...], instead: Mapping[Node, Node]) -> list[Node]:
    """``roots`` with some nodes replaced."""
    return _rebuilt(roots, lambda node: instead.get(node, node))


def simplified(roots: tuple[Node, ...]) -> list[Node]:
    """``roots`` with constants folded, which Triton's functions refuse as operands.

    All else that could be simpler, as a product with 1, the compilers of the texts see.
    """
    return _rebuilt(roots, _folded)


def _rebuilt(roots: tuple[Node, ...], change: Callable[[Node], Node]) -> list[Node]:
    done: dict[Node, Node] = {}
    for old in walk(roots):
        sources = tuple(done[source] for source in old.sources)
        if sources != old.sources:
            stated = old.dtype if rule(old.op, old.arg).stated else None
            made = node(old.op, *sources, dtype=stated, arg=old.arg)
        else:
            made = old
        done[old] = change(made)
    return [done[root] for root in roots]


_NO_FUNCTIONS = (Op.REDUCE, Op.STORE, Op.BELOW, Op.LOAD_AT)
"""Operations that are no function of their operands alone, so never constants."""


def _folded(node: Node) -> Node:
    known = node.sources and all(source.op is Op.CONST for source in node.sources)
    if known and node.op not in _NO_FUNCTIONS:
        return const(interp.fold_constant(node), node.dtype)
    return node


# ---- Scalars of the whole gradient ---------------------------------------------------
#
# Stages make them before the blocks are visited:
#
#     sample(G, share)   some elements, drawn at random
#     sort(S, order)     these, or all elements, in order
#     pick(S, fraction)  the element at that part of them
#     whole(b, f)        a block's value, combined over all blocks
#
# A trace records its stages in order. Each gives a scalar, one value for the call.
# Later stages and the program itself may use it.

RESULT_NAME = r"stage\d+\w*"
"""The pattern of the names of stages' buffers, which are numbered."""


@dataclass(frozen=True)
class Draw:
    """A sample of ``share`` of all elements, at least ``least``, by its own stream.

    With replacement; but a sample that would be as large as the gradient is the
    gradient itself, each element once. ``stream`` is None where all elements were asked
    for, and nothing is drawn.
    """

    share: float
    least: int
    stream: int | None

    def count(self, numel: int) -> int:
        """How many of ``numel`` elements are in it."""
        return min(max(math.ceil(self.share * numel), self.least), numel)


@dataclass(frozen=True)
class Pick:
    """The element at ``fraction`` of a sorted sample."""

    draw: Draw
    descending: bool
    fraction: float

    def place(self, numel: int) -> int:
        """The place of the one picked in the sorted sample of ``numel`` elements."""
        count = self.draw.count(numel)
        return min(int(self.fraction * count), count - 1)


@dataclass(frozen=True)
class Stage:
    """One scalar of the whole gradient, known before the main kernel runs.

    ``value`` is an expression of an element to sample (``how``: Pick), or of a block to
    combine with the others' (``how``: Fold).
    """

    result: Buffer
    value: Node
    how: Pick | Fold


class Recording:
    """A trace's notes beside its expressions: stages and the random streams' number."""

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
    """Inside the block, an encode's, programs may draw numbers and have stages."""
    made = Recording()
    token = _recording.set(made)
    try:
        yield made
    finally:
        _recording.reset(token)


def recorded(operator: str) -> Recording:
    """The recording under way; refuses ``operator`` in a decode, which has none."""
    recording = _recording.get()
    if recording is None:
        refuse(f"{operator} in decode", "do it in encode and send what decode needs")
    return recording


@dataclass(eq=False, repr=False)
class Sample(Symbol):
    """Some elements, drawn at random with replacement, or all; in order once sorted."""

    node: Node
    draw: Draw
    descending: bool | None = None


def sample(vector: Vector, share: float, least: int = 1) -> Sample:
    """``share`` of all the gradient's elements, rounded up, at least ``least``.

    Drawn with replacement, other ones in each call, unless they would be as many as
    there are: then each is in it once. Element by element, a map of the gradient is
    computed of those drawn only.
    """
    recording = recorded("sample()")
    value = _drawn_from("sample", vector)
    if not isinstance(share, float | int) or not 0 < share <= 1:
        refuse(
            f"sample of a share of {share!r}",
            "give a number in (0, 1]: 0.001 for 0.1 %",
        )
    _check_anywhere(value)
    return Sample(value, Draw(share, int(least), recording.stream()))


def sort(elements: Sample | Vector, udf: Callable[[Any, Any], Number]) -> Sample:
    """A sample, or the whole gradient, in the order that ``udf`` of two elements says.

    ``smaller`` or ``greater`` comes first; or ``udf`` compares its arguments by ``<``
    or ``>``. For an order by a key, map to the key first. NaN ranks above infinity.
    """
    if isinstance(elements, Vector):
        recorded("sort()")
        elements = Sample(_drawn_from("sort", elements), Draw(1.0, 1, None))
    if not isinstance(elements, Sample):
        refuse(
            "sort of what is no vector",
            "sort(v, smaller) or sort(sample(v, share), smaller)",
        )
    first, second = ir.fold_operands(FLOAT32)
    said = udf(Scalar(first), Scalar(second))
    comparison = said.node if isinstance(said, Scalar) else elements.node
    if {*comparison.sources} != {first, second} or comparison.op not in _ORDERS:
        refuse(
            "sort by a function that is no order",
            "sort by smaller or greater, and map to what is sorted by: sort(map(v, "
            "abs), ...)",
        )
    is_less = comparison.op is Op.LESS and comparison.sources[0] is first
    return Sample(
        elements.node, elements.draw, comparison.op is not Op.SMALLER and not is_less
    )


_ORDERS = (Op.SMALLER, Op.GREATER, Op.LESS)


def _drawn_from(operator: str, vector: Vector) -> Node:
    """The element of a vector that a sample may hold."""
    if not isinstance(vector, Vector) or vector.keep is not None:
        refuse(
            f"{operator} of something other than a vector of all elements",
            _BEFORE[operator],
        )
    value = working(Scalar(vector.node))
    if value.dtype is not FLOAT32:
        refuse(
            f"{operator} of {value.dtype!r}",
            f"{operator} float32 values: map(v, float32)",
        )
    return value


_BEFORE = {
    "sample": "sample, then filter",
    "sort": "sort, pick, then filter by what was picked",
}


def _check_anywhere(value: Node) -> None:
    """Refuses a sample of an element that is not the same wherever it is computed."""
    if any(
        n.extent is Extent.BLOCK or n.op in (Op.PLACE, Op.RANDOM)
        for n in ir.walk([value])
    ):
        refuse(
            "sample of what depends on an element's block or place",
            "take the gradient, or a map of it by captured values and "
            "whole-gradient scalars",
        )


def pick(drawn: Sample, fraction: float) -> Scalar:
    """The element at floor(fraction * count) of what was sorted; the last for 1."""
    if not isinstance(drawn, Sample) or drawn.descending is None:
        refuse(
            "pick from what is not in order",
            "pick(sort(sample(v, share), smaller), fraction)",
        )
    if not isinstance(fraction, float | int) or not 0 <= fraction <= 1:
        refuse(f"pick at {fraction!r}", "give a number in [0, 1]: 0.5 for the median")
    how = Pick(drawn.draw, drawn.descending, fraction)
    return recorded("pick()").stage(drawn.node, how)


def whole(
    value: Scalar, udf: Callable[[Any, Any], Number], start: float | int | None = None
) -> Scalar:
    """A block's value over all blocks: ``whole(reduce(v, f), f)`` reduces everything.

    ``udf`` and ``start`` are as in ``reduce``; sums of floats are rounded once a
    block and then once more.
    """
    recording = recorded("whole()")
    if not isinstance(value, Scalar):
        refuse(
            "whole of something that is not a block's value", "whole(reduce(v, f), f)"
        )
    if value.node.extent is not Extent.BLOCK:
        known = value.node.extent is Extent.CALL
        what = "known of the whole gradient already" if known else "one element's"
        refuse(f"whole of a value that is {what}", "whole(reduce(v, f), f)")
    partial = working(value)
    return recording.stage(partial, fold_by(udf, partial, start))


# ---- from traces to kernels ----------------------------------------------------------


GRADIENT = Buffer("gradient", FLOAT32, Extent.ELEMENT)
LATEST = Buffer("latest", FLOAT32, Extent.ELEMENT)
"""The gradient where ``GRADIENT`` is the gradient plus the residual."""
RESIDUAL = Buffer("residual", FLOAT32, Extent.ELEMENT)
OUT = Buffer("out", FLOAT32, Extent.ELEMENT)
SUM = Buffer("sum", FLOAT32, Extent.ELEMENT)
SCALE = Buffer("scale", FLOAT32, Extent.CALL)
RANKED = Buffer("ranked", FLOAT32, Extent.KEPT)
"""The kept elements of the gradient themselves, by which ``top`` ranks them."""
POPULATION = Buffer("population", INT32, Extent.CALL)
"""The number of elements that a sample is drawn from."""
NUM_DRAWN = Buffer("num_drawn", INT32, Extent.CALL)
"""The number of elements that are drawn."""
SAMPLE = Buffer("sample", FLOAT32, Extent.ELEMENT)
OWN_BUFFERS = (GRADIENT, LATEST, RESIDUAL, OUT, SUM, SCALE, RANKED)
"""Buffers of kernels that read or write fields too: no field may have such a name."""

FOLD_BLOCK = 16384
"""How many blocks' values are combined at a time."""


@dataclass(frozen=True, eq=False)
class Traced:
    """A program as expressions: fields' values, and the decoded element by fields.

    ``keep`` is the condition of kept elements, whose fields are then all that is
    decoded, and ``top`` the share of the gradient to which they are cut.
    """

    name: str
    block: int
    fields: tuple[tuple[Buffer, Node], ...]
    decoded: Node
    stages: tuple[Stage, ...] = ()
    keep: Node | None = None
    top: float | None = None

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        return tuple(buffer for buffer, _ in self.fields)

    @cached_property
    def reads_latest(self) -> bool:
        """Whether the gradient alone is needed beside its sum with the residual."""
        return load_buffer(LATEST) in walk(
            (*self.stores(), *(stage.value for stage in self.stages))
        )

    @cached_property
    def coding(self) -> Any:
        """The coding of the field that has a coder (``symbols.Coded``).

        None where none has.
        """
        coded = (
            buffer.coder.coding(buffer, self.block)
            for buffer in self.buffers
            if buffer.coder
        )
        return next(coded, None)

    @cached_property
    def shares_scale(self) -> bool:
        """Whether elements are decoded with numbers that other elements share."""
        return any(buffer.extent < Extent.ELEMENT for buffer in self.buffers)

    @cached_property
    def kept(self) -> tuple[Buffer, ...]:
        """The fields of kept elements."""
        return tuple(buffer for buffer in self.buffers if buffer.extent is Extent.KEPT)

    @cached_property
    def indices(self) -> Buffer:
        """The field of their places."""
        return next(buffer for buffer, value in self.fields if value.op is Op.PLACE)

    @cached_property
    def ranked(self) -> Buffer:
        """The buffer of the gradient's own kept elements: a sent field, if any."""
        plain = (
            b
            for b, value in self.fields
            if b in self.kept and value is load_buffer(GRADIENT)
        )
        return next(plain, RANKED)

    @cached_property
    def extra(self) -> tuple[Buffer, ...]:
        """The buffers that are kept beside the fields, because ``top`` needs them."""
        return () if self.top is None or self.ranked in self.kept else (RANKED,)

    def stores(self) -> tuple[Node, ...]:
        """The stores that fill the fields.

        Codes of kept elements lie there a byte each.
        """
        extra = ((buffer, load_buffer(GRADIENT)) for buffer in self.extra)
        return tuple(
            store(
                buffer,
                _canonical(value),
                self.keep if buffer.extent is Extent.KEPT else None,
            )
            for buffer, value in (*self.fields, *extra)
        )


_PLAIN = {load_buffer(LATEST): load_buffer(GRADIENT)}
_WITH_RESIDUAL = {
    load_buffer(GRADIENT): node(Op.ADD, load_buffer(GRADIENT), load_buffer(RESIDUAL)),
    load_buffer(LATEST): load_buffer(GRADIENT),
}


def _canonical(value: Node) -> Node:
    """Floats travel with one zero and one NaN: every back end makes the same bytes."""
    return node(Op.CANONICAL, value) if value.dtype is FLOAT32 else value


def encode(program: Traced) -> Kernel:
    """Fills the fields from the gradient."""
    return _kernel(program, "encode", substitute(program.stores(), _PLAIN))


def encode_with_residual(program: Traced) -> Kernel:
    """Fills the fields from gradient plus residual.

    The residual becomes what they lack.

    Where that is not finite the residual keeps its value: an inf or NaN is sent, and
    never kept. What ``top`` leaves of kept elements is not known yet: they stay in the
    residual for now.
    """
    before = load_buffer(RESIDUAL)
    whole = _WITH_RESIDUAL[load_buffer(GRADIENT)]
    fields = substitute(program.stores(), _WITH_RESIDUAL)
    sent = {load_buffer(target.arg): target.sources[0] for target in fields}
    (decoded,) = substitute((program.decoded,), sent)
    nothing = const(0.0, FLOAT32)
    if program.top is not None:
        decoded = nothing
    elif program.keep is not None:
        (keep,) = substitute((program.keep,), _WITH_RESIDUAL)
        decoded = node(Op.WHERE, keep, decoded, nothing)
    left = node(Op.SUB, whole, decoded)
    kept = node(Op.WHERE, node(Op.FINITE, left), left, before)
    return _kernel(program, "encode_with_residual", (*fields, store(RESIDUAL, kept)))


def decode(program: Traced) -> Kernel:
    """Writes scale times the decoded gradient; of kept elements the plain values."""
    if program.keep is not None:
        return _kernel(program, "decode", (store(OUT, _decoded_entry(program)),))
    scaled = node(Op.MUL, program.decoded, load_buffer(SCALE))
    return _kernel(program, "decode", (store(OUT, scaled),))


def merge(program: Traced) -> Kernel:
    """Adds scale times the decoded gradient: CaSync's merge, without a decoded copy."""
    if program.keep is not None:
        return decode(program)
    scaled = node(Op.MUL, program.decoded, load_buffer(SCALE))
    total = node(Op.ADD, load_buffer(SUM), scaled)
    return _kernel(program, "merge", (store(SUM, total),))


def _decoded_entry(program: Traced) -> Node:
    """The decoded value in a kernel whose elements are the kept ones."""
    entries = {load_buffer(b): load_buffer(_entry(b)) for b in program.kept}
    return substitute((program.decoded,), entries)[0]


def _entry(field: Buffer) -> Buffer:
    """A field of kept elements as a kernel sees it whose elements they are."""
    return Buffer(field.name, field.dtype, Extent.ELEMENT)


# ---- stages --------------------------------------------------------------------------


@dataclass(frozen=True)
class StageKernels:
    """The kernels of stages that run at once: of a sample from which all of them pick,
    or of blocks' values and of what combines them.
    """

    stages: tuple[Stage, ...]
    plain: Kernel
    with_residual: Kernel
    fold: Kernel | None


def stage_kernels(program: Traced) -> tuple[StageKernels, ...]:
    """The kernels of the stages, in order."""
    groups: list[list[Stage]] = []
    for stage in program.stages:
        if groups and _joins(groups[-1], stage):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return tuple(
        _stage(program, f"stage{i}", tuple(group)) for i, group in enumerate(groups)
    )


def _joins(group: list[Stage], stage: Stage) -> bool:
    """Whether a stage may run with earlier ones: it must need none of their results."""
    first = group[0]
    if isinstance(first.how, Pick) and isinstance(stage.how, Pick):
        return first.how.draw == stage.how.draw and first.value is stage.value
    if isinstance(first.how, Pick) or isinstance(stage.how, Pick):
        return False
    results = {load_buffer(earlier.result) for earlier in group}
    return results.isdisjoint(walk([stage.value]))


def _stage(program: Traced, name: str, stages: tuple[Stage, ...]) -> StageKernels:
    how = stages[0].how
    plain = _PLAIN
    with_residual = _WITH_RESIDUAL
    if isinstance(how, Pick):
        if how.draw.stream is not None:
            plain, with_residual = _gathered(how.draw.stream)
        stores: tuple[Node, ...] = (store(SAMPLE, _canonical(stages[0].value)),)
    else:
        stores = tuple(
            store(
                Buffer(partials(stage), stage.result.dtype, Extent.BLOCK),
                _canonical(stage.value),
            )
            for stage in stages
        )
    return StageKernels(
        stages,
        _kernel(program, name, substitute(stores, plain)),
        _kernel(program, f"{name}_with_residual", substitute(stores, with_residual)),
        None if isinstance(how, Pick) else _fold(program, name, stages),
    )


def _fold(program: Traced, name: str, stages: tuple[Stage, ...]) -> Kernel:
    """Combines blocks' values, ``FOLD_BLOCK`` at a time."""
    always = const(True, BOOL)
    stores = []
    for stage in stages:
        dtype = stage.result.dtype
        values = load_buffer(Buffer(partials(stage), dtype, Extent.ELEMENT))
        combined = node(Op.REDUCE, values, always, dtype=dtype, arg=stage.how)
        stores.append(store(Buffer(stage.result.name, dtype, Extent.BLOCK), combined))
    return _kernel(program, f"{name}_fold", stores, FOLD_BLOCK)


def partials(stage: Stage) -> str:
    """The name of the buffer of a stage's value of each block."""
    return f"{stage.result.name}_of_blocks"


def _gathered(stream: int) -> tuple[dict[Node, Node], dict[Node, Node]]:
    """The gradient, without and with the residual, at a place drawn for each element.

    Where as many are drawn as there are, each element is at its own place (what lies
    behind the last one, in its group, is read from there too).
    """
    population = load_buffer(POPULATION)
    drawn = node(Op.BELOW, population, arg=stream)
    is_part = node(Op.LESS, load_buffer(NUM_DRAWN), population)
    own_place = node(
        Op.SMALLER, node(Op.PLACE), node(Op.SUB, population, const(1, INT32))
    )
    place = node(Op.WHERE, is_part, drawn, own_place)
    gradient, residual = (
        node(Op.LOAD_AT, place, dtype=FLOAT32, arg=Buffer(b.name, FLOAT32, Extent.CALL))
        for b in (GRADIENT, RESIDUAL)
    )
    both = node(Op.ADD, gradient, residual)
    return (
        {load_buffer(GRADIENT): gradient, load_buffer(LATEST): gradient},
        {load_buffer(GRADIENT): both, load_buffer(LATEST): gradient},
    )


# ---- kernels -------------------------------------------------------------------------


def _kernel(
    program: Traced, form: str, stores: Sequence[Node], block: int | None = None
) -> Kernel:
    """The kernel with these effects, and the buffers that it reads and writes."""
    simple = tuple(simplified(tuple(stores)))
    loads = (node for node in walk(simple) if node.op in (Op.LOAD, Op.LOAD_AT))
    buffers = dict.fromkeys(access.arg for access in (*loads, *simple))
    return Kernel(
        f"{program.name}_{form}", block or program.block, tuple(buffers), simple
    )
