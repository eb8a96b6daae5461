"""Figure 17 and section 5.3 of US-Byte: communications of an iteration by framework.

The paper's figure shows watts, of V100s that are not to be had. It explains them by the
number of communications: L for WFBP, delta_1 + delta_2 for US-Byte, and the sum of m
for ByteScheduler. They are counted here in real iterations on shaped links. Where the
machine has RAPL counters, its energy is read beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.planning import catalogue
from gradwire_bench.report import bars
from gradwire_bench.schedule.schedule import ScheduleBench
from gradwire_bench.testbed.hosts import open_hosts
from gradwire_bench.testbed.ranks import run_ranks

from ..frame import Ask, Claim, Findings, Row
from ..rows import number
from .blocks import CREDIT
from .setting import BENCHMARKS, MBIT, RANKS, cluster_1

BASIC_BYTES = 4 * MBIT
COMPUTE_S = 4.0
"""How long an iteration computes in the replay."""
CREDIT_IN_BYTES = "bytescheduler, credit in bytes"
"""ByteScheduler with its own paper's credit: two blocks' bytes, of eight blocks at
most.
"""
FRAMEWORKS: dict[str, dict[str, Any]] = {
    "wfbp": {},
    "usbyte": {"basic_partition_bytes": BASIC_BYTES},
    "bytescheduler": {"partition_bytes": BASIC_BYTES, "credit": CREDIT},
    CREDIT_IN_BYTES: {
        "partition_bytes": BASIC_BYTES,
        "credit": 8,
        "credit_bytes": CREDIT * BASIC_BYTES,
    },
}
"""The settings of each framework's planner; the paper prints none for figure 17."""
FORMULAS = {
    "wfbp": "L",
    "usbyte": "delta_1 + delta_2",
    "bytescheduler": "sum of m",
    CREDIT_IN_BYTES: "sum of m",
}


def figure17(
    ask: Ask, models: Sequence[str] = BENCHMARKS, compute_s: float = COMPUTE_S
) -> Findings:
    """Communications, processor seconds and joules of an iteration, by model and
    framework.
    """
    num_hosts = 2 if ask.quick else RANKS
    rows: list[Row] = []
    for done, model in ask.each(models):
        ask.report(done, model)
        rows += _measured(model, num_hosts, 1 if ask.quick else 3, compute_s)
    note = (
        f"counted in traces of real iterations on {num_hosts} hosts of one machine, "
        f"with 1/16 of the bytes and computation as waiting; S_p is {BASIC_BYTES:,} "
        "bytes before scaling. A step's report to all ranks, one more under each, is "
        "not counted. Joules are the machine's, of all ranks, with what else "
        "it does; none are read where /sys has no RAPL counters"
    )
    return Findings(tuple(rows), claims(rows), (note,))


def _measured(
    model: str, num_hosts: int, iterations: int, compute_s: float
) -> list[Row]:
    profile = catalogue.load(model)
    slowdown = round(compute_s / (profile.forward_s + profile.backward_s), 1)
    bench = ScheduleBench(profiles=(model,), hosts=num_hosts, slowdown=slowdown)
    settings = {
        "model": model,
        "frameworks": FRAMEWORKS,
        "hop_s": cluster_1(num_hosts).hop_s * slowdown,
        "rate_bytes_per_s": bench.link_bytes_per_s,
        "scale": bench.scale,
        "slowdown": slowdown,
        "iterations": iterations,
    }
    with open_hosts(bench.testbed) as hosts:
        ranks = run_ranks(
            hosts,
            f"{__name__}_rank",
            settings,
            report=lambda part, what: None,
            timeout_s=1800.0,
        )
    return [_row(model, name, [rank[name] for rank in ranks]) for name in FRAMEWORKS]


def _row(model: str, framework: str, ranks: Sequence[dict[str, Any]]) -> Row:
    joules = ranks[0]["joules"]
    row: Row = {
        "name": f"{model}, {framework}",
        "model": model,
        "framework": framework,
        "formula": FORMULAS[framework],
        "num_communications": max(rank["num_communications"] for rank in ranks),
        "iteration_s": max(rank["iteration_s"] for rank in ranks),
        "processor_s": sum(rank["processor_s"] for rank in ranks),
    }
    return row if joules is None else row | {"joules": joules}


def claims(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """The claims of sections 5.3 and 6.6, for each model."""
    by_model: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_model.setdefault(str(row["model"]), {})[str(row["framework"])] = row
    found = []
    for model, own in by_model.items():
        found.append(count_claim(model, own))
        found.append(energy_claim(model, own))
    return tuple(found)


def _three(own: dict[str, Row], key: str) -> list[float]:
    """A figure of WFBP, US-Byte and ByteScheduler."""
    return [number(own[name], key) for name in ("wfbp", "usbyte", "bytescheduler")]


def count_claim(model: str, own: dict[str, Row]) -> Claim:
    """Whether US-Byte's communications lie between the other two's."""
    least, ours, most = _three(own, "num_communications")
    agrees = least <= ours <= most
    return Claim(
        f"{model}: L <= delta_1 + delta_2 <= sum of m communications an iteration",
        "section 5.3",
        f"{least:.0f}, {ours:.0f} and {most:.0f}",
        agrees,
        "" if agrees else "US-Byte's blocks are other ones here",
    )


def energy_claim(model: str, own: dict[str, Row]) -> Claim:
    """Whether energies are in the paper's order, where the machine counts them."""
    says = (
        f"{model}: WFBP takes the least energy and ByteScheduler the most, and US-Byte "
        "is very close to WFBP"
    )
    place = "section 6.6, figure 17"
    if "joules" not in own["usbyte"]:
        spent = _three(own, "processor_s")
        in_words = ", ".join(f"{seconds:.2f}" for seconds in spent)
        ours = f"processor seconds of an iteration, all ranks: {in_words}"
        return Claim(says, place, ours, None, "no meter of power and no RAPL here")
    least, ours_j, most = _three(own, "joules")
    agrees = least < ours_j < most and ours_j - least < most - ours_j
    return Claim(
        says,
        place,
        f"{least:.1f}, {ours_j:.1f} and {most:.1f} J an iteration of this machine",
        agrees,
        "" if agrees else "computation is waiting here, and processors carry the bytes",
    )


def draw17(rows: Sequence[Row], path: Path) -> Path:
    """Bars of the communications of an iteration."""
    return bars.draw(
        rows,
        path,
        keys=["num_communications"],
        title="Communications of an iteration",
        notes={"num_communications": "counted"},
    )
