"""Times compressors against a copy and against torch, both sides in one run, in turn.

Every round runs each case once, right after a copy of the same vector into an existing
buffer, so a noisy machine slows both sides; what is reported is the median over rounds,
with the quartiles of the ratio. The fraction of the copy's bandwidth counts the bytes
that must move (read once, written once): 8 an element for the copy, and for each case
what its row says.

Rows are named after the compressor: ``encode`` is with error feedback, ``encode-plain``
without, ``decode`` adds to a sum (decode and merge), ``decode-plain`` overwrites. What
is timed is the call that an exchange makes. Beside some stand other ways to the same
result (``Peers``).
"""

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire.cli.report.table import Row
from gradwire.contract import Compressor, Layout
from gradwire.contract.registry import load, names
from gradwire.contract.spec import TensorSpec
from gradwire.errors import invalid
from gradwire.kernels.libraries import backend
from gradwire_bench.figures import quartiles, threads_of_torch

TimedCall = Callable[[], object]
Peers = Callable[[Compressor, Tensor, Tensor], dict[str, dict[str, TimedCall]]]
"""Other ways to what a compressor does to a gradient, given it, the gradient and what
may be written: by case ("encode", "encode-plain", "decode") and by their names.
"""
_log = logging.getLogger("gradwire")
COPY_BYTES = 8
PEER_EVERY = 5
"""Peers are slow: a fifth of the rounds tells enough of them."""


@dataclass(frozen=True)
class KernelCase:
    """One call that is timed; ``peers`` are other ways to the same result, by their
    names.
    """

    name: str
    bytes_per_element: float
    run: TimedCall
    peers: dict[str, TimedCall] = field(default_factory=dict)


def codec_cases(
    codec: Compressor, grad_N: Tensor, out_N: Tensor, *, peers: Peers | None = None
) -> list[KernelCase]:
    """The cases of any compressor, under its class's name; ``out_N`` is written.

    A sparse payload's bytes count twice in decoding: entries are read, and written to
    their places.
    """
    spec = TensorSpec("gradient", grad_N.numel(), device=grad_N.device.type)
    name = type(codec).__name__
    state = codec.init(spec)
    residual_N = torch.zeros_like(grad_N)
    buffer = torch.zeros(
        codec.format(spec).size_bytes, dtype=torch.uint8, device=grad_N.device
    )
    payload, _ = codec.encode(state, grad_N)
    sent = payload.size_bytes / grad_N.numel()
    is_sparse = codec.traits.layout is Layout.SPARSE
    decoded, merged = (4 + 2 * sent, 2 * sent) if is_sparse else (4 + sent, 8 + sent)
    encode = partial(codec.encode, state, grad_N, buffer=buffer)
    calls: dict[str, tuple[float, TimedCall]] = {
        "encode": (12 + sent, partial(encode, residual_N=residual_N)),
        "encode-plain": (4 + sent, encode),
        "decode": (merged, lambda: codec.merge(payload, out_N)),
        "decode-plain": (decoded, lambda: codec.decode(payload, out_N)),
    }
    others = {}
    if peers is not None:
        others = peers(codec, grad_N, out_N)
    return [
        KernelCase(f"{name}/{part}", moved, call, others.get(part, {}))
        for part, (moved, call) in calls.items()
    ]


def shipped(chosen: Sequence[str] = ()) -> list[Compressor]:
    """The compressors of these names (of all), with their default settings.

    Raises ``InvalidSetting`` for the name of an algorithm that is an exchange of its
    own.
    """
    made = {name: load("compress", name) for name in chosen or names("compress")}
    programs = {
        name: kind for name, kind in made.items() if issubclass(kind, Compressor)
    }
    for name in chosen:
        if name not in programs:
            remedy = f"measure it whole: gradwire bench exchange --only {name}"
            raise invalid("compressor", name, "one that encodes and decodes", remedy)
    return [kind() for kind in programs.values()]


def measure(
    numel: int,
    threads: int,
    rounds: int = 15,
    codecs: Sequence[Compressor] = (),
    *,
    peers: Peers | None = None,
    device: str = "cpu",
) -> list[Row]:
    """One row a case, of ``codecs`` or of all; ``threads`` holds for ``peers`` as
    well.
    """
    if device == "cpu" and backend() != "cpp":
        _log.warning(
            "no C++ kernels here: these are the figures of the torch references"
        )
    with threads_of_torch(threads):
        draw = torch.Generator().manual_seed(0)
        grad_N = torch.randn(numel, generator=draw).to(device)
        out_N = torch.zeros_like(grad_N)
        rows: list[Row] = []
        for codec in codecs or shipped():
            cases = codec_cases(codec, grad_N, out_N, peers=peers)
            measured = in_turn(cases, grad_N, out_N, rounds)
            rows += measured[bool(rows) :]  # one row of the copy will do
        return [{**row, "threads": threads} for row in rows]


def seconds(run: TimedCall, device: torch.device, calls: int = 1) -> float:
    """The seconds of one call on its device, by ``calls`` that are queued together."""
    if device.type != "cuda":
        start_s = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start_s) / calls
    events: Any = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    start, end = events
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


def seconds_in_turn(
    calls: Mapping[str, TimedCall], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """The seconds of each call in each round, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-1, rounds):
        for name, call in calls.items():
            taken = seconds(call, device)
            if number >= 0:  # the first round compiles, allocates and touches pages
                times[name].append(taken)
    return times


def in_turn(
    cases: Sequence[KernelCase],
    grad_N: Tensor,
    out_N: Tensor,
    rounds: int,
    *,
    calls: int = 1,
    peer_every: int = PEER_EVERY,
) -> list[Row]:
    """Rounds in which each case is timed after a copy, and now and then its peers after
    it; ``calls`` are queued together.
    """
    timed = partial(seconds, device=grad_N.device, calls=calls)
    copies: dict[str, list[float]] = {case.name: [] for case in cases}
    ours: dict[str, list[float]] = {case.name: [] for case in cases}
    peers: dict[str, dict[str, list[float]]] = {
        case.name: {name: [] for name in case.peers} for case in cases
    }
    for number in range(-1, rounds):
        for case in cases:
            out_N.zero_()  # a sum that grows for ever would end in infinities
            figures = timed(lambda: out_N.copy_(grad_N)), timed(case.run)
            if number < 0:
                for peer in case.peers.values():
                    peer()  # the first round compiles, allocates and touches pages
                continue
            copies[case.name].append(figures[0])
            ours[case.name].append(figures[1])
            if number % peer_every == 0:
                for name, peer in case.peers.items():
                    peers[case.name][name].append(timed(peer))
    every_copy = [value for values in copies.values() for value in values]
    numel = grad_N.numel()
    rows = [
        _row(case, copies[case.name], ours[case.name], peers[case.name], numel)
        for case in cases
    ]
    copy = KernelCase("copy", COPY_BYTES, lambda: None)
    return [_row(copy, every_copy, every_copy, {}, numel), *rows]


def _row(
    case: KernelCase,
    copies: list[float],
    ours: list[float],
    peers: dict[str, list[float]],
    numel: int,
) -> Row:
    share = case.bytes_per_element / COPY_BYTES
    fractions = [share * copy / run for copy, run in zip(copies, ours, strict=True)]
    median_s = statistics.median(ours)
    row: Row = {
        "name": case.name,
        "kernel_s": median_s,
        "bandwidth_bytes_per_s": case.bytes_per_element * numel / median_s,
        **quartiles("fraction_of_copy_bandwidth", fractions),
    }
    for name, taken in peers.items():
        row[f"{name}_s"] = statistics.median(taken)
        row[f"speedup_vs_{name}"] = statistics.median(taken) / median_s
    return row
