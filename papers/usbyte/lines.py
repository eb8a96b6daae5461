"""Figure 9 of US-Byte: the seconds of an all-reduce over its bytes, a line whose terms
are a and b.

A ring of sends is played hop by hop on links of the clusters' rates, each hop with the
cost that follows from the printed a. So only the printed b can agree, which is held
against the links' stated rates. That all is linear, the printed a and equation 14 are
what the simulator is made of: a line that it does not have would be a mistake here, and
one that it has is no agreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from gradwire.collective.ring import ring
from gradwire.collective.steps.travel import travel
from gradwire.compress.none import none
from gradwire.exchange.pair import pair
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.fit import LineFit, fit_line
from gradwire_bench.report import curves

from ..frame import Ask, Claim, Findings, Row
from ..one_exchange import simulate_exchange
from ..rows import number
from .setting import (
    A_1_S,
    A_2_S,
    B_1_S_PER_BYTE,
    B_2_S_PER_BYTE,
    RANKS,
    RATE_1,
    RATE_2,
    cluster_1,
    cluster_2,
)

CLUSTERS: dict[str, tuple[Cluster, float, float, float]] = {
    "cluster 1": (cluster_1(RANKS), RATE_1, A_1_S, B_1_S_PER_BYTE),
    "cluster 2": (cluster_2(), RATE_2, A_2_S, B_2_S_PER_BYTE),
}
"""Each cluster, its links' bytes a second, and the printed a and b of 8 nodes."""
NODES = (2, 4, RANKS)
SIZES_MB = (1, 2, 4, 8, 16, 32, 64)
"""Megabytes of the buffers. The text states none; these are chosen here."""
QUICK_SIZES_MB = (1, 8, 64)
NEAR = 0.05
"""How far a term of ours may lie from the paper's, or from equation 14, and agree."""
STRAIGHT = 0.01
"""The most by which seconds may lie off a line, root mean square of the relative
errors.
"""
PLACE = "section 6.2, figure 9"
BUILT_IN = (
    "the simulator's hops are given the printed a, and each byte the same time, so its "
    "own line could not be another: only measurements of the clusters could confirm it"
)
"""Why a result that fits is no agreement."""


def figure9(ask: Ask, ranks: Sequence[int] = NODES) -> Findings:
    """Seconds of a ring all-reduce by cluster, nodes and bytes, simulated on all
    nodes.
    """
    sizes = QUICK_SIZES_MB if ask.quick else SIZES_MB
    rows: list[Row] = []
    for done, (name, num_ranks, size) in ask.each(
        list(product(CLUSTERS, ranks, sizes))
    ):
        ask.report(done, f"{size} MB on {num_ranks} nodes of {name}")
        rows.append(_row(name, num_ranks, size * 10**6))
    claims = [linear_claim(rows)]
    for name in CLUSTERS:
        claims += [intercept_claim(rows, name), slope_claim(rows, name)]
    notes = (
        "a hop costs the printed a over 2(N-1) hops of 8 nodes, so a of 8 nodes is the "
        "paper's; gamma, the time to add two numbers, counts as 0",
    )
    return Findings(tuple(rows), (*claims, equation_claim(rows)), notes)


def _row(name: str, num_ranks: int, size_bytes: int) -> Row:
    cluster, _, a_s, b_s = CLUSTERS[name]
    cluster = cluster.model_copy(update={"num_ranks": num_ranks})
    played = simulate_exchange(pair(none(), ring()), size_bytes // 4, cluster)
    row: Row = {
        "name": f"{name}, {num_ranks} nodes",
        "cluster": name,
        "num_ranks": num_ranks,
        "size_bytes": size_bytes,
        "simulated_s": played.iteration_s,
    }
    return row | ({"paper_s": a_s + b_s * size_bytes} if num_ranks == RANKS else {})


def fits(rows: Sequence[Row]) -> dict[tuple[str, int], LineFit]:
    """The line through the rows of each cluster and number of nodes."""
    samples: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for row in rows:
        point = int(number(row, "size_bytes")), number(row, "simulated_s")
        samples.setdefault(
            (str(row["cluster"]), int(number(row, "num_ranks"))), []
        ).append(point)
    return {key: fit_line(own) for key, own in samples.items()}


def built_in(fits_it: bool, why: str) -> tuple[bool | None, str]:
    """A verdict and its reason: a fit is not said to agree, and another result
    disagrees.
    """
    return (None, BUILT_IN) if fits_it else (False, why)


def linear_claim(rows: Sequence[Row]) -> Claim:
    """Whether all seconds of a cluster and number of nodes lie on a line."""
    off = {key: line.residual for key, line in fits(rows).items()}
    (name, num_ranks), most = max(off.items(), key=lambda each: each[1])
    return Claim(
        "the time of an all-reduce is linear in the size of parameters",
        PLACE,
        f"at most {100 * most:.2g} % off a line ({name}, {num_ranks} nodes)",
        *built_in(
            most <= STRAIGHT,
            "what a message costs hides behind the bytes of a longer one",
        ),
    )


def intercept_claim(rows: Sequence[Row], name: str) -> Claim:
    """The printed a of 8 nodes beside ours."""
    stated_s = CLUSTERS[name][2]
    found_s = fits(rows)[name, RANKS].alpha_s
    fits_it = abs(found_s / stated_s - 1) <= NEAR
    return Claim(
        f"{name}: a is {1e6 * stated_s:.1f} us",
        PLACE,
        f"{1e6 * found_s:.1f} us",
        *built_in(fits_it, "the hops of the ring do not follow one another at once"),
    )


def slope_claim(rows: Sequence[Row], name: str) -> Claim:
    """The printed b of 8 nodes beside ours, and the rate of the links that either
    implies.
    """
    _, rate, _, stated_s = CLUSTERS[name]
    found_s = fits(rows)[name, RANKS].per_unit_s
    agrees = abs(found_s / stated_s - 1) <= NEAR
    implied = travel("all_reduce", RANKS).copies / stated_s
    why = (
        f"a ring sends {travel('all_reduce', RANKS).copies:g} bytes for each, so the "
        f"printed b is that of links which carry {implied / 1e9:.3g} GB a second; "
        f"these carry {rate / 1e9:.3g}"
    )
    return Claim(
        f"{name}: b is {1e6 * stated_s:.3e} us a byte",
        PLACE,
        f"{1e6 * found_s:.3e} us a byte",
        agrees,
        "" if agrees else why,
    )


def equation_claim(rows: Sequence[Row]) -> Claim:
    """Whether both terms grow with the nodes as equation 14 says, from those of 8
    nodes.
    """
    says = "a = 2(N-1) alpha and b = 2(N-1)/N beta with N nodes"
    place = "section 6.2, equation 14"
    found = fits(rows)
    whole = travel("all_reduce", RANKS)
    off: dict[str, float] = {}
    for (name, num_ranks), line in found.items():
        if num_ranks == RANKS:
            continue
        base = found[name, RANKS]
        own = travel("all_reduce", num_ranks)
        terms = {
            "a": line.alpha_s / (base.alpha_s * own.rounds / whole.rounds),
            "b": line.per_unit_s / (base.per_unit_s * own.copies / whole.copies),
        }
        off |= {
            f"{term} of {name}, {num_ranks} nodes": abs(x - 1)
            for term, x in terms.items()
        }
    if not off:
        return Claim(says, place, "not measured", None)
    worst = max(off, key=off.__getitem__)
    in_words = f"at most {100 * off[worst]:.2g} % off ({worst})"
    why = "hops do not follow one another at once, or chunks are of unequal length"
    return Claim(says, place, in_words, *built_in(off[worst] <= NEAR, why))


def draw9(rows: Sequence[Row], path: Path) -> Path:
    """Draws milliseconds over megabytes, with a panel for each cluster."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        panel = panels.setdefault(str(row["cluster"]), {})
        lines = {
            f"{row['num_ranks']} nodes": "simulated_s",
            "8 nodes, as printed": "paper_s",
        }
        for shown, key in lines.items():
            if key in row:
                point = number(row, "size_bytes") / 1e6, 1e3 * number(row, key)
                panel.setdefault(shown, []).append(point)
    return curves.draw_panels(
        panels, path, title="Time of an all-reduce", x_label="megabytes", y_label="ms"
    )
