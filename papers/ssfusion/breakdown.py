"""Figure 13 of SSFusion: where an iteration's time goes, simulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradwire_bench.report import bars

from ..frame import Ask, Claim, Findings, Row, effect
from ..rows import number
from .compare import PARTS, Case, compared
from .contenders import SSFUSION
from .printed import FIGURE_13, FIGURE_13_SELECTION
from .setting import CLOUD, RANKS

MODELS = ("resnet152", "bert_large")
NEAR = 0.05
"""Within which a share by which seconds are less counts as the paper's, where a quarter
is more.
"""


def figure13(
    ask: Ask, models: Sequence[str] = MODELS, num_ranks: int = RANKS[-1]
) -> Findings:
    """Seconds of computation, selection and communication that is not hidden, by
    scheme.
    """
    rows = compared(ask, [Case(CLOUD, model, num_ranks) for model in models])
    claims = [
        *(
            _claim(rows, "communication_s", other, at)
            for at in models
            for other in FIGURE_13
        ),
        *(
            _claim(rows, "selection_s", other, at)
            for at in models
            for other in FIGURE_13_SELECTION
        ),
    ]
    return Findings(tuple(rows), tuple(claims))


def _claim(rows: Sequence[Row], part: str, other: str, model: str) -> Claim:
    printed = (FIGURE_13 if part == "communication_s" else FIGURE_13_SELECTION)[other]
    stated = printed[MODELS.index(model)]
    own = {str(row["name"]): row for row in rows if row["model"] == model}
    return less(part, stated, own[SSFUSION], own.get(other), f"{other} on {model}")


def less(part: str, stated: float, ours: Row, other: Row | None, against: str) -> Claim:
    """By how much a part of SSFusion's iteration is shorter than another scheme's.

    ``other`` is None where the scheme is not here.
    """
    says = f"SSFusion takes {100 * stated:.1f} % less {PARTS[part]} than {against}"
    place = "experiment 3, figure 13"
    if other is None:
        return Claim(says, place, "not measured", None, "no planner of it")
    own_s = number(ours, part)
    other_s = number(other, part)
    in_words = f"{1e3 * own_s:.1f} ms against {1e3 * other_s:.1f} ms"
    if other_s <= 0:
        return Claim(
            says, place, in_words, False, "there all of it is hidden, and none is left"
        )
    found = 1 - own_s / other_s
    link = (
        f"{1e3 * number(ours, 'link_s'):.1f} and {1e3 * number(other, 'link_s'):.1f} ms"
    )
    share = other_s / number(other, "iteration_s")
    why = (
        f"it is {100 * share:.1f} % of the other's iteration; hidden or not, the "
        "links are in "
    )
    why += f"use for {link}"
    in_words = (
        f"{100 * abs(found):.1f} % {'less' if found >= 0 else 'more'}: {in_words}"
    )
    return effect(says, place, in_words, found, stated, why, NEAR)


def draw13(rows: Sequence[Row], path: Path) -> Path:
    """Draws bars of the parts of each scheme's iteration."""
    drawn = [{**row, "name": f"{row['name']}, {row['model']}"} for row in rows]
    return bars.draw(
        drawn, path, keys=list(PARTS), title="Parts of an iteration, simulated"
    )
