"""``bench device``: what gradwire's kernels and training reach on this machine's GPU,
in minutes.

Six parts, the most telling first. Each runs by itself, and an error of one hides no
other:

* ``bits``: every program's kernels, and those written by hand, against their references
  on the host (``device_bits.py``).
* ``kernels``: the device's copy bandwidth; every compressor's encode and decode in
  bytes a second and as a share of it (bytes that must move, by ``micro/kernel.py``),
  beside eager torch; registers of ``onebit`` at block 65536, whose block is longer than
  one tile.
* ``training``: a transformer of 100 million parameters, ``ranks`` processes on the one
  GPU over shaped links: steps per second of DDP, of DDP's fp16 hook and PowerSGD hook,
  and of gradwire.
* ``partition``: ZEN's figure 16: 5.2 % of 214 million elements, by a sort and by
  algorithm 1.
* ``offload``: SSFusion's table III: DGC of 10 KB to 10,000 KB on the device, or by the
  host from pinned memory, and what either takes of a loop of matrix products meanwhile
  (``offload.py``).
* ``compiled``: the kernels again that torch can express, beside ``torch.compile``.

Times are the device's own (events around calls that are queued one behind the other),
so what Python takes for a call shows only where a call has to wait for the device. Each
row's peers run in the same rounds. Rows are told as they are measured, so a run that is
cut short has told them. Once ``minutes`` are over no further row is begun, and a
training is ended: a note says so instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gradwire.cli.report.table import Row, cell, heading
from gradwire.compress.onebit import onebit
from gradwire.contract import Compressor
from gradwire.contract.units import format_rate
from gradwire.errors import RankFailed, invalid
from gradwire.kernels.libraries import has_triton
from gradwire.kernels.sparse.entries import Entries
from gradwire_bench.checks import check_counts, check_names
from gradwire_bench.micro.kernel import (
    COPY_BYTES,
    KernelCase,
    codec_cases,
    in_turn,
    shipped,
)
from gradwire_bench.micro.partition import partition_forms
from gradwire_bench.testbed.hosts import Testbed, open_hosts
from gradwire_bench.testbed.ranks import Json, Report, run_ranks
from gradwire_bench.testbed.wide_area import NEAR, WideArea

from ..errors import TestbedUnavailable
from . import ahead, device_bits, kernel_peers, offload
from .device_rank import SIDES

PARTS = ("bits", "kernels", "training", "partition", "offload", "compiled")
Announce = Callable[[Row], object]
"""Is told each row as soon as it is measured."""
ZEN_DENSITY = 0.052
"""The density of ZEN's figure 16."""
_CALLS = 5
"""Calls that are queued one behind the other and timed together."""
_SHARES = {"bits": 0.3, "kernels": 0.55, "training": 0.85}
"""The share of the minutes after which a part begins no further row, and a training is
ended.
"""
_LAST_SHARE = 0.9
"""The share of all other parts: what has begun by then ends within the minutes."""


@dataclass(frozen=True, kw_only=True)
class DeviceBench:
    """Settings of ``bench device``: sizes in elements, rates in bytes a second."""

    device: str = "cuda"
    parts: tuple[str, ...] = PARTS
    numel: int = 2**26
    zen_numel: int = 214_000_000
    offload_bytes: tuple[int, ...] = offload.SIZES_BYTES
    rounds: int = 5
    ranks: int = 2
    rates_bytes_per_s: tuple[float, ...] = (125e6, 1.25e9)
    wide_area: WideArea = NEAR
    width: int = 768
    num_layers: int = 12
    steps: int = 5
    minutes: float = 8.0

    def __post_init__(self) -> None:
        check_names("part", self.parts, PARTS)
        if self.device not in ("cpu", "cuda"):
            raise invalid("device", self.device, "cuda or cpu", "leave it out")
        if self.device == "cuda" and not torch.cuda.is_available():
            accepted = "a GPU that torch finds"
            remedy = (
                "run it where there is one; --compile-only needs none, --device cpu "
                "tries it"
            )
            raise invalid("device", "none", accepted, remedy)
        check_counts(self, numel=64, zen_numel=1000, rounds=2, ranks=2)
        if self.minutes <= 0:
            raise invalid("minutes", self.minutes, "more than 0", "leave it out for 8")

    @classmethod
    def small(cls, **settings: Any) -> DeviceBench:
        """Sizes that show in a minute, on a CPU, that the parts run; no figure of them
        counts.
        """
        sizes: Json = {
            "numel": 2**16,
            "zen_numel": 2**20,
            "rounds": 2,
            "steps": 2,
        }
        sizes["offload_bytes"] = offload.SIZES_BYTES[:2]
        model = {"width": 64, "num_layers": 2, "rates_bytes_per_s": (125e6,)}
        return cls(**{**sizes, **model, "device": "cpu", **settings})


@dataclass(frozen=True)
class _Left:
    """The minutes of a measurement, from its begin on."""

    minutes: float
    start_s: float

    def share(self) -> float:
        """The share that is over."""
        return (time.monotonic() - self.start_s) / (60 * self.minutes)

    def of(self, part: str) -> float:
        """The seconds that are left for a part, and one at least."""
        return max(
            1.0, 60 * self.minutes * (_SHARES.get(part, _LAST_SHARE) - self.share())
        )

    def is_over(self, part: str) -> bool:
        """Whether a part begins no further row."""
        return self.share() >= _SHARES.get(part, _LAST_SHARE)


def run(
    bench: DeviceBench,
    report: Report,
    *,
    codecs: Sequence[Compressor] = (),
    announce: Announce = lambda row: None,
) -> tuple[list[Row], list[str]]:
    """Measures all parts.

    Args:
        bench: The parts and their sizes.
        report: Is called with the share that is done, and what is measured next.
        codecs: The compressors to measure; without them, all that are shipped.
        tell: Is called with each row as soon as it is there.

    Returns:
        The rows, and notes: the device's name, and what was left out for want of time.
    """
    left = _Left(bench.minutes, time.monotonic())
    rows = list[Row]()
    notes = [f"device: {_name(bench.device)}, torch {torch.__version__}"]
    report(0.0, notes[0])
    chosen = codecs or shipped()
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "bits": lambda: device_bits.rows(
            torch.device(bench.device), chosen, left.of("bits")
        ),
        "kernels": lambda: _kernels(bench, chosen, left, report),
        "training": lambda: _trainings(bench, left, report),
        "partition": lambda: _partitions(bench),
        "offload": lambda: iter(
            offload.rows(torch.device(bench.device), bench.offload_bytes, bench.rounds)
        ),
        "compiled": lambda: _compiled(bench, chosen, left, report),
    }
    for place, part in enumerate(part for part in PARTS if part in bench.parts):
        report(place / len(bench.parts), part)
        for row in _all_of(part, parts[part], left, notes):
            rows.append(row)
            announce(row)
    return rows, notes


def _all_of(
    part: str, rows: Callable[[], Iterator[Row]], left: _Left, notes: list[str]
) -> Iterator[Row]:
    """The rows of a part while there is time; what it raises is a row too."""
    late = f"its share of {left.minutes:g} minutes is over"
    if left.is_over(part):
        notes.append(f"{part} was left out: {late}")
        return
    try:
        for row in rows():
            yield row
            if left.is_over(part):
                notes.append(f"{part} was cut short: {late}")
                return
    except Exception as error:  # one part that fails must not hide the others
        yield _failed(part, error)


def line(row: Row) -> str:
    """One row as a line of text, with the unit of each figure.

    >>> line({"name": "copy", "kernel_s": 0.001, "bandwidth_bytes_per_s": 2e12})
    'copy: kernel 1 ms, bandwidth 2.00 TB/s'
    """
    cells = [
        f"{heading(key)} {cell(key, value)}"
        for key, value in row.items()
        if key != "name"
    ]
    return f"{row['name']}: {', '.join(cells)}"


def _failed(name: str, error: Exception) -> Row:
    first, *_ = f"{type(error).__name__}: {error}".splitlines()
    return {"name": name, "note": first}


def _name(device: str) -> str:
    if device != "cuda":
        return "cpu"
    return str(torch.cuda.get_device_name())


# ---- kernels -------------------------------------------------------------------------


def _registers(bench: DeviceBench) -> list[Row]:
    """Registers of the long block, for this very device."""
    if bench.device != "cuda" or not has_triton():
        return []
    major, minor = torch.cuda.get_device_capability()
    prefix = f"{onebit.__name__}{ahead.LONG_BLOCK}/"
    return ahead.compile_all(
        (f"{10 * major + minor}",), (f"{prefix}encode", f"{prefix}merge")
    )


def _vectors(bench: DeviceBench) -> tuple[Tensor, Tensor]:
    """A gradient on the device, and what may be written."""
    draw = torch.Generator().manual_seed(0)
    grad_N = torch.randn(bench.numel, generator=draw).to(bench.device)
    return grad_N, torch.zeros_like(grad_N)


def _kernels(
    bench: DeviceBench, codecs: Sequence[Compressor], left: _Left, report: Report
) -> Iterator[Row]:
    """A row for the copy, and one for each case of each compressor."""
    grad_N, out_N = _vectors(bench)
    copied = KernelCase("copy", COPY_BYTES, lambda: out_N.copy_(grad_N))
    yield _kernel_row(copied, grad_N, out_N, bench.rounds)
    for codec in codecs:
        report(left.share(), type(codec).__name__)
        yield from _codec_rows(codec, "eager", bench, grad_N, out_N)
    yield from _registers(bench)


def _compiled(
    bench: DeviceBench, codecs: Sequence[Compressor], left: _Left, report: Report
) -> Iterator[Row]:
    """The rows of compressors that torch.compile can make too; a compilation takes 10
    s.
    """
    if bench.device != "cuda":
        return
    grad_N, out_N = _vectors(bench)
    for codec in codecs:
        if type(codec).__name__ in kernel_peers.PEERS:
            report(left.share(), f"{type(codec).__name__}, compiled")
            yield from _codec_rows(codec, "compiled", bench, grad_N, out_N)


def _codec_rows(
    codec: Compressor, kind: str, bench: DeviceBench, grad_N: Tensor, out_N: Tensor
) -> Iterator[Row]:
    """The cases of one compressor; one that does not run on this device hides no
    other.
    """
    try:
        peers = kernel_peers.peers((kind,), bench.device)
        for case in codec_cases(codec, grad_N, out_N, peers=peers):
            yield _kernel_row(case, grad_N, out_N, bench.rounds)
    except Exception as error:
        yield _failed(type(codec).__name__, error)


def _kernel_row(case: KernelCase, grad_N: Tensor, out_N: Tensor, rounds: int) -> Row:
    """The case after a copy in each round, and its peers after it; medians."""
    return in_turn([case], grad_N, out_N, rounds, calls=_CALLS, peer_every=1)[1]


# ---- partition -----------------------------------------------------------------------


def _partitions(bench: DeviceBench) -> Iterator[Row]:
    """ZEN's partition of one rank's entries into 8 parts; on a CPU the C++ in place of
    Triton.
    """
    device = torch.device(bench.device)
    count = round(ZEN_DENSITY * bench.zen_numel)
    draw = torch.Generator(device).manual_seed(0)
    drawn_K = torch.randint(
        bench.zen_numel, (2 * count,), generator=draw, device=device, dtype=torch.int32
    )
    distinct_K = torch.unique(drawn_K)
    kept_K = torch.randperm(distinct_K.numel(), generator=draw, device=device)[:count]
    indices_K = distinct_K[kept_K.sort().values]
    values = torch.randn(indices_K.numel(), generator=draw, device=device)
    entries = Entries(indices_K, values)
    for row in partition_forms(entries, bench.zen_numel, 8, bench.rounds):
        yield {**row, "name": f"partition/{row['name']}"}


# ---- training ------------------------------------------------------------------------


def _trainings(bench: DeviceBench, left: _Left, report: Report) -> Iterator[Row]:
    for rate in bench.rates_bytes_per_s:
        try:
            yield from _training(bench, rate, left, report)
        except (RankFailed, TestbedUnavailable) as error:
            yield _failed(f"training at {format_rate(rate)}", error)


def _training(
    bench: DeviceBench, rate: float, left: _Left, report: Report
) -> list[Row]:
    """A row for each way to average, of the same model in the same processes."""
    settings = {
        "device": bench.device,
        "width": bench.width,
        "num_layers": bench.num_layers,
        "steps": bench.steps,
    }
    testbed = Testbed(
        hosts=bench.ranks, rate_bytes_per_s=rate, wide_area=bench.wide_area
    )
    with open_hosts(testbed) as hosts:
        link = (
            f"{format_rate(rate)}{bench.wide_area}"
            if hosts.shaped
            else "unshaped loopback"
        )
        results: list[Json] = run_ranks(
            hosts,
            f"{__package__}.device_rank",
            settings,
            report=lambda done, what: report(
                left.share(), f"training at {link}: {what}"
            ),
            timeout_s=left.of("training"),
        )
    base_s = _step_s(results, SIDES[0])
    return [
        {
            "name": f"training/{side}",
            "link": link,
            "num_ranks": bench.ranks,
            "num_parameters": results[0]["num_parameters"],
            "steps_per_second": 1 / _step_s(results, side),
            "speedup_vs_ddp": base_s / _step_s(results, side),
        }
        for side in SIDES
    ]


def _step_s(results: Sequence[Json], side: str) -> float:
    """The median step of the slowest rank."""
    return max(float(median(result["seconds"][side])) for result in results)
