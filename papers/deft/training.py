"""Beyond the paper: does training end where dense training does? More sparsifiers,
several seeds.

All methods take the same batches, steps, learning rates and first values, in one run;
nothing is tuned for any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

from gradwire_bench.workloads.train import History

from ..frame import Ask, Claim, Findings, Row
from ..rows import POINTS, draw, mean, thinned
from .lacking import findings
from .runs import Run, histories
from .setting import DENSE, FULL_DGC, TRAINED, UNMASKED_DGC, Application, present

METHODS = (DENSE, "topk", "deft", "dgc", "sidco", FULL_DGC, UNMASKED_DGC)
DENSITY = 0.01
SEEDS = {False: (0, 1, 2), True: (0,)}
"""By ``quick``."""
POINTS_LOST = 0.005
SHARE_LOST = 0.03
"""The most that may be lost: half a point of accuracy, 3 % of perplexity."""
PLACE = "the project's own target"
WHY = (
    "steps are few: what a sparsifier holds back, about 1/density steps' worth, is a "
    "large part of them"
)
WHY_MASKED = (
    "masking ends the momentum of what is sent, so what is sent every few steps moves "
    "by a part of what momentum SGD moves it by: it wants a higher learning rate, and "
    "none is tuned here"
)


def training(
    ask: Ask,
    methods: Sequence[str] = METHODS,
    apps: Sequence[Application] = TRAINED,
    seeds: Sequence[int] | None = None,
) -> Findings:
    """Final scores of every method and seed beside dense training's."""
    measured = present(apps)
    seeds = seeds or SEEDS[ask.quick]
    runs = [
        _run(ask, app, method, seed)
        for seed, app, method in product(seeds, measured, methods)
    ]
    found = dict(zip(runs, histories(ask, runs), strict=True))
    rows: list[Row] = []
    claims = []
    for app, method in product(measured, methods):
        ours = {run.seed: one for run, one in found.items() if _is(run, app, method)}
        dense = {run.seed: one for run, one in found.items() if _is(run, app, DENSE)}
        rows.append(_row(app, method, app.ranks(ask.quick), ours, dense))
        if method != DENSE:
            claims.append(_claim(app, method, rows[-1]))
    return findings(
        rows, claims, apps, [app.task(ask.quick).description for app in measured]
    )


def _run(ask: Ask, app: Application, method: str, seed: int) -> Run:
    return Run(
        application=app,
        method=method,
        density=1.0 if method == DENSE else DENSITY,
        num_ranks=app.ranks(ask.quick),
        num_steps=app.steps(ask.quick),
        quick=ask.quick,
        seed=seed,
        num_scores=1,
    )


def _is(run: Run, app: Application, method: str) -> bool:
    return (run.application, run.method) == (app, method)


def _row(
    app: Application,
    method: str,
    num_ranks: int,
    seeds: dict[int, History],
    dense: dict[int, History],
) -> Row:
    """``lost`` is of each seed against dense training of the same seed: points, or a
    share.
    """
    scores = [one.scores[-1][1] for one in seeds.values()]
    theirs = [dense[seed].scores[-1][1] for seed in seeds]
    pairs = list(zip(scores, theirs, strict=True))
    losses = [one.losses for one in seeds.values()]
    lost = [a / b - 1 if app.less_is_better else b - a for a, b in pairs]
    return {
        "name": method,
        "application": app.name,
        "num_ranks": num_ranks,
        "num_steps": len(next(iter(seeds.values())).losses),
        "score": mean(scores),
        "scores": [round(score, 4) for score in scores],
        "mean_lost": mean(lost),
        "most_lost": max(lost),
        "actual_density": mean([mean(one.actual) for one in seeds.values()]),
        "sent_bytes": mean([mean(one.sent_bytes) for one in seeds.values()]),
        POINTS: thinned([mean(at) for at in zip(*losses, strict=True)]),
    }


def _claim(app: Application, method: str, row: Row) -> Claim:
    """The mean over seeds against dense training's; each seed's loss is in the text."""
    lost, most = (float(str(row[key])) for key in ("mean_lost", "most_lost"))
    allowed = SHARE_LOST if app.less_is_better else POINTS_LOST
    unit = "% of perplexity" if app.less_is_better else "points of accuracy"
    met = lost <= allowed
    missed = WHY_MASKED if method == FULL_DGC else WHY
    return Claim(
        f"{method} at density {DENSITY} loses at most {100 * allowed:g} {unit} "
        f"in {app.name}",
        PLACE,
        f"{100 * lost:+.2f} on average, {100 * most:+.2f} in the worst seed",
        None,
        f"the paper states nothing of it: {'met' if met else f'missed, as {missed}'}",
    )


draw_training = partial(
    draw,
    title=f"Training at density {DENSITY:g}",
    x_label="step",
    y_label="loss (nats)",
)
