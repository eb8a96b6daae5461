"""``auto`` beside DDP and beside every single exchange of the same fidelity, on shaped
links.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from gradwire.cli.report.table import Row
from gradwire.contract.bounds import check_number
from gradwire.contract.units import format_rate
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.planner.auto.judgement import admitted

from ..checks import check_counts, check_names
from ..figures import spread
from ..testbed.hosts import Testbed, loopback_hosts, shaped_hosts
from ..testbed.ranks import Json, Report, part_of, run_ranks
from ..testbed.wide_area import NEAR, WideArea, refuse_loopback

MODELS = {
    "transformer": "text",
    "perceptron": "perceptron",
    "convnet": "convnet",
    "lstm": "lstm",
}
"""The models, and the tasks that they are trained on."""
RATES = (25e6 / 8, 100e6 / 8, 500e6 / 8, 2e9 / 8, None)
"""Rates of links in bytes per second; None is unshaped loopback."""
UNDER = ("plain", "ddp")
CONSTANT = frozenset({"num_hosts"})
"""Keys that have one value in all rows of a run."""


@dataclass(frozen=True, kw_only=True)
class AutoBench:
    """Settings of ``bench auto``: each cell is a model on links of one rate.

    Each side has ``rounds`` turns of about ``turn_s`` seconds, and of ``steps`` steps
    at least. Under "ddp" ``auto`` and singles are attached to DDP models, else to plain
    modules. ``singles`` are the single exchanges beside ``auto``: by default all that
    its fidelity admits.
    """

    models: tuple[str, ...] = tuple(MODELS)
    rates: tuple[float | None, ...] = RATES
    wide_area: WideArea = NEAR
    hosts: int = 4
    steps: int = 3
    turn_s: float = 2.0
    rounds: int = 3
    under: str = "plain"
    fidelity: str = "safe"
    singles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        refuse_loopback(self.rates, self.wide_area)
        admitted(self.fidelity, Cluster(num_ranks=1, rate_bytes_per_s=1.0))
        check_names("model", self.models, MODELS)
        check_names("kind of what is attached", [self.under], UNDER)
        check_number(
            "turn_s", self.turn_s, "0 to 600 seconds", "leave it out", 0.0, 600.0
        )
        check_counts(self, hosts=2, steps=2, rounds=1)

    @property
    def others(self) -> tuple[str, ...]:
        """The single exchanges, the dense one first."""
        nowhere = Cluster(num_ranks=1, rate_bytes_per_s=1.0)
        singles = self.singles or admitted(self.fidelity, nowhere).not_measured
        return tuple(dict.fromkeys(("none", *singles)))

    def settings(self, model: str) -> Json:
        """Settings of one cell's ranks."""
        return {**asdict(self), "task": MODELS[model], "singles": self.others}


def run(
    bench: AutoBench,
    report: Report,
    *,
    announce: Callable[[str], None] = lambda line: None,
) -> tuple[list[Row], list[str]]:
    """A row for each side of each cell, and what ``auto`` said in each cell.

    ``announce`` hears of each cell as it ends. Raises ``TestbedUnavailable`` where
    links cannot be shaped.
    """
    rows: list[Row] = []
    notes: list[str] = []
    cells = [(model, rate) for rate in bench.rates for model in bench.models]
    for place, (model, rate) in enumerate(cells):
        cell = f"{model}, {_link(rate)}"
        within = part_of(report, place, len(cells), f"{cell}: ")
        program = f"{__name__}_rank"
        with _hosts(bench, rate) as hosts:
            results = run_ranks(hosts, program, bench.settings(model), report=within)
        own = list(rows_of(bench, model, rate, results))
        rows += own
        notes += [f"{cell}: {said}" for said in results[0]["pilot"]["decisions"]]
        announce(f"{cell}: {summary(own)}")
    return rows, notes


def _link(rate: object) -> str:
    if isinstance(rate, float):
        return format_rate(rate)
    return "loopback"


def _hosts(bench: AutoBench, rate: float | None) -> Any:
    if rate is None:
        return loopback_hosts(Testbed(hosts=bench.hosts))
    testbed = Testbed(
        hosts=bench.hosts, rate_bytes_per_s=rate, wide_area=bench.wide_area
    )
    return shaped_hosts(testbed)


def rows_of(
    bench: AutoBench, model: str, rate: float | None, results: list[Json]
) -> Iterator[Row]:
    """The rows of one cell; a step takes the mean of all ranks' seconds.

    Ranks wait for each other, so all of them take equally long over some steps. Where
    the next forward pass is overlapped they do not end a step together: one that is
    late in a step is early in the next, and the slowest of each step would count the
    one and not the other.
    """
    turns = {
        name: [
            [
                fmean(step)
                for step in zip(
                    *(r["turns_s"][name][turn] for r in results), strict=True
                )
            ]
            for turn in range(bench.rounds)
        ]
        for name in results[0]["turns_s"]
    }
    every = {
        name: [step for turn in turns for step in turn] for name, turns in turns.items()
    }
    middle = {name: median(seconds) for name, seconds in every.items()}
    best = min(bench.others, key=lambda name: middle[name])
    for name, seconds in every.items():
        predicted_s = None
        if name == "auto":
            predicted_s = results[0]["pilot"]["predicted_s"]
        speedups = [
            median(ddp) / median(steps)
            for ddp, steps in zip(turns["ddp"], turns[name], strict=True)
        ]
        core_s = sum(result["core_s"][name] for result in results)
        yield {
            "name": name,
            "model": model,
            "num_hosts": bench.hosts,
            "link_bytes_per_s": rate,
            "steps_per_second": 1 / middle[name],
            **spread(seconds),
            "speedup_vs_ddp": middle["ddp"] / middle[name],
            "speedup_least": min(speedups),
            "speedup_most": max(speedups),
            "speedup_vs_best_single": middle[best] / middle[name],
            "predicted_s": predicted_s,
            "fraction_error": predicted_s and predicted_s / middle[name] - 1,
            "measuring_s": results[0]["pilot"].get("measuring_s")
            if name == "auto"
            else None,
            "fraction_of_cores": core_s / (sum(seconds) * results[0]["num_cores"]),
        }


def summary(cell: Sequence[Row]) -> str:
    """One cell in a few words, as a table of cells holds them.

    The speedup of ``auto`` over DDP with the least and the most of a turn, the same of
    the fastest single exchange, the error of the prediction, and how busy ``auto``
    keeps the machine's cores.
    """
    by_name: dict[object, Any] = {row["name"]: row for row in cell}
    chosen = by_name.pop("auto")
    by_name.pop("ddp")
    best = min(by_name.values(), key=lambda row: row["step_s"])
    error = (
        "none"
        if chosen["fraction_error"] is None
        else f"{100 * chosen['fraction_error']:+.0f} %"
    )
    return (
        f"{chosen['speedup_vs_ddp']:.2f} ({chosen['speedup_least']:.2f} to "
        f"{chosen['speedup_most']:.2f}), {best['name']} {best['speedup_vs_ddp']:.2f}, "
        f"{error}, cores {100 * chosen['fraction_of_cores']:.0f} %"
    )


def cells_table(bench: AutoBench, rows: Sequence[Row]) -> str:
    """All cells in a Markdown table, a model in each row and a link in each column."""
    lines = [
        "| | " + " | ".join(map(_link, bench.rates)) + " |",
        "| --- |" + " --- |" * len(bench.rates),
    ]
    for model in bench.models:
        cells = (
            [
                row
                for row in rows
                if (row["model"], row["link_bytes_per_s"]) == (model, rate)
            ]
            for rate in bench.rates
        )
        lines.append(f"| {model} | " + " | ".join(map(summary, cells)) + " |")
    return "\n".join(lines)
