"""Table 5 of SSFusion: what its online profiling takes of a training.

Source: section IV-B (the first five iterations), table 4 (data sets).
Differences from the paper: how long it trains is not printed. Lengths here are usual
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from gradwire.contract.registry import load
from gradwire.planning.price import iteration_s

from ..frame import Ask, Claim, Findings, Row
from ..rows import number
from .printed import TABLE_5
from .setting import CLOUD, RANKS

PROFILED = 5
"""Iterations of online profiling."""


@dataclass(frozen=True)
class Length:
    """A usual length of a training: so many passes over so many examples."""

    epochs: int
    examples: int
    about: str


IMAGENET = Length(90, 1_281_167, "90 epochs of ImageNet")
LENGTHS = {
    "resnet152": IMAGENET,
    "vit_large": IMAGENET,
    "bert_large": Length(2, 87_599, "2 epochs of SQuAD"),
    "gpt2_large": Length(
        10, 103_227_021 // 512, "10 epochs of WikiText-103 in windows of 512"
    ),
}


def table5(
    ask: Ask, models: Sequence[str] = tuple(TABLE_5), num_ranks: int = RANKS[-1]
) -> Findings:
    """Seconds of planning, measured, and of five iterations, simulated, over the
    training's.
    """
    rows: list[Row] = []
    cluster = CLOUD.cluster(num_ranks)
    for done, model in ask.each(models):
        ask.report(done, model)
        profile = CLOUD.profile(model)
        length = LENGTHS[model]
        start_s = perf_counter()
        plan = load("planner", "ssfusion")(profile, cluster)
        planning_s = perf_counter() - start_s
        step_s = iteration_s(plan, profile, cluster)
        steps = length.epochs * length.examples / (num_ranks * profile.batch_size)
        rows.append(
            {
                "name": model,
                "training": length.about,
                "num_steps": round(steps),
                "iteration_s": step_s,
                "planning_s": planning_s,
                "profiled_s": PROFILED * step_s,
                "fraction": (planning_s + PROFILED * step_s) / (steps * step_s),
            }
        )
    return Findings(tuple(rows), tuple(claim_of(row) for row in rows))


def claim_of(row: Row) -> Claim:
    """A printed share beside the row's, which is of another length of training."""
    stated = TABLE_5[str(row["name"])]
    step_s = number(row, "iteration_s")
    needed = (number(row, "planning_s") + number(row, "profiled_s")) / stated / step_s
    return Claim(
        f"online profiling takes {100 * stated:.2f} % of {row['name']}'s training",
        "experiment 8, table 5",
        f"{100 * number(row, 'fraction'):.3f} % of {row['training']}, "
        f"{row['num_steps']} steps",
        None,
        f"how long the paper trains is not printed; {100 * stated:.2f} % would be "
        f"{needed:.0f} steps",
    )
