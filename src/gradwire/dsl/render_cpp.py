"""C++ text of a kernel: one function, a loop over blocks, in it one loop a pass.

The ABI is the same for every kernel, so that one call carries any of them out:

    void name(gw::Tensor<operands>* tensors, int num_tensors, int threads)

A record a tensor holds its length, key, step and the kernel's buffers in order: many
small tensors are one call, one parallel loop over all their blocks. What a kernel keeps
of them goes through csrc/kept.h. Each operation has one line in ``_TEXT``; what needs
more than a line is a function of csrc. The text has one statement for each value used
twice.
"""

import math
from collections.abc import Sequence

import numpy as np

from .interp import SPELLINGS
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
)
from .operators import support
from .schedule import (
    Pass,
    Text,
    any_order,
    grouped,
    is_always,
    passes,
    pointer,
    sums_floats,
)

_NEAR = 16384
"""Elements of a block beside which the next one fits into a core's own cache."""

_TEXT = {
    **{op: spelling.cpp for op, spelling in SPELLINGS.items()},
    Op.SIZE: "static_cast<int32_t>(n)",
    Op.PLACE: "static_cast<int32_t>(start + at) + j",
}


def render_cpp(*kernels: Kernel) -> str:
    """A C++ file that exports these kernels under their names."""
    needed = ('#include "compll.h"', *support(kernels, "cpp"))
    parts = [*needed, *(_function(kernel) for kernel in kernels)]
    return "\n\n".join(parts) + "\n"


def _function(kernel: Kernel) -> str:
    body = _Body(kernel)
    lines = [body.address(i, b) for i, b in enumerate(kernel.buffers)]
    lines += ["const gw::Draws draws(tensor.key, tensor.step);"] if kernel.draws else []
    lines += [line for pass_ in body.passes for line in body.one_pass(pass_)]
    record = f"gw::Tensor<{len(kernel.buffers)}>"
    arrays = ""
    loop = "for_each_block"
    call = f"{kernel.block}, tensors, num_tensors, threads"
    if body.kept:
        buffers = ", ".join(
            f"{{{i}, {b.dtype.bits // 8 or 1}}}" for i, b in body.kept.items()
        )
        loop = "keep_each_block"
        call = f"{call}, {{{buffers}}}"
        arrays = f"gw::Kept<{len(body.kept)}>& kept, "
    return "\n".join(
        [
            f"GW_EXPORT void {kernel.name}({record}* tensors, int num_tensors, "
            f"int threads) {{",
            f"  gw::{loop}({call},",
            f"      []({record}& tensor, {arrays}int64_t block, int64_t start, "
            f"int64_t n) {{",
            *(f"    {line}" for line in lines),
            "  });",
            "}",
        ]
    )


class _Body(Text):
    """The text within a block."""

    texts = _TEXT

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.passes = passes(kernel)
        self.fetches = _fetches(kernel, self.passes)
        self.written = {target.arg for target in kernel.stores}
        self.kept = {
            i: b for i, b in enumerate(kernel.buffers) if b.extent is Extent.KEPT
        }

    def address(self, place: int, buffer: Buffer) -> str:
        kind = _memory_type(buffer)
        if buffer.extent is Extent.KEPT:
            return (
                f"{kind}* const {pointer(buffer)} = "
                f"kept.at<{kind}>({[*self.kept].index(place)});"
            )
        if buffer not in self.written:
            kind = f"const {kind}"
        where = {Extent.BLOCK: " + block", Extent.ELEMENT: " + start"}.get(
            buffer.extent, ""
        )
        if buffer.extent is Extent.ELEMENT and buffer.dtype in UNSIGNED:
            where = f" + start / gw::kLanes * {buffer.dtype.group_bytes}"
        memory = f"static_cast<{kind}*>(tensor.operand[{place}])"
        return f"{kind}* const {pointer(buffer)} = {memory}{where};"

    def one_pass(self, pass_: Pass) -> list[str]:
        lines = self.statements(pass_.before, set(), "s")
        if not pass_.loops:
            return lines
        self.name_reductions(pass_)
        lines += [
            line for reduction in pass_.reductions for line in self._lanes(reduction)
        ]
        lines += self._loop(pass_)
        return lines + [
            line for reduction in pass_.reductions for line in self._folded(reduction)
        ]

    def _loop(self, pass_: Pass) -> list[str]:
        outside = dict(self.names)  # names of elements end with their loop
        before = [
            line for node in pass_.elements for line in self._prepared(node, pass_)
        ]
        roots = {s for root in (*pass_.reductions, *pass_.stores) for s in root.sources}
        body = self.statements(pass_.elements, roots, "x")
        body += [self._accumulated(reduction) for reduction in pass_.reductions]
        body += [self.stored(target) for target in pass_.stores]
        codes = [
            s.arg
            for s in pass_.stores
            if s.dtype in UNSIGNED and s.arg.extent is Extent.ELEMENT
        ]
        before += [f"uint8_t {pointer(b)}out[gw::kLanes] = {{}};" for b in codes]
        after = [
            f"gw::pack{_code(b)}({pointer(b)}out, {_packed_at(b)}, count);"
            for b in codes
        ]
        kept = [target for target in pass_.stores if target.extent is Extent.KEPT]
        if kept:
            buffers = [target.arg for target in kept]
            before += [
                f"{_memory_type(b)} {pointer(b)}out[gw::kLanes];" for b in buffers
            ]
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
        return (
            ["int64_t place = kept.count;", *loop, "kept.count = place;"]
            if kept
            else loop
        )

    def _prepared(self, node: Node, pass_: Pass) -> list[str]:
        """Statements before a group's loop: unpack codes, draw, fetch cache lines."""
        if node.op in (Op.RANDOM, Op.BELOW):
            name = f"draw{node.arg}"
            call = f"gw::philox(draws, {node.arg}, (start + at) / gw::kLanes, {name});"
            return [f"uint32_t {name}[gw::kLanes];", call]
        if node.op is not Op.LOAD:
            return []
        buffer = node.arg
        if buffer.dtype in UNSIGNED:
            name = f"{pointer(buffer)}in"
            call = f"gw::unpack{_code(buffer)}({_packed_at(buffer)}, {name}, count);"
            return [f"uint8_t {name}[gw::kLanes];", call]
        if buffer not in self.fetches:
            return []
        where, ahead = self.fetches[buffer]
        return (
            [f"gw::prefetch_group({pointer(buffer)} + at{ahead});"]
            if where is pass_
            else []
        )

    def named(self, node: Node, name: str, text: str) -> str:
        return f"const {_value_type(node.dtype)} {name} = {text};"

    def expression(self, node: Node) -> str:
        plain = [self.names[source] for source in node.sources]
        match node.op:
            case Op.CONST:
                return self.literal(node.arg, node.dtype)
            case Op.LOAD:
                return _loaded(node.arg)
            case Op.RANDOM:
                return f"gw::uniform(draw{node.arg}[j])"
            case Op.BELOW:
                return f"gw::below(draw{node.arg}[j], {plain[0]})"
            case Op.LOAD_AT:
                return f"{pointer(node.arg)}[{plain[0]}]"
            case _:
                return self.applied(node, plain)

    def applied(self, node: Node, operands: Sequence[str]) -> str:
        if node.op is Op.OPERATOR:
            template: str = node.arg.template("cpp")
            return template.format(*map(grouped, operands))
        if node.op is not Op.CAST:
            return super().applied(node, operands)
        if node.dtype is FLOAT32:
            return f"static_cast<float>({operands[0]})"
        to = f"to_uint<{node.dtype.top}>" if node.dtype in UNSIGNED else "to_int"
        return f"gw::{to}({operands[0]})"

    def _lanes(self, node: Node) -> list[str]:
        fold: Fold = node.arg
        kind = _lane_type(node)
        name = self.lane(node)
        if fold.start == 0:
            return [f"{kind} {name}[gw::kLanes] = {{}};"]
        start = self.literal(fold.start, node.dtype)
        return [
            f"{kind} {name}[gw::kLanes];",
            f"for ({kind}& lane : {name}) lane = {start};",
        ]

    def _accumulated(self, node: Node) -> str:
        fold: Fold = node.arg
        value, keep = node.sources
        lane = f"{self.lane(node)}[j]"
        text = grouped(self.names[value])
        if fold.body.op is Op.ADD and any_order(fold):
            kind = _lane_type(node)
            chosen = (
                text
                if is_always(keep)
                else f"({grouped(self.names[keep])} ? {text} : 0)"
            )
            return f"{lane} += static_cast<{kind}>({chosen});"
        taken = self.fold(fold.body, lane, text)
        chosen = (
            taken
            if is_always(keep)
            else f"{grouped(self.names[keep])} ? {taken} : {lane}"
        )
        return f"{lane} = {chosen};"

    def _folded(self, node: Node) -> list[str]:
        fold: Fold = node.arg
        kind = _lane_type(node)
        result = _value_type(node.dtype)
        combine = (
            f"[]({kind} a, {kind} b) {{ return {self.fold(fold.body, 'a', 'b')}; }}"
        )
        return [
            f"const {result} {self.names[node]} =",
            f"    gw::folded<{result}>({self.lane(node)}, {combine});",
        ]

    def stored(self, target: Node) -> str:
        buffer = target.arg
        value = self.names[target.sources[0]]
        # blocks agree on a value a call, and one writes it
        if buffer.extent < Extent.ELEMENT:
            once = "if (block == 0) " if buffer.extent is Extent.CALL else ""
            return f"{once}*{pointer(buffer)} = {value};"
        if buffer.extent is Extent.KEPT or buffer.dtype in UNSIGNED:
            return (
                f"{pointer(buffer)}out[j] = "
                f"static_cast<{_memory_type(buffer)}>({value});"
            )
        return f"{pointer(buffer)}[at + j] = {value};"

    def literal(self, value: float, dtype: DType) -> str:
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


def _fetches(kernel: Kernel, order: tuple[Pass, ...]) -> dict[Buffer, tuple[Pass, str]]:
    """The pass in which each vector is fetched ahead, and how much farther than usual.

    The first pass over a block waits for memory and the others do not. So the last one,
    which mostly computes, fetches the next block for it, where the caches have room for
    two.
    """
    readers: dict[Buffer, list[Pass]] = {}
    for pass_ in order:
        for node in pass_.elements:
            if node.op is Op.LOAD and node.dtype is FLOAT32:
                readers.setdefault(node.arg, []).append(pass_)
    near = kernel.block <= _NEAR
    fetches = {}
    for buffer, reading in readers.items():
        is_ahead = near and len(reading) > 1
        fetches[buffer] = (reading[-1], " + n") if is_ahead else (reading[0], "")
    return fetches


def _appended(buffers: list[Buffer]) -> list[str]:
    """Puts a group's kept elements behind the elements that the thread has."""
    return [
        "const uint64_t mask = gw::mask_of(keep);",
        *(
            f"gw::append({pointer(b)} + place, {pointer(b)}out, mask, count);"
            for b in buffers
        ),
        "place += gw::count_of(mask);",
    ]


def _loaded(buffer: Buffer) -> str:
    if buffer.extent is not Extent.ELEMENT:
        return f"*{pointer(buffer)}"
    return (
        f"{pointer(buffer)}in[j]"
        if buffer.dtype in UNSIGNED
        else f"{pointer(buffer)}[at + j]"
    )


def _packed_at(buffer: Buffer) -> str:
    return f"{pointer(buffer)} + at / gw::kLanes * {buffer.dtype.group_bytes}"


def _code(buffer: Buffer) -> str:
    """How codes of this type are packed, as the end of the name of what packs them."""
    return "_by_five" if buffer.dtype is DType.UINT_3 else f"<{buffer.dtype.bits}>"


def _value_type(dtype: DType) -> str:
    return {FLOAT32: "float", BOOL: "bool"}.get(dtype, "int32_t")


def _memory_type(buffer: Buffer) -> str:
    return {FLOAT32: "float", INT32: "int32_t"}.get(buffer.dtype, "uint8_t")


def _lane_type(node: Node) -> str:
    return "double" if sums_floats(node.arg) else _value_type(node.arg.body.dtype)
