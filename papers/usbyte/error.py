"""Table 4 of US-Byte: predicted iterations against measured ones, replayed on shaped
links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from gradwire.planning import catalogue
from gradwire_bench.errors import TestbedUnavailable
from gradwire_bench.report import bars

from ..frame import Ask, Claim, Findings, Row
from .setting import MODELS, RANKS

TABLE_4 = {
    "googlenet": 0.0228,
    "resnet50": 0.0355,
    "vgg16": 0.0122,
    "mobilenet_v2": 0.0163,
    "inception_v3": 0.0341,
    "bert_base": 0.0475,
}
"""Errors on cluster 1, equation 15."""
BOUND = 0.05
COMPUTE_S = 4.0
"""How long an iteration computes in the replay."""
RIVALS = ("wfbp", "bytescheduler")
OWN = {"usbyte": "", "usbyte_extended": ", with gradwire's extensions"}
"""Planners that have a row for each model, and what is added to its name."""


def table4(ask: Ask, models: Sequence[str] = MODELS) -> Findings:
    """US-Byte's predicted and measured seconds, as in the paper and with gradwire's
    extensions; beside them, what it gains over the other two.

    Without a testbed the rows bear the paper's errors alone, and a note says why.
    """
    try:
        measured = _measure(ask, models)
    except TestbedUnavailable as error:
        rows: list[Row] = [_paper(model, "usbyte") for model in models]
        note = f"not measured, as there is no testbed here: {error}"
        return Findings(tuple(rows), (_claim(rows),), (note,), complete=False)
    rows = [
        _paper(model, planner) | _own(measured, model, planner)
        for model, planner in product(models, OWN)
    ]
    slowest = max(float(str(row["slowdown"])) for row in measured)
    notes = (
        f"replayed by {RANKS} hosts of one machine: real runtime, bytes and links, "
        f"computation is waiting. Bytes are 1/{measured[0]['scale']:g} of cluster 1's. "
        f"Seconds are as many times longer (up to {slowest:g}) as it takes for an "
        f"iteration to compute for {COMPUTE_S:g} s: on fast models the ranks would "
        "measure the cores they share. alpha and beta are measured on these links, not "
        "the paper's",
    )
    return Findings(tuple(rows), (_claim(rows),), notes)


def _measure(ask: Ask, models: Sequence[str]) -> list[Row]:
    """Rows of ``gradwire bench schedule`` for these models, each at its own
    slowdown.
    """
    from gradwire_bench.schedule import schedule

    rows: list[Row] = []
    for model in models:
        profile = catalogue.load(model)
        settings = schedule.ScheduleBench(
            profiles=(model,),
            hosts=RANKS,
            planners=tuple(OWN) if ask.quick else (*RIVALS, *OWN),
            slowdown=round(COMPUTE_S / (profile.forward_s + profile.backward_s), 1),
            turns=1,
            iterations=2 if ask.quick else 5,
            trials=2 if ask.quick else 25,
        )
        rows += schedule.run(settings, ask.report).rows
    return rows


def _paper(model: str, planner: str) -> Row:
    row: Row = {"name": f"{model}{OWN[planner]}", "model": model, "planner": planner}
    return row | (
        {"fraction_error_paper": TABLE_4.get(model)} if planner == "usbyte" else {}
    )


def _own(measured: Sequence[Row], model: str, planner: str) -> Row:
    by_planner = {str(row["name"]): row for row in measured if row["model"] == model}
    own = by_planner[planner]
    seconds = float(str(own["measured_s"]))
    predicted_s = float(str(own["simulated_s"]))
    row: Row = {
        "measured_s": seconds,
        "simulated_s": predicted_s,
        "fraction_error": abs(predicted_s - seconds) / seconds,
    }
    for rival in RIVALS:
        if rival in by_planner:
            other_s = float(str(by_planner[rival]["measured_s"]))
            row[f"fraction_over_{rival}_measured"] = other_s / seconds - 1
    return row


def _claim(rows: Sequence[Mapping[str, object]]) -> Claim:
    errors = {
        str(row["name"]): float(str(row["fraction_error"]))
        for row in rows
        if "measured_s" in row and row["planner"] == "usbyte"
    }
    says = "the error of the predicted iteration is below 5 % for all six models"
    if not errors:
        return Claim(says, "section 6.2, table 4", "not measured", None)
    worst = max(errors, key=errors.__getitem__)
    agrees = errors[worst] < BOUND
    return Claim(
        says,
        "section 6.2, table 4",
        f"at most {100 * errors[worst]:.1f} % ({worst})",
        agrees,
        ""
        if agrees
        else "eight ranks share the cores of one machine, which the model does not "
        "know",
    )


def draw4(rows: Sequence[Row], path: Path) -> Path:
    """Errors of ours and of the paper's, side by side."""
    return bars.draw(
        rows,
        path,
        keys=["fraction_error", "fraction_error_paper"],
        title="Error of the predicted iteration",
        notes={
            "fraction_error": "here, replayed",
            "fraction_error_paper": "table 4, cluster 1",
        },
    )
