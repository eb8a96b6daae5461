"""Section 5.3 of DEFT: its formulas for the seconds of communication, beside bytes and
seconds.

Top-k is said to cost log(n) alpha + 2 (n-1) k beta, DEFT as much with the k of the
worker that has most instead. An all-gather of k values and k indices costs that, which
is what Top-k here sends. So alpha and beta are those of an all-gather, measured in the
same run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from gradwire.planning.data.cluster import Cluster
from gradwire_bench.report import curves
from gradwire_bench.testbed.hosts import Testbed, open_hosts
from gradwire_bench.testbed.ranks import Report, run_ranks

from ..frame import Ask, Claim, Findings, Row
from ..rows import number
from ..workloads.kept import layer_sizes
from .setting import LSTM, Application

METHODS = ("topk", "cltk", "deft")
DENSITIES = (0.001, 0.01, 0.1)
WORD_BYTES = 4
"""The bytes of a value or an index, of which beta is the cost in the paper's
formula.
"""
NEAR = 0.25
"""The share of a formula's seconds by which those measured may differ from it."""


class Bench(NamedTuple):
    """The hosts that are measured on, and the task whose gradient they exchange."""

    sizes: dict[str, int]
    hosts: int
    rate_bytes_per_s: float
    repeats: int
    budget_s: float
    sizes_bytes: tuple[int, ...] = (2**14, 2**17, 2**20, 2**22)
    """The sizes of buffers at which single collectives are measured."""


MODEL = {"vocabulary": 5_000, "embedding": 128, "hidden": 256, "batch": 2}
BENCHES = {
    False: Bench(
        MODEL, hosts=8, rate_bytes_per_s=25_000_000.0, repeats=7, budget_s=0.5
    ),
    True: Bench(MODEL, hosts=4, rate_bytes_per_s=50_000_000.0, repeats=5, budget_s=0.2),
}
Measure = Callable[[Bench, Application, Report], tuple[list[dict[str, Any]], bool]]


def measure(
    bench: Bench, app: Application, report: Report
) -> tuple[list[dict[str, Any]], bool]:
    """Every rank's counts and times, and whether links were shaped."""
    layers = layer_sizes(app.make(**bench.sizes))
    settings = {
        "task": app.make.__name__,
        "methods": {
            f"{name}, {density:g}": [
                name,
                {"density": density} | ({"layers": layers} if name == "deft" else {}),
            ]
            for density in DENSITIES
            for name in METHODS
        },
        **bench._asdict(),
    }
    testbed = Testbed(hosts=bench.hosts, rate_bytes_per_s=bench.rate_bytes_per_s)
    with open_hosts(testbed) as hosts:
        program = f"{__package__}.cost_rank"
        return run_ranks(
            hosts, program, settings, report=report, timeout_s=600.0
        ), hosts.shaped


def cost(ask: Ask, app: Application = LSTM, run: Measure = measure) -> Findings:
    """Bytes and seconds of each method by density, beside what section 5.3 gives for
    its k.
    """
    bench = BENCHES[ask.quick]
    results, shaped = run(bench, app, ask.report)
    cluster = Cluster.parse(results[0]["cluster"])
    rows = [
        _row(
            title,
            [one["steps"][title] for one in results],
            cluster,
            results[0]["numel"],
        )
        for title in results[0]["steps"]
    ]
    where = (
        "shaped links"
        if shaped
        else "plain loopback, whose counters count all ranks' bytes"
    )
    line = cluster.line("all_gather")
    notes = (
        f"{bench.hosts} processes of one machine on {where}; an all-gather takes "
        f"{1e3 * line.alpha_s:.2f} ms and {1e9 * line.per_unit_s:.1f} ns for "
        "each byte of a rank",
    )
    return Findings(tuple(rows), _claims(rows, shaped), notes, complete=shaped)


def _row(
    title: str, ranks: Sequence[Sequence[dict[str, Any]]], cluster: Cluster, numel: int
) -> Row:
    """One method at one density, from every rank's steps."""
    name, density = title.split(", ")
    steps = list(zip(*ranks, strict=True))
    k = max(one["num_own"] for step in steps for one in step)
    payload_bytes = 2 * WORD_BYTES * k
    counted = [
        max(sum(sent for *_, sent in one["asked"]) for one in step) for step in steps
    ]
    by_verbs = [
        sum(
            cluster.collective_s(verb, size_bytes)
            for verb, size_bytes, _ in step[0]["asked"]
        )
        for step in steps
    ]
    line = cluster.line("all_gather")
    # The rank that waits least for others: what they compute is no communication.
    seconds = median(min(one["communication_s"] for one in step) for step in steps)
    formula_s = line.alpha_s + line.per_unit_s * payload_bytes
    return {
        "name": title,
        "method": name,
        "density": float(density),
        "num_ranks": cluster.num_ranks,
        "numel": numel,
        "num_most_selected": k,
        "num_averaged": max(one["num_averaged"] for step in steps for one in step),
        "formula_bytes": (cluster.num_ranks - 1) * payload_bytes,
        "counted_bytes": median(counted),
        "interface_bytes": median(
            max(one["tx_bytes"] for one in step) for step in steps
        ),
        "formula_s": formula_s,
        "communication_s": seconds,
        "ratio_of_seconds": seconds / formula_s,
        "by_verbs_s": median(by_verbs),
        "num_verbs": len(steps[0][0]["asked"]),
    }


def _claims(rows: Sequence[Row], shaped: bool) -> tuple[Claim, ...]:
    if not shaped:
        says = "DEFT's communication costs log(n) alpha + 2 (n-1) max k beta"
        return (Claim(says, "section 5.3", "not measured: links are not shaped", None),)
    return (
        _formula_claim(
            rows, "topk", "Top-k's communication costs log(n) alpha + 2 (n-1) k beta"
        ),
        _formula_claim(
            rows,
            "deft",
            "DEFT's communication costs as much with the largest sum of its workers' k "
            "in place of k",
        ),
        _faster(rows),
    )


def _formula_claim(rows: Sequence[Row], method: str, says: str) -> Claim:
    own = [row for row in rows if row["method"] == method]
    ratios = [number(row, "ratio_of_seconds") for row in own]
    counted = [
        number(row, "counted_bytes") / number(row, "formula_bytes") for row in own
    ]
    agrees = all(abs(ratio - 1) <= NEAR for ratio in ratios)
    ours = (
        f"{_by_density(own, ratios)} times the formula's seconds, and "
        f"{_by_density(own, counted)} times its bytes"
    )
    return Claim(
        says, "section 5.3", ours, agrees, "" if agrees else _why(own, counted)
    )


def _why(own: Sequence[Row], counted: Sequence[float]) -> str:
    """The reason from the rows: bytes that the formula leaves out, or rounds that it
    does.
    """
    verbs = max(number(row, "num_verbs") for row in own)
    expected = [number(row, "by_verbs_s") / number(row, "formula_s") for row in own]
    reasons = []
    if max(counted) > 1 + NEAR:
        reasons.append(
            "the values of the union of all selections are summed by an "
            "all-reduce (algorithm 1), "
            "which moves each twice, where the formula counts one worker's values"
        )
    if min(counted) < 1 - NEAR:
        reasons.append(
            "fewer bytes travel: an index takes fewer than a value, and an all-reduce "
            "sums the values of all workers' k, where the formula counts the largest k "
            "n - 1 times"
        )
    if verbs > 2:
        reasons.append(
            f"{verbs:.0f} collectives follow one another, where the formula has "
            "one's latency"
        )
    waited = [number(row, "communication_s") / number(row, "by_verbs_s") for row in own]
    shown = _by_density(own, expected)
    reasons.append(
        f"what its collectives cost one by one adds up to {shown} times the formula"
    )
    if max(waited) > 1 + NEAR:
        reasons.append(
            f"it takes {_by_density(own, waited)} times that sum: ranks wait for "
            "others, with which they share this machine's cores"
        )
    return "; ".join(reasons)


def _by_density(rows: Sequence[Row], values: Sequence[float]) -> str:
    pairs = zip(rows, values, strict=True)
    return ", ".join(f"{number(row, 'density'):g}: {value:.2f}" for row, value in pairs)


def _faster(rows: Sequence[Row]) -> Claim:
    """DEFT's seconds over those of each other method, by density."""
    found = {(str(row["method"]), number(row, "density")): row for row in rows}
    densities = sorted({density for _, density in found})

    def over(other: str, key: str) -> list[float]:
        return [
            number(found["deft", density], key) / number(found[other, density], key)
            for density in densities
        ]

    shown = "; ".join(
        f"{other}'s seconds times "
        + ", ".join(
            f"{ratio:.2f} at {density:g} (bytes {of_bytes:.2f})"
            for density, ratio, of_bytes in zip(
                densities,
                over(other, "communication_s"),
                over(other, "counted_bytes"),
                strict=True,
            )
        )
        for other in ("topk", "cltk")
    )
    slower = [
        f"{other} at {density:g}"
        for other in ("topk", "cltk")
        for density, ratio in zip(
            densities, over(other, "communication_s"), strict=True
        )
        if ratio >= 1
    ]
    rounds = {name: number(found[name, densities[0]], "num_verbs") for name in METHODS}
    return Claim(
        "the formula is evidence that DEFT's communication is faster than "
        "Top-k's and CLT-k's",
        "section 5.3",
        shown,
        not slower,
        f"not faster than {', '.join(slower)}: DEFT makes {rounds['deft']:.0f} "
        f"collectives to Top-k's {rounds['topk']:.0f} and CLT-k's "
        f"{rounds['cltk']:.0f}, and what they wait for weighs more than the bytes that "
        "it saves there"
        if slower
        else "",
    )


def draw_cost(rows: Sequence[Row], path: Path) -> Path:
    """Seconds over density: a panel for each method, measured and by the formula."""
    titles = {
        "communication_s": "measured",
        "formula_s": "section 5.3",
        "by_verbs_s": "by its collectives",
    }
    panels = {
        method: {
            title: [
                (number(row, "density"), number(row, key))
                for row in rows
                if row["method"] == method
            ]
            for key, title in titles.items()
        }
        for method in METHODS
    }
    return curves.draw_panels(
        panels,
        path,
        title="Seconds of communication",
        x_label="density",
        y_label="seconds",
    )
