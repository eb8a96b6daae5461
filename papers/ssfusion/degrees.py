"""Figure 2 of SSFusion, its time: the share of selection in an iteration, by fusion
degree.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradwire.planning.data.profile import Profile
from gradwire.planning.simulation.clock import run_on_clock
from gradwire_bench.report import curves
from gradwire_lab.planning.flat_plan import flat_plan
from gradwire_lab.planning.sparse_fusion import Arrival, arrivals

from ..frame import Ask, Claim, Findings, Row, effect
from ..rows import number
from .missing import DEGREES
from .printed import FIGURE_2, FIGURE_5_S, TABLE_3_GPU_S
from .setting import DENSITY, LOCAL, LOCAL_RANKS, SPARSIFIER

NEAR = 0.05
"""Within which a share of an iteration counts as the paper's, where a quarter of it is
more.
"""
PLACE = "section III-A, figure 2"


def figure2(
    ask: Ask, models: Sequence[str] = tuple(FIGURE_2), degrees: Sequence[int] = DEGREES
) -> Findings:
    """The share of an iteration that selection on the GPU takes, for each model and
    degree.
    """
    rows: list[Row] = []
    claims: list[Claim] = []
    for done, model in ask.each(models):
        profile = LOCAL.profile(model)
        own = []
        for degree in degrees:
            ask.report(done, f"{model}, {degree} % fused")
            own.append(_row(model, profile, degree))
        rows += own
        claims += claims_of(model, own)
    return Findings(tuple(rows), tuple(claims))


def fused(every: list[Arrival], degree: int) -> list[list[Arrival]]:
    """The first ``degree`` per cent of the tensors as one group, and each other by
    itself.
    """
    num_fused = round(degree / 100 * len(every))
    first = [every[:num_fused]] if num_fused else []
    return [*first, *([one] for one in every[num_fused:])]


def _row(model: str, profile: Profile, degree: int) -> Row:
    groups = fused(arrivals(profile), degree)
    plan = flat_plan("degree", profile, groups, SPARSIFIER, DENSITY, inline=True)
    timing = run_on_clock(plan, profile, LOCAL.cluster(LOCAL_RANKS))
    return {
        "name": f"{degree} % fused",
        "model": model,
        "degree": degree,
        "num_messages": len(plan.messages),
        "iteration_s": timing.iteration_s,
        "compute_s": profile.forward_s + profile.backward_s,
        "selection_s": timing.inline_s,
        "fraction_selection": timing.inline_s / timing.iteration_s,
    }


def claims_of(model: str, rows: Sequence[Row]) -> list[Claim]:
    """The shares that are printed beside ours, and whether they fall with the
    degree.
    """
    share = {
        int(number(row, "degree")): number(row, "fraction_selection") for row in rows
    }
    names = {
        0: "tensor by tensor",
        20: "at a fusion degree of 20 %",
        100: "all tensors fused",
    }
    claims = []
    for degree, stated in zip((0, 20, 100), FIGURE_2[model], strict=True):
        if stated is None or degree not in share:
            continue
        row = next(row for row in rows if row["degree"] == degree)
        says = (
            f"{names[degree]}, sparsification takes {100 * stated:.1f} % of "
            f"{model}'s training"
        )
        found = share[degree]
        why = _why(model, row, stated)
        claims.append(
            effect(says, PLACE, f"{100 * found:.1f} %", found, stated, why, NEAR)
        )
    values = [share[degree] for degree in sorted(share)]
    falls = values == sorted(values, reverse=True) and values[0] > values[-1]
    claims.append(
        Claim(
            "sparsification takes a smaller share the more tensors are fused",
            PLACE,
            f"{model}: " + ", ".join(f"{100 * value:.1f}" for value in values) + " %",
            falls,
            "" if falls else "it does not fall from each degree to the next",
        )
    )
    return claims


def _why(model: str, row: Row, stated: float) -> str:
    """The seconds that table 3 comes to, beside those that the paper's own figure 5
    leaves.
    """
    times = number(row, "num_messages")
    least_s = times * TABLE_3_GPU_S[0]
    why = (
        f"{times:.0f} selections of at least {1e3 * TABLE_3_GPU_S[0]:.2f} ms (table 3) "
        f"are {least_s:.2f} s, ours in all {number(row, 'selection_s'):.2f} s"
    )
    if row["degree"] == 0:
        allowed_s = stated * FIGURE_5_S[model][1]
        why += (
            f"; {100 * stated:.1f} % of the {FIGURE_5_S[model][1]} s of figure 5 are "
            "only "
        )
        why += f"{allowed_s:.2f} s"
    return why


def draw2(rows: Sequence[Row], path: Path) -> Path:
    """Draws the share of selection over the degree, with a line for each model."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        point = (number(row, "degree"), 100 * number(row, "fraction_selection"))
        series.setdefault(str(row["model"]), []).append(point)
    return curves.draw_panels(
        {"": series},
        path,
        title="Selection by fusion degree, simulated",
        x_label="tensors fused, %",
        y_label="selection, % of an iteration",
    )
