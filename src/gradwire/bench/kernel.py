"""Times the CPU kernels against a copy and against torch, both sides in one run, in turn.

Every round runs each case once after a copy of the same vector into an existing buffer, so a noisy
machine slows both sides; what is reported is the median over rounds, with the quartiles of the
ratio. The fraction of the copy's bandwidth counts the bytes that must move (read once, written
once): 8 an element for the copy, and for each kernel what its row says.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..kernels import cast, onebit, select
from ..kernels._build import backend

Row = dict[str, object]
_log = logging.getLogger("gradwire")
DENSITY = 0.01
COPY_BYTES = 8


@dataclass(frozen=True)
class Case:
    """One kernel; ``peer`` is the torch way to the same result, where there is one."""

    name: str
    bytes_per_element: float
    run: Callable[[], object]
    peer: Callable[[], object] | None = None


def seconds(run: Callable[[], object]) -> float:
    """How long one call of ``run`` takes."""
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def onebit_cases(grad_N: torch.Tensor, out_N: torch.Tensor) -> list[Case]:
    """onebit's kernels on float32 ``grad_N``; ``out_N`` is written."""
    numel = grad_N.numel()
    residual_N = torch.zeros(numel)
    scales_B2 = torch.zeros(-(-numel // onebit.BLOCK), 2)
    bits_U = torch.zeros(-(-numel // 8), dtype=torch.uint8)
    return [
        Case(
            "onebit/encode",
            12 + 1 / 8,
            lambda: onebit.encode(grad_N, scales_B2, bits_U, residual_N),
        ),
        Case(
            "onebit/encode-no-residual", 4 + 1 / 8, lambda: onebit.encode(grad_N, scales_B2, bits_U)
        ),
        Case("onebit/decode", 4 + 1 / 8, lambda: onebit.decode(scales_B2, bits_U, out_N)),
        Case("onebit/merge", 8 + 1 / 8, lambda: onebit.decode_add(scales_B2, bits_U, out_N)),
    ]


def topk_cases(grad_N: torch.Tensor, out_N: torch.Tensor) -> list[Case]:
    """Top-k's kernels at ``DENSITY``, beside torch's own selection; ``out_N`` is written."""
    num_selected = max(1, round(grad_N.numel() * DENSITY))
    indices_K = torch.zeros(num_selected, dtype=torch.int32)
    values_K = torch.zeros(num_selected)
    residual_N = torch.zeros(grad_N.numel())

    def torch_topk() -> None:
        torch.abs(grad_N, out=out_N)
        chosen_K = torch.topk(out_N, num_selected, sorted=False).indices
        torch.take(grad_N, chosen_K)

    return [
        Case(
            "topk/encode-no-residual",
            4,
            lambda: select.topk(grad_N, indices_K, values_K),
            torch_topk,
        ),
        Case(
            "topk/encode",
            12,
            lambda: select.topk(grad_N, indices_K, values_K, residual_N),
            torch_topk,
        ),
        Case(
            "topk/merge",
            DENSITY * 16,
            lambda: select.scatter_add(indices_K, values_K, out_N),
            lambda: out_N.index_add_(0, indices_K, values_K),
        ),
    ]


def cast_cases(grad_N: torch.Tensor, out_N: torch.Tensor, dtype: torch.dtype) -> list[Case]:
    """Casts of float32 ``grad_N`` to a 16-bit ``dtype`` and back; ``out_N`` is written."""
    half_N = torch.zeros(grad_N.numel(), dtype=dtype)
    residual_N = torch.zeros(grad_N.numel())
    scaled_N = torch.zeros(grad_N.numel())
    name = "cast16-fp16" if dtype == torch.float16 else "cast16-bf16"

    def torch_encode() -> None:
        torch.mul(grad_N, 0.25, out=scaled_N)
        half_N.copy_(scaled_N)

    return [
        Case(f"{name}/encode", 6, lambda: cast.cast16_encode(grad_N, half_N, 0.25), torch_encode),
        Case(
            f"{name}/encode-with-residual",
            14,
            lambda: cast.cast16_encode(grad_N, half_N, 0.25, residual_N),
        ),
        Case(
            f"{name}/decode",
            6,
            lambda: cast.cast16_decode(half_N, out_N, 4.0),
            lambda: out_N.copy_(half_N).mul_(4.0),
        ),
        Case(f"{name}/merge", 10, lambda: cast.cast16_decode_add(half_N, out_N, 4.0)),
    ]


def measure(numel: int, threads: int, rounds: int = 15) -> list[Row]:
    """One row a kernel; ``threads`` holds for torch's side as well."""
    if backend() != "cpp":
        _log.warning("no C++ kernels here: these are the figures of the torch references")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        grad_N = torch.randn(numel, generator=torch.Generator().manual_seed(0))
        out_N = torch.zeros(numel)
        cases = [
            *onebit_cases(grad_N, out_N),
            *topk_cases(grad_N, out_N),
            *cast_cases(grad_N, out_N, torch.float16),
            *cast_cases(grad_N, out_N, torch.bfloat16),
        ]
        return _rows(cases, lambda: out_N.copy_(grad_N), numel, threads, rounds)
    finally:
        torch.set_num_threads(before)


def _rows(
    cases: list[Case], copy: Callable[[], object], numel: int, threads: int, rounds: int
) -> list[Row]:
    copies: dict[str, list[float]] = {case.name: [] for case in cases}
    ours: dict[str, list[float]] = {case.name: [] for case in cases}
    peers: dict[str, list[float]] = {case.name: [] for case in cases}
    for number in range(-1, rounds):
        for case in cases:
            timed = seconds(copy), seconds(case.run)
            # The peers of top-k are slow: a quarter of the rounds tells enough.
            peer_s = seconds(case.peer) if case.peer and (number + 1) % 4 == 0 else None
            if number < 0:
                continue  # the first round compiles, allocates and touches pages
            copies[case.name].append(timed[0])
            ours[case.name].append(timed[1])
            if peer_s is not None:
                peers[case.name].append(peer_s)
    every_copy = [value for values in copies.values() for value in values]
    rows: list[Row] = [_copy_row(every_copy, numel, threads)]
    rows += [
        _row(case, copies[case.name], ours[case.name], peers[case.name], numel, threads)
        for case in cases
    ]
    return rows


def _copy_row(copies: list[float], numel: int, threads: int) -> Row:
    median_s = statistics.median(copies)
    return {
        "name": "copy",
        "threads": threads,
        "kernel_s": median_s,
        "bandwidth_bytes_per_s": COPY_BYTES * numel / median_s,
        "fraction_of_copy_bandwidth": 1.0,
    }


def _row(
    case: Case, copies: list[float], ours: list[float], peers: list[float], numel: int, threads: int
) -> Row:
    share = case.bytes_per_element / COPY_BYTES
    fractions = [share * copy / run for copy, run in zip(copies, ours, strict=True)]
    low, middle, high = statistics.quantiles(fractions, n=4)
    median_s = statistics.median(ours)
    row: Row = {
        "name": case.name,
        "threads": threads,
        "kernel_s": median_s,
        "bandwidth_bytes_per_s": case.bytes_per_element * numel / median_s,
        "fraction_of_copy_bandwidth": middle,
        "fraction_of_copy_bandwidth_q1": low,
        "fraction_of_copy_bandwidth_q3": high,
    }
    if peers:
        row["torch_s"] = statistics.median(peers)
        row["speedup_vs_torch"] = statistics.median(peers) / median_s
    return row
