"""Table 1 and figures 9 and 11 of HiPress: throughput of all systems, simulated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gradwire_bench.report import curves

from ..frame import Ask, Claim, Findings, Row, effect
from ..rows import number
from .printed import BYTEPS, FIGURE_9, FIGURE_11, RING, TABLE_1, Stated
from .setting import (
    EC2,
    EC2_AS_TABLE_1,
    EC2_WITHIN,
    HOSTS,
    LOCAL,
    LOCAL_AS_TABLE_1,
    Site,
)
from .systems import SYSTEMS, TRAINED, row_of

NEAR = 0.1
"""How far a gain of ours may lie from the paper's, and agree, where a quarter of it is
more.
"""
NEAR_EFFICIENCY = 0.025
"""The same for table 1: half of the least difference between two systems' efficiencies
there.
"""
WITHIN = [RING, *(one for one in SYSTEMS if one.startswith("HiPress"))]
"""Systems of figure 9 whose seconds within hosts are counted too."""
SIZES = (2, 4, 8, HOSTS)
"""Hosts of figure 9."""
LOCALLY = {
    "vgg19": TRAINED["vgg19"],
    "bert_base": TRAINED["vgg19"],
}
"""Figure 11's models and systems."""


def table1(ask: Ask) -> Findings:
    """Scaling efficiency and share of communication, on links that carry what table 1
    implies.
    """
    rows = []
    for (model, name), (efficiency, share) in TABLE_1.items():
        for site in (EC2_AS_TABLE_1, EC2):
            row = row_of(site, model, HOSTS, SYSTEMS[name])
            rows.append(row | {"efficiency_paper": efficiency, "fraction_paper": share})
    judged = where(rows, reading=EC2_AS_TABLE_1.name)
    claims = [
        _table1_claim(row, key) for row in judged for key in ("efficiency", "fraction")
    ]
    note = (
        "table 1's share of communication over its efficiency is the seconds that a "
        f"dense training communicates: {EC2_AS_TABLE_1.rate_gbit:.0f} Gbit/s arrive by "
        f"a ring (Transformer) and {EC2_AS_TABLE_1.push_pull_gbit:.0f} by BytePS "
        "(Bert-large), of 100. The two do not depend on each other, and efficiencies "
        "are predictions"
    )
    return Findings(tuple(rows), tuple(claims), (note,))


def _table1_claim(row: Row, key: str) -> Claim:
    stated = number(row, f"{key}_paper")
    found = number(
        row, "efficiency" if key == "efficiency" else "fraction_communication"
    )
    word = "efficiency" if key == "efficiency" else "share of communication"
    says = f"{row['name']} of {row['model']}: {word} {stated:g}"
    if key == "fraction" and row["name"] in (RING, BYTEPS):
        why = (
            "the rate of the links is derived from this share, so it follows from "
            "the efficiency"
        )
        return Claim(says, "table 1", f"{found:.2f}", None, why)
    return effect(
        says, "table 1", f"{found:.2f}", found, stated, spent(row), NEAR_EFFICIENCY
    )


def figure9(
    ask: Ask,
    trained: Mapping[str, Sequence[str]] = TRAINED,
    sizes: Sequence[int] = SIZES,
) -> Findings:
    """Throughput of six models on 2 to 16 hosts of eight V100, under two readings of
    the links.

    On the most hosts also with the seconds in which the GPUs of a host add up.
    """
    found = _compared(ask, (EC2_AS_TABLE_1, EC2), trained, sizes, FIGURE_9)
    flat = where(found.rows, reading=EC2_AS_TABLE_1.name, num_hosts=sizes[-1])
    flat = [row for row in flat if row["name"] in WITHIN]
    own = [
        row_of(EC2_WITHIN, str(r["model"]), sizes[-1], SYSTEMS[str(r["name"])])
        for r in flat
    ]
    pairs = zip(own, flat, strict=True)
    longer = [number(a, "iteration_s") / number(b, "iteration_s") - 1 for a, b in pairs]
    worst = own[longer.index(max(longer))]
    note = (
        f"{EC2_WITHIN.name}: {len(own)} trainings take {min(longer):+.1%} to "
        f"{max(longer):+.1%} "
        f"({worst['name']} of {worst['model']}) longer than where it takes no time"
    )
    return replace(found, rows=(*found.rows, *own), notes=(*found.notes, note))


def figure11(
    ask: Ask,
    trained: Mapping[str, Sequence[str]] = LOCALLY,
    sizes: Sequence[int] = (HOSTS,),
) -> Findings:
    """Throughput of two models on 16 hosts of two 1080 Ti, under two readings of the
    links.
    """
    return _compared(ask, (LOCAL_AS_TABLE_1, LOCAL), trained, sizes, FIGURE_11)


def _compared(
    ask: Ask,
    sites: Sequence[Site],
    trained: Mapping[str, Sequence[str]],
    sizes: Sequence[int],
    stated: Sequence[Stated],
) -> Findings:
    if ask.quick:
        sites = sites[:1]
        sizes = sizes[-1:]
    cases = [
        (site, model, num_hosts, name)
        for site in sites
        for model, names in trained.items()
        for num_hosts in sizes
        for name in names
    ]
    rows = []
    for done, (site, model, num_hosts, name) in ask.each(cases):
        ask.report(done, f"{name} of {model} on {num_hosts} hosts, {site.name}")
        rows.append(row_of(site, model, num_hosts, SYSTEMS[name]))
    wanted = [one for one in stated if one.model in trained]
    judged = where(rows, reading=sites[0].name)
    claims = [gain_claim(judged, one) for one in wanted]
    if len(sizes) > 1:
        claims += [widening(judged, model, names) for model, names in trained.items()]
    notes = [agreement(where(rows, reading=site.name), wanted, site) for site in sites]
    fewer = [f"on {sizes[-1]} hosts and under one reading only"] if ask.quick else []
    return Findings(tuple(rows), tuple(claims), (*notes, *fewer))


def where(rows: Iterable[Row], **wanted: object) -> list[Row]:
    """The rows of these values."""
    return [
        row for row in rows if all(row[key] == value for key, value in wanted.items())
    ]


def gains(rows: Sequence[Row], stated: Stated) -> dict[int, float]:
    """By the number of hosts: how much faster one system trains than another; 0.1 is 10
    %.
    """
    ours, other = (
        {int(number(row, "num_hosts")): number(row, "iteration_s") for row in found}
        for found in (
            where(rows, model=stated.model, name=name)
            for name in (stated.ours, stated.other)
        )
    )
    return {hosts: other[hosts] / ours[hosts] - 1 for hosts in sorted(ours)}


def _gain(rows: Sequence[Row], stated: Stated) -> tuple[int, float]:
    """The hosts that a statement is of, and our gain there."""
    found = gains(rows, stated)
    hosts = max(found, key=found.__getitem__) if stated.is_most else max(found)
    return hosts, found[hosts]


def gain_claim(rows: Sequence[Row], stated: Stated) -> Claim:
    """A printed gain beside ours, and where the two systems' seconds go if they
    differ.
    """
    hosts, found = _gain(rows, stated)
    most = "at most " if stated.is_most else ""
    says = (
        f"{stated.model}: {stated.ours} is {most}{100 * stated.gain:.1f} % faster than "
        f"{stated.other}"
    )
    in_words = f"{100 * found:.1f} % on {hosts} hosts"
    at = where(rows, model=stated.model, num_hosts=hosts)
    pair = [row for name in (stated.ours, stated.other) for row in where(at, name=name)]
    why = "; ".join(map(spent, pair)) + _bound(pair)
    return effect(says, stated.place, in_words, found, stated.gain, why, NEAR)


def spent(row: Row) -> str:
    """Where the seconds of an iteration go, in words."""
    return (
        f"{row['name']} computes {1e3 * number(row, 'compute_s'):.0f} ms, waits "
        f"{1e3 * number(row, 'exposed_s'):.0f} ms, and has the link in use for "
        f"{100 * number(row, 'fraction_communication'):.0f} % of an iteration"
    )


def _bound(pair: Sequence[Row]) -> str:
    most = number(pair[1], "exposed_s") / number(pair[1], "compute_s")
    return f". Waiting for nothing would gain {100 * most:.1f} % over {pair[1]['name']}"


def widening(rows: Sequence[Row], model: str, names: Sequence[str]) -> Claim:
    """Whether HiPress's gain over the slower dense system grows with the hosts."""
    ours = next(name for name in names if name.startswith("HiPress"))
    found = gains(rows, Stated(model, ours, names[0], 0.0, is_most=False, place=""))
    values = list(found.values())
    widens = values == sorted(values) and values[0] < values[-1]
    in_words = ", ".join(
        f"{100 * gain:.1f} % on {hosts}" for hosts, gain in found.items()
    )
    why = (
        "a ring or push and pull of N hosts moves 2(N-1)/N of the bytes, which hardly "
        "grows; what grows is latencies and what is decoded"
    )
    return Claim(
        f"{model}: {ours} gains more over {names[0]} on more hosts",
        "section 6.2.1",
        in_words,
        widens,
        "" if widens else why,
    )


def agreement(rows: Sequence[Row], stated: Sequence[Stated], site: Site) -> str:
    """How many of the printed gains one reading has, and of how many the sign."""
    near = sum(bool(gain_claim(rows, one).agrees) for one in stated)
    ahead = sum(_gain(rows, one)[1] > 0 for one in stated)
    return (
        f"{site.name}: of {len(stated)} printed gains {near} are met to a quarter of "
        f"the gain and {100 * NEAR:.0f} percentage points, and {ahead} have their sign"
    )


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Draws samples a second over hosts, with a panel for each model and a line for
    each system.
    """
    reading = rows[0]["reading"]
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in where(rows, reading=reading):
        point = (number(row, "num_hosts"), number(row, "samples_per_s"))
        panels.setdefault(str(row["model"]), {}).setdefault(
            str(row["name"]), []
        ).append(point)
    return curves.draw_panels(
        panels,
        path,
        title=f"Throughput, simulated: {reading}",
        x_label="hosts",
        y_label="samples a second",
        doubling=True,
    )
