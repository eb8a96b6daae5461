"""Triton's words for the operations, types, numbers and memory of the IR.

Each operation is one line of ``_TEXT``; what needs more than a line is a function of device.py.
"""

from __future__ import annotations

import math

import numpy as np

from ..ir import BOOL, FLOAT32, INT32, UNSIGNED, Buffer, DType, Fold, Node, Op, neutral

_TEXT = {
    Op.SIZE: "n.to(tl.int32)",
    Op.PLACE: "(start + j).to(tl.int32)",
    Op.ADD: "{} + {}",
    Op.SUB: "{} - {}",
    Op.MUL: "{} * {}",
    Op.DIV: "tl.div_rn({}, {})",
    Op.SMALLER: "gw.smaller({}, {})",
    Op.GREATER: "gw.greater({}, {})",
    Op.ABS: "tl.abs({})",
    Op.FLOOR: "gw.floored({})",
    Op.ROUND: "gw.rounded({})",
    Op.SQRT: "tl.sqrt_rn({})",
    Op.FINITE: "gw.finite({})",
    Op.CANONICAL: "gw.canonical({})",
    Op.LESS: "{} < {}",
    Op.AT_MOST: "{} <= {}",
    Op.EQUAL: "{} == {}",
    Op.AND: "{} & {}",
    Op.OR: "{} | {}",
    Op.NOT: "~{}",
    Op.SHL: "{} << ({} & 31)",
    Op.SHR: "{} >> ({} & 31)",
    Op.WHERE: "tl.where({}, {}, {})",
}
_CALLS = {found for found, text in _TEXT.items() if text.startswith(("tl.", "gw."))}


_FOLDS = {Op.ADD: ("sum", "total"), Op.SMALLER: ("least", "least"), Op.GREATER: ("most", "most")}
"""The name of each reduction in any order, and of the function of device.py for its lanes."""


def pointer(buffer: Buffer) -> str:
    """The buffer's name with an underscore: then it is no keyword, and none of our own names."""
    return f"{buffer.name}_"


def any_order(fold: Fold) -> bool:
    """Whether the lanes may be combined in any order: sums, least, most."""
    return neutral(fold.body) is not None


def sums_floats(fold: Fold) -> bool:
    """Whether the lanes are doubles."""
    return any_order(fold) and fold.body.op is Op.ADD and fold.body.dtype is FLOAT32


def fold_name(fold: Fold) -> str:
    """The beginning of a result's name."""
    return _FOLDS[fold.body.op][0] if any_order(fold) else "fold"


def combined(fold: Fold, lanes: str) -> str:
    """All lanes combined in any order."""
    return f"gw.{_FOLDS[fold.body.op][1]}({lanes})"


def folded_text(body: Node, a: str, b: str) -> str:
    """The body of a fold as one expression of two names."""
    if body.op is Op.ARG:
        return (a, b)[body.arg]
    if body.op is Op.CONST:
        return literal(body.arg, body.dtype)
    return applied(body, [folded_text(source, a, b) for source in body.sources])


def applied(found: Node, operands: list[str]) -> str:
    """An operation of operands that are texts."""
    if found.op is Op.CAST:
        return _cast(found, operands[0])
    if found.op is Op.OPERATOR:
        template: str = found.arg.template("triton")
        pairs = zip(found.sources, operands, strict=True)
        return template.format(*(_tensor(source, text) for source, text in pairs))
    if found.op not in _CALLS:
        operands = [grouped(text) for text in operands]
    if found.op is Op.NEG:  # -x is 0 - x in some versions of triton, which loses a zero's sign
        template = "{} * -1.0" if found.dtype is FLOAT32 else "-{}"
    else:
        template = _TEXT[found.op]
    return template.format(*operands)


def grouped(text: str) -> str:
    """``text`` in parentheses, unless it is one name, number or call."""
    depth = 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == " " and not depth:
            return f"({text})"
    return text


def _tensor(found: Node, text: str) -> str:
    """An operand that has a tensor's methods: a number has none, and ~x.to() is ~(x.to())."""
    if found.op is Op.CONST and not text.startswith("tl.full"):
        return f"tl.full((1, 1), {text}, {type_name(found.dtype)})"
    return f"({text})" if text[0] in "~-" else grouped(text)


def _cast(found: Node, text: str) -> str:
    """A conversion: saturating, towards zero, NaN to 0."""
    if found.dtype is FLOAT32:
        return f"{_tensor(found.sources[0], text)}.to(tl.float32)"
    if found.dtype in UNSIGNED:
        return f"gw.to_uint({text}, {found.dtype.top})"
    return f"gw.to_int({text})"


def code(buffer: Buffer, arguments: str, width: str = "") -> str:
    """The end of the name, and the arguments, of what packs or unpacks codes of this type."""
    by_five = buffer.dtype is DType.UINT_3
    given = [arguments, *([] if by_five else [str(buffer.dtype.bits)]), *([width] if width else [])]
    return f"{'_by_five' if by_five else ''}({', '.join(given)})"


def type_name(dtype: DType) -> str:
    """The type in which values of ``dtype`` are computed."""
    return {FLOAT32: "tl.float32", BOOL: "tl.int1"}.get(dtype, "tl.int32")


def type_of(buffer: Buffer) -> str:
    """The type of a buffer's elements in memory; packed codes lie in bytes."""
    return {FLOAT32: "float32", INT32: "int32"}.get(buffer.dtype, "uint8")


def literal(value: float, dtype: DType) -> str:
    """A constant of this type."""
    if dtype is BOOL:
        return "True" if value else "False"
    if dtype is not FLOAT32:
        return str(int(value))
    if not math.isfinite(value):
        return f'float("{value}")'
    # A number below the smallest normal one would be taken for a double.
    text = str(float(np.float32(value)))
    tiny = 0 < abs(value) < float(np.finfo(np.float32).tiny)
    return f"tl.full((1, 1), {text}, tl.float32)" if tiny else text
