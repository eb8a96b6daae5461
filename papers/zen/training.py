"""Figures 11 to 14 of ZEN: how fast models train by each scheme.

Two kinds of rows, each of which says what it is. *Measured*: small models train on a
few hosts of this machine, on links whose rates are as far apart as the paper's.
*Simulated*: the paper's models on up to 16 machines by the planner's formulas, with the
sparsity of the captures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from gradwire.contract.units import format_rate
from gradwire_bench.micro.sparse_rank import DENSE
from gradwire_bench.micro.sparse_rank import PAPER as ZEN
from gradwire_bench.report import bars
from gradwire_bench.testbed.hosts import Testbed, open_hosts
from gradwire_bench.testbed.ranks import run_ranks

from ..frame import Ask, Claim, Findings, Row, effect
from .captures import DENSITY, lacking
from .parts import COMPUTING, LSTM_S
from .sparsity import findings
from .speed import MACHINES, MBIT, SHOWN
from .training_model import (
    COSTS,
    COUNTS,
    NATURAL,
    SPARSIFIED,
    Model,
    simulated,
    step_row,
    unlike,
)
from .values import number

SCHEMES = tuple(COSTS)
UNPRINTED = frozenset(
    {
        "kind",
        "model",
        "num_machines",
        "computing_s",
        *(f"step_s_{name}" for name in SCHEMES),
    }
)


@dataclass(frozen=True)
class Training:
    """A training that is measured here."""

    task: str
    sizes: Mapping[str, Any]
    parameter: str | None = None
    """The embedding whose gradient goes by the scheme; None for all gradients,
    sparsified.
    """
    density: float | None = None


OWN_LSTM = Training(
    "text_lstm",
    {"vocabulary": 10_000, "embedding": 256, "hidden": 32, "batch": 20},
    parameter="embedding.weight",
)
OWN_TRANSFORMER = Training(
    "text_transformer",
    {"vocabulary": 5_000, "width": 160, "num_layers": 3},
    density=DENSITY,
)


@dataclass(frozen=True)
class Part:
    """One of the four figures."""

    place: str
    sparsity: str
    gbit: int
    """The paper's links."""
    rate_bytes_per_s: float
    """The links of what is measured here."""
    models: Sequence[Model]
    own: Training
    hosts: Mapping[bool, tuple[int, ...]] = field(
        default_factory=lambda: {False: (2, 4), True: (2,)}
    )
    """The numbers of hosts that are measured on, by ``quick``."""
    num_steps: Mapping[bool, int] = field(default_factory=lambda: {False: 7, True: 3})


PARTS = {
    "figure11": Part("figure 11", "natural", 25, 200 * MBIT, NATURAL, OWN_LSTM),
    "figure12": Part("figure 12", "natural", 100, 800 * MBIT, NATURAL, OWN_LSTM),
    "figure13": Part(
        "figure 13", "sparsified", 25, 200 * MBIT, SPARSIFIED, OWN_TRANSFORMER
    ),
    "figure14": Part(
        "figure 14", "sparsified", 100, 800 * MBIT, SPARSIFIED, OWN_TRANSFORMER
    ),
}
Measure = Callable[[Ask, Part], tuple[list[Row], bool]]


def measured(ask: Ask, part: Part) -> tuple[list[Row], bool]:
    """Steps of real training on a few hosts, and whether their links were shaped."""
    rows: list[Row] = []
    shaped = True
    for done, hosts in ask.each(part.hosts[ask.quick]):
        settings = {
            "task": part.own.task,
            "sizes": dict(part.own.sizes),
            "parameter": part.own.parameter,
            "density": part.own.density,
            "schemes": list(SCHEMES),
            "num_steps": part.num_steps[ask.quick],
        }

        def report(
            fraction: float, what: str, done: float = done, hosts: int = hosts
        ) -> None:
            share = 1 / len(part.hosts[ask.quick])
            ask.report(0.5 * (done + share * fraction), f"{hosts} hosts, {what}")

        with open_hosts(
            Testbed(hosts=hosts, rate_bytes_per_s=part.rate_bytes_per_s)
        ) as opened:
            program = f"{__name__}_rank"
            results = run_ranks(
                opened, program, settings, report=report, timeout_s=900.0
            )
            shaped = shaped and opened.shaped
        rows.append(_measured_row(part, hosts, [one["steps"] for one in results]))
    return rows, shaped


def _measured_row(part: Part, hosts: int, ranks: Sequence[Mapping[str, Any]]) -> Row:
    """Medians of steps, each as long as on its slowest rank, without the first, which
    warms up.
    """
    step_s = {}
    computing_s = []
    for scheme in SCHEMES:
        steps = list(zip(*(one[scheme][1:] for one in ranks), strict=True))
        step_s[scheme] = median(max(seconds for seconds, *_ in step) for step in steps)
        computing_s += [max(own for _, own, _ in step) for step in steps]
    return step_row(
        "measured",
        part.own.task.removeprefix("text_"),
        hosts,
        step_s,
        median(computing_s),
    )


def figure(ask: Ask, name: str, run: Measure = measured) -> Findings:
    """The rows of one of the figures, measured and simulated, and its claims."""
    part = PARTS[name]
    own, shaped = run(ask, part)
    ask.report(0.5, "simulation")
    rows = [*own, *simulated(ask, part.models, part.gbit)]
    unshaped = "" if shaped else " that were not to be shaped"
    notes = (
        "measured: hosts of this machine, which share its cores, with links of "
        f"{format_rate(part.rate_bytes_per_s)}{unshaped}; "
        "a step is its computation and then its communication",
        f"simulated: {part.gbit} Gbit/s, by the planner's formulas for elements that "
        "travel one by one, without work on the host, with the densities, overlaps and "
        f"skew of the captures. A step's computation is the LSTM's {1e3 * LSTM_S:.0f} "
        f"ms; of other models the paper prints none, and {COMPUTING:.0%} of their "
        "all-reduce at 25 Gbit/s stands for it, as the LSTM's",
    )
    captures = dict.fromkeys(model.capture for model in part.models)
    return findings(
        rows, _claims(ask, part, rows), tuple(captures), notes, complete=shaped
    )


def _claims(ask: Ask, part: Part, rows: Sequence[Row]) -> tuple[Claim, ...]:
    by_model = {
        model.name: [row for row in rows if row["model"] == model.name]
        for model in part.models
    }
    speedups = [
        _speedup_claim(ask, part, model, scheme, paper, by_model[model.name])
        for model in part.models
        for scheme, paper in model.paper[part.gbit].items()
    ]
    return (*speedups, _growing(ask, part, by_model))


def over(row: Row, scheme: str) -> float:
    """ZEN's speedup over a scheme."""
    return number(row, f"step_s_{scheme}") / number(row, f"step_s_{ZEN}")


def _speedup_claim(
    ask: Ask, part: Part, model: Model, scheme: str, paper: float, rows: Sequence[Row]
) -> Claim:
    says = f"{model.name} trains {paper} times as fast with ZEN as with {SHOWN[scheme]}"
    place = f"section 5.2, {part.place}"
    if not rows:
        return Claim(says, place, "not simulated", None, lacking(model.capture) or "")
    ours = over(rows[-1], scheme)
    shown = f"simulated on {MACHINES} machines: {ours:.2f} times"
    reason = unlike(ask, model)
    if reason:
        return Claim(says, place, shown, None, reason)
    why = (
        "the formulas count bytes and rounds alone, and the sparsity is that of our "
        f"small model: {100 * number(rows[-1], 'fraction_computing'):.0f} % of the "
        "step with all-reduce is computation, the rest follows from densities"
    )
    return effect(says, place, shown, ours - 1, paper - 1, why)


def _growing(ask: Ask, part: Part, by_model: Mapping[str, Sequence[Row]]) -> Claim:
    """ZEN's speedup over SparCML and OmniReduce, by the number of machines, in the
    simulation.
    """
    falls = []
    shown = []
    for model, rows in by_model.items():
        for scheme in ("sparcml", "omnireduce") if rows else ():
            first = over(rows[0], scheme)
            last = over(rows[-1], scheme)
            shown.append(f"{model} over {SHOWN[scheme]} {first:.2f} to {last:.2f}")
            if last <= first:
                falls.append(f"{model} over {SHOWN[scheme]}")
    reasons = [unlike(ask, model) for model in part.models if by_model[model.name]]
    alike = "" in reasons
    why = "" if alike else next(iter(reasons), "nothing was simulated")
    if alike and falls:
        why = (
            f"not for {', '.join(falls)}: on few machines it gains as much, as sums "
            "share little"
        )
    return Claim(
        "ZEN gains more over SparCML and OmniReduce with more machines",
        f"section 5.2, {part.place}",
        f"simulated on {COUNTS[0]} to {COUNTS[-1]}: {'; '.join(shown) or 'nothing'}",
        not falls if alike else None,
        why,
    )


def figure11(ask: Ask, run: Measure = measured) -> Findings:
    """Natural sparsity at 25 Gbit/s."""
    return figure(ask, "figure11", run)


def figure12(ask: Ask, run: Measure = measured) -> Findings:
    """Natural sparsity at 100 Gbit/s."""
    return figure(ask, "figure12", run)


def figure13(ask: Ask, run: Measure = measured) -> Findings:
    """Sparsified gradients at 25 Gbit/s."""
    return figure(ask, "figure13", run)


def figure14(ask: Ask, run: Measure = measured) -> Findings:
    """Sparsified gradients at 100 Gbit/s."""
    return figure(ask, "figure14", run)


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Bars of the speedups over training with all-reduce, a panel for each scheme."""
    keys = [f"speedup_{scheme}" for scheme in SCHEMES if scheme != DENSE]
    return bars.draw(
        rows,
        path,
        keys=keys,
        title="Training over that with all-reduce",
        notes={
            f"speedup_{scheme}": SHOWN[scheme] for scheme in SCHEMES if scheme != DENSE
        },
    )
