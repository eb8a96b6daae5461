"""Triton text of a kernel: a function for ``ROWS`` blocks, and two that launch it.

A value a call has shape (1, 1), one a block (ROWS, 1), one an element (ROWS, TILE).
Blocks of up to ``WHOLE`` elements are one tile, which stays in registers: each operand
is read once, whatever the number of passes. Longer ones are visited by a loop over
tiles a pass, or piece by piece where no value of a block is made of its elements.
Parameters are the kernel's buffers in order, the gradient's length, key and step of
what is drawn, and where a row's kept elements go. NAME takes the parameters of one
tensor. NAME_many takes several tensors', in the words of a table
(``device.tensor_of``). Rendering does not need triton.

Order of a reduction: lane j takes the elements j, j + TILE, ... of its block in turn,
and lanes are combined in the order that Triton likes. Least and most are the same in
every order. Floats are added in double precision, so a sum is off from interp.py's by
at most 2 L 2^-53 of the sum of the terms' magnitudes (L elements a block) before both
are rounded to float32. Any other fold has interp.py's own 64 lanes and order, hence its
bits, and is as much slower.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from .. import schedule
from ..interp import LANES, SPELLINGS
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
    fold_operands,
    node,
    store,
    walk,
)
from ..operators import support
from ..schedule import (
    Pass,
    Text,
    any_order,
    grouped,
    is_always,
    passes,
    pointer,
    sums_floats,
)

# ---- Triton's words for the operations, types, numbers and memory of the IR ----------
#
# Operations are in ``interp.SPELLINGS``; what needs more than a line is a function of
# device.py.

_TEXT = {
    **{op: spelling.triton or spelling.cpp for op, spelling in SPELLINGS.items()},
    Op.SIZE: "n.to(tl.int32)",
    Op.PLACE: "(start + j).to(tl.int32)",
}


def combined(fold: Fold, lanes: str) -> str:
    """All lanes combined in any order."""
    name = schedule.fold_name(fold)
    return f"gw.{'total' if name == 'sum' else name}({lanes})"


def _tensor(node: Node, text: str) -> str:
    """An operand with a tensor's methods.

    A number has none, and ~x.to() is ~(x.to()).
    """
    if node.op is Op.CONST and not text.startswith("tl.full"):
        return f"tl.full((1, 1), {text}, {type_name(node.dtype)})"
    return f"({text})" if text[0] in "~-" else grouped(text)


def code(buffer: Buffer, arguments: str, width: str = "") -> str:
    """The name's end and the arguments of a packer or unpacker of this type's codes."""
    by_five = buffer.dtype is DType.UINT_3
    operands = [
        arguments,
        *([] if by_five else [str(buffer.dtype.bits)]),
        *([width] if width else []),
    ]
    return f"{'_by_five' if by_five else ''}({', '.join(operands)})"


def type_name(dtype: DType) -> str:
    """The type in which values of ``dtype`` are computed."""
    return {FLOAT32: "tl.float32", BOOL: "tl.int1"}.get(dtype, "tl.int32")


def type_of(buffer: Buffer) -> str:
    """The type of a buffer's elements in memory; packed codes lie in bytes."""
    return {FLOAT32: "float32", INT32: "int32"}.get(buffer.dtype, "uint8")


# ---- the text of a kernel ------------------------------------------------------------


WHOLE = 16384
"""The longest block that is one tile: 32 registers for each of 512 threads."""

_PIECE = 2048  # of blocks whose elements need not meet


_HEAD = """\
import triton
import triton.language as tl

from gradwire.dsl.gpu import device as gw"""

COUNT = Buffer("count", INT32, Extent.BLOCK)
"""How many elements of each row are kept."""

FIRST = "first"
"""The operand (int32) of where each row's kept elements go, up to all rows' number."""

_ADDED = Fold(node(Op.ADD, *fold_operands(INT32)), 0)


def render_triton(*kernels: Kernel) -> str:
    """A Python file with these kernels, a counting one before one that keeps."""
    counts = {kernel: counting(kernel) for kernel in kernels}
    all_of_them = [
        each for kernel in kernels for each in (counts[kernel], kernel) if each
    ]
    parts = [
        _HEAD,
        *support(kernels, "triton"),
        *(_function(kernel) for kernel in all_of_them),
    ]
    return "\n\n\n".join(parts) + "\n"


@lru_cache(maxsize=1024)
def counting(kernel: Kernel) -> Kernel | None:
    """The kernel that counts each row's kept elements; None if none are kept."""
    if kernel.keep is None:
        return None
    number = node(Op.REDUCE, const(1, INT32), kernel.keep, dtype=INT32, arg=_ADDED)
    stores = (store(COUNT, number),)
    loads = (Op.LOAD, Op.LOAD_AT)
    loaded = {found.arg for found in walk(stores) if found.op in loads}
    buffers = (*(buffer for buffer in kernel.buffers if buffer in loaded), COUNT)
    return Kernel(f"{kernel.name}_count", row(kernel), buffers, stores)


@lru_cache(maxsize=1024)
def row(kernel: Kernel) -> int:
    """The elements that one row of a program's tiles takes: a block, or its piece."""
    tied = {Op.REDUCE, Op.SIZE}
    together = any(n.op in tied for n in walk(kernel.stores))
    if together or min(target.extent for target in kernel.stores) < Extent.ELEMENT:
        return kernel.block
    return math.gcd(kernel.block, _PIECE)


def parameters(kernel: Kernel) -> tuple[str, ...]:
    """One tensor's parameters: its buffers, and the fields of ``words`` behind them."""
    draws = ("key_low", "key_high", "step") if kernel.draws else ()
    keeps = (FIRST,) if kernel.keep else ()
    return (*map(pointer, kernel.buffers), "num_elements", *draws, *keeps)


def _function(kernel: Kernel) -> str:
    """One kernel: its parameters, its program's rows, its passes; and its launcher."""
    once = any(buffer.extent is Extent.CALL for buffer in kernel.buffers)
    body = _Body(kernel)
    first = "tl.load(first + row, mask=n > 0, other=0) - tl.load(first)"
    lines = [line for pass_ in passes(kernel) for line in body.one_pass(pass_)]
    rows = [
        "@triton.jit",
        f"def {kernel.name}_rows(",
        f"    program, {', '.join(parameters(kernel))},",
        "    ROWS: tl.constexpr, TILE: tl.constexpr,",
        "):",
        "    row = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]",
        f"    start = row * {body.row}",
        f"    n = tl.minimum(num_elements - start, {body.row})",
        "    block = "
        f"{'row' if body.row == kernel.block else f'start // {kernel.block}'}",
        *(["    call = tl.arange(0, 1)[:, None]"] if once else []),
        *(f"    {line}" for line in body.head()),
        *([f"    kept_before = {first}"] if kernel.keep else []),
        *(f"    {line}" for line in lines),
    ]
    return "\n\n\n".join(["\n".join(rows), *_launched(kernel)])


def _launched(kernel: Kernel) -> tuple[str, str]:
    """The kernels of one tensor and of several."""
    names = parameters(kernel)
    changing = ", ".join(
        f'"{name}"' for name in names if name in ("key_low", "key_high", "step")
    )
    alone = [
        f"@triton.jit(do_not_specialize=[{changing}])" if changing else "@triton.jit",
        f"def {kernel.name}({', '.join(names)}, ROWS: tl.constexpr, TILE: "
        "tl.constexpr):",
        f"    {kernel.name}_rows(tl.program_id(0), {', '.join(names)}, ROWS, TILE)",
    ]
    words = [_word(place, buffer) for place, buffer in enumerate(kernel.buffers)]
    for name in names[len(words) :]:
        word = f"tl.load(words + {len(words)})"
        if name == "num_elements":
            words.append(f"tl.multiple_of({word}, ALIGN)")
        elif name == FIRST:
            words.append(f"gw.memory(words, {len(words)}, tl.int32, 1)")
        else:
            words.append(f"{word}.to(tl.int32)")
    many = [
        '@triton.jit(do_not_specialize=["num_tensors"])',
        f"def {kernel.name}_many(table, num_tensors, ALIGN: tl.constexpr,",
        "    ROWS: tl.constexpr, TILE: tl.constexpr,",
        "):",
        f"    program, words = gw.tensor_of(table, num_tensors, {len(words)})",
        f"    {kernel.name}_rows(",
        "        program,",
        *(f"        {word}," for word in words),
        "        ROWS, TILE,",
        "    )",
    ]
    return "\n".join(alone), "\n".join(many)


def is_wide(buffer: Buffer) -> bool:
    """Whether a buffer has an unpacked value an element.

    A field of a payload may lie anywhere.
    """
    return buffer.extent is Extent.ELEMENT and buffer.dtype not in UNSIGNED


def _word(place: int, buffer: Buffer) -> str:
    """A buffer's memory.

    Only gradients and what is as long are sure to be read in vectors.
    """
    align = "ALIGN" if is_wide(buffer) else "1"
    return f"gw.memory(words, {place}, tl.{type_of(buffer)}, {align})"


class _Body(Text):
    """The text within a block."""

    texts = _TEXT

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.row = row(kernel)
        self.width = "TILE"
        """The elements of each row that are in hand at once."""
        order = list(walk(kernel.stores))
        self.whole = self.row <= WHOLE and all(
            any_order(node.arg) for node in order if node.op is Op.REDUCE
        )
        """Whether a row is one tile."""
        self.at = "0" if self.whole else "at"
        if self.whole:
            self.uses = Counter(source for node in order for source in node.sources)

    def head(self) -> list[str]:
        """The lines before all passes: the only tile, or else the loops' ends."""
        return (
            self._tile("TILE") if self.whole else ["longest = tl.max(n).to(tl.int32)"]
        )

    def one_pass(self, pass_: Pass) -> list[str]:
        lines = self.statements(pass_.before, set(), "s")
        if not pass_.loops:
            return lines
        self.name_reductions(pass_)
        if self.whole:
            lines += self._elements(pass_)
            for reduction in pass_.reductions:
                folded = combined(reduction.arg, self._taken(reduction))
                lines.append(f"{self.names[reduction]} = {folded}")
            return lines + [self.stored(target) for target in pass_.stores]
        return lines + self._loop(pass_)

    def _loop(self, pass_: Pass) -> list[str]:
        outside = dict(self.names)  # names of elements end with their loop
        # All lanes of a pass are of one width: 64 where the order is part of the
        # result.
        in_any_order = all(any_order(reduction.arg) for reduction in pass_.reductions)
        width = self.width = "TILE" if in_any_order else str(LANES)
        lines = self._tile(width) + self._elements(pass_)
        lines += [self._accumulated(reduction) for reduction in pass_.reductions]
        lines += [self.stored(target) for target in pass_.stores]
        self.names = outside
        return [
            *(self._lanes(reduction, width) for reduction in pass_.reductions),
            f"for at in range(0, longest, {width}):",
            *(f"    {line}" for line in lines),
            *(
                line
                for reduction in pass_.reductions
                for line in self._folded(reduction)
            ),
        ]

    def _tile(self, width: str) -> list[str]:
        place = "" if self.whole else "at + "
        return [f"j = {place}tl.arange(0, {width})[None, :]", "inside = j < n"]

    def _elements(self, pass_: Pass) -> list[str]:
        """The lines that compute, for a tile's elements, a pass's values and stores."""
        order = tuple(node for node in pass_.elements if node not in self.names)
        roots = {s for root in (*pass_.reductions, *pass_.stores) for s in root.sources}
        lines = self._drawn(order) + self.statements(order, roots, "x")
        return lines + self._kept(pass_.stores)

    def _drawn(self, order: tuple[Node, ...]) -> list[str]:
        """The random bits of the tile's elements, by stream."""
        first = "start" if self.whole else "start + at"
        draws = (Op.RANDOM, Op.BELOW)
        streams = dict.fromkeys(found.arg for found in order if found.op in draws)
        arguments = f"key_low, key_high, step, {first}"
        return [
            f"draw{stream} = gw.words({arguments}, {stream}, {self.width})"
            for stream in streams
        ]

    def named(self, node: Node, name: str, text: str) -> str:
        return f"{name} = {text}"

    def expression(self, node: Node) -> str:
        plain = [self.names[source] for source in node.sources]
        match node.op:
            case Op.CONST:
                return self.literal(node.arg, node.dtype)
            case Op.LOAD:
                return self._loaded(node.arg)
            case Op.LOAD_AT:
                masked = (
                    ", mask=inside, other=0" if node.extent is Extent.ELEMENT else ""
                )
                return f"tl.load({pointer(node.arg)} + {grouped(plain[0])}{masked})"
            case Op.RANDOM:
                return f"gw.uniform(draw{node.arg})"
            case Op.BELOW:
                return f"gw.below(draw{node.arg}, {plain[0]})"
            case _:
                return self.applied(node, plain)

    def applied(self, node: Node, operands: Sequence[str]) -> str:
        tensors = [_tensor(*pair) for pair in zip(node.sources, operands, strict=True)]
        if node.op is Op.OPERATOR:
            template: str = node.arg.template("triton")
            return template.format(*tensors)
        if node.op is Op.NEG and node.dtype is FLOAT32:
            # -x is 0 - x in some versions of triton, which loses a zero's sign
            return f"{grouped(operands[0])} * -1.0"
        if node.op is not Op.CAST:
            return super().applied(node, operands)
        if node.dtype is FLOAT32:
            return f"{tensors[0]}.to(tl.float32)"
        if node.dtype in UNSIGNED:
            return f"gw.to_uint({operands[0]}, {node.dtype.top})"
        return f"gw.to_int({operands[0]})"

    def literal(self, value: float, dtype: DType) -> str:
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

    def _loaded(self, buffer: Buffer) -> str:
        memory = pointer(buffer)
        wide = ".to(tl.int32)" if buffer.dtype in UNSIGNED else ""
        match buffer.extent:
            case Extent.CALL:
                return f"tl.load({memory} + call){wide}"
            case Extent.BLOCK:
                return f"tl.load({memory} + block, mask=n > 0, other=0){wide}"
            case _ if wide:
                arguments = f"{memory}, start, {self.at}, n"
                return f"gw.load_codes{code(buffer, arguments, self.width)}"
            case _:
                return f"tl.load({memory} + (start + j), mask=inside, other=0)"

    def _lanes(self, node: Node, width: str) -> str:
        kind = "tl.float64" if sums_floats(node.arg) else type_name(node.dtype)
        start = self.literal(node.arg.start, node.dtype)
        return f"{self.lane(node)} = tl.full((ROWS, {width}), {start}, {kind})"

    def _taken(self, node: Node) -> str:
        """A reduction's term of each element: neutral where that does not count."""
        fold: Fold = node.arg
        text = self.names[node.sources[0]]
        start = self.literal(fold.start, node.dtype)
        wide = ".to(tl.float64)" if sums_floats(fold) else ""
        return f"tl.where({self._counted(node)}, {text}, {start}){wide}"

    def _counted(self, node: Node) -> str:
        keep = node.sources[1]
        return "inside" if is_always(keep) else f"inside & {grouped(self.names[keep])}"

    def _accumulated(self, node: Node) -> str:
        fold: Fold = node.arg
        lane = self.lane(node)
        if any_order(fold):
            return f"{lane} = {self.fold(fold.body, lane, self._taken(node))}"
        taken = self.fold(fold.body, lane, grouped(self.names[node.sources[0]]))
        return f"{lane} = tl.where({self._counted(node)}, {taken}, {lane})"

    def _folded(self, node: Node) -> list[str]:
        fold: Fold = node.arg
        name = self.names[node]
        lane = self.lane(node)
        if any_order(fold):
            return [f"{name} = {combined(fold, lane)}"]
        result = f"gw.canonical({lane})" if node.dtype is FLOAT32 else lane
        return [
            f"for _ in tl.static_range({LANES.bit_length() - 1}):",
            f"    a, b = gw.halves({lane})",
            f"    {lane} = {self.fold(fold.body, 'a', 'b')}",
            f"{name} = {result}",
        ]

    def _kept(self, stores: tuple[Node, ...]) -> list[str]:
        """The lines that find the places of the tile's kept elements."""
        keep = next(
            (target.sources[1] for target in stores if target.extent is Extent.KEPT),
            None,
        )
        if keep is None:
            return []
        return [
            f"kept = inside & {grouped(self.names[keep])}",
            "place, kept_before = gw.places(kept, kept_before)",
        ]

    def stored(self, target: Node) -> str:
        buffer = target.arg
        value = self.names[target.sources[0]]
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
