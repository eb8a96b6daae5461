"""``auto`` beside DDP and beside every single exchange of the same fidelity, on shaped links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from typing import Any

from ..data.cluster import Cluster
from ..errors import invalid
from ..planning.fidelity import admitted
from ..report.table import Row
from ..testbed.hosts import Hosts, Testbed, loopback_hosts, shaped_hosts
from ..testbed.ranks import Report, run_ranks
from ..units import format_rate
from .auto_rank import ANEW, CHANGE

MODELS = {"transformer": "text", "perceptron": "perceptron", "convnet": "convnet", "lstm": "lstm"}
"""The models, and the tasks that they are trained on."""
RATES = (25e6 / 8, 100e6 / 8, 500e6 / 8, 2e9 / 8, None)
"""Rates of links in bytes per second; None is unshaped loopback."""
CONSTANT = frozenset({"num_hosts"})
"""Keys that have one value in all rows of a run."""


@dataclass(frozen=True, kw_only=True)
class AutoBench:
    """Settings of ``bench auto``: each cell is a model on links of one rate.

    Each side has ``rounds`` turns of ``steps`` steps. ``singles`` are the single exchanges beside
    ``auto``: by default all that its fidelity admits.
    """

    models: tuple[str, ...] = tuple(MODELS)
    rates: tuple[float | None, ...] = RATES
    hosts: int = 4
    steps: int = 6
    rounds: int = 3
    fidelity: str = "safe"
    singles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        admitted(self.fidelity, Cluster(num_ranks=1, rate_bytes_per_s=1.0))
        for model in self.models:
            if model not in MODELS:
                raise invalid("model", model, ", ".join(MODELS), "leave it out for all")
        for name, least in (("hosts", 2), ("steps", 2), ("rounds", 1)):
            if getattr(self, name) < least:
                raise invalid(name, getattr(self, name), f"at least {least}", "leave it out")

    @property
    def others(self) -> tuple[str, ...]:
        """The single exchanges, the dense one first."""
        nowhere = Cluster(num_ranks=1, rate_bytes_per_s=1.0)
        singles = self.singles or admitted(self.fidelity, nowhere).not_measured
        return tuple(dict.fromkeys(("none", *singles)))

    def settings(self, model: str, *, changes: bool = False) -> dict[str, Any]:
        """Settings of one cell's ranks."""
        return {
            "task": MODELS[model],
            "fidelity": self.fidelity,
            "singles": self.others,
            "steps": self.steps,
            "rounds": self.rounds,
            "changes": changes,
        }


def run(
    bench: AutoBench, report: Report, *, timeout_s: float = 900.0
) -> tuple[list[Row], list[str]]:
    """A row for each side of each cell, and what ``auto`` said in each cell.

    Raises ``TestbedUnavailable`` where links cannot be shaped.
    """
    rows: list[Row] = []
    notes: list[str] = []
    cells = [(model, rate) for rate in bench.rates for model in bench.models]
    for place, (model, rate) in enumerate(cells):
        link = "loopback" if rate is None else format_rate(rate)

        def told(fraction: float, what: str, done: int = place, cell: str = link) -> None:
            report((done + fraction) / len(cells), f"{cells[done][0]}, {cell}: {what}")

        program, settings = f"{__name__}_rank", bench.settings(model)
        with _hosts(bench, rate) as hosts:
            results = run_ranks(hosts, program, settings, report=told, timeout_s=timeout_s)
        rows += rows_of(bench, model, rate, results)
        notes += [f"{model}, {link}: {said}" for said in results[0]["pilot"]["decisions"]]
    return rows, notes


def _hosts(bench: AutoBench, rate: float | None) -> Any:
    if rate is None:
        return loopback_hosts(Testbed(hosts=bench.hosts))
    return shaped_hosts(Testbed(hosts=bench.hosts, rate_bytes_per_s=rate))


def rows_of(
    bench: AutoBench, model: str, rate: float | None, results: list[dict[str, Any]]
) -> Iterator[Row]:
    """The rows of one cell; a step takes the mean of all ranks' seconds.

    Ranks wait for each other, so all of them take equally long over some steps. Where the next
    forward pass is overlapped they do not end a step together: one that is late in a step is early
    in the next, and the slowest of each step would count the one and not the other.
    """
    every = {
        name: [fmean(step) for step in zip(*(r["step_s"][name] for r in results), strict=True)]
        for name in results[0]["step_s"]
    }
    middle = {name: median(seconds) for name, seconds in every.items()}
    best_s = min(middle[name] for name in bench.others)
    for name, seconds in every.items():
        low, *_, high = quantiles(seconds, n=5, method="inclusive")
        predicted_s = results[0]["pilot"]["predicted_s"] if name == "auto" else None
        yield {
            "name": name,
            "model": model,
            "num_hosts": bench.hosts,
            "link_bytes_per_s": rate,
            "steps_per_second": 1 / middle[name],
            "step_s": middle[name],
            "step_p20_s": low,
            "step_p80_s": high,
            "speedup_vs_ddp": middle["ddp"] / middle[name],
            "speedup_vs_best_single": best_s / middle[name],
            "predicted_s": predicted_s,
            "fraction_error": None if predicted_s is None else predicted_s / middle[name] - 1,
        }


def run_changed(
    bench: AutoBench,
    first_rate: float,
    then_rate: float,
    report: Report,
    *,
    timeout_s: float = 900.0,
) -> tuple[list[Row], list[str]]:
    """A row for each model, whose links change in mid-run, and what ``auto`` said.

    ``steps_to_plan`` counts steps from the change to the next plan, None where there was none.
    """
    rows: list[Row] = []
    notes: list[str] = []
    for place, model in enumerate(bench.models):
        with shaped_hosts(Testbed(hosts=bench.hosts, rate_bytes_per_s=first_rate)) as hosts:
            told = _changing(hosts, bench, then_rate, report, place)
            program, settings = f"{__name__}_rank", bench.settings(model, changes=True)
            results = run_ranks(hosts, program, settings, report=told, timeout_s=timeout_s)
        said, changed_at = results[0]["pilot"]["decisions"], results[0]["changed_at"]
        steps = [int(re.findall(r"\d+", one)[0]) for one in said if ANEW in one]
        rows.append(
            {
                "name": model,
                "num_hosts": bench.hosts,
                "link_bytes_per_s": first_rate,
                "then_bytes_per_s": then_rate,
                "steps_to_plan": next((s - changed_at for s in steps if s > changed_at), None),
                "replicas": "equal" if len({r["digest"] for r in results}) == 1 else "differ",
            }
        )
        notes += [f"{model}: {one}" for one in said]
    return rows, notes


def _changing(hosts: Hosts, bench: AutoBench, rate: float, report: Report, place: int) -> Report:
    """A report that changes the links' rate when the ranks ask for it."""

    def told(fraction: float, what: str) -> None:
        if what == CHANGE:
            hosts.change_rate(Testbed(hosts=bench.hosts, rate_bytes_per_s=rate))
        report((place + fraction) / len(bench.models), what)

    return told
