"""Triton text of a kernel: a function that does ``ROWS`` blocks a program, and two that launch it.

A value a call has shape (1, 1), one a block (ROWS, 1), one an element (ROWS, TILE). Blocks of up to
``WHOLE`` elements are one tile, which stays in registers: each operand is read once, whatever the
number of passes. Longer ones are visited by a loop over tiles a pass, or piece by piece where no
value of a block is made of its elements. Parameters are the kernel's buffers in order, the
gradient's length, key and step of what is drawn, and where a row's kept elements go. NAME takes
those of one tensor; NAME_many those of several, in the words of a table (``device.tensor_of``).
Rendering does not need triton.

Order of a reduction: lane j takes the elements j, j + TILE, ... of its block in turn, and lanes are
combined in the order that Triton likes. Least and most are the same in every order. Floats are
added in double precision, so a sum is off from interp.py's by at most 2 L 2^-53 of the sum of the
terms' magnitudes (L elements a block) before both are rounded to float32. Any other fold has
interp.py's own 64 lanes and order, hence its bits, and is as much slower."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from itertools import count

import numpy as np

from ..interp import LANES
from ..ir import (
    BOOL,
    FLOAT32,
    INT32,
    UNSIGNED,
    Buffer,
    DType,
    Extent,
    Fold,
    Kernel,
    Node,
    Op,
    const,
    neutral,
    node,
    store,
    walk,
)
from ..operators import support
from ..schedule import Pass, passes

# ---- Triton's words for the operations, types, numbers and memory of the IR --------------------
#
# Each operation is one line of ``_TEXT``; what needs more than a line is a function of device.py.

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


# ---- the text of a kernel ----------------------------------------------------------------------


WHOLE = 16384
"""The longest block that is one tile: 32 registers for each of 512 threads."""

_PIECE = 2048  # of blocks whose elements need not meet

_LONGEST_INLINE = 48  # a longer expression gets a name

_HEAD = """\
import triton
import triton.language as tl

from gradwire.dsl.gpu import device as gw"""

COUNT = Buffer("count", INT32, Extent.BLOCK)
"""How many elements of each row are kept."""

FIRST = "first"
"""The operand (int32) that says where each row's kept elements go, up to a number for all rows."""

_ADDED = Fold(node(Op.ADD, *(node(Op.ARG, dtype=INT32, arg=i) for i in (0, 1))), 0)


def render_triton(*kernels: Kernel) -> str:
    """A Python file with these kernels, and before one that keeps elements what counts them."""
    counts = {kernel: counting(kernel) for kernel in kernels}
    all_of_them = [each for kernel in kernels for each in (counts[kernel], kernel) if each]
    parts = [_HEAD, *support(kernels, "triton"), *(_function(kernel) for kernel in all_of_them)]
    return "\n\n\n".join(parts) + "\n"


@lru_cache(maxsize=1024)
def counting(kernel: Kernel) -> Kernel | None:
    """The kernel that counts each row's kept elements; None if none are kept."""
    if kernel.keep is None:
        return None
    number = node(Op.REDUCE, const(1, INT32), kernel.keep, dtype=INT32, arg=_ADDED)
    stores = (store(COUNT, number),)
    read = {n.arg for n in walk(stores) if n.op in (Op.LOAD, Op.LOAD_AT)}
    buffers = (*(buffer for buffer in kernel.buffers if buffer in read), COUNT)
    return Kernel(f"{kernel.name}_count", row(kernel), buffers, stores)


@lru_cache(maxsize=1024)
def row(kernel: Kernel) -> int:
    """How many elements one row of a program's tiles takes: a block, or a piece of one."""
    tied = {Op.REDUCE, Op.SIZE}
    together = any(n.op in tied for n in walk(kernel.stores))
    if together or min(target.extent for target in kernel.stores) < Extent.ELEMENT:
        return kernel.block
    return math.gcd(kernel.block, _PIECE)


def parameters(kernel: Kernel) -> tuple[str, ...]:
    """The parameters of one tensor: its buffers, and what ``words`` of a table hold behind them."""
    draws = ("key_low", "key_high", "step") if kernel.draws else ()
    keeps = (FIRST,) if kernel.keep else ()
    return (*map(pointer, kernel.buffers), "num_elements", *draws, *keeps)


def _function(kernel: Kernel) -> str:
    """One kernel: its parameters, what a program's rows are, its passes; and what launches it."""
    once = any(buffer.extent is Extent.CALL for buffer in kernel.buffers)
    body = _Body(kernel)
    first = "tl.load(first + row, mask=n > 0, other=0) - tl.load(first)"
    lines = [line for one in passes(kernel) for line in body.one_pass(one)]
    rows = [
        "@triton.jit",
        f"def {kernel.name}_rows(",
        f"    program, {', '.join(parameters(kernel))},",
        "    ROWS: tl.constexpr, TILE: tl.constexpr,",
        "):",
        "    row = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]",
        f"    start = row * {body.row}",
        f"    n = tl.minimum(num_elements - start, {body.row})",
        f"    block = {'row' if body.row == kernel.block else f'start // {kernel.block}'}",
        *(["    call = tl.arange(0, 1)[:, None]"] if once else []),
        *(f"    {line}" for line in body.head()),
        *([f"    kept_before = {first}"] if kernel.keep else []),
        *(f"    {line}" for line in lines),
    ]
    return "\n\n\n".join(["\n".join(rows), *_launched(kernel)])


def _launched(kernel: Kernel) -> tuple[str, str]:
    """The kernels of one tensor and of several."""
    given = parameters(kernel)
    changing = ", ".join(f'"{name}"' for name in given if name in ("key_low", "key_high", "step"))
    alone = [
        f"@triton.jit(do_not_specialize=[{changing}])" if changing else "@triton.jit",
        f"def {kernel.name}({', '.join(given)}, ROWS: tl.constexpr, TILE: tl.constexpr):",
        f"    {kernel.name}_rows(tl.program_id(0), {', '.join(given)}, ROWS, TILE)",
    ]
    found = [_word(place, buffer) for place, buffer in enumerate(kernel.buffers)]
    for name in given[len(found) :]:
        word = f"tl.load(words + {len(found)})"
        if name == "num_elements":
            found.append(f"tl.multiple_of({word}, ALIGN)")
        elif name == FIRST:
            found.append(f"gw.memory(words, {len(found)}, tl.int32, 1)")
        else:
            found.append(f"{word}.to(tl.int32)")
    many = [
        '@triton.jit(do_not_specialize=["num_tensors"])',
        f"def {kernel.name}_many(table, num_tensors, ALIGN: tl.constexpr,",
        "    ROWS: tl.constexpr, TILE: tl.constexpr,",
        "):",
        f"    program, words = gw.tensor_of(table, num_tensors, {len(found)})",
        f"    {kernel.name}_rows(",
        "        program,",
        *(f"        {word}," for word in found),
        "        ROWS, TILE,",
        "    )",
    ]
    return "\n".join(alone), "\n".join(many)


def is_wide(buffer: Buffer) -> bool:
    """Whether a buffer has an unpacked value an element; a field of a payload may lie anywhere."""
    return buffer.extent is Extent.ELEMENT and buffer.dtype not in UNSIGNED


def _word(place: int, buffer: Buffer) -> str:
    """A buffer's memory; only gradients and what is as long are sure to be read in vectors."""
    align = "ALIGN" if is_wide(buffer) else "1"
    return f"gw.memory(words, {place}, tl.{type_of(buffer)}, {align})"


class _Body:
    """The text within a block; remembers which names values have."""

    def __init__(self, kernel: Kernel) -> None:
        self.row = row(kernel)
        self.names: dict[Node, str] = {}
        self.numbers = count(1)
        order = list(walk(kernel.stores))
        self.whole = self.row <= WHOLE and all(
            any_order(found.arg) for found in order if found.op is Op.REDUCE
        )
        """Whether a row is one tile."""
        self.at = "0" if self.whole else "at"
        self.uses = Counter(source for found in order for source in found.sources)

    def head(self) -> list[str]:
        """The lines before all passes: the tile if there is only one, else how far loops go."""
        return self._tile("TILE") if self.whole else ["longest = tl.max(n).to(tl.int32)"]

    def one_pass(self, one: Pass) -> list[str]:
        lines = self._statements(one.before, set(), "s")
        if not one.loops:
            return lines
        for found in one.reductions:
            self.names[found] = f"{fold_name(found.arg)}{next(self.numbers)}"
        if self.whole:
            lines += self._elements(one, "TILE")
            for found in one.reductions:
                lines.append(f"{self.names[found]} = {combined(found.arg, self._taken(found))}")
            return lines + [self._stored(target) for target in one.stores]
        return lines + self._loop(one)

    def _loop(self, one: Pass) -> list[str]:
        outside = dict(self.names)  # names of elements end with their loop
        # All lanes of a pass are of one width: 64 where the order is part of the result.
        width = "TILE" if all(any_order(found.arg) for found in one.reductions) else str(LANES)
        lines = self._tile(width) + self._elements(one, width)
        lines += [self._accumulated(found) for found in one.reductions]
        lines += [self._stored(target) for target in one.stores]
        self.names = outside
        return [
            *(self._lanes(found, width) for found in one.reductions),
            f"for at in range(0, longest, {width}):",
            *(f"    {line}" for line in lines),
            *(line for found in one.reductions for line in self._folded(found)),
        ]

    def _tile(self, width: str) -> list[str]:
        place = "" if self.whole else "at + "
        return [f"j = {place}tl.arange(0, {width})[None, :]", "inside = j < n"]

    def _elements(self, one: Pass, width: str) -> list[str]:
        """The lines that compute, for each element of a tile, what a pass reduces and stores."""
        order = tuple(found for found in one.elements if found not in self.names)
        roots = {s for found in (*one.reductions, *one.stores) for s in found.sources}
        lines = self._drawn(order, width) + self._statements(order, roots, "x", width)
        return lines + self._kept(one.stores)

    def _drawn(self, order: tuple[Node, ...], width: str) -> list[str]:
        """The random bits of the tile's elements, by stream."""
        first = "start" if self.whole else "start + at"
        streams = dict.fromkeys(n.arg for n in order if n.op in (Op.RANDOM, Op.BELOW))
        given = f"key_low, key_high, step, {first}"
        return [f"draw{stream} = gw.words({given}, {stream}, {width})" for stream in streams]

    def _statements(
        self, order: tuple[Node, ...], roots: set[Node], prefix: str, width: str = ""
    ) -> list[str]:
        """A line for each value, except for constants and for elements that are used once."""
        here = Counter(source for found in order for source in found.sources)
        uses = self.uses if self.whole else here
        lines = []
        for found in order:
            if found.op is Op.STORE:
                lines.append(self._stored(found))
                continue
            text = self._expression(found, width)
            once = uses[found] == 1 and found not in roots and len(text) <= _LONGEST_INLINE
            if found.op is Op.CONST or (once and found.extent is Extent.ELEMENT):
                self.names[found] = text  # values a block are named: later passes use them too
                continue
            name = self.names[found] = f"{prefix}{next(self.numbers)}"
            lines.append(f"{name} = {text}")
        return lines

    def _expression(self, found: Node, width: str) -> str:
        plain = [self.names[source] for source in found.sources]
        match found.op:
            case Op.CONST:
                return literal(found.arg, found.dtype)
            case Op.LOAD:
                return self._loaded(found.arg, width)
            case Op.LOAD_AT:
                masked = ", mask=inside, other=0" if found.extent is Extent.ELEMENT else ""
                return f"tl.load({pointer(found.arg)} + {grouped(plain[0])}{masked})"
            case Op.RANDOM:
                return f"gw.uniform(draw{found.arg})"
            case Op.BELOW:
                return f"gw.below(draw{found.arg}, {plain[0]})"
            case _:
                return applied(found, plain)

    def _loaded(self, buffer: Buffer, width: str) -> str:
        memory = pointer(buffer)
        wide = ".to(tl.int32)" if buffer.dtype in UNSIGNED else ""
        match buffer.extent:
            case Extent.CALL:
                return f"tl.load({memory} + call){wide}"
            case Extent.BLOCK:
                return f"tl.load({memory} + block, mask=n > 0, other=0){wide}"
            case _ if wide:
                return f"gw.load_codes{code(buffer, f'{memory}, start, {self.at}, n', width)}"
            case _:
                return f"tl.load({memory} + (start + j), mask=inside, other=0)"

    def _lanes(self, found: Node, width: str) -> str:
        kind = "tl.float64" if sums_floats(found.arg) else type_name(found.dtype)
        start = literal(found.arg.start, found.dtype)
        return f"{self._lane(found)} = tl.full((ROWS, {width}), {start}, {kind})"

    def _lane(self, found: Node) -> str:
        return f"{self.names[found]}_lane"

    def _taken(self, found: Node) -> str:
        """The term that a reduction takes of each element: neutral where that does not count."""
        fold: Fold = found.arg
        text, start = self.names[found.sources[0]], literal(fold.start, found.dtype)
        wide = ".to(tl.float64)" if sums_floats(fold) else ""
        return f"tl.where({self._counted(found)}, {text}, {start}){wide}"

    def _counted(self, found: Node) -> str:
        keep = found.sources[1]
        always = keep.op is Op.CONST and bool(keep.arg)
        return "inside" if always else f"inside & {grouped(self.names[keep])}"

    def _accumulated(self, found: Node) -> str:
        fold: Fold = found.arg
        lane = self._lane(found)
        if any_order(fold):
            return f"{lane} = {folded_text(fold.body, lane, self._taken(found))}"
        taken = folded_text(fold.body, lane, grouped(self.names[found.sources[0]]))
        return f"{lane} = tl.where({self._counted(found)}, {taken}, {lane})"

    def _folded(self, found: Node) -> list[str]:
        fold: Fold = found.arg
        name, lane = self.names[found], self._lane(found)
        if any_order(fold):
            return [f"{name} = {combined(fold, lane)}"]
        result = f"gw.canonical({lane})" if found.dtype is FLOAT32 else lane
        return [
            f"for _ in tl.static_range({LANES.bit_length() - 1}):",
            f"    a, b = gw.halves({lane})",
            f"    {lane} = {folded_text(fold.body, 'a', 'b')}",
            f"{name} = {result}",
        ]

    def _kept(self, stores: tuple[Node, ...]) -> list[str]:
        """The lines that find the places of the tile's kept elements."""
        keep = next((found.sources[1] for found in stores if found.extent is Extent.KEPT), None)
        if keep is None:
            return []
        return [
            f"kept = inside & {grouped(self.names[keep])}",
            "place, kept_before = gw.places(kept, kept_before)",
        ]

    def _stored(self, target: Node) -> str:
        buffer, value = target.arg, self.names[target.sources[0]]
        memory = pointer(buffer)
        packed = buffer.dtype in UNSIGNED
        match buffer.extent:
            case Extent.CALL:
                return f"tl.store({memory} + call, {value})"
            case Extent.BLOCK:
                return f"tl.store({memory} + block, {value}, mask=n > 0)"
            case Extent.KEPT:
                return f"tl.store({memory} + place, {value}, mask=kept)"
            case _ if packed:
                codes = f"{memory}, tl.where(inside, {value}, 0), start, {self.at}, n"
                return f"gw.store_codes{code(buffer, codes)}"
            case _:
                return f"tl.store({memory} + (start + j), {value}, mask=inside)"
