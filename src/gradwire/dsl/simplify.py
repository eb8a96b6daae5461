"""Expressions with parts replaced, or simplified: the same bits result."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from . import interp
from .ir import BOOL, FLOAT32, UNSIGNED, DType, Node, Op, const, node, rule, walk


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
    return found.dtype if rule(found.op, found.arg).stated else None


_NO_FUNCTIONS = (Op.REDUCE, Op.STORE, Op.BELOW, Op.LOAD_AT)
"""Operations that are no function of their operands alone: none is folded into a constant."""


def _simpler(found: Node) -> Node:
    """``found``, or a node of fewer operations with the same value for every input."""
    sources = found.sources
    known = sources and all(source.op is Op.CONST for source in sources)
    if known and found.op not in _NO_FUNCTIONS:
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
