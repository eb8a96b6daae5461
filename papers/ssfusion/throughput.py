"""Figures 11, 14, 15, 16 and 17 of SSFusion: throughput of all schemes, simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from gradwire_bench.report import curves

from ..frame import Ask, Claim, Findings, Row
from ..rows import number
from .compare import (
    PARTS,
    Case,
    compared,
    dense_notes,
    improvement,
    over,
    range_of,
    readings,
    shown,
    where,
)
from .contenders import COMMON, RIVALS, SSFUSION, VARIANTS
from .printed import (
    CUPCAKE,
    FIGURE_11,
    FIGURE_11_O,
    FIGURE_11_OI,
    FIGURE_11_OVER,
)
from .replayed import models_of
from .setting import AS_FIGURE_2, AS_FIGURE_9, AS_NODES, CLOUD, MODELS, RANKS

LITERAL = replace(COMMON, bound="none")
"""SSFusion with equation 2 as printed, which may send everything dense."""


def figure11(
    ask: Ask, models: Sequence[str] = MODELS, ranks: Sequence[int] = RANKS
) -> Findings:
    """Throughput on 16 to 64 GPUs, and on the most of them under other readings."""
    if ask.quick:
        models = models[:2]
        ranks = (ranks[0], ranks[-1])
    most = max(ranks)
    cases = [Case(CLOUD, model, n) for model, n in product(models, ranks)]
    readings_too = (AS_FIGURE_9, AS_FIGURE_2, AS_NODES)
    cases += [Case(other, model, most) for other in readings_too for model in models]
    cases += [Case(CLOUD, model, most, LITERAL) for model in models]
    rows = compared(ask, cases)
    main = where(rows, reading=cases[0].name)
    on_others = _others(RANKS, ranks, "GPUs")
    missing = ", ".join(filter(None, (_others(MODELS, models, "models"), on_others)))
    claims = [
        improvement(
            where(main, model=model),
            FIGURE_11[model],
            f"{SSFUSION} outperforms all others on {model}",
            "experiment 1, figure 11",
            missing=on_others,
        )
        for model in models
    ]
    for variant, others, stated in FIGURE_11_OVER:
        says = f"{VARIANTS[variant]} outperforms {' and '.join(others)}"
        claims.append(
            improvement(
                main,
                stated,
                says,
                "experiment 1",
                ours=VARIANTS[variant],
                others=others,
                missing=missing,
            )
        )
    claims += [_offloading(main, missing), _interleaving(main, missing)]
    claims += [widening(where(main, model=model), model) for model in models]
    fewer = (
        [f"of {', '.join(models)} on {ranks[0]} and {most} GPUs only"]
        if ask.quick
        else []
    )
    ranks_note = order_note(main, ask.earlier.get("figure11_replayed"))
    notes = (ranks_note, *dense_notes(rows), *_ranges(rows), *fewer)
    return Findings(tuple(rows), tuple(claims), notes)


def _others(every: Sequence[object], taken: Sequence[object], what: str) -> str:
    """The values that the paper's range is over and this run is not, in words.

    >>> _others((16, 32, 64), (16, 64), "GPUs")
    'on 32 GPUs'
    """
    left = [str(one) for one in every if one not in taken]
    return f"on {' and '.join(left)} {what}" if left else ""


def order_note(rows: Sequence[Row], replayed: Findings | None) -> str:
    """The order of SSFusion and Cupcake, simulated and on real links."""
    gains = over(rows, SSFUSION, [CUPCAKE]).values()
    simulated = [gain > 0 for gain in gains]
    in_words = (
        f"{SSFUSION} is faster than {CUPCAKE} in {sum(simulated)} of "
        f"{len(simulated)} simulated"
    )
    if replayed is None or not replayed.rows:
        return (
            f"{in_words} comparisons. On real links the order may be the other: "
            "figure11_replayed was not measured before this, and in docs/measured.md "
            "SSFusion is 1.34 times as fast on bert_base"
        )
    taken = {
        (row["model"], row["name"]): number(row, "measured_s") for row in replayed.rows
    }
    pairs = {
        m: (taken[m, "ssfusion"], taken[m, "cupcake"]) for m in models_of(replayed.rows)
    }
    real = [ours < other for ours, other in pairs.values()]
    seconds = "; ".join(
        f"{m} {ours:.2f} and {other:.2f} s" for m, (ours, other) in pairs.items()
    )
    alike = len({*simulated, *real}) == 1
    return (
        f"{in_words} comparisons, and in {sum(real)} of {len(real)} that "
        "figure11_replayed "
        f"measured on real links ({seconds}): "
        + (
            "both rank them alike"
            if alike
            else "the two rank them differently, so trust neither"
        )
    )


def _ranges(rows: Sequence[Row]) -> list[str]:
    """A sentence for each reading: the gains of SSFusion-(O+I) under it."""
    sentences = []
    for name in readings(rows):
        of_reading = where(rows, reading=name)
        gains = range_of(over(of_reading, SSFUSION, RIVALS).values())
        gains_over_o = range_of(over(of_reading, SSFUSION, [VARIANTS["o"]]).values())
        sentences.append(
            f"{name}: {SSFUSION} over all of {', '.join(RIVALS)} {shown(gains)}, "
            f"over -O {shown(gains_over_o)}"
        )
    return sentences


def _offloading(rows: Sequence[Row], missing: str) -> Claim:
    return improvement(
        rows,
        FIGURE_11_O,
        "SSFusion-O outperforms SSFusion(naive)",
        "experiment 1",
        ours=VARIANTS["o"],
        others=[VARIANTS["naive"]],
        reason=offloaded,
        missing=missing,
    )


def offloaded(pair: Sequence[Row], case: str) -> str:
    """The seconds that offloading takes off the backward pass, and of how many."""
    ours, other = pair
    less_s = number(other, "selection_s") - number(ours, "selection_s")
    share = number(other, "selection_s") / number(other, "iteration_s")
    return (
        f"{case} offloading takes {1e3 * less_s:.0f} ms off an iteration of "
        f"{1e3 * number(other, 'iteration_s'):.0f} ms, {100 * share:.0f} % of "
        "which is selection"
    )


def _interleaving(rows: Sequence[Row], missing: str) -> Claim:
    return improvement(
        rows,
        FIGURE_11_OI,
        "SSFusion-(O+I) outperforms SSFusion-O",
        "experiment 1",
        others=[VARIANTS["o"]],
        reason=interleaved,
        missing=missing,
    )


def interleaved(pair: Sequence[Row], case: str) -> str:
    """How much there is for an all-reduce to shorten: what is dense, and what is not
    hidden.
    """
    _, other = pair
    exposed = number(other, "communication_s") / number(other, "iteration_s")
    most = 1 / (1 - exposed) - 1
    return (
        f"{case} {100 * number(other, 'fraction_dense'):.1f} % of what {other['name']} "
        f"sends is dense, and {100 * exposed:.1f} % of its iteration is communication "
        f"that is not hidden: without any it would gain {100 * most:.1f} %"
    )


def widening(rows: Sequence[Row], model: str) -> Claim:
    """Whether the largest gain over the paper's schemes grows with the number of
    GPUs.
    """
    ranks = sorted({int(number(row, "num_ranks")) for row in rows})
    most = {
        n: max(over(where(rows, num_ranks=n), SSFUSION, RIVALS).values()) for n in ranks
    }
    gains = list(most.values())
    widens = gains == sorted(gains) and gains[0] < gains[-1]
    (last,) = where(rows, num_ranks=ranks[-1], name=SSFUSION)
    shares = ", ".join(
        f"{100 * number(last, key) / number(last, 'iteration_s'):.1f} % {word}"
        for key, word in PARTS.items()
    )
    return Claim(
        "the gap between SSFusion and the others widens as the cluster grows",
        "experiment 7",
        f"{model}, at most: "
        + ", ".join(f"{100 * g:.1f} % on {n}" for n, g in most.items()),
        widens,
        ""
        if widens
        else f"what grows with GPUs is communication; on {ranks[-1]} an iteration is "
        f"{shares}",
    )


def draw11(rows: Sequence[Row], path: Path) -> Path:
    """Draws samples a second over GPUs, with a panel for each model and a line for each
    scheme.
    """
    main = where(rows, reading=CLOUD.name)
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in main:
        lines = panels.setdefault(str(row["model"]), {})
        point = (number(row, "num_ranks"), number(row, "throughput"))
        lines.setdefault(str(row["name"]), []).append(point)
    return curves.draw_panels(
        panels,
        path,
        title="Throughput, simulated",
        x_label="GPUs",
        y_label="samples a second",
        doubling=True,
    )
