"""Theorem 2 of ZEN: the imbalance of hashed parts, measured, beside its bound.

Also the alternatives to hashing: parts that are ranges, and parts whose boundaries were
computed from the gradients of an earlier step (section 3.1).

The theorem leaves its constant open. With c = 3 it follows from Chernoff's bound. There
are n^2 parts, each of m / n entries on average. The probability that any one is more
than (1 + delta) times that is at most n^2 exp(-delta^2 m / 3n). That is 1 / n for
delta^2 = 9 n ln n / m, as long as delta is at most 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log, sqrt
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.sparse.permutation import Permutation
from gradwire.planning.data.sparsity import Indices
from gradwire_bench.report import bars

from ..frame import Ask, Claim, Findings, Row
from .captures import MODELS, Capture, captured, present
from .sparsity import findings, ranks_of
from .values import number
from .volumes import Traffic

RANKS = (4, 16, 128)
CONSTANT = 3.0
NUMEL = 2**21
ADVERSARIAL_DENSITY = 0.01
PRACTICAL = 1.1
PAPER_ENTRIES = 406e6 * 0.0113
"""The non-zero elements of the LSTM's embedding's gradient on a GPU: table 1."""
BOUNDARIES = (1.4, 5.1)
BOUNDARY_RANKS = 16
SEED = 1
WAYS = ("push", "pull")
UNPRINTED = frozenset({"of"})


def theorem2(
    ask: Ask,
    models: Sequence[str] = MODELS,
    ranks: Sequence[int] | None = None,
    numel: int = NUMEL,
) -> Findings:
    """Imbalance of push and pull by model, input and number of ranks."""
    wanted = ranks or tuple(n for n in RANKS if n <= ranks_of(ask)) or RANKS[:1]
    rows: list[Row] = []
    needed = max(*wanted, 2 * BOUNDARY_RANKS if BOUNDARY_RANKS in wanted else 1)
    for done, model in ask.each(present(models)):
        ask.report(0.8 * done, model)
        found = captured(ask, model, needed)
        rows += _model_rows(found, wanted)
    for done, (name, indices_K) in ask.each(list(adversarial(numel).items())):
        ask.report(0.8 + 0.2 * done, name)
        rows += [_row(name, "made", [indices_K] * n, numel) for n in wanted]
    return findings(rows, claims(rows), models)


def _model_rows(found: Capture, ranks: Sequence[int]) -> list[Row]:
    """A model's rows for each number of ranks.

    They are for elements, as the paper hashes them, and for whole rows where the
    gradient has rows.
    """
    sets = found.elements(max(ranks))
    rows = []
    units = [torch.from_numpy(one) for one in found.units]
    for n in ranks:
        row = _row(found.name, "elements", sets[:n], found.numel)
        if n == BOUNDARY_RANKS:
            old = found.units[:n]
            new = found.units[n : 2 * n]
            row["push_by_old_boundaries"] = max(by_boundaries(old, new, n))
        rows.append(row)
        if found.width > 1:
            rows.append(_row(f"{found.name}, rows", "rows", units[:n], found.num_units))
    return rows


def adversarial(numel: int) -> dict[str, Tensor]:
    """Index sets by name that no even cut of the index space balances."""
    count = round(ADVERSARIAL_DENSITY * numel)
    front = torch.arange(count, dtype=torch.int32)
    return {
        "all in front": front,
        "all at the end": numel - count + front,
        "every 64th of the first 64 %": front * 64,
        "powers of two apart": _distinct(
            front.long() * 2**15 % numel + front.long() // 64
        ),
    }


def _distinct(indices_K: Tensor) -> Tensor:
    return torch.from_numpy(np.unique(indices_K.numpy()).astype(np.int32))


def bound(count: float, world: int) -> float:
    """The bound of theorem 2 with ``CONSTANT``, for ``count`` entries; it is at most
    ``world``.

    >>> round(bound(5e6, 128), 3)
    1.033
    """
    if count <= 0 or world == 1:
        return 1.0
    return min(1 + CONSTANT * _root(count, world), float(world))


def _root(count: float, world: int) -> float:
    return sqrt(world * log(world) / count)


def _row(name: str, of: str, sets: Sequence[Tensor], numel: int) -> Row:
    world = len(sets)
    ranged = Traffic.of(sets, numel)
    hashed = Traffic.of(sets, numel, Permutation(numel, SEED).places)
    smallest = min(one.numel() for one in sets)
    merged = int(hashed.pulled_W.sum())
    return {
        "name": f"{name}, {world} ranks",
        "of": of,
        "num_ranks": world,
        "num_units": smallest,
        "push_imbalance": hashed.push_imbalance,
        "push_bound": bound(smallest, world),
        "pull_imbalance": hashed.pull_imbalance,
        "pull_bound": bound(merged, world),
        "constant": _constant(hashed, smallest, merged),
        "push_by_ranges": ranged.push_imbalance,
        "pull_by_ranges": ranged.pull_imbalance,
    }


def _constant(hashed: Traffic, pushed: int, merged: int) -> float:
    """The constant before the square root that this push and this pull would need."""
    world = len(hashed.pulled_W)
    pairs = ((hashed.push_imbalance, pushed), (hashed.pull_imbalance, merged))
    return max((value - 1) / _root(count, world) for value, count in pairs)


def by_boundaries(
    old: Sequence[Indices], new: Sequence[Indices], num_parts: int
) -> list[float]:
    """Definition 8's push imbalance of each new set, cut at the quantiles of the old
    sets' union.

    >>> by_boundaries([np.array([0, 1, 2, 3])], [np.array([0, 1]), np.array([0, 3])], 2)
    [2.0, 1.0]
    """
    merged = np.unique(np.concatenate(old))
    edges = merged[np.arange(1, num_parts) * len(merged) // num_parts]
    found = []
    for one in new:
        counts = np.bincount(
            np.searchsorted(edges, one, side="right"), minlength=num_parts
        )
        found.append(num_parts * float(counts.max()) / max(1, len(one)))
    return found


def claims(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """The claims of theorem 2, and those of sections 3.1 and 3.2 about practice."""
    return (_theorem(rows), _example(), _practical(rows), _old_boundaries(rows))


def _theorem(rows: Sequence[Row]) -> Claim:
    wrong = [
        str(row["name"])
        for row in rows
        if any(
            number(row, f"{way}_imbalance") > number(row, f"{way}_bound")
            for way in WAYS
        )
    ]
    constants = [number(row, "constant") for row in rows]
    ranged = max(
        number(row, "pull_by_ranges") / number(row, "num_ranks") for row in rows
    )
    return Claim(
        "with probability 1 - 1/n the imbalance is at most 1 + c sqrt(n log n / "
        "entries)",
        "theorem 2",
        f"c is {min(constants):.2f} to {max(constants):.2f} as measured; c = "
        f"{CONSTANT:g} is the "
        f"bound here. Parts that are ranges have an imbalance of up to {ranged:.2f} n",
        not wrong,
        f"beyond c = {CONSTANT:g}: {', '.join(wrong)}" if wrong else "",
    )


def _example() -> Claim:
    n = 128
    entries = 1e7 * 0.5
    value = sqrt(n * log(n) / entries)
    return Claim(
        "for n = 128, |G| = 10^7 and a density of 0.5, the square root is below 0.02",
        "section 3.2",
        f"{value:.3f} with natural logarithms",
        None,
        "arithmetic: nothing is measured",
    )


def _practical(rows: Sequence[Row]) -> Claim:
    real = [row for row in rows if row["of"] == "elements"]
    above = [
        f"{row['name']}: {_worst(row):.2f} of {row['num_units']} entries"
        for row in real
        if _worst(row) >= PRACTICAL
    ]
    entries = max((number(row, "num_units") for row in real), default=0)
    whole = [f"{row['name']}: {_worst(row):.2f}" for row in rows if row["of"] == "rows"]
    why = (
        "the imbalance follows from how many entries there are, and these models have "
        f"at most {entries:,.0f} a rank: {'; '.join(above)}. With the "
        f"{PAPER_ENTRIES:,.0f} of the paper's LSTM the bound itself is "
        f"{bound(PAPER_ENTRIES, 128):.2f} among 128"
    )
    ours = "; ".join(f"{row['name']}: {_worst(row):.3f}" for row in real)
    return Claim(
        "the practical imbalance ratio is always below 1.1 for the six models",
        "section 3.2",
        ours + (f"; hashing whole rows: {', '.join(whole)}" if whole else ""),
        not above if real else None,
        why if above else "" if real else "no model's data are here",
    )


def _worst(row: Row) -> float:
    return max(number(row, "push_imbalance"), number(row, "pull_imbalance"))


def _old_boundaries(rows: Sequence[Row]) -> Claim:
    found: Mapping[str, float] = {
        str(row["name"]): number(row, "push_by_old_boundaries")
        for row in rows
        if "push_by_old_boundaries" in row
    }
    says = (
        "boundaries computed from earlier gradients (n = 16) leave an imbalance of "
        f"push between {BOUNDARIES[0]} and {BOUNDARIES[1]}"
    )
    if not found:
        return Claim(says, "section 3.1", "not measured", None)
    least, most = BOUNDARIES
    outside = {
        "below, as the captures are of one step, of the same parameters": [
            name for name, value in found.items() if value < least
        ],
        "above, as in a small model a few rows of frequent words are a larger share": [
            name for name, value in found.items() if value > most
        ],
    }
    why = [
        f"{', '.join(names)}: {reason}" for reason, names in outside.items() if names
    ]
    return Claim(
        says,
        "section 3.1",
        "; ".join(f"{name}: {value:.2f}" for name, value in found.items()),
        not why,
        "; ".join(why),
    )


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Draws bars of push imbalance: measured, its bound, and that of parts that are
    ranges.
    """
    return bars.draw(
        rows,
        path,
        keys=("push_imbalance", "push_bound", "push_by_ranges"),
        title="Imbalance of push: 1 is balanced",
        notes={
            "push_imbalance": "hashed",
            "push_bound": f"bound, c = {CONSTANT:g}",
            "push_by_ranges": "ranges",
        },
    )
