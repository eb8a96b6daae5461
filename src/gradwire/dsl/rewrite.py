"""Rewrites: a program's two traces become the four kernels of a compressor, each one fused pass.

``encode`` and ``decode`` are expressions, so fusing them is substitution: the residual form puts
what ``encode`` sends where ``decode`` reads it (what is packed and unpacked is itself again), and
merge adds what decode writes. Nothing is materialised between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from . import interp
from .ir import (
    BOOL,
    FLOAT32,
    RULES,
    UNSIGNED,
    Buffer,
    DType,
    Extent,
    Kernel,
    Node,
    Op,
    const,
    load,
    node,
    store,
    walk,
)

GRADIENT = Buffer("gradient", FLOAT32, Extent.ELEMENT)
RESIDUAL = Buffer("residual", FLOAT32, Extent.ELEMENT)
OUT = Buffer("out", FLOAT32, Extent.ELEMENT)
SUM = Buffer("sum", FLOAT32, Extent.ELEMENT)
SCALE = Buffer("scale", FLOAT32, Extent.CALL)


@dataclass(frozen=True)
class Traced:
    """A program as expressions: each field's value, and the decoded element in terms of fields."""

    name: str
    block: int
    fields: tuple[tuple[Buffer, Node], ...]
    decoded: Node

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return tuple(buffer for buffer, _ in self.fields)

    def _stores(self) -> tuple[Node, ...]:
        return tuple(store(buffer, _canonical(value)) for buffer, value in self.fields)


def _canonical(value: Node) -> Node:
    """Floats travel with one zero and one NaN: the same bytes whichever back end made them."""
    return node(Op.CANONICAL, value) if value.dtype is FLOAT32 else value


def encode(program: Traced) -> Kernel:
    """Fills the fields from the gradient."""
    return _kernel(program, "encode", (GRADIENT, *program.buffers), program._stores())


def encode_with_residual(program: Traced) -> Kernel:
    """Fills the fields from gradient plus residual; the residual becomes what they lack.

    Where that is not finite the residual keeps its value: an inf or NaN is sent, and never kept.
    """
    before = load(RESIDUAL)
    whole = node(Op.ADD, load(GRADIENT), before)
    fields = tuple(substitute(program._stores(), {load(GRADIENT): whole}))
    sent = {load(target.arg): target.sources[0] for target in fields}
    (decoded,) = substitute((program.decoded,), sent)
    left = node(Op.SUB, whole, decoded)
    kept = node(Op.WHERE, node(Op.FINITE, left), left, before)
    return _kernel(
        program,
        "encode_with_residual",
        (GRADIENT, RESIDUAL, *program.buffers),
        (*fields, store(RESIDUAL, kept)),
    )


def decode(program: Traced) -> Kernel:
    """Writes scale times the decoded gradient."""
    scaled = node(Op.MUL, program.decoded, load(SCALE))
    return _kernel(program, "decode", (OUT, SCALE, *program.buffers), (store(OUT, scaled),))


def merge(program: Traced) -> Kernel:
    """Adds scale times the decoded gradient: CaSync's merge, without a decoded copy."""
    scaled = node(Op.MUL, program.decoded, load(SCALE))
    total = node(Op.ADD, load(SUM), scaled)
    return _kernel(program, "merge", (SUM, SCALE, *program.buffers), (store(SUM, total),))


def _kernel(
    program: Traced, form: str, buffers: tuple[Buffer, ...], stores: tuple[Node, ...]
) -> Kernel:
    return Kernel(f"{program.name}_{form}", program.block, buffers, tuple(simplified(stores)))


def substitute(roots: tuple[Node, ...], instead: Mapping[Node, Node]) -> list[Node]:
    """``roots`` with some nodes replaced."""
    return _rebuilt(roots, lambda found: instead.get(found, found))


def simplified(roots: tuple[Node, ...]) -> list[Node]:
    """``roots`` with constants folded and what changes nothing left out; the same bits result."""
    return _rebuilt(roots, _simpler)


def _rebuilt(roots: tuple[Node, ...], change: Callable[[Node], Node]) -> list[Node]:
    done: dict[Node, Node] = {}
    for found in walk(roots):
        sources = tuple(done[source] for source in found.sources)
        if sources != found.sources:
            done[found] = change(node(found.op, *sources, dtype=_stated(found), arg=found.arg))
        else:
            done[found] = change(found)
    return [done[root] for root in roots]


def _stated(found: Node) -> DType | None:
    return found.dtype if RULES[found.op].stated else None


def _simpler(found: Node) -> Node:
    """``found``, or a node of fewer operations with the same value for every input."""
    sources = found.sources
    known = sources and all(source.op is Op.CONST for source in sources)
    if known and found.op not in (Op.REDUCE, Op.STORE):
        return const(interp.fold_constant(found), found.dtype)
    match found.op:
        case Op.MUL if _is(sources[1], 1.0):
            return sources[0]
        case Op.MUL if _is(sources[0], 1.0):
            return sources[1]
        case Op.ADD if _is(sources[0], 0.0) and sources[1].op is Op.RANDOM:
            return sources[1]  # a draw is never -0.0
        case Op.SUB if _is(sources[1], 0.0):
            return sources[0]
        case Op.CANONICAL if sources[0].op in (Op.REDUCE, Op.CANONICAL):
            return sources[0]
        case Op.NOT if sources[0].op is Op.NOT:
            return sources[0].sources[0]
        case Op.WHERE if sources[0].op is Op.CONST:
            return sources[1] if sources[0].arg else sources[2]
        case Op.WHERE if sources[1] is sources[2]:
            return sources[1]
        case Op.AND if found.dtype is BOOL and sources[0] is sources[1]:
            return sources[0]
        case Op.CAST if _comes_back(found):
            return sources[0].sources[0]
        case _:
            return found


def _comes_back(found: Node) -> bool:
    """Whether this narrows what was widened from its own unsigned type."""
    (wide,) = found.sources
    widened = wide.op is Op.CAST and wide.dtype not in UNSIGNED
    return widened and found.dtype in UNSIGNED and wide.sources[0].dtype is found.dtype


def _is(found: Node, value: float) -> bool:
    return found.op is Op.CONST and found.dtype is FLOAT32 and str(found.arg) == str(value)
