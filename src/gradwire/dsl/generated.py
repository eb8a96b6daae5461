"""Every generated compressor: the methods of ``contract.Compressor``, by four kernels.

Kernels take float32 vectors that lie in one piece. Gradients of another dtype are
converted to it first, sums and residuals of another dtype are computed by torch from
what was sent.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from ..contract import Compressor, Memory, Residual, State
from ..contract.payload import Field, Format, Payload
from ..contract.spec import TensorSpec, check_gradient
from ..contract.thread_scratch import thread_scratch
from ..errors import invalid
from ..kernels import select
from .build import Built
from .interp import Call, Draws, to_bytes
from .ir import FLOAT32, INT32, UNSIGNED, Buffer, DType, Extent, Kernel, Op
from .rewrite import OUT, Pick, StageKernels, Traced, partials

# ---- The layout of a program's fields: a payload's format, and what its size tells ---
#
# Legend: N elements of the gradient, K kept ones. Fields of kept elements lie behind
# all others, in order of the program; how many entries they have follows from the
# payload's size alone.

MEMORY: dict[DType, torch.dtype] = {FLOAT32: torch.float32, INT32: torch.int32}
"""The dtypes of values that are not packed; unsigned ones lie in bytes."""


def most_kept(program: Traced, numel: int) -> int:
    """K at most: what ``top`` leaves of N elements, or all of them."""
    if program.keep is None or not numel:
        return 0
    return numel if program.top is None else max(1, round(program.top * numel))


@lru_cache(maxsize=4096)
def program_format(program: Traced, numel: int, num_kept: int) -> Format:
    """The format of a payload of ``numel`` elements with ``num_kept`` kept ones.

    Raises ``InvalidSetting`` where an int32 cannot tell the elements' places.
    """
    if numel >= 2**31 and (program.keep is not None or program.stages):
        raise invalid(
            f"{program.name} gradient",
            f"{numel} elements",
            "below 2**31",
            "cut it into chunks",
        )
    counts = {
        Extent.CALL: min(numel, 1),
        Extent.BLOCK: -(-numel // program.block),
        Extent.ELEMENT: numel,
        Extent.KEPT: num_kept,
    }
    return Format(
        tuple(_field(buffer, counts[buffer.extent]) for buffer in program.buffers)
    )


def num_received(program: Traced, numel: int, size_bytes: int) -> int | None:
    """K of a payload of so many bytes; None if no payload is that long."""
    num_kept = most_kept(program, numel)
    if num_kept:
        entry_bytes = sum(buffer.dtype.bits for buffer in program.kept) / 8
        first = program_format(program, numel, 0).size_bytes
        # Each field may be up to a group of codes longer than its entries' bits: never
        # shorter.
        num_kept = min(max(0, int((size_bytes - first) / entry_bytes) + 1), num_kept)
    while num_kept and program_format(program, numel, num_kept).size_bytes > size_bytes:
        num_kept -= 1
    fits = program_format(program, numel, num_kept).size_bytes == size_bytes
    return num_kept if fits else None


def _field(buffer: Buffer, count: int) -> Field:
    if buffer.dtype not in UNSIGNED:
        return Field(buffer.name, MEMORY[buffer.dtype], count)
    packed = buffer.extent >= Extent.ELEMENT
    return Field(
        buffer.name, torch.uint8, buffer.dtype.packed_bytes(count) if packed else count
    )


# ---- Steps between kernels: stages' scalars are made, and payloads filled ------------
#
# Legend: N elements of the gradient, S of a sample, B blocks.


@dataclass(frozen=True, eq=False)
class Kernels:
    """The forms of a program under given settings, and what runs them.

    Of kept elements ``decode`` and ``merge`` are one kernel, which gives their values.
    """

    traced: Traced
    encode: Kernel
    encode_with_residual: Kernel
    decode: Kernel
    merge: Kernel
    stages: tuple[StageKernels, ...]
    built: Built

    @cached_property
    def draws(self) -> bool:
        """Whether encoding needs random numbers."""
        return self.encode.draws or any(stage.plain.draws for stage in self.stages)


def scratch(
    name: str, dtype: torch.dtype, lengths: Sequence[int], device: torch.device
) -> list[Tensor]:
    """Undefined vectors of ``thread_scratch``: the name's next call overwrites them."""
    whole = thread_scratch(f"compll {name}", sum(lengths), dtype, device)
    stops = accumulate(lengths)
    return [
        whole[stop - numel : stop] for numel, stop in zip(lengths, stops, strict=True)
    ]


def run_forms(
    built: Built, plain: Kernel, with_residual: Kernel, calls: Sequence[Call]
) -> list[int]:
    """One run for the calls that have a residual, and one for the others.

    Returns how many elements each call kept; nothing is run for an empty gradient.
    """
    kept = [0] * len(calls)
    live = [
        (i, "residual" in call.operands) for i, call in enumerate(calls) if call.numel
    ]
    for kernel, has_residual in ((plain, False), (with_residual, True)):
        places = [i for i, has in live if has is has_residual]
        if places:
            counts = built.run_many(kernel, [calls[i] for i in places])
            for place, count in zip(places, counts, strict=True):
                kept[place] = count
    return kept


# ---- stages --------------------------------------------------------------------------


def with_scalars(made: Kernels, calls: Sequence[Call]) -> list[Call]:
    """The calls with what the stages make of their gradients.

    An empty one needs nothing.
    """
    known = [call for call in calls if call.numel]
    for stage in made.stages if known else ():
        results = (_picked if stage.fold is None else _combined)(
            made.built, stage, known
        )
        known = [
            call.beside(scalars) for call, scalars in zip(known, results, strict=True)
        ]
    each = iter(known)
    return [next(each) if call.numel else call for call in calls]


def _picked(
    built: Built, made: StageKernels, calls: Sequence[Call]
) -> list[dict[str, Tensor]]:
    picks = {
        stage.result.name: stage.how
        for stage in made.stages
        if isinstance(stage.how, Pick)
    }
    how = next(iter(picks.values()))
    counts = [how.draw.count(call.numel) for call in calls]
    device = calls[0].device
    samples = scratch("sample", torch.float32, counts, device)
    drawing = [
        call.beside(
            {
                "population": _single(call.numel, torch.int32, device),
                "num_drawn": _single(count, torch.int32, device),
                "sample": sample_S,
            }
        )._replace(numel=count)
        for call, count, sample_S in zip(calls, counts, samples, strict=True)
    ]
    run_forms(built, made.plain, made.with_residual, drawing)
    return [
        {name: _picked_of(sample_S, how, call.numel) for name, how in picks.items()}
        for call, sample_S in zip(calls, samples, strict=True)
    ]


def _picked_of(sample_S: Tensor, how: Pick, numel: int) -> Tensor:
    """The element that is picked, as a vector of one; NaN ranks above infinity."""
    rank = how.place(numel)
    if how.descending:
        rank = sample_S.numel() - 1 - rank
    if sample_S.is_cpu:  # numpy's selection takes a fifth of the time of torch's
        return torch.from_numpy(np.partition(sample_S.numpy(), rank)[rank : rank + 1])
    return sample_S.kthvalue(rank + 1).values.view(1)


def _combined(
    built: Built, made: StageKernels, calls: Sequence[Call]
) -> list[dict[str, Tensor]]:
    fold = made.fold
    assert fold is not None
    of_blocks = [partials(stage) for stage in made.stages]
    results = [stage.result.name for stage in made.stages]
    counts = [-(-call.numel // made.plain.block) for call in calls]
    values = [
        _vectors(made, count, call) for count, call in zip(counts, calls, strict=True)
    ]
    filling = [
        call.beside(dict(zip(of_blocks, vectors, strict=True)))
        for call, vectors in zip(calls, values, strict=True)
    ]
    run_forms(built, made.plain, made.with_residual, filling)
    names = (*of_blocks, *results)
    # one value is its own fold
    while left := [i for i, count in enumerate(counts) if count > 1]:
        folding = []
        for i in left:
            length = counts[i]
            counts[i] = -(-counts[i] // fold.block)
            old = values[i]
            values[i] = _vectors(made, counts[i], calls[i])
            folding.append(
                Call(dict(zip(names, (*old, *values[i]), strict=True)), length)
            )
        built.run_many(fold, folding)
    return [dict(zip(results, vectors, strict=True)) for vectors in values]


def _vectors(made: StageKernels, count: int, call: Call) -> list[Tensor]:
    """Room for ``count`` values of each stage."""
    device = call.device
    kinds = (MEMORY[stage.result.dtype] for stage in made.stages)
    return [torch.empty(count, dtype=kind, device=device) for kind in kinds]


# ---- payloads ------------------------------------------------------------------------


def encode_dense(
    made: Kernels, calls: Sequence[Call], buffers: Sequence[Tensor | None]
) -> list[Payload]:
    """The payloads, in ``buffers`` where they are given; residuals are updated."""
    code = made.traced.coding
    payloads = []
    for call, buffer in zip(calls, buffers, strict=True):
        format = program_format(made.traced, call.numel, 0)
        payloads.append(
            Payload.empty(format, buffer if code is None else None, call.device)
        )
    filling = [
        call._replace(payload=payload)
        for call, payload in zip(calls, payloads, strict=True)
    ]
    run_forms(made.built, made.encode, made.encode_with_residual, filling)
    if code is None:
        return payloads
    return [
        code.encode(plain, Payload.empty(code.format(plain.format), to, call.device))
        for plain, call, to in zip(payloads, calls, buffers, strict=True)
    ]


def _in_front(format: Format, buffer: Memory, device: torch.device) -> Payload:
    """A payload to be filled, in the front of ``buffer`` or in a new one."""
    return Payload.empty(
        format, None if buffer is None else buffer[: format.size_bytes], device
    )


# ---- Kept elements become a payload, and a payload a gradient again ------------------
#
# Kernels append what they keep to memory that has room for all; once its number is
# known it is cut to the largest, if there are too many, and put where the payload's
# size lets it lie.
#
# Legend: N elements of the gradient, C that a filter kept, K of them sent.


def encode_kept(
    made: Kernels, calls: Sequence[Call], buffers: Sequence[Tensor | None]
) -> list[Payload]:
    """The payloads, in the front of ``buffers`` where they are given.

    Residuals are updated.
    """
    memory = _memory(made.traced, calls)
    heads = [  # the fields that lie before the kept ones
        _in_front(program_format(made.traced, call.numel, 0), buffer, call.device)
        for call, buffer in zip(calls, buffers, strict=True)
    ]
    keeping = [
        call.beside(room)._replace(payload=head)
        for call, room, head in zip(calls, memory, heads, strict=True)
    ]
    counts = run_forms(made.built, made.encode, made.encode_with_residual, keeping)
    kept = [
        {name: full[:count] for name, full in room.items()}
        for room, count in zip(memory, counts, strict=True)
    ]
    sent = _cut(
        made.traced, kept, [most_kept(made.traced, call.numel) for call in calls]
    )
    rows = zip(keeping, sent, buffers, strict=True)
    return [_payload(made, call, elements, buffer) for call, elements, buffer in rows]


def _memory(program: Traced, calls: Sequence[Call]) -> list[dict[str, Tensor]]:
    """The memory of each call's kept elements, by buffer name."""
    if not calls:
        return []
    device = calls[0].device
    lengths = [call.numel for call in calls]
    kept = (*program.kept, *program.extra)
    columns = [
        scratch(b.name, MEMORY.get(b.dtype, torch.uint8), lengths, device) for b in kept
    ]
    return [
        {b.name: column for b, column in zip(kept, row, strict=True)}
        for row in zip(*columns, strict=True)
    ]


def _payload(
    made: Kernels, call: Call, kept: dict[str, Tensor], buffer: Memory
) -> Payload:
    """The payload of these elements, which are no more than may be sent."""
    program = made.traced
    head = call.payload
    assert head is not None
    count = kept[program.indices.name].numel()
    payload = _in_front(program_format(program, call.numel, count), buffer, call.device)
    if head.size_bytes and buffer is None:
        payload.content[: head.size_bytes].copy_(head.content)
    for field in program.kept if count else ():
        own_K = kept[field.name]
        is_coded = field.dtype in UNSIGNED and field.dtype is not DType.UINT8
        packed = to_bytes(own_K.int(), field.dtype) if is_coded else own_K
        payload[field.name].copy_(packed)
    residual_N = call.operands.get("residual")
    if program.top is not None and residual_N is not None and count:
        value_K = _values(made, payload)
        # where it is not finite nothing is lost
        left_K = kept[program.ranked.name] - value_K
        taken_K = torch.where(left_K.isfinite(), value_K, 0.0)
        select.scatter_add(payload[program.indices.name], taken_K, residual_N, -1.0)
    return payload


def _cut(
    program: Traced, kept: list[dict[str, Tensor]], mosts: Sequence[int]
) -> list[dict[str, Tensor]]:
    """The largest that each call kept, or all if no more than may be sent."""
    over = [
        i
        for i, most in enumerate(mosts)
        if kept[i][program.indices.name].numel() > most
    ]
    ranked = [kept[i][program.ranked.name] for i in over]
    largest = [
        torch.empty_like(own_C[: mosts[i]])
        for i, own_C in zip(over, ranked, strict=True)
    ]
    places = [torch.empty_like(own_K, dtype=torch.int32) for own_K in largest]
    select.topk_many(ranked, places, largest, [None] * len(over))
    for i, places_K, largest_K in zip(over, places, largest, strict=True):
        sent = {
            name: largest_K
            if name == program.ranked.name
            else memory.index_select(0, places_K)
            for name, memory in kept[i].items()
        }
        kept[i] = sent
    return kept


def merge_kept(made: Kernels, payload: Payload, sum_N: Tensor, scale: float) -> None:
    """Adds ``scale`` times each kept value at its place.

    ``sum_N`` is contiguous float32.
    """
    indices_K = payload[made.traced.indices.name]
    select.scatter_add(indices_K, _values(made, payload), sum_N, scale)


def _values(made: Kernels, payload: Payload) -> Tensor:
    """The values that the kept elements decode to."""
    decoded = made.decode.stores[0].sources[0]
    if (
        decoded.op is Op.LOAD
        and decoded.dtype is FLOAT32
        and decoded.arg.extent is Extent.ELEMENT
    ):
        return payload[decoded.arg.name]
    count = payload[made.traced.indices.name].numel()
    (out_K,) = scratch("out", torch.float32, [count], payload.content.device)
    made.built.run_many(
        made.decode, (Call({OUT.name: out_K}, count, Draws(), payload),)
    )
    return out_K


# ---- the compressor ------------------------------------------------------------------


_NEXT_STEP = torch.tensor([0, 1], device="cpu")


class Generated(Compressor):
    """A compressor whose work is done by ``kernels()``."""

    @abstractmethod
    def kernels(self) -> Kernels:
        """The kernels under these settings."""

    def for_world(self, world: int, rank: int = 0) -> Compressor:
        """A program with a ``seed`` draws other numbers on each rank.

        So the mean of W unbiased payloads has 1/W of the variance of one.
        """
        return _of_rank(self, rank) if rank and hasattr(self, "seed") else self

    def init(self, spec: TensorSpec) -> State:
        """(stream, step) if random numbers are drawn.

        C++ is compiled now and not in the first step, where the spec's device is the
        CPU.
        """
        made = self.kernels()
        cpp = spec.device == "cpu"
        if cpp:
            made.built.library()
            for buffer in made.traced.buffers:
                if buffer.coder is not None:
                    buffer.coder.library()
        stream = crc32(spec.name.encode())
        return torch.tensor([stream, 0], device="cpu") if made.draws else None

    def format(self, spec: TensorSpec) -> Format:
        traced = self.kernels().traced
        format = program_format(traced, spec.numel, most_kept(traced, spec.numel))
        return format if traced.coding is None else traced.coding.format(format)

    def holding(self, spec: TensorSpec, num_kept: int) -> Format:
        """The layout of a payload of so many kept elements, or of the most."""
        traced = self.kernels().traced
        return program_format(
            traced, spec.numel, min(num_kept, most_kept(traced, spec.numel))
        )

    def received(self, spec: TensorSpec, size_bytes: int) -> Format:
        form = _received(self.kernels(), spec.numel, size_bytes)
        if form is None:
            raise self.no_such_size(spec, size_bytes)
        return form

    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Residual = None,
        buffer: Memory = None,
    ) -> tuple[Payload, State]:
        if residual_N is None or _fits(residual_N):
            (sent,) = self._encode((state,), (grad_N,), (residual_N,), (buffer,))
            return sent
        whole_N = _checked(grad_N, residual_N) + residual_N
        if self.kernels().traced.reads_latest:
            near_N = residual_N.to(torch.float32).contiguous()
            ((payload, state),) = self._encode(
                (state,), (grad_N,), (near_N,), (buffer,)
            )
        else:
            ((payload, state),) = self._encode((state,), (whole_N,), (None,), (buffer,))
        left_N = whole_N - self.decode(payload, torch.empty_like(whole_N))
        residual_N.copy_(torch.where(left_N.isfinite(), left_N, residual_N))
        return payload, state

    def encode_many(
        self,
        states: Sequence[State],
        grads: Sequence[Tensor],
        residuals: Sequence[Tensor | None] | None = None,
        buffers: Sequence[Tensor | None] | None = None,
    ) -> list[tuple[Payload, State]]:
        nothing = [None] * len(grads)
        residuals = residuals or nothing
        if all(residual_N is None or _fits(residual_N) for residual_N in residuals):
            return self._encode(states, grads, residuals, buffers or nothing)
        return super().encode_many(states, grads, residuals, buffers)

    def decode(self, payload: Payload, out_N: Tensor, *, scale: float = 1.0) -> Tensor:
        self.decode_many((payload,), (out_N,), scale=scale)
        return out_N

    def decode_many(
        self, payloads: Sequence[Payload], outs: Sequence[Tensor], *, scale: float = 1.0
    ) -> None:
        made = self.kernels()
        whole = [
            out_N if _fits(out_N) else torch.empty_like(out_N, dtype=torch.float32)
            for out_N in outs
        ]
        for payload, out_N in zip(payloads, outs, strict=True):
            _check_matching(made, payload, out_N)
        if made.traced.keep is None:
            made.built.run_many(
                made.decode, _decoding(made, "out", payloads, whole, scale)
            )
        else:
            for payload, whole_N in zip(payloads, whole, strict=True):
                merge_kept(made, payload, whole_N.zero_(), scale)
        for out_N, whole_N in zip(outs, whole, strict=True):
            if out_N is not whole_N:
                out_N.copy_(whole_N)

    def merge(self, payload: Payload, sum_N: Tensor, *, scale: float = 1.0) -> None:
        self.merge_many((payload,), (sum_N,), scale=scale)

    def merge_many(
        self, payloads: Sequence[Payload], sums: Sequence[Tensor], *, scale: float = 1.0
    ) -> None:
        made = self.kernels()
        for payload, sum_N in zip(payloads, sums, strict=True):
            _check_matching(made, payload, sum_N)
        if not all(map(_fits, sums)):
            for payload, sum_N in zip(payloads, sums, strict=True):
                sum_N.add_(self.decode(payload, torch.empty_like(sum_N), scale=scale))
        elif made.traced.keep is not None:
            for payload, sum_N in zip(payloads, sums, strict=True):
                merge_kept(made, payload, sum_N, scale)
        else:
            made.built.run_many(
                made.merge, _decoding(made, "sum", payloads, sums, scale)
            )

    def entries(self, payload: Payload) -> tuple[Tensor, Tensor]:
        made = self.kernels()
        if made.traced.keep is None:
            return super().entries(payload)
        indices_K = payload[made.traced.indices.name]
        if not indices_K.numel():
            return indices_K, indices_K.to(torch.float32)
        return indices_K, _values(made, payload)  # a reused buffer

    def _encode(
        self,
        states: Sequence[State],
        grads: Sequence[Tensor],
        residuals: Sequence[Tensor | None],
        buffers: Sequence[Tensor | None],
    ) -> list[tuple[Payload, State]]:
        made = self.kernels()
        calls = [
            self._call(state, grad_N, residual_N)
            for state, grad_N, residual_N in zip(states, grads, residuals, strict=True)
        ]
        if made.stages:
            calls = with_scalars(made, calls)
        encoded = encode_dense if made.traced.keep is None else encode_kept
        payloads = encoded(made, calls, buffers)
        later = (state if state is None else state + _NEXT_STEP for state in states)
        return list(zip(payloads, later, strict=True))

    def _call(self, state: State, grad_N: Tensor, residual_N: Residual) -> Call:
        """The call that encodes a gradient: operands, length and random numbers."""
        numel = _checked(grad_N, residual_N).numel()
        fits = grad_N if _fits(grad_N) else grad_N.to(torch.float32).contiguous()
        operands = {"gradient": fits}
        if residual_N is not None:
            operands["residual"] = residual_N
        return Call(operands, numel, self._draws(state))

    def _draws(self, state: State) -> Draws:
        """The numbers of this call: its key is ``seed`` and the tensor's stream."""
        stream, step = (0, 0) if state is None else state.tolist()
        return Draws((getattr(self, "seed", 0) & 0xFFFFFFFF) + (stream << 32), step)


@lru_cache(maxsize=4096)
def _of_rank(codec: Any, rank: int) -> Compressor:
    """The program with its own seed: an odd multiplier makes all ranks' differ."""
    program: Compressor = replace(
        codec, seed=(codec.seed + rank * 0x9E3779B9) & 0xFFFFFFFF
    )
    return program


def _fits(vector_N: Tensor) -> bool:
    return vector_N.dtype == torch.float32 and vector_N.is_contiguous()


def _checked(grad_N: Tensor, residual_N: Residual) -> Tensor:
    """The gradient; refuses what a kernel would read beyond: it trusts lengths."""
    check_gradient(grad_N)
    if residual_N is not None and (
        residual_N.shape != grad_N.shape or residual_N.device != grad_N.device
    ):
        raise invalid(
            "residual",
            f"{tuple(residual_N.shape)} on {residual_N.device}",
            f"{tuple(grad_N.shape)} on {grad_N.device}",
            "begin with zeros like the gradient",
        )
    return grad_N


@lru_cache(maxsize=4096)
def _received(made: Kernels, numel: int, size_bytes: int) -> Format | None:
    """The layout of a payload of so many bytes.

    None if no gradient of that length has one.
    """
    code = made.traced.coding
    if code is not None:
        form: Format | None = code.received(
            program_format(made.traced, numel, 0), size_bytes
        )
        return form
    num_kept = num_received(made.traced, numel, size_bytes)
    return None if num_kept is None else program_format(made.traced, numel, num_kept)


def _check_matching(made: Kernels, payload: Payload, out_N: Tensor) -> None:
    """Refuses a payload of another length, program or device than its target."""
    numel = out_N.numel()
    buffer = payload.buffer
    if buffer is None or buffer.device != out_N.device:
        given = "size only" if buffer is None else f"on {buffer.device}"
        raise invalid(
            "payload", given, f"on {out_N.device}", "decode it on its own device"
        )
    form = payload.format
    known = _received(made, numel, form.size_bytes)
    if known is not form and known != form:
        raise invalid(
            "payload",
            payload,
            f"one of {numel} elements by {made.traced.name}",
            "decode into a vector like the gradient",
        )


def _decoding(
    made: Kernels,
    name: str,
    payloads: Sequence[Payload],
    vectors: Sequence[Tensor],
    scale: float,
) -> list[Call]:
    """Calls that decode into (or add to) the buffer ``name``."""
    code = made.traced.coding
    if code is not None:
        pairs = zip(payloads, vectors, strict=True)
        payloads = [
            code.decode(p, program_format(made.traced, to_N.numel(), 0))
            for p, to_N in pairs
        ]
    return [
        Call(
            {name: to_N, "scale": _single(scale, torch.float32, to_N.device)},
            to_N.numel(),
            payload=payload,
        )
        for payload, to_N in zip(payloads, vectors, strict=True)
    ]


@lru_cache(maxsize=4096)
def _single(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=dtype, device=device)  # waits for no device
