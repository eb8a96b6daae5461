"""Symbolic scalars and vectors: what a program does to them becomes nodes of IR.

What Python can do to a value is recorded; what it cannot (decide on it, loop over it,
hand it to another library) is refused with the line of the program and the remedy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from ..errors import GradwireError, InvalidSetting, shown
from . import ir
from .ir import BOOL, FLOAT32, INT32, UNSIGNED, DType, Node, Op

Number: TypeAlias = "Scalar | bool | int | float"

LANGUAGE = [str(Path(__file__).parent)]
"""Folders of the language's own code, which no refusal names.

A package with operators adds its.
"""


class Refusal(InvalidSetting):
    """An error in a program, and its place there.

    ``reason`` is the text without the place.
    """

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.reason = reason


def refuse(what: str, remedy: str) -> NoReturn:
    """Raises Refusal that begins with the file and line of the program being traced."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        tuple(LANGUAGE)
    ):
        frame = frame.f_back
    raise Refusal(f"{frame.f_code.co_filename}:{frame.f_lineno}", f"{what}; {remedy}")


MOST_OPERATIONS = 20_000
"""The most operations of one trace. Functions that each call the next one twice double
the work at each level: eighteen levels are a quarter of a million operations of a few
dozen lines.
"""

_MOST_FOLDED = 500
"""The most operations of a function to reduce by. Each counts as often as it is used,
as back ends write the function as one expression.
"""

_counted: ContextVar[list[int] | None] = ContextVar("counted", default=None)


@contextmanager
def tracing(what: str) -> Iterator[None]:
    """Inside the block a program is traced: its operations are counted, and refused
    beyond a bound.

    Calls that nest deeper than Python's stack are refused too, and what else Python
    raises is refused with the line that raised it.
    """
    token = _counted.set([0])
    try:
        yield
    except GradwireError:
        raise
    except RecursionError:
        remedy = (
            "assign parts of an expression to variables, and let no function call "
            "itself"
        )
        raise Refusal(
            what, f"calls or expressions are nested too deeply; {remedy}"
        ) from None
    except Exception as error:
        reason = f"{type(error).__name__}: {shown(error.args[0] if error.args else '')}"
        remedy = "a program's functions are ordinary Python, run once on symbols"
        raise Refusal(_raised_at(error) or what, f"{reason}; {remedy}") from error
    finally:
        _counted.reset(token)


def _raised_at(error: Exception) -> str:
    """The line of the program that an error comes from.

    Empty where no line of it is known.
    """
    place = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith(tuple(LANGUAGE)):
            place = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def count_operation() -> None:
    """One more operation of the program that is being traced.

    Refuses more than are sensible.
    """
    count = _counted.get()
    if count is None:
        return
    count[0] += 1
    if count[0] > MOST_OPERATIONS:
        refuse(
            f"a program of more than {MOST_OPERATIONS} operations",
            "compute what is used twice once, and assign it to a variable",
        )


def made(op: Op, *sources: Node, dtype: DType | None = None, arg: Any = None) -> Node:
    """``ir.node`` on behalf of a program: refuses with its line."""
    count_operation()
    try:
        return ir.node(op, *sources, dtype=dtype, arg=arg)
    except ir.IllTyped as error:
        refuse(str(error), "convert with float32(x), int32(x) or a comparison")


_DECIDE = "use where(condition, a, b) to choose, and & | ~ for and, or, not"
_CONCRETE = (
    "a value is known only when the compressor runs; use the language's own operators"
)


class Symbol:
    """The base of scalars and vectors: what both of them refuse."""

    def __bool__(self) -> NoReturn:
        refuse("a branch on a value (if, while, and, or, not, min, max)", _DECIDE)

    def __iter__(self) -> NoReturn:
        refuse(
            "a loop over elements",
            "use map, filter or reduce, which visit every element",
        )

    def __getitem__(self, place: object) -> NoReturn:
        refuse("an element by its place", "use filter to select and reduce to combine")

    def __len__(self) -> NoReturn:
        refuse("len() of a vector", "use size(v)")

    def _concrete(self, *_: object) -> NoReturn:
        refuse("a number was asked for (float, int, range, math.*)", _CONCRETE)

    __float__ = __int__ = __index__ = __complex__ = _concrete
    __trunc__ = __floor__ = __ceil__ = _concrete

    def _foreign(self, *_: object, **__: object) -> NoReturn:
        refuse("a function of torch or numpy", _CONCRETE)

    __array__ = _foreign
    __array_priority__ = 1e6
    """So a number of numpy's on an operator's left leaves it to the right symbol."""

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> NoReturn:
        refuse("a function of torch or numpy", _CONCRETE)


def _both(
    op: Op,
) -> tuple[Callable[[Scalar, Number], Scalar], Callable[[Scalar, Number], Scalar]]:
    """The methods of an operation: with the scalar on the left, and on the right."""
    return (
        lambda self, other: self._binary(op, other),
        lambda self, other: self._binary(op, other, swapped=True),
    )


@dataclass(eq=False, repr=False)
class Scalar(Symbol):
    """One symbolic number: an element in a user's function or a block's value."""

    __hash__ = Symbol.__hash__
    node: Node

    def _binary(self, op: Op, other: Number, *, swapped: bool = False) -> Scalar:
        pair = (other, self) if swapped else (self, other)
        return operated(op, *pair)

    __add__, __radd__ = _both(Op.ADD)
    __sub__, __rsub__ = _both(Op.SUB)
    __mul__, __rmul__ = _both(Op.MUL)
    __truediv__, __rtruediv__ = _both(Op.DIV)
    __lshift__, __rlshift__ = _both(Op.SHL)
    __rshift__, __rrshift__ = _both(Op.SHR)
    __and__, __rand__ = _both(Op.AND)
    __or__, __ror__ = _both(Op.OR)
    __lt__, __gt__ = _both(Op.LESS)
    __le__, __ge__ = _both(Op.AT_MOST)

    def __eq__(self, other: object) -> Scalar:  # type: ignore[override]  # symbolic, not a bool
        return self._binary(Op.EQUAL, other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> Scalar:  # type: ignore[override]
        return ~(self == other)

    def _lacking(self, *_: object) -> NoReturn:
        refuse(
            "an operator that the language lacks",
            "write floor(a / b) for //, x * x for x**2",
        )

    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _lacking
    __matmul__ = __rmatmul__ = __xor__ = __rxor__ = __divmod__ = __rdivmod__ = (
        __pos__
    ) = _lacking

    def __neg__(self) -> Scalar:
        return Scalar(made(Op.NEG, working(self)))

    def __abs__(self) -> Scalar:
        return Scalar(made(Op.ABS, working(self)))

    def __invert__(self) -> Scalar:
        return Scalar(made(Op.NOT, self.node))

    def __round__(self) -> Scalar:
        return operated(Op.ROUND, self)


@dataclass(eq=False, repr=False)
class Vector(Symbol):
    """One symbolic number an element: its expression, and when it counts.

    ``top`` is the share of the gradient that it is cut to, if it is.
    """

    __hash__ = Symbol.__hash__
    node: Node
    keep: Node | None = None
    top: float | None = None

    def _arithmetic(self, *_: object) -> NoReturn:
        refuse("arithmetic on a whole vector", "write map(v, lambda x: ...)")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _arithmetic
    __eq__ = __ne__ = _arithmetic
    __truediv__ = __rtruediv__ = __lt__ = __le__ = __gt__ = __ge__ = _arithmetic
    __neg__ = __abs__ = __invert__ = __and__ = __or__ = __lshift__ = __rshift__ = (
        _arithmetic
    )
    __floordiv__ = __mod__ = __pow__ = __rpow__ = __matmul__ = __xor__ = __pos__ = (
        _arithmetic
    )


@dataclass(eq=False, repr=False)
class Coded(Symbol):
    """A vector of all elements whose packed bytes travel by another package's coder.

    ``coder.coding(field, block)`` is what generated.py asks: ``format`` and
    ``received`` are of payloads that travel, ``encode`` and ``decode`` lead from the
    kernels' payload to them and back. ``coder.library()`` compiles what it needs. A
    field NAME has NAME_lengths beside it.
    """

    node: Node
    coder: Any


def lifted(value: Number, like: DType | None = None) -> Node:
    """A number's node: a captured int is a float beside floats, else an int32."""
    if isinstance(value, Scalar):
        return value.node
    if isinstance(value, bool):
        return ir.const(value, BOOL)
    if isinstance(value, Integral) and like is not FLOAT32:
        if not -(2**31) <= int(value) < 2**31:
            refuse(f"{value} does not fit an int32", "write it as a float")
        return ir.const(int(value), INT32)
    if isinstance(value, Real):  # numpy's too
        return ir.const(float(value), FLOAT32)
    kind = "a vector" if isinstance(value, Vector) else repr(value)
    refuse(
        f"{kind} where a number is needed",
        "use map(v, ...) on vectors, reduce(v, ...) first",
    )


def working(value: Number, like: DType | None = None) -> Node:
    """``lifted``, with unsigned types widened to int32, in which they compute."""
    node = lifted(value, like)
    return cast(node, INT32) if node.dtype in UNSIGNED else node


def cast(node: Node, dtype: DType) -> Node:
    """The value as another type; itself if it is of that type."""
    return node if node.dtype is dtype else made(Op.CAST, node, dtype=dtype)


def fold_by(
    udf: Callable[[Any, Any], Number], value: Node, start: float | int | None
) -> ir.Fold:
    """``udf`` traced as what combines two values like this one.

    Refuses what is no fold.
    """
    body = lifted(udf(*map(Scalar, ir.fold_operands(value.dtype))), value.dtype)
    if _written_out(body) > _MOST_FOLDED:
        refuse(
            f"reduce by a function of over {_MOST_FOLDED} operations",
            "map first, then combine",
        )
    if body.dtype is not value.dtype:
        refuse(
            f"reduce of {value.dtype!r} by a function that gives {body.dtype!r}",
            "map first",
        )
    leaves = (found.op for found in ir.walk([body]) if not found.sources)
    if not {*leaves} <= {Op.ARG, Op.CONST}:
        refuse("reduce by a function that uses other values", "map first, then combine")
    neutral = ir.neutral(body)
    first = neutral if start is None else start
    if first is None:
        refuse(
            "reduce by a function of your own",
            "give start=, the value that changes nothing",
        )
    if not isinstance(first, Real if value.dtype is FLOAT32 else Integral):
        refuse(
            f"reduce of {value.dtype!r} from {first!r}",
            "start is a number of that type",
        )
    first = lifted(first, value.dtype).arg  # rounded as every constant is
    if neutral is not None and neutral != first:
        refuse(
            f"reduce by {body.op.value} from {first}",
            "leave start out and add it afterwards",
        )
    return ir.Fold(body, first)


def _written_out(body: Node) -> int:
    """Operations of an expression without names for what is used twice."""
    sizes: dict[Node, int] = {}
    for node in ir.walk([body]):
        sizes[node] = 1 + sum(sizes[source] for source in node.sources)
    return sizes[body]


def operated(op: Op, *values: Number) -> Scalar:
    """An operation on values of one type, which are float32 if it takes no other."""
    is_floating = ir.RULES[op].operands[0] == {FLOAT32}
    return Scalar(made(op, *alike(*values, floating=is_floating)))


def alike(*values: Number, floating: bool = False) -> tuple[Node, ...]:
    """Nodes of one type: float32 if any is (or ``floating``); no numbers with bools."""
    kinds = {value.node.dtype for value in values if isinstance(value, Scalar)}
    plain = [value for value in values if isinstance(value, Real)]
    floating = (
        floating or FLOAT32 in kinds or not all(isinstance(v, Integral) for v in plain)
    )
    nodes = [working(value, FLOAT32 if floating else None) for value in values]
    if floating:
        nodes = [cast(n, FLOAT32) if n.dtype is INT32 else n for n in nodes]
    return tuple(nodes)
