"""The interpreter: the meaning of every operation; other back ends must agree.

Legend: B blocks, L elements a block, 64 lanes. A value a call has shape (1, 1), one a
block (B, 1), one an element (B, L); elements behind the gradient's end are zeros that
no reduction counts and no condition keeps.

Order of a reduction: lane j takes the elements j, j + 64, j + 128, ... of its block in
turn, then
the lanes are halved: lane j with lane j + 32, and so on down to one. Sums of floats are
made in double precision and rounded once. So results do not depend on threads or on the
width of vectors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract.payload import Payload
from ..kernels.codes import packed_codes, unpacked_codes
from .ir import FLOAT32, UNSIGNED, DType, Extent, Fold, Kernel, Node, Op, neutral, walk
from .philox import below, uniform

LANES = 64


@dataclass(frozen=True)
class Draws:
    """The random numbers that a call sees, by ``key`` and ``step``."""

    key: int = 0
    step: int = 0


class Call(NamedTuple):
    """One tensor's part in a run: operands by buffer name, length, random numbers.

    Operands are float32 vectors that lie in one piece, and bytes for packed fields, all
    on one device. Those that ``operands`` lacks are fields of ``payload``.
    """

    operands: Mapping[str, Tensor]
    numel: int
    draws: Draws = Draws()
    payload: Payload | None = None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every operand by its buffer's name."""
        if self.payload is None:
            return self.operands
        fields = {field.name: self.payload[field.name] for field in self.payload.format}
        return {**fields, **self.operands}

    @property
    def device(self) -> torch.device:
        """The device on which all operands lie."""
        return next(iter(self.operands.values())).device

    @property
    def on_cpu(self) -> bool:
        """Whether all operands lie on the CPU."""
        return self.device.type == "cpu"

    def beside(self, operands: Mapping[str, Tensor]) -> Call:
        """The call with some operands more."""
        return self._replace(operands={**self.operands, **operands})

    def words(self, kernel: Kernel) -> list[int]:
        """The numbers of csrc/blocks.h's Tensor, whose addresses need no views."""
        words = [self.numel, self.draws.key, self.draws.step, 0]
        if self.payload is None:
            words += [
                self.operands[buffer.name].data_ptr() for buffer in kernel.buffers
            ]
            return words
        base = self.payload.content.data_ptr()
        places = self.payload.format.places
        for buffer in kernel.buffers:
            operand = self.operands.get(buffer.name)
            words.append(
                base + places[buffer.name][0] if operand is None else operand.data_ptr()
            )
        return words


@dataclass(frozen=True)
class _Call:
    operands: Mapping[str, Tensor]
    numel: int
    block: int
    draws: Draws
    device: torch.device

    @property
    def length(self) -> int:
        """L: elements a block, as short as one block may be."""
        return min(self.block, -(-self.numel // LANES) * LANES)

    @property
    def num_blocks(self) -> int:
        return -(-self.numel // self.block)

    @property
    def place_BL(self) -> Tensor:
        place = torch.arange(self.num_blocks * self.length, device=self.device)
        return place.view(-1, self.length)

    @property
    def valid_BL(self) -> Tensor:
        return self.place_BL < self.numel

    def elements(self, value: Tensor) -> Tensor:
        """One value for each element of the gradient."""
        return value.expand(self.num_blocks, self.length).reshape(-1)[: self.numel]


def run(
    kernel: Kernel, operands: Mapping[str, Tensor], numel: int, draws: Draws
) -> int:
    """Carries a kernel out: ``operands`` by buffer name, unsigned ones as packed bytes.

    Returns how many elements were kept, which lie in the front of their buffers; 0
    where the kernel keeps none.
    """
    if numel == 0:
        return 0
    device = next(iter(operands.values())).device
    call = _Call(operands, numel, kernel.block, draws, device)
    values: dict[Node, Tensor] = {}
    # All values first: a kernel may write the buffer that it reads.
    for node in walk(kernel.stores):
        if node.op is not Op.STORE:
            values[node] = _value(node, [values[s] for s in node.sources], call)
    keep = None if kernel.keep is None else call.elements(values[kernel.keep])
    for target in kernel.stores:
        value = values[target.sources[0]]
        if target.extent is Extent.KEPT:
            kept_K = call.elements(value)[keep]
            operands[target.arg.name][: kept_K.numel()] = kept_K
        else:
            _write(target, value, call)
    return 0 if keep is None else int(keep.sum())


def fold_constant(node: Node) -> bool | int | float:
    """The value of an operation on constants."""
    sources = [
        torch.tensor([[s.arg]], dtype=torch_dtype(s.dtype)) for s in node.sources
    ]
    value = applied(node, *sources).item()
    assert isinstance(value, bool | int | float)
    return value


def torch_dtype(dtype: DType) -> torch.dtype:
    """The dtype in which the interpreter computes with values of a type."""
    if dtype is FLOAT32:
        return torch.float32
    return torch.bool if dtype is DType.BOOL else torch.int32


def _value(node: Node, sources: list[Tensor], call: _Call) -> Tensor:
    match node.op:
        case Op.CONST:
            dtype = torch_dtype(node.dtype)
            return torch.full((1, 1), node.arg, dtype=dtype, device=call.device)
        case Op.LOAD:
            return _read(node, call)
        case Op.SIZE:
            return call.valid_BL.sum(1, keepdim=True).int()
        case Op.LOAD_AT:
            return call.operands[node.arg.name][sources[0].long()]
        case Op.PLACE:
            return call.place_BL.int()
        case Op.RANDOM:
            return uniform(call.place_BL, call.draws.key, call.draws.step, node.arg)
        case Op.BELOW:
            return below(
                sources[0], call.place_BL, call.draws.key, call.draws.step, node.arg
            )
        case Op.REDUCE:
            value, keep = (s.expand(call.num_blocks, call.length) for s in sources)
            return _reduced(node.arg, value, keep & call.valid_BL)
        case _:
            return applied(node, *sources)


def _cast(node: Node, value: Tensor) -> Tensor:
    if node.dtype is FLOAT32:
        return value.float()
    low = 0
    high = node.dtype.top
    if node.dtype not in UNSIGNED:
        low = -(2**31)
        high = 2**31 - 1
    if value.dtype is torch.float32:
        value = value.double().nan_to_num(nan=0.0).clamp(low, high)
    return value.to(torch.int64).clamp(low, high).int()


def canonical(value: Tensor) -> Tensor:
    """``value`` with one zero and one NaN, whatever operations they came from."""
    if not value.dtype.is_floating_point:
        return value
    return torch.where(value != value, torch.nan, value + 0.0)


class Spelling(NamedTuple):
    """An operation of elements: its definition in torch, and its text elsewhere."""

    interp: Callable[..., Tensor]
    cpp: str
    triton: str = ""
    """Empty where it is that of C++."""


SPELLINGS: dict[Op, Spelling] = {
    Op.ADD: Spelling(operator.add, "{} + {}"),
    Op.SUB: Spelling(operator.sub, "{} - {}"),
    Op.MUL: Spelling(operator.mul, "{} * {}"),
    Op.DIV: Spelling(operator.truediv, "{} / {}", "tl.div_rn({}, {})"),
    Op.SMALLER: Spelling(
        lambda a, b: torch.where((a < b) | (a != a), a, b),
        "gw::smaller({}, {})",
        "gw.smaller({}, {})",
    ),
    Op.GREATER: Spelling(
        lambda a, b: torch.where((a > b) | (a != a), a, b),
        "gw::greater({}, {})",
        "gw.greater({}, {})",
    ),
    Op.NEG: Spelling(operator.neg, "-({})", "-{}"),
    Op.ABS: Spelling(torch.abs, "gw::abs({})", "tl.abs({})"),
    Op.FLOOR: Spelling(torch.floor, "gw::floor({})", "gw.floored({})"),
    Op.ROUND: Spelling(torch.round, "gw::round({})", "gw.rounded({})"),
    # In float32 torch's root is off by a last place.
    Op.SQRT: Spelling(
        lambda a: a.double().sqrt().float(), "gw::sqrt({})", "tl.sqrt_rn({})"
    ),
    Op.FINITE: Spelling(torch.isfinite, "gw::finite({})", "gw.finite({})"),
    Op.CANONICAL: Spelling(canonical, "gw::canonical({})", "gw.canonical({})"),
    Op.LESS: Spelling(operator.lt, "{} < {}"),
    Op.AT_MOST: Spelling(operator.le, "{} <= {}"),
    Op.EQUAL: Spelling(operator.eq, "{} == {}"),
    Op.AND: Spelling(operator.and_, "{} & {}"),
    Op.OR: Spelling(operator.or_, "{} | {}"),
    Op.NOT: Spelling(operator.invert, "!{}", "~{}"),
    Op.SHL: Spelling(lambda a, b: a << (b & 31), "{} << ({} & 31)"),
    Op.SHR: Spelling(lambda a, b: a >> (b & 31), "{} >> ({} & 31)"),
    Op.WHERE: Spelling(torch.where, "{} ? {} : {}", "tl.where({}, {}, {})"),
}


def applied(node: Node, *operands: Tensor) -> Tensor:
    """An operation of elements by its definition."""
    if node.op is Op.CAST:
        return _cast(node, *operands)
    definition = (
        node.arg.interpreted if node.op is Op.OPERATOR else SPELLINGS[node.op].interp
    )
    result: Tensor = definition(*operands)
    return result


def _reduced(fold: Fold, value_BL: Tensor, keep_BL: Tensor) -> Tensor:
    """One value a block, in the order that this module's docstring fixes."""
    start = torch.full((), fold.start, dtype=value_BL.dtype, device=value_BL.device)
    rows = torch.where(keep_BL, value_BL, start).view(value_BL.shape[0], -1, LANES)
    if neutral(fold.body) is None:
        keep = keep_BL.view(rows.shape)
        lanes = start.expand(rows[:, 0].shape)
        for row in range(rows.shape[1]):
            taken = _combined(fold.body, lanes, rows[:, row])
            lanes = torch.where(keep[:, row], taken, lanes)
        return canonical(_halved(lanes, lambda a, b: _combined(fold.body, a, b)))
    if fold.body.op is Op.ADD:
        wide = rows.double() if fold.body.dtype is FLOAT32 else rows.long()
        lanes = wide.cumsum(1)[:, -1]  # in turn, unlike sum
        return canonical(_halved(lanes, torch.add).to(value_BL.dtype))
    extreme = torch.amin if fold.body.op is Op.SMALLER else torch.amax
    return canonical(extreme(rows, (1, 2))[:, None])


def _halved(lanes: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = combine(lanes[:, :half], lanes[:, half:])
    return lanes


def _combined(body: Node, a: Tensor, b: Tensor) -> Tensor:
    """``body`` with its two operands filled in."""
    operands = (node for node in walk([body]) if node.op is Op.ARG)
    return evaluated(
        body, {operand: (a, b)[operand.arg] for operand in operands}, like=a
    )


def evaluated(
    body: Node, operands: Mapping[Node, Tensor], like: Tensor | None = None
) -> Tensor:
    """An expression of these operands alone.

    Each is a tensor of one shape (``like`` if there is none).
    """
    values = dict(operands)
    like = next(iter(operands.values())) if like is None else like
    for node in walk([body]):
        if node.op is Op.CONST:
            values[node] = torch.full_like(
                like, node.arg, dtype=torch_dtype(node.dtype)
            )
        elif node not in values:
            values[node] = applied(node, *(values[s] for s in node.sources))
    return values[body]


def _read(node: Node, call: _Call) -> Tensor:
    memory = call.operands[node.arg.name]
    if node.arg.extent < Extent.ELEMENT:
        return memory.to(torch_dtype(node.dtype)).view(-1, 1)
    if node.dtype in UNSIGNED:
        memory = from_bytes(memory, node.dtype, call.numel)
    whole = torch.zeros(
        call.num_blocks * call.length, dtype=memory.dtype, device=call.device
    )
    whole[: call.numel] = memory
    return whole.view(call.num_blocks, call.length)


def _write(target: Node, value: Tensor, call: _Call) -> None:
    memory = call.operands[target.arg.name]
    if target.arg.extent < Extent.ELEMENT:
        count = 1 if target.arg.extent is Extent.CALL else call.num_blocks
        memory.copy_(value.expand(count, 1).reshape(-1))
        return
    flat_N = call.elements(value)
    memory.copy_(to_bytes(flat_N, target.dtype) if target.dtype in UNSIGNED else flat_N)


def to_bytes(codes_N: Tensor, dtype: DType) -> Tensor:
    """Codes of an unsigned type as they travel: ``dtype.packed_bytes(N)`` uint8."""
    if dtype is DType.UINT_3:
        return packed_by_five(codes_N)
    return packed_codes(codes_N, int(dtype.bits))


def from_bytes(bytes_U: Tensor, dtype: DType, numel: int) -> Tensor:
    """The first ``numel`` codes of an unsigned type in these bytes, as int32."""
    if dtype is DType.UINT_3:
        return unpacked_by_five(bytes_U, numel)
    return unpacked_codes(bytes_U, int(dtype.bits), numel)


def packed_by_five(codes_N: Tensor) -> Tensor:
    """Codes 0 to 2, five a byte.

    Byte b of a group of 64 is the sum of code[b + 13 i] * 3^i.

    Adjacent codes go to adjacent bytes, so a vector packs them all at once. Code 64 is
    0; the last group of n < 13 codes has n bytes.
    """
    num_groups = -(-codes_N.numel() // LANES)
    whole = codes_N.new_zeros(num_groups * LANES)
    whole[: codes_N.numel()] = codes_N
    padded = torch.nn.functional.pad(whole.view(num_groups, LANES), (0, 1))
    weights = 3 ** torch.arange(5, dtype=torch.int32, device=codes_N.device)
    digits = padded.view(num_groups, 5, 13) * weights[:, None]
    bytes_U = digits.sum(1).to(torch.uint8).reshape(-1)
    return bytes_U[: DType.UINT_3.packed_bytes(codes_N.numel())]


def unpacked_by_five(bytes_U: Tensor, numel: int) -> Tensor:
    """The first ``numel`` codes (int32) that ``packed_by_five`` made into bytes."""
    num_groups = -(-numel // LANES)
    padded = torch.zeros(num_groups * 13, dtype=torch.int32, device=bytes_U.device)
    padded[: bytes_U.numel()] = bytes_U.int()
    weights = 3 ** torch.arange(5, dtype=torch.int32, device=bytes_U.device)
    codes = padded.view(num_groups, 1, 13) // weights[:, None] % 3
    return codes.reshape(num_groups, LANES + 1)[:, :LANES].reshape(-1)[:numel]
