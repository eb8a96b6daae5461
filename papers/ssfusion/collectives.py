"""Figure 9 of SSFusion: all-gather and all-reduce of a whole gradient, by formula.

The two models are not named. The rates that the printed seconds imply say which they
may be: of equation 3 without latency, an all-gather of D bytes takes (P - 1) D / rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from math import log
from pathlib import Path

from gradwire.collective.steps.travel import travel
from gradwire.planning import catalogue
from gradwire_bench.report import curves

from ..frame import Ask, Claim, Findings, Row
from ..rows import number
from .printed import FIGURE_9_GATHER_S, FIGURE_9_RANKS, FIGURE_9_REDUCE_S
from .setting import AS_FIGURE_9, CLOUD, GBIT, MODELS

TAKEN = ("bert_large", "gpt2_large")
"""The models taken for the figure's: those whose implied rates differ least
(``implied``).
"""
RANKS = (8, 16, 32, 64)
PLACE = "section IV-D, figure 9"
NO_VERDICT = (
    "equations 3 and 4 beside measurements of models that were chosen for the rates "
    "they imply: nothing is measured or simulated here"
)
VERBS = {"all_gather": FIGURE_9_GATHER_S, "all_reduce": FIGURE_9_REDUCE_S}


def figure9(
    ask: Ask, models: Sequence[str] = TAKEN, ranks: Sequence[int] = RANKS
) -> Findings:
    """Seconds of both verbs on links of the stated rate, and of the rate that the
    figure shows.
    """
    rows: list[Row] = [
        {
            "name": model,
            "reading": reading.name,
            "num_ranks": num_ranks,
            "size_bytes": catalogue.load(model).size_bytes,
            **{
                f"{verb}_s": reading.cluster(num_ranks).collective_s(
                    verb, catalogue.load(model).size_bytes
                )
                for verb in VERBS
            },
        }
        for reading in (CLOUD, AS_FIGURE_9)
        for model in models
        for num_ranks in ranks
    ]
    sizes = {model: catalogue.load(model).size_bytes for model in MODELS}
    note = (
        "Gbit/s that the printed all-gathers among 64 imply, if the models are "
        + "; ".join(
            f"{first} and {second}: {one:.1f} and {other:.1f}"
            for (first, second), (one, other) in implied(sizes)[:3]
        )
    )
    return Findings(tuple(rows), tuple(claims_of(rows)), (note,))


def implied(
    sizes: Mapping[str, int],
) -> list[tuple[tuple[str, str], tuple[float, float]]]:
    """Pairs of models and the rates in Gbit/s that figure 9 implies for them, the
    likest first.
    """
    most = FIGURE_9_RANKS[-1]
    taken_s = [own[-1] for own in FIGURE_9_GATHER_S]
    found = []
    for pair in permutations(sizes, 2):
        one, other = (
            (most - 1) * sizes[model] / seconds / GBIT
            for model, seconds in zip(pair, taken_s, strict=True)
        )
        found.append((pair, (one, other)))
    return sorted(found, key=lambda each: abs(log(each[1][0] / each[1][1])))


def claims_of(rows: Sequence[Row]) -> list[Claim]:
    """Seconds on the stated links, and growth from the fewest GPUs to the most: no
    verdicts.
    """
    by_place = {
        (row["name"], row["num_ranks"]): row
        for row in rows
        if row["reading"] == CLOUD.name
    }
    claims = []
    for verb, printed in VERBS.items():
        for model, stated in zip(TAKEN, printed, strict=True):
            pair = [by_place.get((model, num_ranks)) for num_ranks in FIGURE_9_RANKS]
            ours = [number(row, f"{verb}_s") for row in pair if row is not None]
            if len(ours) == len(stated):
                claims += [
                    _seconds(verb, model, stated, ours),
                    _growth(verb, model, stated, ours),
                ]
    return claims


def _seconds(
    verb: str, model: str, stated: tuple[float, float], ours: Sequence[float]
) -> Claim:
    few, most = FIGURE_9_RANKS
    longer = ", ".join(
        f"{theirs / own:.1f}" for own, theirs in zip(ours, stated, strict=True)
    )
    return Claim(
        f"an {_words(verb)} takes {stated[0]} s on {few} GPUs and {stated[1]} s "
        f"on {most}",
        PLACE,
        f"{model}: {ours[0]:.2f} and {ours[1]:.2f} s",
        None,
        f"{NO_VERDICT}. The paper's are {longer} times as long as the links' "
        "rate alone says",
    )


def _growth(
    verb: str, model: str, stated: tuple[float, float], ours: Sequence[float]
) -> Claim:
    few, most = FIGURE_9_RANKS
    return Claim(
        f"from {few} to {most} GPUs an {_words(verb)}'s seconds grow "
        f"{stated[1] / stated[0]:.2f} times",
        PLACE,
        f"{model}: {ours[1] / ours[0]:.2f} times",
        None,
        f"{NO_VERDICT}. By the equation its bytes grow {_bytes_grow(verb):.2f} times",
    )


def _bytes_grow(verb: str) -> float:
    few, most = (travel(verb, num_ranks).copies for num_ranks in FIGURE_9_RANKS)
    return most / few


def _words(verb: str) -> str:
    return verb.replace("_", "-")


def draw9(rows: Sequence[Row], path: Path) -> Path:
    """Draws seconds over GPUs under the reading of the figure, with a line for each
    verb.
    """
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["reading"] == AS_FIGURE_9.name:
            for verb in VERBS:
                point = (number(row, "num_ranks"), number(row, f"{verb}_s"))
                series.setdefault(f"{row['name']}, {verb}", []).append(point)
    return curves.draw_panels(
        {"": series},
        path,
        title="Whole gradients, by formula",
        x_label="GPUs",
        y_label="seconds",
        doubling=True,
    )
