"""Figures 15 and 16 of US-Byte: planning time and training speed over the basic
partition size.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from gradwire.contract.registry import load
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.profile import Profile
from gradwire.planning.price import iteration_s
from gradwire_bench.report import curves

from ..frame import Ask, Claim, Findings, Row
from .setting import BENCHMARKS, MBIT, MODELS, RANKS, cluster_2, profile_of

SIZES_MBIT = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Values of S_p. The paper states the first and the last; those between them are chosen
here.
"""
CREDIT = 2
"""ByteScheduler's credit. The paper states it for its simulations only; here it is
assumed for other figures too.
"""
STABLE = 1.25
"""The most that planning at the worst S_p may take over the best to count as
"stable".
"""
DROP = 0.1
"""The share of the best speed from which a loss counts as a significant drop."""
CLOCK = time.thread_time
"""The clock of planning, which counts only the one thread that plans."""
WHY_NO_SIZE = "WFBP takes no S_p here, so its speeds over S_p could not differ"
WHY_SLOW = "planning is one thread of Python, whose seconds are this processor's"


def figure15(
    ask: Ask,
    models: Sequence[str] = MODELS,
    sizes_mbit: Sequence[float] = SIZES_MBIT,
    repeats: int | None = None,
) -> Findings:
    """The seconds that planning takes on this machine: the shortest of several runs."""
    repeats = repeats or (1 if ask.quick else 3)
    rows: list[Row] = []
    for done, (model, size) in ask.each(list(itertools.product(models, sizes_mbit))):
        ask.report(done, f"{model} at S_p = {size:g} Mb")
        profile = profile_of(model)
        cluster = cluster_2()
        rows.append(
            {
                "name": model,
                "partition_mbit": size,
                "partition_bytes": _bytes(size),
                "num_layers": len(profile.layers),
                "planning_s": _planning_s(profile, cluster, size, repeats),
            }
        )
    return Findings(
        tuple(rows),
        (_below(rows), _vgg16(rows), _stable(rows)),
        (
            "planning is algorithm 2, and whole layers beside its blocks; both are "
            "priced on the virtual clock",
        ),
    )


def _planning_s(
    profile: Profile, cluster: Cluster, size_mbit: float, repeats: int
) -> float:
    planner = load("planner", "usbyte")
    settings = {"basic_partition_bytes": _bytes(size_mbit)}
    seconds = []
    for _ in range(repeats):
        start_s = CLOCK()
        planner(profile, cluster, **settings)
        seconds.append(CLOCK() - start_s)
    return min(seconds)


def _bytes(size_mbit: float) -> int:
    return round(size_mbit * MBIT)


def _below(rows: Sequence[Row]) -> Claim:
    longest = max(float(str(row["planning_s"])) for row in rows)
    says = "planning takes less than 10 s whatever S_p is"
    agrees = longest < 10
    ours = f"at most {longest:.2g} s"
    why = "" if agrees else WHY_SLOW
    return Claim(says, "section 6.5, figure 15", ours, agrees, why)


def _vgg16(rows: Sequence[Row]) -> Claim:
    own = [float(str(row["planning_s"])) for row in rows if row["name"] == "vgg16"]
    says = "less than 1 s for VGG16"
    if not own:
        return Claim(says, "section 7.2", "not measured", None)
    agrees = max(own) < 1
    why = "" if agrees else WHY_SLOW
    return Claim(says, "section 7.2", f"at most {max(own):.2g} s", agrees, why)


def _stable(rows: Sequence[Row]) -> Claim:
    """The claim that planning time is stable, for algorithm 2 alone as in the paper's
    figure.
    """
    by_size: dict[object, float] = {}
    for row in rows:
        size = row["partition_mbit"]
        by_size[size] = by_size.get(size, 0.0) + float(str(row["planning_s"]))
    growth = max(by_size.values()) / min(by_size.values())
    agrees = growth <= STABLE
    return Claim(
        "planning time remains stable when S_p changes",
        "section 6.5, figure 15",
        f"all models together take {growth:.1f} times as long at the worst S_p as at "
        f"the best; stable: at most {STABLE:g} times",
        agrees,
        ""
        if agrees
        else "where S_p is small more operations fit between two layers' ends",
    )


def figure16(
    ask: Ask,
    models: Sequence[str] = BENCHMARKS,
    sizes_mbit: Sequence[float] | None = None,
) -> Findings:
    """The predicted speed over S_p on 8 nodes of cluster 2."""
    sizes = sizes_mbit or (SIZES_MBIT[::3] if ask.quick else SIZES_MBIT)
    rows: list[Row] = []
    for done, (model, size) in ask.each(list(itertools.product(models, sizes))):
        ask.report(done, f"{model} at S_p = {size:g} Mb")
        rows.append(_speed_row(profile_of(model), cluster_2(), size))
    notes = (
        f"ByteScheduler's credit is {CREDIT}, as in section 6.7; section 6.5 "
        "does not state it",
        "computation is that of a V100: layer times of the paper's RTX 3090 are "
        "not published",
    )
    return Findings(tuple(rows), tuple(_speed_claims(rows)), notes)


def _speed_row(profile: Profile, cluster: Cluster, size_mbit: float) -> Row:
    size = _bytes(size_mbit)
    plans = {
        "usbyte": load("planner", "usbyte")(
            profile, cluster, basic_partition_bytes=size
        ),
        "bytescheduler": load("planner", "bytescheduler")(
            profile, cluster, partition_bytes=size, credit=CREDIT
        ),
        "wfbp": load("planner", "wfbp")(profile, cluster),
    }
    row: Row = {
        "name": profile.model,
        "partition_mbit": size_mbit,
        "partition_bytes": size,
    }
    for planner, plan in plans.items():
        seconds = iteration_s(plan, profile, cluster)
        row[f"samples_per_s_{planner}"] = RANKS * profile.batch_size / seconds
    return row | {
        f"num_messages_{name}": len(plan.messages) for name, plan in plans.items()
    }


def _speed_claims(rows: Sequence[Row]) -> list[Claim]:
    place = "section 6.5, figure 16"
    drops = {
        planner: _drops(rows, planner)
        for planner in ("usbyte", "bytescheduler", "wfbp")
    }
    shown = {
        name: f"{100 * min(own):.0f} to {100 * max(own):.0f} %"
        for name, own in drops.items()
    }
    claims = [
        Claim(
            "WFBP is not affected by S_p",
            place,
            f"drops by {shown['wfbp']}",
            *(
                (None, WHY_NO_SIZE)
                if max(drops["wfbp"]) == 0
                else (False, "its plans differ")
            ),
        )
    ]
    for planner in ("bytescheduler", "usbyte"):
        agrees = max(drops[planner]) >= DROP
        why = (
            "under the model blocks of one layer that are sent in a row are one block, "
            "whatever S_p is; what each basic block costs the paper's scheduler is not "
            "in its model"
        )
        claims.append(
            Claim(
                f"{planner} drops significantly when S_p is small",
                place,
                f"drops by {shown[planner]} from the best S_p to the smallest; "
                f"significantly: by {100 * DROP:g} % for one model",
                agrees,
                "" if agrees else why,
            )
        )
    pairs = list(zip(drops["usbyte"], drops["bytescheduler"], strict=True))
    less = all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)
    ours = (
        f"US-Byte drops by {shown['usbyte']}, ByteScheduler by {shown['bytescheduler']}"
    )
    why = "" if less else "a model of US-Byte loses more, or no model loses less"
    return [
        *claims,
        Claim("US-Byte is less affected than ByteScheduler", place, ours, less, why),
    ]


def _drops(rows: Sequence[Row], planner: str) -> list[float]:
    """The share of the best speed that each model loses at the smallest S_p."""
    by_model: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        point = (
            float(str(row["partition_mbit"])),
            float(str(row[f"samples_per_s_{planner}"])),
        )
        by_model.setdefault(str(row["name"]), []).append(point)
    return [
        1 - min(own)[1] / max(speed for _, speed in own) for own in by_model.values()
    ]


def draw15(rows: Sequence[Row], path: Path) -> Path:
    """Draws planning seconds over S_p, with a line for each model."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        point = (float(str(row["partition_mbit"])), float(str(row["planning_s"])))
        series.setdefault(str(row["name"]), []).append(point)
    title = "Planning time over S_p"
    return curves.draw_panels(
        {"": series}, path, title=title, x_label="S_p (Mbit)", y_label="seconds"
    )


def draw16(rows: Sequence[Row], path: Path) -> Path:
    """Draws samples a second over S_p, with a line for each model and planner."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for planner in ("usbyte", "bytescheduler", "wfbp"):
            point = (
                float(str(row["partition_mbit"])),
                float(str(row[f"samples_per_s_{planner}"])),
            )
            series.setdefault(f"{row['name']} {planner}", []).append(point)
    title = "Speed over S_p, 8 nodes at 100 Gbit/s"
    return curves.draw_panels(
        {"": series},
        path,
        title=title,
        x_label="S_p (Mbit)",
        y_label="samples a second",
    )
