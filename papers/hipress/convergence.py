"""Figure 16 of HiPress in small: trainings that are real, whose iterations take
simulated seconds.

A small model is trained for as many steps by dense all-reduces and through the
compressor. A step then counts as many seconds as an iteration of the paper's model
takes on 16 hosts (figure 11's site), so time to converge is steps to a score times
those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gradwire.contract.registry import load
from gradwire.exchange.by_name import by_name, exchange_for
from gradwire_bench.workloads import fashion_mnist
from gradwire_bench.workloads.task import TrainingTask
from gradwire_bench.workloads.train import History, train

from ..deft.runs import one_thread
from ..frame import Ask, Claim, Findings, Row, effect
from ..rows import POINTS, draw, number
from ..workloads.applications import fashion_convnet, text_lstm
from .printed import FIGURE_16_TIME, HIPRESS_DGC, HIPRESS_TERNGRAD, RING
from .setting import HOSTS, LOCAL_AS_TABLE_1
from .systems import SYSTEMS, row_of

NUM_RANKS = 4
DENSE = "dense"
WARM_UP = 0.1
"""The share of the steps in which the learning rate goes up before it comes down."""
SCORES = 10
SHARE_LOST = 0.02
POINTS_LOST = 0.01
"""The most that is lost where a score counts as almost the same: share of a perplexity
or loss, points of an accuracy.
"""
LATE = (
    "elements that wait in residuals have fewer steps to arrive than in the paper's "
    "epochs, and the noise of a quantiser fewer to average out"
)
MORE = "steps to the score grow by most of what its iterations are faster, or by more"
FEWER = (
    "iterations alone are that much faster: dense ones wait for links that carry what "
    "table 1 implies (see figure 9)"
)


@dataclass(frozen=True)
class Trained:
    """A model that is trained here for one of the paper's."""

    name: str
    make: Callable[..., TrainingTask]
    num_steps: int
    num_quick_steps: int
    compressor: str
    system: str
    """The paper's system, whose iterations' seconds count."""
    alike: str
    """The catalogued model whose iterations count."""
    less_is_better: bool
    collective: str | None = None
    """The collective of the paper's system; None is the one that suits the
    compressor.
    """
    missing: Callable[[], str | None] = lambda: None
    """A function that says why its data are not here and how to get them; None if they
    are.
    """


MODELS = (
    Trained(
        "lstm",
        partial(text_lstm, vocabulary=2000, embedding=64, hidden=128, batch=4),
        400,
        40,
        "dgc",
        HIPRESS_DGC,
        "lstm",
        less_is_better=True,
        collective="casync_ring",
    ),
    Trained(
        "convnet",
        partial(fashion_convnet, batch=16, num_held_out=2000),
        400,
        20,
        "terngrad",
        HIPRESS_TERNGRAD,
        "resnet50",
        less_is_better=False,
        missing=fashion_mnist.missing,
    ),
)
"""An LSTM on text of this machine; for ResNet-50 a convolutional network on
Fashion-MNIST.
"""


def figure16(
    ask: Ask, models: Sequence[Trained] = MODELS, num_hosts: int = HOSTS
) -> Findings:
    """Scores over seconds of dense training and of HiPress's, and the seconds to a
    score.
    """
    present = [model for model in models if model.missing() is None]
    rows: list[Row] = []
    claims: list[Claim] = []
    for done, model in ask.each(present):
        own = []
        for place, name in enumerate((DENSE, model.compressor)):
            ask.report(done + place / 2 / len(present), f"{name}, {model.name}")
            own.append(_row(model, name, _trained(model, name, ask.quick), num_hosts))
        rows += own
        claims.append(close_claim(model, own))
    if present:
        claims.append(sooner_claim(present, rows))
    lacking = [
        f"{one.name}: {why}" for one in models if (why := one.missing()) is not None
    ]
    note = (
        f"{NUM_RANKS} ranks, one seed, nothing tuned; the score to reach is the worse "
        "of the two at the end"
    )
    return Findings(tuple(rows), tuple(claims), (note, *lacking), complete=not lacking)


def _trained(model: Trained, name: str, quick: bool) -> History:
    num_steps = model.num_quick_steps if quick else model.num_steps
    kind = load("compress", "none" if name == DENSE else name)
    exchange = exchange_for(kind())
    if name != DENSE and model.collective is not None:
        keeps = kind.traits.error_feedback
        exchange = by_name(name, {}, model.collective, error_feedback=keeps)
    with one_thread():
        return train(
            model.make(seed=0),
            exchange,
            world=NUM_RANKS,
            num_steps=num_steps,
            num_warm_up=round(WARM_UP * num_steps),
            num_scores=SCORES,
            as_attached=True,
        )


def _row(model: Trained, name: str, found: History, num_hosts: int) -> Row:
    system = SYSTEMS[RING if name == DENSE else model.system]
    iteration = row_of(LOCAL_AS_TABLE_1, model.alike, num_hosts, system)
    step_s = number(iteration, "iteration_s")
    return {
        "name": name,
        "application": model.name,
        "system": system.name,
        "score": found.scores[-1][1],
        "loss": found.losses[-1],
        "iteration_s": step_s,
        POINTS: [[step_s * step, score] for step, score in found.scores],
    }


def close_claim(model: Trained, rows: Sequence[Row]) -> Claim:
    """Whether the compressed training ends as the dense one does."""
    before, after = (number(row, "score") for row in rows)
    worse = after / before - 1 if model.less_is_better else before - after
    is_close = worse <= (SHARE_LOST if model.less_is_better else POINTS_LOST)
    allowed = (
        f"{SHARE_LOST:.0%}" if model.less_is_better else f"{100 * POINTS_LOST:g} points"
    )
    return Claim(
        f"{model.compressor} ends with almost the same score as dense training "
        f"({model.name})",
        "figure 16",
        f"{after:.4g} beside {before:.4g}; almost: at most {allowed} lost",
        is_close,
        "" if is_close else LATE,
    )


def sooner_claim(models: Sequence[Trained], rows: Sequence[Row]) -> Claim:
    """By how much sooner the compressed training reaches a score: the most among the
    models.
    """
    less = {}
    in_words = []
    for model in models:
        pair = [row for row in rows if row["application"] == model.name]
        reached = [
            reached_s(row, pair, less_is_better=model.less_is_better) for row in pair
        ]
        dense_s, own_s = (number(row, "iteration_s") for row in pair)
        less[model.name] = 1 - reached[1] / reached[0]
        in_words.append(
            f"{100 * less[model.name]:.1f} % less ({model.name}), an iteration being "
            f"{dense_s / own_s:.2f} x as fast"
        )
    most = max(less.values())
    return effect(
        f"HiPress converges in up to {100 * FIGURE_16_TIME:.1f} % less time",
        "section 6.5, figure 16",
        "; ".join(in_words),
        most,
        FIGURE_16_TIME,
        FEWER if most > FIGURE_16_TIME else MORE,
    )


def reached_s(row: Row, rows: Sequence[Row], *, less_is_better: bool) -> float:
    """The first second at which a row's curve is as good as the worse of all ends."""
    ends = [number(one, "score") for one in rows]
    target = max(ends) if less_is_better else min(ends)
    points = row[POINTS]
    assert isinstance(points, list)
    return next(
        float(seconds)
        for seconds, score in points
        if (score <= target if less_is_better else score >= target)
    )


def draw16(rows: Sequence[Row], path: Path) -> Path:
    """Draws scores over simulated seconds, with a panel for each model."""
    return draw(
        rows,
        path,
        title="Time to converge, iterations simulated",
        x_label="s",
        y_label="score",
    )
