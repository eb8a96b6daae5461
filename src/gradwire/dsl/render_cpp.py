"""C++ text of a kernel: one function, a loop over blocks, in it one loop a pass.

The ABI is the same for every kernel, so that one call carries any of them out:

    void name(gw::Tensor<operands>* tensors, int num_tensors, int threads)

A record a tensor holds its length, key, step and the kernel's buffers in order: many small tensors
are one call, one parallel loop over all their blocks. What a kernel keeps of them goes through
csrc/kept.h. Each operation has one line in ``_TEXT``; what needs more than a line is a function of
csrc. The text has one statement for each value used twice.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import count

import numpy as np

from .ir import (
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
    neutral,
)
from .operators import support
from .schedule import Pass, passes

_LONGEST_INLINE = 48  # a longer expression gets a name
_NEAR = 16384  # elements of a block beside which the next one fits into a core's own cache

_TEXT = {
    Op.SIZE: "static_cast<int32_t>(n)",
    Op.PLACE: "static_cast<int32_t>(start + at) + j",
    Op.ADD: "{} + {}",
    Op.SUB: "{} - {}",
    Op.MUL: "{} * {}",
    Op.DIV: "{} / {}",
    Op.SMALLER: "gw::smaller({}, {})",
    Op.GREATER: "gw::greater({}, {})",
    Op.NEG: "-{}",
    Op.ABS: "gw::abs({})",
    Op.FLOOR: "gw::floor({})",
    Op.ROUND: "gw::round({})",
    Op.SQRT: "gw::sqrt({})",
    Op.FINITE: "gw::finite({})",
    Op.CANONICAL: "gw::canonical({})",
    Op.LESS: "{} < {}",
    Op.AT_MOST: "{} <= {}",
    Op.EQUAL: "{} == {}",
    Op.AND: "{} & {}",
    Op.OR: "{} | {}",
    Op.NOT: "!{}",
    Op.SHL: "{} << ({} & 31)",
    Op.SHR: "{} >> ({} & 31)",
    Op.WHERE: "{} ? {} : {}",
}
_CALLS = {found for found, text in _TEXT.items() if "::" in text} | {Op.CAST}
_BARE = {Op.LOAD, Op.LOAD_AT, Op.RANDOM, Op.BELOW}  # no parentheses around them

_FOLD_NAMES = {Op.ADD: "sum", Op.SMALLER: "least", Op.GREATER: "most"}


def render_cpp(*kernels: Kernel) -> str:
    """A C++ file that exports these kernels under their names."""
    needed = ('#include "compll.h"', *support(kernels, "cpp"))
    parts = [*needed, *(_function(kernel) for kernel in kernels)]
    return "\n\n".join(parts) + "\n"


def _function(kernel: Kernel) -> str:
    body = _Body(kernel)
    lines = [body.address(i, b) for i, b in enumerate(kernel.buffers)]
    lines += ["const gw::Draws draws(tensor.key, tensor.step);"] if kernel.draws else []
    lines += [line for one in body.passes for line in body.one_pass(one)]
    record, arrays, loop = f"gw::Tensor<{len(kernel.buffers)}>", "", "for_each_block"
    call = f"{kernel.block}, tensors, num_tensors, threads"
    if body.kept:
        buffers = ", ".join(f"{{{i}, {b.dtype.bits // 8 or 1}}}" for i, b in body.kept.items())
        loop, call = "keep_each_block", f"{call}, {{{buffers}}}"
        arrays = f"gw::Kept<{len(body.kept)}>& kept, "
    return "\n".join(
        [
            f"GW_EXPORT void {kernel.name}({record}* tensors, int num_tensors, int threads) {{",
            f"  gw::{loop}({call},",
            f"      []({record}& tensor, {arrays}int64_t block, int64_t start, int64_t n) {{",
            *(f"    {line}" for line in lines),
            "  });",
            "}",
        ]
    )


class _Body:
    """The text within a block; remembers which names values have."""

    def __init__(self, kernel: Kernel) -> None:
        self.names: dict[Node, str] = {}
        self.numbers = count(1)
        self.passes = passes(kernel)
        self.fetches = _fetches(kernel, self.passes)
        self.written = {target.arg for target in kernel.stores}
        self.kept = {i: b for i, b in enumerate(kernel.buffers) if b.extent is Extent.KEPT}

    def address(self, place: int, buffer: Buffer) -> str:
        kind = _memory_type(buffer)
        if buffer.extent is Extent.KEPT:
            return f"{kind}* const {_name(buffer)} = kept.at<{kind}>({[*self.kept].index(place)});"
        if buffer not in self.written:
            kind = f"const {kind}"
        where = {Extent.BLOCK: " + block", Extent.ELEMENT: " + start"}.get(buffer.extent, "")
        if buffer.extent is Extent.ELEMENT and buffer.dtype in UNSIGNED:
            where = f" + start / gw::kLanes * {buffer.dtype.group_bytes}"
        return (
            f"{kind}* const {_name(buffer)} = static_cast<{kind}*>(tensor.operand[{place}]){where};"
        )

    def one_pass(self, one: Pass) -> list[str]:
        lines = self._statements(one.before, set(), "s")
        if not one.loops:
            return lines
        for found in one.reductions:
            self.names[found] = f"{_FOLD_NAMES.get(found.arg.body.op, 'fold')}{next(self.numbers)}"
        lines += [line for found in one.reductions for line in self._lanes(found)]
        lines += self._loop(one)
        return lines + [line for found in one.reductions for line in self._folded(found)]

    def _loop(self, one: Pass) -> list[str]:
        outside = dict(self.names)  # names of elements end with their loop
        before = [line for found in one.elements for line in self._prepared(found, one)]
        roots = {s for found in (*one.reductions, *one.stores) for s in found.sources}
        body = self._statements(one.elements, roots, "x")
        body += [self._accumulated(found) for found in one.reductions]
        body += [self._stored(target) for target in one.stores]
        codes = [
            s.arg for s in one.stores if s.dtype in UNSIGNED and s.arg.extent is Extent.ELEMENT
        ]
        before += [f"uint8_t {_name(b)}out[gw::kLanes] = {{}};" for b in codes]
        after = [f"gw::pack{_code(b)}({_name(b)}out, {_packed_at(b)}, count);" for b in codes]
        kept = [target for target in one.stores if target.extent is Extent.KEPT]
        if kept:
            buffers = [target.arg for target in kept]
            before += [f"{_memory_type(b)} {_name(b)}out[gw::kLanes];" for b in buffers]
            before += ["uint8_t keep[gw::kLanes] = {};"]
            body += [f"keep[j] = {self.names[kept[0].sources[1]]};"]
            after += _appended(buffers)
        self.names = outside
        loop = [
            "gw::for_each_group(n, [&](int64_t at, int count) GW_INLINE {",
            *(f"  {line}" for line in before),
            "  #pragma omp simd",
            "  for (int j = 0; j < count; ++j) {",
            *(f"    {line}" for line in body),
            "  }",
            *(f"  {line}" for line in after),
            "});",
        ]
        return ["int64_t place = kept.count;", *loop, "kept.count = place;"] if kept else loop

    def _prepared(self, found: Node, one: Pass) -> list[str]:
        """Statements before a group's loop: they unpack codes, draw numbers, fetch cache lines."""
        if found.op in (Op.RANDOM, Op.BELOW):
            name = f"draw{found.arg}"
            call = f"gw::philox(draws, {found.arg}, (start + at) / gw::kLanes, {name});"
            return [f"uint32_t {name}[gw::kLanes];", call]
        if found.op is not Op.LOAD:
            return []
        buffer = found.arg
        if buffer.dtype in UNSIGNED:
            name = f"{_name(buffer)}in"
            call = f"gw::unpack{_code(buffer)}({_packed_at(buffer)}, {name}, count);"
            return [f"uint8_t {name}[gw::kLanes];", call]
        if buffer not in self.fetches:
            return []
        where, ahead = self.fetches[buffer]
        return [f"gw::prefetch_group({_name(buffer)} + at{ahead});"] if where is one else []

    def _statements(self, order: tuple[Node, ...], roots: set[Node], prefix: str) -> list[str]:
        """A line for each value, except for constants and for elements that are used once."""
        uses = Counter(source for found in order for source in found.sources)
        lines = []
        for found in order:
            if found.op is Op.STORE:
                line = f"*{_name(found.arg)} = {self.names[found.sources[0]]};"
                once = found.arg.extent is Extent.CALL  # blocks agree on it, and one writes it
                lines.append(f"if (block == 0) {line}" if once else line)
                continue
            text = self._expression(found)
            once = uses[found] == 1 and found not in roots and len(text) <= _LONGEST_INLINE
            if found.op is Op.CONST or (once and found.extent is Extent.ELEMENT):
                self.names[found] = text  # values a block are named: later passes use them too
                continue
            name = self.names[found] = f"{prefix}{next(self.numbers)}"
            lines.append(f"const {_value_type(found.dtype)} {name} = {text};")
        return lines

    def _expression(self, found: Node) -> str:
        match found.op:
            case Op.CONST:
                return _literal(found.arg, found.dtype)
            case Op.LOAD:
                return _loaded(found.arg)
            case Op.RANDOM:
                return f"gw::uniform(draw{found.arg}[j])"
            case Op.BELOW:
                return f"gw::below(draw{found.arg}[j], {self.names[found.sources[0]]})"
            case Op.LOAD_AT:
                return f"{_name(found.arg)}[{self.names[found.sources[0]]}]"
            case Op.CAST:
                return _cast(found, self.names[found.sources[0]])
            case _:
                use = self.names.__getitem__ if found.op in _CALLS else self._use
                return _template(found).format(*(use(source) for source in found.sources))

    def _use(self, found: Node) -> str:
        """The text of an operand, in parentheses where it is an expression."""
        name = self.names[found]
        return name if found.op in _CALLS or found.op in _BARE else _bracketed(name)

    def _lanes(self, found: Node) -> list[str]:
        fold: Fold = found.arg
        kind, name = _lane_type(found), self._lane(found)
        if fold.start == 0:
            return [f"{kind} {name}[gw::kLanes] = {{}};"]
        start = _literal(fold.start, found.dtype)
        return [
            f"{kind} {name}[gw::kLanes];",
            f"for ({kind}& lane : {name}) lane = {start};",
        ]

    def _lane(self, found: Node) -> str:
        return f"{self.names[found]}_lane"

    def _accumulated(self, found: Node) -> str:
        fold: Fold = found.arg
        value, keep = found.sources
        lane, text = f"{self._lane(found)}[j]", self._use(value)
        if fold.body.op is Op.ADD and neutral(fold.body) is not None:
            kind = _lane_type(found)
            chosen = text if _always(keep) else f"({self._use(keep)} ? {text} : 0)"
            return f"{lane} += static_cast<{kind}>({chosen});"
        taken = _folded_text(fold.body, lane, text)
        chosen = taken if _always(keep) else f"{self._use(keep)} ? {taken} : {lane}"
        return f"{lane} = {chosen};"

    def _folded(self, found: Node) -> list[str]:
        fold: Fold = found.arg
        kind, result = _lane_type(found), _value_type(found.dtype)
        combine = f"[]({kind} a, {kind} b) {{ return {_folded_text(fold.body, 'a', 'b')}; }}"
        return [
            f"const {result} {self.names[found]} =",
            f"    gw::folded<{result}>({self._lane(found)}, {combine});",
        ]

    def _stored(self, target: Node) -> str:
        buffer, value = target.arg, self.names[target.sources[0]]
        if buffer.extent is Extent.KEPT or buffer.dtype in UNSIGNED:
            return f"{_name(buffer)}out[j] = static_cast<{_memory_type(buffer)}>({value});"
        return f"{_name(buffer)}[at + j] = {value};"


def _fetches(kernel: Kernel, order: tuple[Pass, ...]) -> dict[Buffer, tuple[Pass, str]]:
    """The pass in which each vector is fetched ahead, and how much farther than usual.

    The first pass over a block waits for memory and the others do not. So the last one, which
    mostly computes, fetches the next block for it, where the caches have room for two.
    """
    readers: dict[Buffer, list[Pass]] = {}
    for one in order:
        for found in one.elements:
            if found.op is Op.LOAD and found.dtype is FLOAT32:
                readers.setdefault(found.arg, []).append(one)
    near = kernel.block <= _NEAR
    return {
        buffer: (found[-1], " + n") if near and len(found) > 1 else (found[0], "")
        for buffer, found in readers.items()
    }


def _appended(buffers: list[Buffer]) -> list[str]:
    """Puts a group's kept elements behind those that the thread has."""
    return [
        "const uint64_t mask = gw::mask_of(keep);",
        *(f"gw::append({_name(b)} + place, {_name(b)}out, mask, count);" for b in buffers),
        "place += gw::count_of(mask);",
    ]


def _name(buffer: Buffer) -> str:
    """The buffer's name with an underscore: then it is no keyword, and none of our own names."""
    return f"{buffer.name}_"


def _always(keep: Node) -> bool:
    return keep.op is Op.CONST and bool(keep.arg)


def _folded_text(body: Node, a: str, b: str) -> str:
    """The body of a fold as one expression of two names."""
    if body.op is Op.ARG:
        return (a, b)[body.arg]
    if body.op is Op.CONST:
        return _literal(body.arg, body.dtype)
    sources = [_folded_text(source, a, b) for source in body.sources]
    if body.op is Op.CAST:
        return _cast(body, sources[0])
    if body.op not in _CALLS:
        sources = [_bracketed(text) for text in sources]
    return _template(body).format(*sources)


def _bracketed(text: str) -> str:
    """An operand in parentheses, unless it is a name or a number; two signs would decrement."""
    return f"({text})" if " " in text or text.startswith("-") else text


def _template(found: Node) -> str:
    """The text of an operation, with places for its operands."""
    if found.op is Op.OPERATOR:
        text: str = found.arg.template("cpp")
        return text
    return _TEXT[found.op]


def _cast(found: Node, text: str) -> str:
    if found.dtype is FLOAT32:
        return f"static_cast<float>({text})"
    return (
        f"gw::to_uint<{found.dtype.top}>({text})"
        if found.dtype in UNSIGNED
        else (f"gw::to_int({text})")
    )


def _loaded(buffer: Buffer) -> str:
    if buffer.extent is not Extent.ELEMENT:
        return f"*{_name(buffer)}"
    return f"{_name(buffer)}in[j]" if buffer.dtype in UNSIGNED else f"{_name(buffer)}[at + j]"


def _packed_at(buffer: Buffer) -> str:
    return f"{_name(buffer)} + at / gw::kLanes * {buffer.dtype.group_bytes}"


def _code(buffer: Buffer) -> str:
    """How codes of this type are packed, as the end of the name of what packs them."""
    return "_by_five" if buffer.dtype is DType.UINT_3 else f"<{buffer.dtype.bits}>"


def _value_type(dtype: DType) -> str:
    return {FLOAT32: "float", BOOL: "bool"}.get(dtype, "int32_t")


def _memory_type(buffer: Buffer) -> str:
    return {FLOAT32: "float", INT32: "int32_t"}.get(buffer.dtype, "uint8_t")


def _lane_type(found: Node) -> str:
    body = found.arg.body
    sums = body.op is Op.ADD and neutral(body) is not None
    return "double" if sums and body.dtype is FLOAT32 else _value_type(body.dtype)


def _literal(value: float, dtype: DType) -> str:
    if dtype is BOOL:
        return "true" if value else "false"
    if dtype is not FLOAT32:
        return "(-2147483647 - 1)" if value == -(2**31) else str(int(value))
    if math.isnan(value):
        return "std::numeric_limits<float>::quiet_NaN()"
    if math.isinf(value):
        sign = "-" if value < 0 else ""
        return f"{sign}std::numeric_limits<float>::infinity()"
    return f"{np.float32(value)!s}f"
