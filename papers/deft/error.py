"""Figures 5 and 6 of DEFT: what ranks have not delivered yet, by equation 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from gradwire_bench.workloads.train import History

from ..frame import Ask, Claim, Findings, Row
from ..rows import POINTS, draw, mean, thinned
from .lacking import findings
from .runs import Run, histories, run_of
from .setting import APPLICATIONS, DENSE, LSTM, METHODS, RESNET, Application, present

TIMES = 10
"""Figure 6: how many times the density of figures 3 to 5 DEFT gets there."""
LIKE = 1.25
"""Within which factor of each other two errors count as alike."""


def figure5(
    ask: Ask,
    methods: Sequence[str] = METHODS,
    apps: Sequence[Application] = APPLICATIONS,
) -> Findings:
    """The error of every sparsifier in the three applications."""
    sparse = [method for method in methods if method != DENSE]
    runs = [run_of(ask, app, method) for app in present(apps) for method in sparse]
    places = [(run.application.name, run.method) for run in runs]
    found = dict(zip(places, histories(ask, runs), strict=True))
    rows = [
        _row(run.method, run, found[at]) for run, at in zip(runs, places, strict=True)
    ]
    return findings(rows, [_lower(app.name, found) for app in present(apps)], apps)


def figure6(ask: Ask, apps: Sequence[Application] = (RESNET, LSTM)) -> Findings:
    """DEFT with as many times the density as Top-k's has after build-up, about, beside
    Top-k.
    """
    rows: list[Row] = []
    claims = []
    measured = present(apps)
    runs = [
        run_of(ask, app, method, density)
        for app in measured
        for method, density in (("topk", app.density), ("deft", TIMES * app.density))
    ]
    found = histories(ask, runs)
    for app, (topk, deft) in zip(
        measured, zip(runs[::2], runs[1::2], strict=True), strict=True
    ):
        ours = found[runs.index(deft)]
        theirs = found[runs.index(topk)]
        rows += [_row("topk", topk, theirs), _row(f"deft, {TIMES} times", deft, ours)]
        claims.append(_similar(app.name, ours, theirs))
    return findings(rows, claims, apps)


def _similar(application: str, ours: History, theirs: History) -> Claim:
    ratio = mean(ours.errors) / mean(theirs.errors)
    agrees = 1 / LIKE <= ratio <= LIKE
    return Claim(
        f"with {TIMES} times the density DEFT's error is similar to Top-k's in "
        f"{application}",
        "section 5.2, figure 6",
        f"{ratio:.2f} times Top-k's on average, where up to {LIKE:g} times of each "
        f"other is similar; densities of the mean {mean(ours.actual):.4f} and "
        f"{mean(theirs.actual):.4f}",
        agrees,
        ""
        if agrees
        else "errors of trainings this short are mostly of their beginnings",
    )


def _row(name: str, run: Run, found: History) -> Row:
    return {
        "name": name,
        "application": run.application.name,
        "num_ranks": run.num_ranks,
        "density": run.density,
        "actual_density": mean(found.actual),
        "mean_error": mean(found.errors),
        "last_error": found.errors[-1],
        POINTS: thinned(found.errors),
    }


def _lower(application: str, found: Mapping[tuple[str, str], History]) -> Claim:
    """Top-k's error against the other two, step by step."""
    says = (
        f"Top-k's error is below DEFT's and CLT-k's in all iterations of {application}"
    )
    place = "section 5.2, figure 5"
    errors = {
        method: found[application, method].errors
        for method in ("topk", "cltk", "deft")
        if (application, method) in found
    }
    if len(errors) < 3:
        return Claim(says, place, "not measured", None)
    below = {
        method: mean(
            [a < b for a, b in zip(errors["topk"], errors[method], strict=True)]
        )
        for method in ("cltk", "deft")
    }
    agrees = min(below.values()) == 1
    ours = ", ".join(
        f"below {name}'s in {100 * share:.1f} %" for name, share in below.items()
    )
    why = (
        ""
        if agrees
        else "gradients shrink as each learns at its own pace, and errors with them"
    )
    return Claim(says, place, f"{ours} of the steps", agrees, why)


draw5 = partial(
    draw, title="Error by sparsifier", x_label="step", y_label="mean of ||e||"
)
draw6 = partial(
    draw,
    title="Error at like densities of the mean",
    x_label="step",
    y_label="mean of ||e||",
)
