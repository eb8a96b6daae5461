"""Figures 10 and 18 of US-Byte: speed over nodes, under our model and under other
readings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from gradwire_bench.report import curves

from ..frame import Ask, Claim, Findings, Row
from .readings import (
    BY_TENSOR,
    DOUBLINGS,
    FREE,
    HALF_RATE,
    IN_TURN,
    LOSSY,
    MEGABYTES,
    MERGED,
    OURS,
    PRINTED_B,
    Compared,
    Reading,
    combinations,
    combined,
    compare,
    needed_messages,
)
from .setting import BENCHMARKS, MODELS, RANKS, profile_of

Range = tuple[float, float]
"""The least and the largest improvement: 0.11 is 11 %."""
FIGURE_10: dict[str, Range] = {"bytescheduler": (0.11, 0.26), "wfbp": (0.21, 0.56)}
FIGURE_18: dict[str, Range] = {"bytescheduler": (0.28, 0.69), "wfbp": (2.34, 3.32)}
SHOWN = {"usbyte": "US-Byte", "bytescheduler": "ByteScheduler", "wfbp": "WFBP"}
TRIALS = 20
QUICK_TRIALS = 4
"""The numbers of settings tried where settings are searched for."""
NEARLY_LINEAR = 0.9
SEARCHED = (
    HALF_RATE,
    IN_TURN,
    LOSSY,
    combined(IN_TURN, LOSSY),
    combined(HALF_RATE, IN_TURN, LOSSY),
)
"""Other readings of figure 10. One in which a grows by doublings is left out: at 8
nodes it is the same.
"""
STATED = (
    replace(OURS, name="S_p and credit of section 6.7"),
    replace(MEGABYTES, name="S_p (in megabytes) and credit of section 6.7"),
)
"""Readings of figure 10 in which nothing is searched for."""
COMBINED = "several at once"
"""The name of the rows of the combined reading that comes closest."""

WHY_10 = {
    "bytescheduler": "under the model ByteScheduler with a searched block size loses "
    "little to US-Byte even where no latency is hidden (rows 'latencies in turn'), and "
    "a credit hides its latencies at no cost, while US-Byte sends one block at a time. "
    "What the credit and each block cost the real ByteScheduler is in nobody's model",
    "wfbp": "where all communication hides behind computation there is nothing to "
    "gain, as on 2 nodes: the paper's links must have been slower or its GPUs faster "
    "than its tables and our model say; and algorithm 1 as printed loses blocks, which "
    "shortens iterations (rows of that name)",
}
WHY_18 = {
    "bytescheduler": "S_p = 4 Mb makes a thousand blocks of a large model, and "
    "equation 14 makes each cost 16.5 ms of latency on 128 nodes. The values of a in "
    "the published code grow by doublings of the nodes instead: see the rows of other "
    "readings",
    "wfbp": "impossible under the paper's own equations: WFBP takes at most backward + "
    "C + forward and US-Byte at least the larger of backward + forward and C, where C "
    "is one all-reduce a layer. No schedule gains more than 100 %, whatever the model, "
    "a and b are; the column 'most over wfbp' is that bound with the figures of the "
    "row. Only a US-Byte that sends fewer messages than there are layers, which the "
    "paper rules out, could gain more: see the rows 'layers merged'",
}
WHY_NOT_LINEAR = (
    "US-Byte sends a message a layer or more, each with 2(N-1) hops of latency by "
    "equation 14: the latencies alone last longer than the computation. With a that "
    "grows by doublings it is nearly linear, see there"
)


def figure10(
    ask: Ask,
    models: Sequence[str] = MODELS,
    ranks: Sequence[int] = (2, 4, 8),
    trials: int | None = None,
) -> Findings:
    """Speed on 2, 4 and 8 nodes of cluster 1, settings searched for as the paper does.

    US-Byte has rows of its own with gradwire's extensions. On the most nodes there are
    other readings as well; on 8, beside both, what a replay measured, where table 4 was
    measured before.
    """
    trials = trials or (QUICK_TRIALS if ask.quick else TRIALS)
    jobs = [
        (one, model, n, trials)
        for one in (OURS, FREE)
        for model in models
        for n in ranks
    ]
    jobs += [
        (reading, model, max(ranks), trials) for reading in SEARCHED for model in models
    ]
    jobs += [(reading, model, max(ranks), 0) for reading in STATED for model in models]
    rows = []
    for done, (reading, model, num_ranks, tried) in ask.each(jobs):
        ask.report(done, f"{model} on {num_ranks} nodes, {reading.name}")
        rows.append(
            _row(reading, model, num_ranks, compare(reading, model, num_ranks, tried))
        )
    _add_measured(rows, ask)
    ours = [row for row in rows if row["name"] == OURS.name]
    at_most = [row for row in rows if row["num_ranks"] == max(ranks)]
    notes = (
        "samples are images, and sequences of 128 tokens for bert_base",
        f"on {max(ranks)} nodes {_nearest(at_most, FIGURE_10)}",
    )
    place = "section 6.3, figure 10"
    return Findings(tuple(rows), _claims(ours, FIGURE_10, place, WHY_10), notes)


def _add_measured(rows: Sequence[Row], ask: Ask) -> None:
    """Adds the improvements that the replay of table 4 measured on 8 hosts, each to the
    planner's own row.
    """
    table4 = ask.earlier.get("table4")
    known = table4.rows if table4 else ()
    measured = {(row["model"], row.get("planner")): row for row in known}
    planned_by = {OURS.name: "usbyte", FREE.name: "usbyte_extended"}
    for row in rows:
        own = measured.get((row["model"], planned_by.get(str(row["name"]))))
        if own is None or row["num_ranks"] != RANKS:
            continue
        for planner in FIGURE_10:
            key = f"fraction_over_{planner}_measured"
            if key in own:
                row[key] = own[key]


def figure18(
    ask: Ask,
    models: Sequence[str] = BENCHMARKS,
    ranks: Sequence[int] = (8, 16, 32, 64, 128),
) -> Findings:
    """8 to 128 nodes, S_p = 4 Mb, credit 2: our model, and on the most nodes other
    readings.

    Among combined readings only the closest to the paper have rows.
    """
    most = max(ranks)
    singly = (
        PRINTED_B,
        HALF_RATE,
        DOUBLINGS,
        IN_TURN,
        MEGABYTES,
        BY_TENSOR,
        LOSSY,
        MERGED,
        FREE,
    )
    jobs = [*product((OURS,), models, ranks), *product(singly, models, (most,))]
    rows = []
    for done, (reading, model, num_ranks) in ask.each(jobs):
        ask.report(0.3 * done, f"{model} on {num_ranks} nodes, {reading.name}")
        rows.append(_row(reading, model, num_ranks, compare(reading, model, num_ranks)))
    for reading, model in product((OURS, FREE), models):
        searched = "settings searched for" + (
            f", {FREE.name}" if reading is FREE else ""
        )
        ask.report(0.3, f"{model}, {searched}")
        found = compare(reading, model, most, QUICK_TRIALS if ask.quick else TRIALS)
        rows.append(_row(reading, model, most, found) | {"name": searched})
    several, notes = _closest(ask, models, most)
    rows += several
    at_most = [row for row in rows if row["num_ranks"] == most]
    ours = [row for row in at_most if row["name"] == OURS.name]
    for row in ours:
        _add_needed(row)
    claims = _claims(ours, FIGURE_18, "section 6.7, figure 18", WHY_18)
    notes = (
        _nearest(at_most, FIGURE_18),
        *notes,
        "with all settings searched for, ByteScheduler's credit hides its latencies "
        "and a US-Byte that sends one block at a time and merges nothing falls behind "
        "it: see the rows",
    )
    return Findings(tuple(rows), (*claims, _linear(ours)), notes)


def _row(reading: Reading, model: str, num_ranks: int, found: Compared) -> Row:
    profile = profile_of(model)
    alone_s = profile.forward_s + profile.backward_s
    row: Row = {"name": reading.name, "model": model, "num_ranks": num_ranks}
    for planner, seconds in found.seconds.items():
        row[f"samples_per_s_{planner}"] = num_ranks * profile.batch_size / seconds
        row[f"speedup_{planner}"] = num_ranks * alone_s / seconds
    return {
        **row,
        "fraction_over_bytescheduler": found.over("bytescheduler"),
        "fraction_over_wfbp": found.over("wfbp"),
        "fraction_most_over_wfbp": found.most_over_wfbp,
        "fraction_sent": found.fraction_sent,
        "settings": found.settings,
    }


def _add_needed(row: Row) -> None:
    """Adds the messages that WFBP sends, and how many the paper's least improvement
    would need.
    """
    model = str(row["model"])
    num_ranks = int(str(row["num_ranks"]))
    usbyte_s = (
        num_ranks * profile_of(model).batch_size / _value(row, "samples_per_s_usbyte")
    )
    least = FIGURE_18["wfbp"][0]
    sent, needed = needed_messages(OURS, model, num_ranks, usbyte_s, least)
    row["num_messages_wfbp"] = sent
    row["num_messages_wfbp_needed"] = needed


def _closest(
    ask: Ask, models: Sequence[str], num_ranks: int
) -> tuple[list[Row], tuple[str, ...]]:
    """The rows of two combined readings, and notes that say which readings were
    combined.

    The first is closest to both of the paper's ranges, the second to that over
    ByteScheduler.
    """
    found: list[tuple[str, list[Row]]] = []
    for done, reading in ask.each(combinations()[:: 24 if ask.quick else 1]):
        ask.report(0.4 + 0.6 * done, f"combined: {reading.name}")
        rows = [
            _row(reading, m, num_ranks, compare(reading, m, num_ranks)) for m in models
        ]
        found.append((reading.name, rows))
    kept: list[Row] = []
    notes = []
    over = {"bytescheduler": FIGURE_18["bytescheduler"]}
    for title, paper in (
        (COMBINED, FIGURE_18),
        (f"{COMBINED}, for ByteScheduler", over),
    ):
        off = [_distance(rows, paper) for _, rows in found]
        name, rows = found[off.index(min(off))]
        kept += [row | {"name": title} for row in rows]
        notes.append(f"'{title}' is the closest of all that can be combined: {name}")
    return kept, tuple(notes)


def _value(row: Row, key: str) -> float:
    value = row[key]
    assert isinstance(value, (int, float)), f"{key} is no number"
    return float(value)


def _range(rows: Sequence[Row], planner: str) -> Range:
    values = [_value(row, f"fraction_over_{planner}") for row in rows]
    return min(values), max(values)


def _distance(rows: Sequence[Row], paper: Mapping[str, Range]) -> float:
    """How far the ranges lie from the paper's: mean difference of the logarithms of
    their ends.
    """
    off = [
        abs(math.log((1 + ours) / (1 + theirs)))
        for planner, stated in paper.items()
        for ours, theirs in zip(_range(rows, planner), stated, strict=True)
    ]
    return sum(off) / len(off)


def _shown(values: Range) -> str:
    return f"{100 * values[0]:.0f} to {100 * values[1]:.0f} %"


def _claims(
    ours: Sequence[Row], paper: Mapping[str, Range], place: str, why: Mapping[str, str]
) -> tuple[Claim, ...]:
    """The paper's ranges beside ours; they agree if ours lies within theirs, to the
    percent.
    """
    claims = []
    for planner, stated in paper.items():
        found = _range(ours, planner)
        agrees = stated[0] - 0.005 <= found[0] and found[1] <= stated[1] + 0.005
        says = f"US-Byte outperforms {SHOWN[planner]} by {_shown(stated)}"
        claims.append(
            Claim(says, place, _shown(found), agrees, "" if agrees else why[planner])
        )
    return tuple(claims)


def _linear(ours: Sequence[Row]) -> Claim:
    """ResNet-50, if it was measured, against "approximately linear scaling
    efficiency".
    """
    says = "US-Byte scales ResNet-50 approximately linearly"
    place = "section 6.7, figure 18"
    row = next((row for row in ours if row["model"] == "resnet50"), None)
    if row is None:
        return Claim(says, place, "not measured", None)
    share = _value(row, "speedup_usbyte") / _value(row, "num_ranks")
    agrees = share >= NEARLY_LINEAR
    found = f"{100 * share:.0f} % of linear on {row['num_ranks']} nodes"
    return Claim(says, place, found, agrees, "" if agrees else WHY_NOT_LINEAR)


def _nearest(rows: Sequence[Row], paper: Mapping[str, Range]) -> str:
    """A sentence that names the reading closest to the paper's ranges."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(str(row["name"]), []).append(row)
    name = min(by_name, key=lambda one: _distance(by_name[one], paper))
    ranges = " and ".join(
        f"{_shown(_range(by_name[name], planner))} over {SHOWN[planner]}"
        for planner in paper
    )
    return f"the reading closest to the paper's ranges is '{name}', with {ranges}"


def draw10(rows: Sequence[Row], path: Path) -> Path:
    """Draws samples a second over nodes, with a line for each model and planner."""
    return _draw(
        rows, path, "samples_per_s_", "samples a second", "10 Gbit/s, settings searched"
    )


def draw18(rows: Sequence[Row], path: Path) -> Path:
    """Draws the speedup against one GPU over nodes, with a line for each model and
    planner.
    """
    return _draw(rows, path, "speedup_", "speedup over one GPU", "10 Gbit/s, our model")


def _draw(
    rows: Sequence[Row], path: Path, prefix: str, y_label: str, title: str
) -> Path:
    series: dict[str, list[tuple[float, float]]] = {}
    drawn = {OURS.name: SHOWN, FREE.name: {"usbyte": f"US-Byte {FREE.name}"}}
    for row in rows:
        for planner, shown in drawn.get(str(row["name"]), {}).items():
            point = (_value(row, "num_ranks"), _value(row, prefix + planner))
            series.setdefault(f"{row['model']}, {shown}", []).append(point)
    return curves.draw_panels(
        {"": series}, path, title=title, x_label="nodes", y_label=y_label
    )
