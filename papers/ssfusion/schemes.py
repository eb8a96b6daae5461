"""Figure 5 of SSFusion: per-tensor, multi-tensor and selective sparsification,
simulated.

Groups are Cupcake's in all three. Only what is sparsified in them differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradwire.planning.data.plan import DENSE, ExchangeSetting, Plan, PlannedMessage
from gradwire.planning.data.profile import Profile
from gradwire.planning.simulation.clock import run_on_clock
from gradwire_bench.report import bars
from gradwire_lab.planning.flat_plan import flat_plan
from gradwire_lab.planning.sparse_fusion import (
    Arrival,
    SparseCost,
    arrivals,
    best_fusion,
    chunks_in,
)

from ..frame import Ask, Claim, Findings, Row, effect
from ..rows import number
from .printed import FIGURE_5_S, SMALL_NUMEL
from .setting import DENSITY, LOCAL, LOCAL_RANKS, SPARSIFIER

PER_TENSOR = "per-tensor"
MULTI = "multi-tensor"
SELECTIVE = "selective"
NEAR = 0.05
CLOSE = 0.1
"""Within which a share counts as the paper's, where a quarter of it is more, and an
iteration as close to another one.
"""
PLACE = "section III-C, figure 5"


def apart(profile: Profile, groups: Sequence[list[Arrival]], small: int) -> Plan:
    """The plan of groups in which each tensor of more than ``small`` elements is
    sparsified by itself, in the backward pass, and the others travel dense.
    """
    messages = []
    exchanges = {}
    for number_, group in enumerate(groups):
        sparse = [one for one in group if one.tensor.numel > small]
        name = f"group {number_}" if sparse else DENSE
        messages.append(
            PlannedMessage(
                chunks=chunks_in(group),
                exchange=name,
                inline=tuple(one.tensor.name for one in sparse),
            )
        )
        if sparse:
            exchanges[name] = ExchangeSetting(
                compressor="selective",
                settings={
                    "sparsifier": SPARSIFIER,
                    "density": DENSITY,
                    "num_dense": len(group) - len(sparse),
                },
                error_feedback=True,
            )
    return Plan(
        planner="selective" if small else "per-tensor",
        model=profile.model,
        messages=tuple(messages),
        exchanges=exchanges,
    )


def figure5(ask: Ask, models: Sequence[str] = tuple(FIGURE_5_S)) -> Findings:
    """Seconds of an iteration on 8 GPUs of the local cluster."""
    rows: list[Row] = []
    claims: list[Claim] = []
    cluster = LOCAL.cluster(LOCAL_RANKS)
    cost = SparseCost.of(cluster, SPARSIFIER, DENSITY)
    for done, model in ask.each(models):
        ask.report(done, model)
        profile = LOCAL.profile(model)
        groups = best_fusion(arrivals(profile), cost)
        plans = {
            PER_TENSOR: apart(profile, groups, 0),
            MULTI: flat_plan(
                "multi-tensor", profile, groups, SPARSIFIER, DENSITY, inline=True
            ),
            SELECTIVE: apart(profile, groups, SMALL_NUMEL),
        }
        own: list[Row] = []
        for name, plan in plans.items():
            timing = run_on_clock(plan, profile, cluster)
            num_inline = len(plan.messages) if name == MULTI else len(timing.inline)
            own.append(
                {
                    "name": name,
                    "model": model,
                    "num_messages": len(plan.messages),
                    "num_selections": num_inline,
                    "iteration_s": timing.iteration_s,
                    "compute_s": profile.forward_s + profile.backward_s,
                    "selection_s": timing.inline_s,
                }
            )
        rows += own
        claims += claims_of(model, own)
    return Findings(tuple(rows), tuple(claims))


def claims_of(model: str, rows: Sequence[Row]) -> list[Claim]:
    """Selective against per-tensor sparsification, and against multi-tensor
    sparsification.
    """
    own = {str(row["name"]): row for row in rows}
    taken = {name: number(row, "iteration_s") for name, row in own.items()}
    stated = 1 - FIGURE_5_S[model][0] / FIGURE_5_S[model][1]
    found = 1 - taken[SELECTIVE] / taken[PER_TENSOR]
    more = taken[SELECTIVE] / taken[MULTI] - 1
    is_close = abs(more) <= CLOSE
    saved = number(own[PER_TENSOR], "num_selections") - number(
        own[SELECTIVE], "num_selections"
    )
    selected = number(own[PER_TENSOR], "selection_s") / taken[PER_TENSOR]
    left = number(own[SELECTIVE], "selection_s") / taken[SELECTIVE]
    return [
        effect(
            f"selective sparsification takes {FIGURE_5_S[model][0]} s for {model}, "
            f"per-tensor {FIGURE_5_S[model][1]} s: {100 * stated:.0f} % less",
            PLACE,
            f"{taken[SELECTIVE]:.2f} and {taken[PER_TENSOR]:.2f} s: "
            f"{100 * found:.0f} % less",
            found,
            stated,
            f"selection is {100 * selected:.0f} % of the per-tensor iteration, "
            f"and {saved:.0f} of "
            f"{number(own[PER_TENSOR], 'num_selections'):.0f} selections are left out",
            NEAR,
        ),
        Claim(
            "selective sparsification takes about as long as multi-tensor "
            "sparsification",
            PLACE,
            f"{model}: {taken[SELECTIVE]:.2f} against {taken[MULTI]:.2f} s, "
            f"{100 * more:+.0f} %; about as long: within {100 * CLOSE:g} %",
            is_close,
            ""
            if is_close
            else f"{number(own[SELECTIVE], 'num_selections'):.0f} selections are left, "
            f"{100 * left:.0f} % of its iteration, where multi-tensor sparsification "
            f"has {number(own[MULTI], 'num_selections'):.0f}",
        ),
    ]


def draw5(rows: Sequence[Row], path: Path) -> Path:
    """Draws bars of the seconds of an iteration, with a panel for each model."""
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    names = list(dict.fromkeys(str(row["name"]) for row in rows))
    taken = {(row["name"], row["model"]): row["iteration_s"] for row in rows}
    drawn: list[Row] = [
        {"name": name, **{f"{model}_s": taken[name, model] for model in models}}
        for name in names
    ]
    return bars.draw(
        drawn,
        path,
        keys=[f"{model}_s" for model in models],
        title="An iteration, simulated",
    )
