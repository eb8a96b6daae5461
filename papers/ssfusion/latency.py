"""Figure 4 and table 3 of SSFusion: seconds of selection by size, measured on this CPU.

The paper's GPU takes about as long for any small tensor, as starting its kernels takes
longest. So what is compared is the shape: from which size on seconds grow, and what
many small ones cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from gradwire.contract import Compressor
from gradwire.contract.registry import load
from gradwire.contract.spec import TensorSpec
from gradwire_bench.micro.kernel import TimedCall, seconds
from gradwire_bench.report import curves

from ..deft.runs import one_thread
from ..frame import Ask, Claim, Findings, Row
from ..rows import number
from .printed import KB, TABLE_3_CPU_S, TABLE_3_GPU_S, TABLE_3_KB
from .setting import DENSITY, ITEM_BYTES, SPARSIFIER

RANDOM = "localrandomk"
"""Figure 4's fifth, of which figure 14 has no numbers."""
CODECS = ("dgc", "gaussiank", "redsync", "sidco", RANDOM)
SIZES = (2**8, 2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22)
MANY = 256
SMALL = 2**10
"""So many tensors of so many elements are selected from apart, and as one."""
ROUNDS = {False: 30, True: 5}
"""By ``quick``."""
FLAT = 1.25
"""The factor up to which seconds count as about the same: the paper's grow by 1.06 /
0.85.
"""
ALIKE = 2**18
"""The size at which sparsifiers are compared with DGC."""
APART = "apart"
TOGETHER = "in one call"
ONE = "as one"


def measured(calls: Mapping[str, TimedCall], rounds: int) -> dict[str, float]:
    """The median seconds of each call, all made in turn in each round, in one
    thread.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    with one_thread():
        for call in calls.values():
            call()
        for _ in range(rounds):
            for name, call in calls.items():
                found[name].append(seconds(call, torch.device("cpu")))
    return {name: median(every) for name, every in found.items()}


def _codec(name: str) -> Compressor:
    made: Compressor = load("compress", name)(density=DENSITY)
    return made


def _encode(name: str, grad_N: Tensor) -> TimedCall:
    codec = _codec(name)
    spec = TensorSpec("gradient", grad_N.numel())
    buffer = torch.zeros(codec.format(spec).size_bytes, dtype=torch.uint8)
    return partial(codec.encode, codec.init(spec), grad_N, buffer=buffer)


def _gradient(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0))


def slowness(ask: Ask) -> dict[str, float]:
    """How many times as long as DGC each sparsifier takes: from figure 4, or measured
    now.
    """
    known = ask.earlier.get("figure4")
    rows = known.rows if known else ()
    taken = {
        str(row["sparsifier"]): number(row, "taken_s")
        for row in rows
        if row["name"] == ONE and row["numel"] == ALIKE
    }
    if not taken:
        calls = {name: _encode(name, _gradient(ALIKE)) for name in CODECS}
        taken = measured(calls, ROUNDS[ask.quick])
    return {name: taken[name] / taken[SPARSIFIER] for name in CODECS}


def figure4(ask: Ask, sizes: Sequence[int] = SIZES) -> Findings:
    """Seconds of each sparsifier by size; of DGC also many small tensors, apart and in
    one call.
    """
    rounds = ROUNDS[ask.quick]
    rows: list[Row] = []
    for done, numel in ask.each(sizes):
        ask.report(done, f"{numel} elements")
        grad_N = _gradient(numel)
        taken = measured({name: _encode(name, grad_N) for name in CODECS}, rounds)
        rows += [_row(ONE, name, 1, numel, second) for name, second in taken.items()]
    together = many(rounds)
    rows += [
        _row(name, SPARSIFIER, 1 if name == ONE else MANY, MANY * SMALL, second)
        for name, second in together.items()
    ]
    return Findings(tuple(rows), (flat_claim(rows), *many_claims(together)))


def _row(
    name: str, sparsifier: str, num_tensors: int, numel: int, taken_s: float
) -> Row:
    return {
        "name": name,
        "sparsifier": sparsifier,
        "num_tensors": num_tensors,
        "numel": numel,
        "taken_s": taken_s,
        "ns_per_element": 1e9 * taken_s / numel,
    }


def many(rounds: int) -> dict[str, float]:
    """Seconds of many small tensors by DGC: each by itself, all in one call, and as one
    vector.
    """
    codec = _codec(SPARSIFIER)
    spec = TensorSpec("small", SMALL)
    grads = [_gradient(SMALL) for _ in range(MANY)]
    sizes = codec.format(spec).size_bytes
    buffers = [torch.zeros(sizes, dtype=torch.uint8) for _ in grads]
    states = [codec.init(spec) for _ in grads]

    def apart() -> None:
        for state, grad_N, buffer in zip(states, grads, buffers, strict=True):
            codec.encode(state, grad_N, buffer=buffer)

    return measured(
        {
            APART: apart,
            TOGETHER: lambda: codec.encode_many(states, grads, [None] * MANY, buffers),
            ONE: _encode(SPARSIFIER, _gradient(MANY * SMALL)),
        },
        rounds,
    )


def flat_claim(rows: Sequence[Row]) -> Claim:
    """Whether seconds of DGC are about the same from 10 to 100 KB, as on the paper's
    GPU.
    """
    own = {
        int(number(row, "numel")): number(row, "taken_s")
        for row in rows
        if row["name"] == ONE and row["sparsifier"] == SPARSIFIER
    }
    small = [size for size in sorted(own) if 10 * KB <= ITEM_BYTES * size <= 100 * KB]
    says = (
        "below 100 KB DGC takes about as long whatever the size (0.85 ms on their GPU)"
    )
    if len(small) < 2:
        return Claim(says, "section III-B, figure 4", "not measured", None)
    first = small[0]
    last = small[-1]
    grows = own[last] / own[first]
    longer = last / first
    return Claim(
        says,
        "section III-B, figure 4",
        f"from {first} to {last} elements {1e6 * own[first]:.0f} to "
        f"{1e6 * own[last]:.0f} us, "
        f"{grows:.2f} times as long; about as long: up to {FLAT:g} times",
        grows <= FLAT,
        ""
        if grows <= FLAT
        else f"on a CPU no kernel is launched: {longer:.0f} times the elements take "
        f"{grows:.1f} times as long, and the smallest {1e6 * min(own.values()):.0f} us "
        "instead of 850",
    )


def many_claims(taken: Mapping[str, float]) -> list[Claim]:
    """The cost of many small tensors beside that of one of as many elements."""
    apart = taken[APART] / taken[ONE]
    together = taken[TOGETHER] / taken[ONE]
    about = f"{MANY} tensors of {SMALL} elements"
    slower = apart > FLAT
    return [
        Claim(
            "small tensors have non-negligible sparsification latency: many cost more "
            "than one of as many elements",
            "insight 1",
            f"{about}, each by itself: {apart:.2f} times as long as one; all in one "
            f"call: {together:.2f} times",
            slower,
            ""
            if slower
            else f"apart they take {1e6 * taken[APART] / MANY:.1f} us each",
        )
    ]


def table3(ask: Ask) -> Findings:
    """DGC's seconds at the sizes of table 3: on this CPU, beside the paper's CPU and
    GPU.
    """
    sizes = [size_kb * KB // ITEM_BYTES for size_kb in TABLE_3_KB]
    rows: list[Row] = []
    for done, (numel, size_kb) in ask.each(list(zip(sizes, TABLE_3_KB, strict=True))):
        ask.report(done, f"{size_kb} KB")
        taken = measured(
            {SPARSIFIER: _encode(SPARSIFIER, _gradient(numel))}, ROUNDS[ask.quick]
        )
        place = TABLE_3_KB.index(size_kb)
        rows.append(
            {
                "name": f"{size_kb} KB",
                "numel": numel,
                "taken_s": taken[SPARSIFIER],
                "paper_cpu_s": TABLE_3_CPU_S[place],
                "paper_gpu_s": TABLE_3_GPU_S[place],
            }
        )
    return Findings(tuple(rows), tuple(table3_claims(rows)))


def table3_claims(rows: Sequence[Row]) -> list[Claim]:
    """The claims of table 3 about the CPU beside ours; the GPU's are not measured."""
    ours = [number(row, "taken_s") for row in rows]
    theirs = [number(row, "paper_cpu_s") for row in rows]
    grows = ours[-1] / ours[0]
    printed = theirs[-1] / theirs[0]
    agrees = printed / FLAT <= grows <= printed * FLAT
    in_words = ", ".join(f"{1e3 * taken:.3g}" for taken in ours)
    return [
        Claim(
            "on a CPU, DGC takes 1.49, 1.81, 3.22 and 8.74 ms for 10, 100, 1000 and "
            f"10,000 KB: {printed:.1f} times as long for a thousand times the size",
            "table 3",
            f"{in_words} ms: {grows:.1f} times; agreed from {printed / FLAT:.1f} to "
            f"{printed * FLAT:.1f}",
            agrees,
            ""
            if agrees
            else f"the smallest takes {1e3 * ours[0]:.3g} ms and not "
            f"{1e3 * theirs[0]:.3g}: without what a framework's operators cost each, "
            "seconds follow the elements",
        ),
        Claim(
            "on a CPU it takes 75.3 to 380.2 % longer than on a GPU",
            "section IV-C, table 3",
            "not measured",
            None,
            "selection on a GPU is not timed here",
        ),
    ]


def draw4(rows: Sequence[Row], path: Path) -> Path:
    """Draws milliseconds over elements, with a line for each sparsifier."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["name"] == ONE and row["num_tensors"] == 1:
            point = (number(row, "numel"), 1e3 * number(row, "taken_s"))
            series.setdefault(str(row["sparsifier"]), []).append(point)
    panels = {"": {name: sorted(set(points)) for name, points in series.items()}}
    return curves.draw_panels(
        panels,
        path,
        title="Selection on this CPU",
        x_label="elements",
        y_label="milliseconds",
        doubling=True,
    )
