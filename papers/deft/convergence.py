"""Figures 3, 8 and 10 of DEFT: scores over steps, by sparsifier, by density, by number
of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from gradwire_bench.workloads.train import History

from ..frame import Ask, Claim, Findings, Row
from ..rows import POINTS, draw, number
from .lacking import findings
from .runs import Run, histories, run_of
from .setting import APPLICATIONS, DENSE, LSTM, METHODS, Application, present

NEAR_POINTS = 0.01
NEAR_SHARE = 0.05
"""Within which a score counts as dense training's: points of a rate, share of a
perplexity.
"""
SLIGHTLY = 0.25
"""Share of a perplexity by which it may be above another and count as slightly
slower.
"""
DENSITIES = (0.1, 0.01, 0.001)
"""Figure 8."""
WHY_SHORT = (
    "the paper trains 30 to 200 epochs, here it is a few hundred steps: at a density d "
    "an element waits 1/d steps on average, so a sparsifier starts later by as many"
)


def figure3(
    ask: Ask,
    methods: Sequence[str] = METHODS,
    apps: Sequence[Application] = APPLICATIONS,
) -> Findings:
    """Every sparsifier beside dense training, in the three applications."""
    measured = present(apps)
    runs = [run_of(ask, app, method) for app in measured for method in methods]
    found = histories(ask, runs)
    rows = [_row(run.method, run, one) for run, one in zip(runs, found, strict=True)]
    claims = [_attained(app, rows) for app in measured]
    return findings(rows, [*claims, *_order(rows, measured)], apps)


def figure8(
    ask: Ask, densities: Sequence[float] = DENSITIES, app: Application = LSTM
) -> Findings:
    """DEFT at three densities on the language model."""
    runs = [run_of(ask, app, "deft", density) for density in densities]
    runs.append(run_of(ask, app, DENSE))
    names = [*(f"density {density:g}" for density in densities), DENSE]
    found = histories(ask, runs)
    rows = [
        _row(name, run, one) for name, run, one in zip(names, runs, found, strict=True)
    ]
    return Findings(
        tuple(rows), (_catches_up(rows[: len(densities)], runs[0].num_steps),)
    )


def _catches_up(rows: Sequence[Row], num_steps: int) -> Claim:
    """The least density against the best of the others, at every score of the
    training.
    """
    low, *others = sorted(rows, key=lambda row: number(row, "density"))
    curves = [_scores(row) for row in others]
    ratios = {
        step: score / min(curve[step] for curve in curves)
        for step, score in _scores(low).items()
    }
    first = [ratio for step, ratio in ratios.items() if 2 * step < num_steps]
    later = [ratio for step, ratio in ratios.items() if 2 * step >= num_steps]
    agrees = 1 < max(first) <= 1 + SLIGHTLY and max(later) <= 1 + NEAR_SHARE
    return Claim(
        f"at density {low['density']:g} DEFT is slightly slower at first, and from "
        "half of training on there is no significant difference to larger ones",
        "section 5.3, figure 8",
        f"perplexity up to {max(first):.2f} times the best of the others at first, "
        f"where 1 to {1 + SLIGHTLY:g} counts as slightly slower; up to "
        f"{max(later):.2f} times from half on, where {1 + NEAR_SHARE:g} counts as no "
        "difference",
        agrees,
        "" if agrees else WHY_SHORT,
    )


def _scores(row: Row) -> dict[int, float]:
    """A row's curve, by step."""
    points = row[POINTS]
    assert isinstance(points, list)
    return {int(step): float(score) for step, score in points}


def figure10(ask: Ask, app: Application = LSTM) -> Findings:
    """DEFT on 1 to 16 ranks on the language model, beside dense training on the
    most.
    """
    most = run_of(ask, app, "deft")
    counts = [num for num in (2, 4, 8, 16) if num <= most.num_ranks]
    runs = [replace(most, num_ranks=num) for num in counts]
    runs.append(run_of(ask, app, DENSE))
    names = [*(f"{num} ranks" for num in counts), DENSE]
    found = histories(ask, runs)
    rows = [
        _row(name, run, one) for name, run, one in zip(names, runs, found, strict=True)
    ]
    return Findings(tuple(rows), (_reached(app, rows),))


def _reached(app: Application, rows: Sequence[Row]) -> Claim:
    """Each number of ranks against dense training, which is the last of the rows."""
    dense = number(rows[-1], "score")
    scores = {str(row["name"]): number(row, "score") for row in rows[:-1]}
    agrees = all(_near(app, score, dense) for score in scores.values())
    shown = ", ".join(f"{name}: {score:.1f}" for name, score in scores.items())
    return Claim(
        "on every number of workers perplexity reaches that of dense training",
        "section 5.4, figure 10",
        f"{shown}; dense {dense:.1f}, {_allowed(app)} worse counts as reached",
        agrees,
        "" if agrees else WHY_SHORT,
    )


def _row(name: str, run: Run, found: History) -> Row:
    """Scores at the end and halfway; the curve of all."""
    half = next(score for step, score in found.scores if 2 * step >= run.num_steps)
    return {
        "name": name,
        "application": run.application.name,
        "num_ranks": run.num_ranks,
        "num_steps": run.num_steps,
        "density": run.density,
        "metric": run.application.metric,
        "score": found.scores[-1][1],
        "score_halfway": half,
        "loss": found.losses[-1],
        POINTS: [list(point) for point in found.scores],
    }


def _near(app: Application, score: float, dense: float) -> bool:
    """Whether a score is dense training's or better, to what counts as nothing."""
    if app.less_is_better:
        return score <= dense * (1 + NEAR_SHARE)
    return score >= dense - NEAR_POINTS


def _allowed(app: Application) -> str:
    return (
        f"{NEAR_SHARE:.0%}" if app.less_is_better else f"{100 * NEAR_POINTS:g} points"
    )


def _attained(app: Application, rows: Sequence[Row]) -> Claim:
    scores = {
        str(row["name"]): number(row, "score")
        for row in rows
        if row["application"] == app.name
    }
    dense = scores.pop(DENSE)
    agrees = all(_near(app, score, dense) for score in scores.values())
    ours = ", ".join(f"{name} {score:.4g}" for name, score in scores.items())
    return Claim(
        f"all sparsifiers attain the convergence point of dense training in {app.name}",
        "section 5.2, figure 3",
        f"{app.metric}: {ours}; dense {dense:.4g}, {_allowed(app)} worse counts "
        "as attained",
        agrees,
        "" if agrees else WHY_SHORT,
    )


def _order(rows: Sequence[Row], apps: Sequence[Application]) -> list[Claim]:
    """Whether Top-k leads the sparsifiers halfway through, wherever all three were
    measured.
    """
    says = "Top-k converges faster than DEFT and CLT-k"
    place = "section 5.2, figure 3"
    leads = []
    shown = []
    for app in apps:
        half = {
            str(row["name"]): number(row, "score_halfway")
            for row in rows
            if row["application"] == app.name
        }
        if not {"topk", "cltk", "deft"} <= set(half):
            return [Claim(says, place, "not measured", None)]
        others = [half["cltk"], half["deft"]]
        ahead = (
            min(others) > half["topk"]
            if app.less_is_better
            else max(others) < half["topk"]
        )
        leads.append(ahead)
        shown.append(
            f"{app.name} {half['topk']:.4g} against {others[0]:.4g}, {others[1]:.4g}"
        )
    why = (
        ""
        if all(leads)
        else "curves this short cross, and their scores are of few examples"
    )
    ours = "halfway, topk against cltk, deft: " + "; ".join(shown)
    return [Claim(says, place, ours, all(leads), why)]


draw3 = partial(draw, title="Scores by sparsifier", x_label="step", y_label="score")
draw8 = partial(draw, title="DEFT by density", x_label="step", y_label="perplexity")
draw10 = partial(draw, title="DEFT by ranks", x_label="step", y_label="perplexity")
