"""Experiment 2 of SSFusion, its time: how much less of it SSFusion trains, simulated.

All schemes train as many epochs, so a training's seconds are as its iterations'.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..frame import Ask, Claim, Findings, Row
from ..rows import number
from .compare import Case, compared, difference, is_within, shown
from .contenders import LACKING, RIVALS, SSFUSION
from .printed import FIGURE_12_TIME
from .setting import LOCAL, LOCAL_RANKS

MODELS = ("resnet152", "vgg19", "lstm", "bert_base")


def figure12_time(
    ask: Ask, models: Sequence[str] = MODELS, num_ranks: int = LOCAL_RANKS
) -> Findings:
    """Seconds of an iteration of each scheme on the local cluster."""
    rows = compared(ask, [Case(LOCAL, model, num_ranks) for model in models])
    return Findings(tuple(rows), (claim_of(rows),))


def claim_of(rows: Sequence[Row]) -> Claim:
    """The range of the shares by which SSFusion's iterations are shorter, beside the
    paper's.
    """
    saved: dict[str, tuple[float, Row, Row]] = {}
    for model in dict.fromkeys(str(row["model"]) for row in rows):
        own = {str(row["name"]): row for row in rows if row["model"] == model}
        for other in RIVALS:
            less = 1 - number(own[SSFUSION], "iteration_s") / number(
                own[other], "iteration_s"
            )
            saved[f"{other}, {model}"] = less, own[SSFUSION], own[other]
    least, most = (chosen(saved, key=lambda at: saved[at][0]) for chosen in (min, max))
    found = saved[least][0], saved[most][0]
    lacking = (
        f"{', '.join(LACKING)} could widen the range: no planner of it"
        if LACKING
        else ""
    )
    within = is_within(found, FIGURE_12_TIME)
    _, own_row, rival = saved[least]
    return Claim(
        f"SSFusion reduces the time of training by {shown(FIGURE_12_TIME)}",
        "experiment 2, analysis (3)",
        f"{shown(found)} (least against {least}, most against {most})",
        None if within and LACKING else within,
        lacking if within else difference([own_row, rival], str(own_row["model"])),
    )
