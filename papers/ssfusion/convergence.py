"""Figure 12 of SSFusion: where training ends, by scheme, seed by seed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

from gradwire_bench.workloads.train import History

from ..frame import Ask, Claim, Findings, Row
from ..rows import POINTS, draw, mean, number, thinned
from .printed import CUPCAKE, FIGURE_12, OKTOPK, OMGS, SPARDL
from .training import (
    APART,
    DENSE,
    MODELS,
    SCHEMES,
    SEEDS,
    SSFUSION,
    Run,
    Scheme,
    Trained,
    exchange_of,
    history,
)

RIVALS = (OKTOPK, SPARDL, OMGS, CUPCAKE)
POINTS_LOST = 0.003
SHARE_LOST = 0.015
"""The most that is lost where a score counts as close to dense training's: points of an
accuracy, share of a perplexity or loss.
"""
SHORT = "SSFusion"
SHORT_APART = "sparsification tensor by tensor (HiPress, Espresso)"
PLACE = "experiment 2, figure 12"


def figure12(
    ask: Ask, models: Sequence[Trained] = MODELS, schemes: Sequence[Scheme] = SCHEMES
) -> Findings:
    """Final scores of each scheme, a mean over seeds, beside those of dense
    training.
    """
    present = [one for one in models if one.missing() is None]
    runs = [
        Run(model, scheme, seed, ask.quick)
        for model, seed, scheme in product(present, SEEDS[ask.quick], schemes)
    ]
    found: dict[Run, History] = {}
    for done, run in ask.each(runs):
        ask.report(done, f"{run.scheme.name}, {run.model.name}, seed {run.seed}")
        found[run] = history(ask, run)
    rows: list[Row] = []
    claims: list[Claim] = []
    for model in present:
        own = [
            _row(
                model,
                scheme,
                [(run, one) for run, one in found.items() if run.model is model],
            )
            for scheme in schemes
        ]
        rows += own
        claims += claims_of(model, own)
    lacking: list[Row] = [
        {"name": "not measured", "application": one.name, "why": one.missing()}
        for one in models
        if one not in present
    ]
    notes = tuple(one.make().description for one in present)
    return Findings((*rows, *lacking), tuple(claims), notes, complete=not lacking)


def _row(model: Trained, scheme: Scheme, found: Sequence[tuple[Run, History]]) -> Row:
    """``lost`` is of each seed against dense training of the same seed: points, or a
    share.
    """
    own = {run.seed: one for run, one in found if run.scheme is scheme}
    dense = {run.seed: one for run, one in found if run.scheme.name == DENSE}
    pairs = [
        (one.scores[-1][1], dense[seed].scores[-1][1]) for seed, one in own.items()
    ]
    lost = [a / b - 1 if model.less_is_better else b - a for a, b in pairs]
    histories = list(own.values())
    task = model.make()
    return {
        "name": scheme.name,
        "application": model.name,
        "num_messages": exchange_of(scheme, task, model.alike)[1],
        "num_steps": len(histories[0].losses),
        "metric": task.metric,
        "score": mean([score for score, _ in pairs]),
        "scores": [round(score, 4) for score, _ in pairs],
        "mean_lost": mean(lost),
        "most_lost": max(lost),
        "least_lost": min(lost),
        "actual_density": mean([mean(one.actual) for one in histories]),
        "sent_bytes": mean([mean(one.sent_bytes) for one in histories]),
        POINTS: thinned(
            [mean(at) for at in zip(*(h.losses for h in histories), strict=True)]
        ),
    }


def claims_of(model: Trained, rows: Sequence[Row]) -> list[Claim]:
    """The claims of figure 12 beside the rows of one model."""
    by_name = {str(row["name"]): row for row in rows}
    rivals = [by_name[name] for name in RIVALS if name in by_name]
    ours = by_name[SSFUSION]
    claims = [_close(model, ours, by_name[DENSE]), _ahead(model, ours, rivals, SHORT)]
    if APART in by_name:
        claims.append(_ahead(model, by_name[APART], rivals, SHORT_APART))
    return claims


def _close(model: Trained, ours: Row, dense: Row) -> Claim:
    allowed = SHARE_LOST if model.less_is_better else POINTS_LOST
    says = "; ".join(
        f"{name}: {FIGURE_12[name][1]:g} of {FIGURE_12[name][0]:g}"
        for name in model.printed
    )
    lost = number(ours, "mean_lost")
    density = number(ours, "actual_density")
    near = lost <= allowed
    return Claim(
        f"{SHORT} ends close to dense training" + (f" ({says})" if says else ""),
        PLACE,
        f"{model.name}, {ours['metric']}: {number(ours, 'score'):.4g} of "
        f"{number(dense, 'score'):.4g}; {100 * lost:.2f} {_unit(model)} lost, where "
        f"{100 * allowed:g} is close",
        near,
        ""
        if near
        else f"{number(ours, 'num_steps'):.0f} steps are few: at {100 * density:.1f} "
        f"% of the elements a step, an element waits {1 / density:.0f} steps; the "
        "paper trains epochs",
    )


def _ahead(model: Trained, ours: Row, rivals: Sequence[Row], about: str) -> Claim:
    """Whether a scheme ends ahead of all rivals; those that are ahead of it are the
    reason.
    """
    better = [
        row for row in rivals if number(row, "mean_lost") <= number(ours, "mean_lost")
    ]
    in_words = ", ".join(f"{row['name']} {number(row, 'score'):.4g}" for row in rivals)
    return Claim(
        f"{about} ends ahead of {', '.join(str(row['name']) for row in rivals)}",
        PLACE,
        f"{model.name}, {ours['metric']}: {number(ours, 'score'):.4g} against "
        f"{in_words}",
        not better,
        _why_not_ahead(model, ours, better) if better else "",
    )


def _why_not_ahead(model: Trained, ours: Row, better: Sequence[Row]) -> str:
    """How much better others are, how much more they send, and how far apart seeds
    lie.
    """
    spread = number(ours, "most_lost") - number(ours, "least_lost")
    parts = [
        f"{row['name']} is "
        f"{100 * (number(ours, 'mean_lost') - number(row, 'mean_lost')):.2f} "
        f"{_unit(model)} better and sends "
        f"{number(row, 'sent_bytes') / number(ours, 'sent_bytes'):.2f} times as "
        "many bytes"
        for row in better
    ]
    return f"{'; '.join(parts)}. Its own seeds lie {100 * spread:.2f} apart"


def _unit(model: Trained) -> str:
    return "%" if model.less_is_better else "points"


draw12 = partial(
    draw, title="Training at density 0.01", x_label="step", y_label="loss (nats)"
)
