"""Fuzzers of payloads: what codecs, sparse formats and exchanges make of bytes that
changed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gradwire.collective.steps.tensorwise import tensorwise
from gradwire.contract import Compressor, Exchange, Layout, Member
from gradwire.contract.payload import Format, Payload
from gradwire.contract.registry import examples
from gradwire.contract.spec import TensorSpec, working_dtype
from gradwire.contract.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Recv,
    ReduceScatter,
    Steps,
)
from gradwire.exchange.error_feedback import ErrorFeedback, feedback_refusal
from gradwire.exchange.local import drive
from gradwire.kernels.sparse.entries import Entries, Part, num_units
from gradwire.kernels.sparse.merge import merge
from gradwire.kernels.sparse.partition import partition
from gradwire.kernels.sparse.permutation import Permutation
from gradwire.kernels.sparse.scatter import scatter_entries
from gradwire_lab.laws.inputs import make_gradient
from tests.fuzzing.mutations import mutated, resized
from tests.laws.cases import compressors, own_exchanges, pairs

KINDS = ("normal", "wide", "zeros", "both infs", "one nan", "huge")
SIZES = (1, 5, 64, 300, 1025)
DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64)


def tensor_of(data: bytes) -> Tensor:
    """Bytes in memory of their own, exactly as long: what reads on behind them is
    seen.
    """
    made = torch.empty(len(data), dtype=torch.uint8)
    if data:
        made.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return made


# ---- codecs --------------------------------------------------------------------------


def codecs(rng: random.Random, among: Sequence[Compressor] | None = None) -> None:
    """Decodes and merges a payload that a codec made and that changed on its way."""
    among = compressors() if among is None else among
    codec, numel = rng.choice(among), rng.choice(SIZES)
    dtype, kind = rng.choice(DTYPES), rng.choice(KINDS)
    spec, form, data = _payload(codec, kind, numel, dtype, rng.randrange(4) == 0)
    shaped: Compressor = codec
    if spec.shapes:
        shaped = tensorwise(codec, tuple(shape[0] for shape in spec.shapes))
    if rng.randrange(6) == 0:
        form = shaped.received(spec, resized(rng, len(data)))
        data = (data * 2 + bytes(form.size_bytes))[: form.size_bytes]
    payload = Payload(form, tensor_of(mutated(rng, data, (numel,))))
    out_N = torch.zeros(numel, dtype=rng.choice((dtype, working_dtype(dtype))))
    match rng.randrange(3):
        case 0:
            shaped.decode(payload, out_N, scale=0.5)
        case 1:
            sum_N = torch.zeros(numel, dtype=working_dtype(dtype))
            shaped.merge_all([payload, payload], sum_N, scale=0.5)
        case _ if shaped.traits.layout is Layout.SPARSE:
            taken = Entries(*shaped.entries(payload), shaped.width)
            _shared_out(rng, taken, num_units(numel, shaped.width), out_N)
        case _:
            shaped.merge(payload, torch.zeros(numel, dtype=working_dtype(dtype)))


@cache
def _payload(
    codec: Compressor, kind: str, numel: int, dtype: torch.dtype, several: bool
) -> tuple[TensorSpec, Format, bytes]:
    """A sound payload: its gradient's spec, its layout and its bytes."""
    shapes = ((numel // 3,), (numel - numel // 3,)) if several and numel > 2 else ()
    spec = TensorSpec("gradient", numel, dtype, shapes=shapes)
    if shapes:
        codec = tensorwise(codec, tuple(shape[0] for shape in shapes))
    grad_N = make_gradient(kind, numel, dtype, seed=numel)
    payload, _ = codec.encode(codec.init(spec), grad_N)
    assert payload.buffer is not None
    return spec, payload.format, bytes(payload.buffer.numpy())


def _shared_out(rng: random.Random, taken: Entries, units: int, out_N: Tensor) -> None:
    """What collectives of sparse payloads do with entries that came."""
    match rng.randrange(3):
        case 0:
            merge([taken, taken], units, scale=0.5)
        case 1:
            permutation = Permutation(units, 0) if rng.randrange(2) else None
            partition(taken, units, 3, permutation)
        case _:
            values = taken.values.to(out_N.dtype)
            scatter_entries(taken._replace(values=values), Part(units), out_N)


def kernels(worker: int, workers: int) -> None:
    """Builds the kernels of every codec whose number is this worker's, so that none
    waits later.
    """
    for codec in compressors()[worker::workers]:
        _, form, data = _payload(codec, "normal", 64, torch.float32, several=False)
        payload = Payload(form, tensor_of(data))
        codec.decode(payload, torch.zeros(64))
        codec.merge(payload, torch.zeros(64))


# ---- sparse formats ------------------------------------------------------------------


def formats(rng: random.Random) -> None:
    """Decodes, scatters and merges the entries of a part that changed on their way."""
    form, units = rng.choice(_FORMATS), rng.choice((1, 7, 64, 300, 5000))
    width, dtype = rng.choice((1, 1, 3, 16)), rng.choice(DTYPES)
    density = rng.choice((0.0, 0.02, 0.3, 1.0))
    layout, data, length = _entries(form, units, width, dtype, density)
    if rng.randrange(6) == 0:
        layout = form.layout(rng.randint(0, length), length, width, dtype)
        data = (data * 2 + bytes(layout.size_bytes))[: layout.size_bytes]
    payload = Payload(layout, tensor_of(mutated(rng, data, (units, len(data)))))
    if rng.randrange(3) == 0:
        out_N = torch.zeros(length * width, dtype=dtype)
        form.scatter(payload, Part(length), out_N, width=width)
        return
    _shared_out(
        rng, form.decode(payload, length, width), length, torch.zeros(length * width)
    )


_FORMATS = examples("sparse.formats")


@cache
def _entries(
    form: Any, units: int, width: int, dtype: torch.dtype, density: float
) -> tuple[Format, bytes, int]:
    draw = torch.Generator().manual_seed(units)
    places_K = (
        (torch.rand(units, generator=draw) < density)
        .nonzero()
        .flatten()
        .to(torch.int32)
    )
    values = torch.randn(places_K.numel() * width, generator=draw).to(dtype)
    payload = form.encode(Entries(places_K, values, width), units)
    assert payload.buffer is not None
    return payload.format, bytes(payload.buffer.numpy()), units


# ---- exchanges -----------------------------------------------------------------------


def exchanges(rng: random.Random, among: Sequence[Exchange] | None = None) -> None:
    """Two steps of an exchange in one process, in which bytes change on their way to
    one rank.
    """
    exchange = rng.choice(_exchanges() if among is None else among)
    world, numel = rng.choice((2, 3, 4)), rng.choice((1, 9, 64, 300))
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16))
    spec = TensorSpec("gradient", numel, dtype, shapes=((numel,),))
    kept = feedback_refusal(exchange) is None and rng.randrange(2)
    tried: Exchange = ErrorFeedback(exchange) if kept else exchange
    members = [Member(rank, world) for rank in range(world)]
    states = [tried.init(spec, world) for _ in members]
    victim = rng.randrange(world)
    for _ in range(2):
        draw = torch.Generator().manual_seed(rng.getrandbits(31))
        grads = [torch.randn(numel, generator=draw).to(dtype) for _ in members]
        all_steps = [
            tried.synchronise(me, state, grad_N, grad_N)
            for me, state, grad_N in zip(members, states, grads, strict=True)
        ]
        all_steps[victim] = _disturbed(rng, all_steps[victim], numel)
        states = drive(all_steps, seed=rng.getrandbits(16)).results


@cache
def _exchanges() -> tuple[Exchange, ...]:
    return (*pairs(), *own_exchanges())


def _disturbed(rng: random.Random, steps: Steps[Any], numel: int) -> Steps[Any]:
    """The steps, in some of whose transfers other bytes arrive."""
    value: Any = None
    while True:
        try:
            asked = steps.send(value)
        except StopIteration as stop:
            return stop.value
        value = yield asked
        for verb in asked if isinstance(asked, tuple) else (asked,):
            for landed in _landed(verb):
                if rng.randrange(3) == 0 and landed.numel():
                    data = bytes(landed.contiguous().view(torch.uint8).numpy())
                    wrong = tensor_of(mutated(rng, data, (numel,)))
                    landed.copy_(wrong.view(landed.dtype))


def _landed(verb: Any) -> Iterator[Tensor]:
    match verb:
        case Recv() | AllReduce() | Broadcast():
            yield verb.buf
        case AllGather() | AllToAll() | ReduceScatter():
            yield verb.out


TARGETS: dict[str, Callable[[random.Random], None]] = {
    "codecs": codecs,
    "formats": formats,
    "exchanges": exchanges,
}
