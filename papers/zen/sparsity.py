"""Figures 2 and 3 of ZEN: how gradients of different ranks overlap, and where they are
not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from gradwire.planning.data.sparsity import (
    BLOCK,
    DOUBLINGS,
    HEATMAP_PARTS,
    SparsityProfile,
    TensorSparsity,
    UnitSparsity,
)
from gradwire_bench.report import curves
from gradwire_lab.planning.index_sets import overlap_mean, overlap_spread, unit_sparsity

from .. import heat
from ..frame import Ask, Claim, Findings, Row
from .captures import (
    DENSITY,
    MODELS,
    SOURCES,
    Capture,
    captured,
    lacking,
    present,
    stem,
)
from .values import by_number, listed, number
from .volumes import blocks

RANKS = 128
QUICK_RANKS = 32
BINS = 20
"""The number of bins of the distribution of overlap ratios, from 0 to 1."""
LEAST_OVERLAP = 0.05
"""The overlap that practical ones are "much higher" than: section 2.3."""
APART = 0.21
"""The Kolmogorov-Smirnov distance that two samples of 120 from one distribution exceed
once in 100 times.
"""
NORMAL = 0.68
FIRST_OF_EIGHT = 0.6
LSTM_SKEW = 70.0
UNPRINTED = frozenset({"overlaps", "shares", "about"})

WHY_NOT_FIRST = {
    "lstm": "the rows of its embedding are by falling frequency, but no word is that "
    "frequent",
    "deepfm": "the rows of its table are by field, and within a field not by frequency",
    "transformer": "DGC takes its 5 % from the layers with the largest gradients, and "
    "the model's first layer, the embedding, is not one of them",
}
WHY_LESS_SKEW = (
    "no skewness ratio exceeds 1 / density, {most:.0f} here; ours is {share:.0f} % of "
    "that, the paper's 70 of 88 is 79 %. A vocabulary of 20,000 words has 156 in the "
    "first of 128 parts, and a batch of 700 words does not have all of those; the "
    "paper's has 6,200 there"
)


def ranks_of(ask: Ask) -> int:
    """The number of ranks whose gradients are captured of each model."""
    return QUICK_RANKS if ask.quick else RANKS


def findings(
    rows: Sequence[Row],
    claims: tuple[Claim, ...],
    models: Sequence[str],
    notes: Sequence[str] = (),
    complete: bool = True,
) -> Findings:
    """Findings with a note for each model whose data this machine lacks.

    Such a note says how to get the data.
    """
    found = [(name, lacking(name)) for name in models]
    absent = [f"not measured: {name}. {why}" for name, why in found if why is not None]
    return Findings(
        tuple(rows), claims, (*notes, *absent), complete=complete and not absent
    )


def sparsity(ask: Ask, name: str, num_ranks: int) -> SparsityProfile:
    """The figures of definitions 1 to 5 for a capture.

    They are kept beside it, where planners and benchmarks find them.
    """
    path = None if ask.folder is None else ask.folder / f"sparsity-{stem(name)}.json"
    if path is not None and path.exists():
        kept = SparsityProfile.load(path)
        if kept.num_gradients == num_ranks:
            return kept
    found = profile_of(captured(ask, name, num_ranks), num_ranks)
    if path is not None:
        found.save(path)
    return found


def profile_of(found: Capture, num_ranks: int) -> SparsityProfile:
    """The sparsity of a capture's first ranks, in its own units and in OmniReduce's
    blocks.
    """
    units = found.units[:num_ranks]
    blocked = [blocks(one).numpy() for one in found.elements(num_ranks)]
    tensor = TensorSparsity(
        name=SOURCES[found.name].parameter or "gradient",
        units=unit_sparsity(units, found.width, found.num_units),
        blocks=unit_sparsity(blocked, BLOCK, -(-found.numel // BLOCK)),
    )
    selected = SOURCES[found.name].parameter is None
    return SparsityProfile(
        source=found.about,
        num_gradients=num_ranks,
        compressor="dgc" if selected else None,
        settings={"density": DENSITY} if selected else {},
        tensors=(tensor,),
    )


Read = Callable[[str, SparsityProfile], Row]


def _rows(
    ask: Ask, models: Sequence[str], num_ranks: int | None, read: Read
) -> tuple[Row, ...]:
    """A row for each model, which ``read`` makes of the model's sparsity."""
    rows = []
    for done, name in ask.each(present(models)):
        ask.report(done, name)
        rows.append(read(name, sparsity(ask, name, num_ranks or ranks_of(ask))))
    return tuple(rows)


def _units(found: SparsityProfile) -> UnitSparsity:
    return found.tensors[0].units


def figure2a(
    ask: Ask, models: Sequence[str] = MODELS, num_ranks: int | None = None
) -> Findings:
    """The overlap ratios of pairs of gradients."""
    rows = _rows(ask, models, num_ranks, row2a)
    return findings(rows, claims2a(rows), models)


def row2a(name: str, found: SparsityProfile) -> Row:
    """One model's overlap ratios."""
    units = _units(found)
    return {
        "name": name,
        "about": found.source,
        "fraction_density": units.density,
        "overlap_mean": overlap_mean(units),
        "overlap_deviation": overlap_spread(units),
        "overlap_least": min(units.overlaps),
        "overlap_most": max(units.overlaps),
        "overlaps": list(units.overlaps),
    }


def claims2a(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """The claims of sections 2.1 and 2.3 about overlaps."""
    means = [
        (number(row, "overlap_mean"), number(row, "overlap_deviation")) for row in rows
    ]
    shown = [
        f"{row['name']}: {m:.2f} +- {d:.2f}"
        for row, (m, d) in zip(rows, means, strict=True)
    ]
    distances = [
        farthest(listed(one, "overlaps"), listed(other, "overlaps"))
        for one, other in combinations(rows, 2)
    ]
    apart = min(distances, default=0.0) > APART
    within = [_within_a_deviation(row) for row in rows]
    normal = all(abs(share - NORMAL) < 0.1 for share in within)
    least = min(mean for mean, _ in means)
    shared = least > 2 * LEAST_OVERLAP
    return (
        Claim(
            "different models have different distributions of overlap ratios",
            "section 2.1, figure 2a",
            "; ".join(shown),
            apart if distances else None,
            ""
            if apart
            else "two models' distributions are hardly to be told apart"
            if distances
            else "fewer than two models' data are here",
        ),
        Claim(
            "a model's overlap ratio is approximately normally distributed",
            "section 2.1, figure 2a",
            f"{100 * min(within):.0f} to {100 * max(within):.0f} % of the pairs "
            "are within a "
            f"deviation of the mean, of a normal distribution {100 * NORMAL:.0f} %",
            normal,
            "" if normal else "some pairs of batches share far more than most",
        ),
        Claim(
            "practical overlap ratios are much higher than 0.05",
            "section 2.3",
            f"the least mean is {least:.2f}",
            shared,
            "" if shared else "batches of a model here hardly share anything",
        ),
    )


def farthest(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of two samples' cumulative distributions
    (Kolmogorov-Smirnov).

    >>> farthest([1.0, 2.0], [2.0, 3.0])
    0.5
    """
    at = np.concatenate([one, other])
    parts = (
        np.searchsorted(np.sort(x), at, side="right") / len(x) for x in (one, other)
    )
    first, second = parts
    return float(np.abs(first - second).max())


def _within_a_deviation(row: Row) -> float:
    """The share of a model's overlap ratios within one standard deviation of their
    mean.
    """
    mean = number(row, "overlap_mean")
    deviation = number(row, "overlap_deviation")
    overlaps = listed(row, "overlaps")
    return sum(abs(one - mean) <= deviation for one in overlaps) / len(overlaps)


def draw2a(rows: Sequence[Row], path: Path) -> Path:
    """Draws the distributions of overlap ratios."""
    series = {str(row["name"]): _histogram(listed(row, "overlaps")) for row in rows}
    return curves.draw_panels(
        {"": series},
        path,
        title="Overlap of two ranks' gradients",
        x_label="overlap ratio",
        y_label=f"share of pairs, in steps of {1 / BINS:g}",
    )


def _histogram(overlaps: Sequence[float]) -> list[tuple[float, float]]:
    """The middle of each bin and the share of pairs in it, from the first bin with any
    to the last.
    """
    counts = [0] * BINS
    for one in overlaps:
        counts[min(BINS - 1, int(one * BINS))] += 1
    there = [place for place, count in enumerate(counts) if count]
    around = range(max(0, there[0] - 1), min(BINS, there[-1] + 2))
    return [((place + 0.5) / BINS, counts[place] / len(overlaps)) for place in around]


def figure2b(
    ask: Ask, models: Sequence[str] = MODELS, num_ranks: int | None = None
) -> Findings:
    """The densification ratio of 2 to 128 ranks, as far as gradients were captured."""
    rows = _rows(ask, models, num_ranks, row2b)
    return findings(rows, claims2b(rows), models)


def row2b(name: str, found: SparsityProfile) -> Row:
    """One model's densification ratios; those that would be extrapolated are left
    out.
    """
    units = _units(found)
    measured = {
        one.ranks: one.ratio for one in units.densification if not one.extrapolated
    }
    most = max(measured.values(), default=1.0)
    return {
        "name": name,
        "about": found.source,
        "fraction_density": units.density,
        "fraction_density_of_sum": units.density * most,
        **{f"densification_{ranks}": ratio for ranks, ratio in measured.items()},
    }


def claims2b(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """The claim of section 2.1 about the density of sums."""
    partly = all(
        1 < ratio < n for row in rows for n, ratio in by_number(row, "densification_")
    )
    shown = [
        f"{row['name']}: {100 * number(row, 'fraction_density'):.3g} % to "
        f"{100 * number(row, 'fraction_density_of_sum'):.3g} % among {n:.0f}, "
        f"ratio {ratio:.3g}"
        for row in rows
        for n, ratio in by_number(row, "densification_")[-1:]
    ]
    claim = Claim(
        "sums are denser, by less than the number of GPUs (BERT: 1.06 % to 40.8 "
        "% among 128)",
        "section 2.1, figure 2b; section 3.3.1",
        "; ".join(shown),
        None if partly else False,
        "the ratio of any sets that overlap partly is between 1 and their "
        "number; BERT is not here"
        if partly
        else "ranks of a model here share all of their elements, or none",
    )
    return (claim,)


def draw2b(rows: Sequence[Row], path: Path) -> Path:
    """Draws densification ratios over ranks."""
    return _draw_doubling(rows, path, "densification_", "Sums are denser", "ranks")


def figure3a(
    ask: Ask, models: Sequence[str] = MODELS, num_ranks: int | None = None
) -> Findings:
    """The shares of the non-zero elements in eight partitions, means over ranks."""
    rows = _rows(ask, models, num_ranks, row3a)
    return findings(rows, claims3a(rows), models)


def row3a(name: str, found: SparsityProfile) -> Row:
    """One model's shares."""
    shares = list(_units(found).shares)
    parts = {f"fraction_{place}": share for place, share in enumerate(shares, start=1)}
    return {"name": name, "about": found.source, **parts, "shares": shares}


def claims3a(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """The claim of section 2.1 about eight partitions."""
    first = {str(row["name"]): listed(row, "shares")[0] for row in rows}
    below = [name for name, share in first.items() if share <= FIRST_OF_EIGHT]
    claim = Claim(
        "with eight partitions, more than 60 % of the non-zero gradients are in "
        "the first",
        "section 2.1, figure 3a",
        "; ".join(f"{name}: {100 * share:.0f} %" for name, share in first.items()),
        not below,
        "; ".join(f"{name}: {WHY_NOT_FIRST[name]}" for name in below),
    )
    return (claim,)


def draw3a(rows: Sequence[Row], path: Path) -> Path:
    """Draws the heat map of eight partitions."""
    return heat.draw(
        {str(row["name"]): listed(row, "shares") for row in rows},
        path,
        title="Where the non-zero elements are",
        x_label=f"part, of {HEATMAP_PARTS} equal ones",
    )


def figure3b(
    ask: Ask, models: Sequence[str] = MODELS, num_ranks: int | None = None
) -> Findings:
    """The skewness ratio of 2 to 128 partitions, means over ranks."""
    rows = _rows(ask, models, num_ranks, row3b)
    return findings(rows, claims3b(rows), models)


def row3b(name: str, found: SparsityProfile) -> Row:
    """One model's skewness ratios."""
    units = _units(found)
    return {
        "name": name,
        "about": found.source,
        "fraction_density": units.density,
        **{f"skewness_{one.parts}": one.ratio for one in units.skewness},
    }


def claims3b(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """The claim of section 2.1 about the LSTM in 128 partitions."""
    parts = DOUBLINGS[-1]
    says = (
        f"the LSTM's embedding in {parts} partitions has a skewness ratio over "
        f"{LSTM_SKEW:.0f}"
    )
    place = "section 2.1, figure 3b"
    row = next((row for row in rows if row["name"] == "lstm"), None)
    if row is None:
        return (Claim(says, place, "not measured", None),)
    ratio = number(row, f"skewness_{parts}")
    most = 1 / number(row, "fraction_density")
    agrees = ratio > LSTM_SKEW
    why = "" if agrees else WHY_LESS_SKEW.format(most=most, share=100 * ratio / most)
    return (Claim(says, place, f"{ratio:.1f}", agrees, why),)


def draw3b(rows: Sequence[Row], path: Path) -> Path:
    """Draws skewness ratios over partitions."""
    return _draw_doubling(
        rows, path, "skewness_", "Partitions are uneven", "partitions"
    )


def _draw_doubling(
    rows: Sequence[Row], path: Path, start: str, title: str, over: str
) -> Path:
    series = {str(row["name"]): by_number(row, start) for row in rows}
    return curves.draw_panels(
        {"": series},
        path,
        title=title,
        x_label=over,
        y_label=f"{start.removesuffix('_')} ratio",
        doubling=True,
    )
