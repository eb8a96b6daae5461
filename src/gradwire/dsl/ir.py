"""The IR: expressions of one element and of one block, and their types.

A gradient is cut into blocks of a fixed length; a kernel says what is computed for one
block. A node is one value: one a call (a constant), one a block (a sum, a header field)
or one an element. There is no node for a map or a filter: a mapped vector is the
expression of its element, and a filtered one has a condition beside it, which
reductions and stores of kept elements take as their second operand. So a map is fused
into whatever uses it before anything is rewritten.

Equal nodes are one object (``node`` interns them): shared work is shared, and nodes
compare and hash by identity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ..errors import InvalidSetting


class DType(Enum):
    """The type of a value; the number is its bits on the wire.

    Unsigned ones compute as int32.
    """

    BOOL = ("bool", 1)
    UINT1 = ("uint1", 1)
    UINT2 = ("uint2", 2)
    UINT4 = ("uint4", 4)
    UINT8 = ("uint8", 8)
    UINT_3 = ("uint_3", 13 / 8)  # 0, 1 or 2: five to a byte, 64 to 13 bytes
    INT32 = ("int32", 32)
    FLOAT32 = ("float32", 32)

    def __init__(self, label: str, bits: float) -> None:
        self.label = label
        self.bits = bits

    def __repr__(self) -> str:
        return self.label

    @property
    def top(self) -> int:
        """The largest value of an unsigned type."""
        return int(2**self.bits) - 1

    @property
    def group_bytes(self) -> int:
        """Bytes of 64 packed codes."""
        return int(64 * self.bits / 8)

    def packed_bytes(self, numel: int) -> int:
        """Bytes of ``numel`` packed codes.

        >>> DType.UINT2.packed_bytes(9), DType.UINT_3.packed_bytes(64 + 9)
        (3, 22)
        """
        groups, rest = divmod(numel, 64)
        # byte b of a group holds its codes b, b + 13, b + 26, ...
        if self is DType.UINT_3:
            return 13 * groups + min(rest, 13)
        return self.group_bytes * groups - int(-rest * self.bits // 8)


BOOL = DType.BOOL
INT32 = DType.INT32
FLOAT32 = DType.FLOAT32
UNSIGNED = frozenset({DType.UINT1, DType.UINT2, DType.UINT4, DType.UINT8, DType.UINT_3})


class Extent(IntEnum):
    """How many values a node has.

    An operation has the largest extent of its operands.
    """

    CALL = 0
    BLOCK = 1
    ELEMENT = 2
    KEPT = 3
    """One for each element with a true condition: as many as there are, by place."""

    def __str__(self) -> str:
        return ("a call", "a block", "an element", "a kept element")[self]


@dataclass(frozen=True)
class Buffer:
    """Memory that a kernel reads or writes: a gradient, a residual, a payload's field.

    Unsigned values of elements are packed. One value of a call, a block or a kept
    element takes a byte. A buffer of kept elements has room for every
    element of the gradient.
    """

    name: str
    dtype: DType
    extent: Extent
    coder: Any = None
    """Through which the packed bytes travel (``symbols.Coded``).

    Kernels know nothing of it.
    """


@dataclass(frozen=True)
class Fold:
    """A reduction's combination of two values: ``body`` of two ARGs, from ``start``."""

    body: Node
    start: float


def neutral(body: Node) -> float | None:
    """The value that changes nothing in a sum, a smallest or a greatest.

    None for other folds.
    """
    if {(source.op, source.arg) for source in body.sources} != {
        (Op.ARG, 0),
        (Op.ARG, 1),
    }:
        return None
    low: float = -math.inf
    high: float = math.inf
    if body.dtype is not FLOAT32:
        low = -(2**31)
        high = 2**31 - 1
    return {Op.ADD: 0, Op.SMALLER: high, Op.GREATER: low}.get(body.op)


class Op(Enum):
    """Every kind of node; ``RULES`` says what each may be applied to."""

    CONST = "const"  # arg: the value
    LOAD = "load"  # arg: Buffer
    LOAD_AT = "load_at"  # (place); arg: Buffer of a call, read at that place of it
    SIZE = "size"  # elements in this block
    PLACE = "place"  # the element's own, in the whole gradient
    RANDOM = "random"  # uniform in [0, 1); arg: number of the stream
    # (bound): uniform in 0, 1, ..., bound - 1; arg: number of the stream
    BELOW = "below"
    ARG = "arg"  # an operand of a Fold; arg: 0 or 1
    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"
    SMALLER = "smaller"
    GREATER = "greater"
    NEG = "neg"
    ABS = "abs"
    FLOOR = "floor"
    ROUND = "round"  # to even
    SQRT = "sqrt"
    FINITE = "finite"
    CANONICAL = "canonical"  # one zero, one NaN
    LESS = "less"
    AT_MOST = "at_most"
    EQUAL = "equal"
    AND = "and"
    OR = "or"
    NOT = "not"
    SHL = "shl"
    SHR = "shr"
    WHERE = "where"
    CAST = "cast"  # saturates; NaN becomes 0
    REDUCE = "reduce"  # (value, condition); arg: Fold
    OPERATOR = "operator"  # a registered one; arg: Operator
    STORE = "store"  # (value), (value, condition) of kept elements; arg: Buffer


@dataclass(frozen=True)
class Rule:
    """The types that an operation takes and gives.

    Without ``result``, the last operand's.
    """

    operands: tuple[frozenset[DType], ...] = ()
    result: DType | None = None
    stated: bool = False
    """The node states its own type."""


_FLOAT = frozenset({FLOAT32})
_INT = frozenset({INT32})
_NUMBER = _FLOAT | _INT
_BOOL = frozenset({BOOL})
_WORKING = _NUMBER | _BOOL
_ANY = frozenset(DType)

RULES: dict[Op, Rule] = {
    Op.CONST: Rule(stated=True),
    Op.LOAD: Rule(stated=True),
    Op.LOAD_AT: Rule((_INT,), stated=True),
    **dict.fromkeys((Op.SIZE, Op.PLACE), Rule(result=INT32)),
    Op.RANDOM: Rule(result=FLOAT32),
    Op.BELOW: Rule((_INT,), INT32),
    Op.ARG: Rule(stated=True),
    **dict.fromkeys(
        (Op.ADD, Op.SUB, Op.MUL, Op.SMALLER, Op.GREATER), Rule((_NUMBER, _NUMBER))
    ),
    Op.DIV: Rule((_FLOAT, _FLOAT)),
    **dict.fromkeys((Op.NEG, Op.ABS), Rule((_NUMBER,))),
    **dict.fromkeys((Op.FLOOR, Op.ROUND, Op.SQRT, Op.CANONICAL), Rule((_FLOAT,))),
    Op.FINITE: Rule((_FLOAT,), BOOL),
    **dict.fromkeys((Op.LESS, Op.AT_MOST, Op.EQUAL), Rule((_NUMBER, _NUMBER), BOOL)),
    **dict.fromkeys((Op.AND, Op.OR), Rule((_BOOL | _INT, _BOOL | _INT))),
    Op.NOT: Rule((_BOOL,)),
    **dict.fromkeys((Op.SHL, Op.SHR), Rule((_INT, _INT))),
    Op.WHERE: Rule((_BOOL, _WORKING, _WORKING)),
    Op.CAST: Rule((_ANY,), stated=True),
    Op.REDUCE: Rule((_NUMBER, _BOOL), stated=True),
    Op.STORE: Rule((_ANY,), stated=True),
}

_KEEPING = Rule((_ANY, _BOOL), stated=True)  # a store of kept elements

_LEAF_EXTENTS = {
    Op.CONST: Extent.CALL,
    Op.SIZE: Extent.BLOCK,
    Op.PLACE: Extent.ELEMENT,
    Op.RANDOM: Extent.ELEMENT,
    Op.BELOW: Extent.ELEMENT,
    Op.ARG: Extent.ELEMENT,
}


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Node:
    """One value; made by ``node``, never directly."""

    op: Op
    dtype: DType
    extent: Extent
    sources: tuple[Node, ...]
    arg: Any

    def __repr__(self) -> str:
        inside = ", ".join(repr(source.dtype) for source in self.sources)
        arg = "" if self.arg is None else f" {getattr(self.arg, 'name', self.arg)!r}"
        return f"{self.op.value}({inside}){arg}: {self.dtype!r} {self.extent}"


class IllTyped(InvalidSetting):
    """Operands that the table of legal nodes does not allow."""


_interned: WeakValueDictionary[tuple[Any, ...], Node] = WeakValueDictionary()
# threads may trace at once: two equal nodes would not be one object
_interning = Lock()


def node(op: Op, *sources: Node, dtype: DType | None = None, arg: Any = None) -> Node:
    """The node of this operation, checked against ``RULES``; raises IllTyped.

    ``dtype`` is for operations that state their own type. Type and extent follow
    otherwise.
    """
    refusal = refusal_of(op, sources, dtype, arg)
    if refusal:
        raise IllTyped(refusal)
    found_dtype = dtype or rule(op, arg).result or sources[-1].dtype
    extent = _extent(op, sources, arg)
    # repr tells -0.0 from 0.0 and one NaN equals another.
    key = (op, found_dtype, extent, sources, repr(arg) if op is Op.CONST else arg)
    with _interning:
        known = _interned.get(key)
        if known is None:
            known = _interned[key] = Node(op, found_dtype, extent, sources, arg)
    return known


def fold_operands(dtype: DType) -> tuple[Node, Node]:
    """The two values of this type that a fold combines."""
    return (
        node(Op.ARG, dtype=dtype, arg=0),
        node(Op.ARG, dtype=dtype, arg=1),
    )


def const(value: bool | int | float, dtype: DType) -> Node:
    """A constant.

    A float is rounded to float32 here, so that every back end sees one number.
    """
    if dtype is FLOAT32:
        with np.errstate(over="ignore"):
            value = float(np.float32(value))
    return node(Op.CONST, dtype=dtype, arg=value)


def load_buffer(buffer: Buffer) -> Node:
    """The value that a buffer holds for this element, or for its block or call."""
    return node(Op.LOAD, dtype=buffer.dtype, arg=buffer)


def store(buffer: Buffer, value: Node, keep: Node | None = None) -> Node:
    """Writes ``value`` for each element (or block) of ``buffer``.

    ``keep`` is the condition of kept elements: their values lie one behind the other.
    """
    sources = (value,) if keep is None else (value, keep)
    return node(Op.STORE, *sources, dtype=buffer.dtype, arg=buffer)


def _extent(op: Op, sources: tuple[Node, ...], arg: Any) -> Extent:
    if op is Op.REDUCE:
        return Extent.BLOCK
    if op in (Op.LOAD, Op.STORE):
        extent: Extent = arg.extent
        return extent
    return _LEAF_EXTENTS.get(op) or max(
        (s.extent for s in sources), default=Extent.CALL
    )


def rule(op: Op, arg: Any = None) -> Rule:
    """The types that an operation takes and gives.

    A registered operator brings its own rule.
    """
    if op is Op.OPERATOR:
        operator_rule: Rule = arg.rule
        return operator_rule
    return RULES[op]


def refusal_of(
    op: Op, sources: tuple[Node, ...], dtype: DType | None, arg: Any
) -> str | None:
    """Why ``RULES`` do not allow this node; None if they do."""
    legal = rule(op, arg)
    if op is Op.STORE and len(sources) == 2:
        legal = _KEEPING
    given = ", ".join(repr(source.dtype) for source in sources)
    accepted = ", ".join("|".join(sorted(map(repr, kinds))) for kinds in legal.operands)
    if len(sources) != len(legal.operands) or any(
        source.dtype not in kinds
        for source, kinds in zip(sources, legal.operands, strict=True)
    ):
        name = arg.name if op is Op.OPERATOR else op.value
        return f"{name} takes ({accepted}), got ({given})"
    if legal.result is None and not legal.stated and len(sources) > 1:
        first = sources[-2]
        last = sources[-1]
        if first.dtype is not last.dtype:
            return f"{op.value} takes two operands of one type, got ({given})"
    if legal.stated and dtype is None:
        return f"{op.value} has to state its type"
    if op is Op.STORE and sources[0].dtype is not dtype:
        return f"store takes what its buffer holds ({dtype!r}), got ({given})"
    return None


@dataclass(frozen=True)
class Kernel:
    """A computation for each block of ``block`` elements.

    ``stores`` are its only effects.
    """

    name: str
    block: int
    buffers: tuple[Buffer, ...]
    stores: tuple[Node, ...]

    def __hash__(self) -> int:
        """The hash of the name alone: tables of kernels are consulted in every call."""
        return hash(self.name)

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn."""
        return any(node.op in (Op.RANDOM, Op.BELOW) for node in walk(self.stores))

    @property
    def keep(self) -> Node | None:
        """The condition of the kept elements, one for all of a kernel.

        None if it keeps none.
        """
        kept = (target for target in self.stores if target.extent is Extent.KEPT)
        return next((target.sources[1] for target in kept), None)


def walk(roots: Iterable[Node], least: Extent = Extent.CALL) -> Iterator[Node]:
    """Every node below ``roots`` once, operands before what uses them.

    Nodes of a smaller extent than ``least`` are left out, with what only they use.
    """
    done = set()
    stack = [(root, False) for root in reversed(tuple(roots)) if root.extent >= least]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if ready:
            done.add(node)
            yield node
        else:
            stack.append((node, True))
            sources = (
                source for source in reversed(node.sources) if source.extent >= least
            )
            stack.extend((source, False) for source in sources)
