"""C++ text of a kernel: one function, a loop over blocks, in it one loop a pass.

The ABI is the same for every kernel, so that one call carries any of them out:

    void name(void* const* operand, int64_t num_elements, uint64_t key, uint64_t step, int threads)

with the kernel's buffers in order. Each operation has one line in ``_TEXT``; what needs more than a
line is a function of csrc/compll.h. The text has one statement for each value used twice.
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
from .schedule import Pass, passes

_LONGEST_INLINE = 48  # a longer expression gets a name

_TEXT = {
    Op.SIZE: "static_cast<int32_t>(n)",
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

_FOLD_NAMES = {Op.ADD: "sum", Op.SMALLER: "least", Op.GREATER: "most"}

_SIGNATURE = (
    "(void* const* operand, int64_t num_elements,\n    uint64_t key, uint64_t step, int threads)"
)


def render(*kernels: Kernel) -> str:
    """A C++ file that exports these kernels under their names."""
    parts = ['#include "compll.h"', *(_function(kernel) for kernel in kernels)]
    return "\n\n".join(parts) + "\n"


def _function(kernel: Kernel) -> str:
    body = _Body(kernel)
    setup = [body.address(i, b) for i, b in enumerate(kernel.buffers)]
    draws = ["const gw::Draws draws(key, step);"] if kernel.draws else []
    return "\n".join(
        [
            f"GW_EXPORT void {kernel.name}{_SIGNATURE} {{",
            *(f"  {line}" for line in draws),
            f"  gw::for_each_block({kernel.block}, num_elements, threads,",
            "                     [&](int64_t block, int64_t start, int64_t n) {",
            *(f"    {line}" for line in setup),
            *(f"    {line}" for one in passes(kernel) for line in body.one_pass(one)),
            "  });",
            "}",
        ]
    )


class _Body:
    """The text within a block; remembers which names values have."""

    def __init__(self, kernel: Kernel) -> None:
        self.names: dict[Node, str] = {}
        self.numbers = count(1)
        self.loaded: set[Buffer] = set()
        self.written = {target.arg for target in kernel.stores}

    def address(self, place: int, buffer: Buffer) -> str:
        kind = _memory_type(buffer)
        if buffer not in self.written:
            kind = f"const {kind}"
        offset = {Extent.CALL: "", Extent.BLOCK: " + block", Extent.ELEMENT: " + start"}
        where = offset[buffer.extent]
        if buffer.extent is Extent.ELEMENT and buffer.dtype in UNSIGNED:
            where = f" + start * {buffer.dtype.bits} / 8"
        return f"{kind}* const {_name(buffer)} = static_cast<{kind}*>(operand[{place}]){where};"

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
        prepare = [line for found in one.elements for line in self._prepared(found)]
        codes = [target.arg for target in one.stores if target.dtype in UNSIGNED]
        roots = {s for found in (*one.reductions, *one.stores) for s in found.sources}
        body = self._statements(one.elements, roots, "x")
        body += [self._accumulated(found) for found in one.reductions]
        body += [self._stored(target) for target in one.stores]
        self.names = outside
        return [
            "gw::for_each_group(n, [&](int64_t at, int count) GW_INLINE {",
            *(f"  {line}" for line in prepare),
            *(f"  uint8_t {_name(b)}out[gw::kLanes] = {{}};" for b in codes),
            "  #pragma omp simd",
            "  for (int j = 0; j < count; ++j) {",
            *(f"    {line}" for line in body),
            "  }",
            *(f"  gw::pack<{b.dtype.bits}>({_name(b)}out, {_packed_at(b)}, count);" for b in codes),
            "});",
        ]

    def _prepared(self, found: Node) -> list[str]:
        """What a group needs before its loop: codes unpacked, numbers drawn, lines fetched."""
        if found.op is Op.RANDOM:
            name = f"draw{found.arg}"
            call = f"gw::philox(draws, {found.arg}, (start + at) / gw::kLanes, {name});"
            return [f"uint32_t {name}[gw::kLanes];", call]
        if found.op is not Op.LOAD:
            return []
        buffer = found.arg
        if buffer.dtype in UNSIGNED:
            name = f"{_name(buffer)}in"
            call = f"gw::unpack<{buffer.dtype.bits}>({_packed_at(buffer)}, {name}, count);"
            return [f"uint8_t {name}[gw::kLanes];", call]
        if buffer in self.loaded or buffer.dtype is not FLOAT32:
            return []
        self.loaded.add(buffer)
        return [f"gw::prefetch_group({_name(buffer)} + at);"]

    def _statements(self, order: tuple[Node, ...], roots: set[Node], prefix: str) -> list[str]:
        """A line for each value, except for constants and for elements that are used once."""
        uses = Counter(source for found in order for source in found.sources)
        lines = []
        for found in order:
            if found.op is Op.STORE:
                lines.append(f"*{_name(found.arg)} = {self.names[found.sources[0]]};")
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
            case Op.CAST:
                return _cast(found, self.names[found.sources[0]])
            case _:
                use = self.names.__getitem__ if found.op in _CALLS else self._use
                return _TEXT[found.op].format(*(use(source) for source in found.sources))

    def _use(self, found: Node) -> str:
        """The text of an operand, in parentheses where it is an expression."""
        name = self.names[found]
        bare = found.op in _CALLS or found.op in (Op.LOAD, Op.RANDOM) or " " not in name
        return name if bare else f"({name})"

    def _lanes(self, found: Node) -> list[str]:
        fold: Fold = found.arg
        kind, name = _lane_type(fold), self._lane(found)
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
            kind = _lane_type(fold)
            chosen = text if _always(keep) else f"({self._use(keep)} ? {text} : 0)"
            return f"{lane} += static_cast<{kind}>({chosen});"
        taken = _folded_text(fold.body, lane, text)
        chosen = taken if _always(keep) else f"{self._use(keep)} ? {taken} : {lane}"
        return f"{lane} = {chosen};"

    def _folded(self, found: Node) -> list[str]:
        fold: Fold = found.arg
        kind, result = _lane_type(fold), _value_type(found.dtype)
        combine = f"[]({kind} a, {kind} b) {{ return {_folded_text(fold.body, 'a', 'b')}; }}"
        return [
            f"const {result} {self.names[found]} =",
            f"    gw::folded<{result}>({self._lane(found)}, {combine});",
        ]

    def _stored(self, target: Node) -> str:
        buffer, value = target.arg, self.names[target.sources[0]]
        if buffer.dtype in UNSIGNED:
            return f"{_name(buffer)}out[j] = static_cast<uint8_t>({value});"
        return f"{_name(buffer)}[at + j] = {value};"


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
        sources = [f"({text})" if " " in text else text for text in sources]
    return _TEXT[body.op].format(*sources)


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
    return f"{_name(buffer)} + at * {buffer.dtype.bits} / 8"


def _value_type(dtype: DType) -> str:
    return {FLOAT32: "float", BOOL: "bool"}.get(dtype, "int32_t")


def _memory_type(buffer: Buffer) -> str:
    return {FLOAT32: "float", INT32: "int32_t"}.get(buffer.dtype, "uint8_t")


def _lane_type(fold: Fold) -> str:
    sums = fold.body.op is Op.ADD and neutral(fold.body) is not None
    return "double" if sums and fold.body.dtype is FLOAT32 else _value_type(fold.body.dtype)


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
