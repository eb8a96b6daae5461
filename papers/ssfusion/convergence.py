"""Figure 12 of SSFusion: where training ends, by scheme, seed by seed.

All schemes take the same batches, steps, learning rates and first values, and nothing is tuned for
any of them. A planner's scheme trains on the groups that it makes of a model with the same tensors,
all enlarged to the size of one of the paper's (``Trained.alike``), whose seconds they share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path

import torch

from gradwire import catalogue
from gradwire.bench.training import bytes_gpt
from gradwire.contract import Exchange
from gradwire.data.exchanges import exchanges_of
from gradwire.data.plan import Plan
from gradwire.data.profile import Layer, Profile, ProfiledTensor
from gradwire.exchange import exchange_for
from gradwire.load import load
from gradwire.version import __version__
from gradwire.workloads import fashion_mnist
from gradwire.workloads.task import TrainingTask
from gradwire.workloads.train import History, train

from ..deft.rows import POINTS, draw, mean, number, thinned
from ..deft.runs import one_thread
from ..frame import Ask, Claim, Findings, Row
from ..whole import write_whole
from ..workloads.applications import fashion_convnet, text_lstm
from .grouped import Grouped
from .printed import CUPCAKE, FIGURE_12, OKTOPK, OMGS, SPARDL
from .setting import DENSITY, LOCAL, LOCAL_RANKS, SPARSIFIER

NUM_RANKS = 4
SEEDS = {False: (0, 1, 2), True: (0,)}
"""By ``quick``."""
WARM_UP = 0.1
"""The share of the steps in which the learning rate goes up before it comes down."""
DENSE, SSFUSION, APART = "dense", "SSFusion", "tensor by tensor"
SHORT, SHORT_APART = "SSFusion", "sparsification tensor by tensor (HiPress, Espresso)"
POINTS_LOST, SHARE_LOST = 0.003, 0.015
"""The most that is lost where a score counts as close to dense training's: points of an accuracy,
share of a perplexity or loss."""
FOLDER = "trainings"
PLACE = "experiment 2, figure 12"


@dataclass(frozen=True)
class Trained:
    """A model that is trained here, and how long."""

    name: str
    make: Callable[..., TrainingTask]
    num_steps: int
    num_quick_steps: int
    alike: str
    """The catalogued model whose elements and seconds its tensors share when groups are made."""
    printed: tuple[str, ...]
    """The trainings of figure 12 that it stands for; none where the paper has no such model."""
    less_is_better: bool
    missing: Callable[[], str | None] = lambda: None
    """A function that says why its data are not here and how to get them; None if they are."""

    def steps(self, quick: bool) -> int:
        return self.num_quick_steps if quick else self.num_steps


MODELS = (
    Trained(
        "lstm",
        partial(text_lstm, vocabulary=2000, embedding=64, hidden=128, batch=4),
        300,
        20,
        "lstm",
        ("LSTM, perplexity",),
        less_is_better=True,
    ),
    Trained("gpt", bytes_gpt, 200, 20, "gpt2_large", (), less_is_better=True),
    Trained(
        "convnet",
        partial(fashion_convnet, batch=16, num_held_out=2000),
        1000,
        20,
        "resnet152",
        ("ResNet-152, top-1 accuracy", "VGG-19, top-1 accuracy"),
        less_is_better=False,
        missing=fashion_mnist.missing,
    ),
)


@dataclass(frozen=True)
class Scheme:
    """A scheme of figure 12: an exchange of the whole model, or a planner's groups."""

    name: str
    compressor: str | None = None
    planner: str | None = None


SCHEMES = (
    Scheme(DENSE, compressor="none"),
    Scheme(SSFUSION, planner="ssfusion"),
    Scheme(APART, compressor="selective"),
    Scheme("flat top-k", compressor="topk"),
    Scheme(OKTOPK, compressor="oktopk"),
    Scheme(SPARDL, compressor="spardl"),
    Scheme(OMGS, planner="omgs"),
    Scheme(CUPCAKE, planner="cupcake"),
)
"""HiPress and Espresso sparsify tensor by tensor, so the row of that name is theirs too."""
RIVALS = (OKTOPK, SPARDL, OMGS, CUPCAKE)


def enlarged(task: TrainingTask, model: str) -> Profile:
    """A profile of a task's tensors, all enlarged by one factor to the size of a catalogued model.

    That model's seconds are shared among them by elements.
    """
    like = catalogue.load(model)
    with torch.device("meta"):
        parameters = [one for one in task.make_model().named_parameters() if one[1].requires_grad]
    numels = [prod(one.shape) for _, one in parameters]
    whole = like.size_bytes // 4
    layers = []
    for (name, _), numel in zip(parameters, numels, strict=True):
        share = numel / sum(numels)
        layers.append(
            Layer(
                name=name,
                tensors=(ProfiledTensor(name=name, shape=(max(1, round(share * whole)),)),),
                forward_s=share * like.forward_s,
                backward_s=share * like.backward_s,
            )
        )
    return Profile(
        model=f"{task.name} as large as {model}",
        source=f"tensors of {task.name}, elements and seconds of {model}",
        batch_size=like.batch_size,
        layers=tuple(layers),
    )


def exchange_of(scheme: Scheme, task: TrainingTask, alike: str) -> tuple[Exchange, int]:
    """The exchange that a scheme trains with, and the number of its groups."""
    if scheme.planner is None:
        kind = load("compress", str(scheme.compressor))
        made = kind() if scheme.compressor == "none" else kind(density=DENSITY)
        if scheme.compressor == "selective":
            made = kind(sparsifier=SPARSIFIER, density=DENSITY, num_dense=0)
        return exchange_for(made), 1
    profile = enlarged(task, alike)
    plan = load("planner", scheme.planner)(profile, LOCAL.cluster(LOCAL_RANKS))
    return grouped(plan, profile), len(plan.messages)


def grouped(plan: Plan, profile: Profile) -> Grouped:
    """The exchange that carries out a plan of whole tensors, for a model with as many tensors."""
    names = [one.name for layer in profile.layers for one in layer.tensors]
    place = {name: at for at, name in enumerate(names)}
    made = exchanges_of(plan)
    return Grouped(
        tuple(
            (tuple(place[chunk.tensor] for chunk in one.chunks), made[one.exchange])
            for one in plan.messages
        )
    )


@dataclass(frozen=True)
class Run:
    """One training: all that its history follows from."""

    model: Trained
    scheme: Scheme
    seed: int
    quick: bool

    def path(self, folder: Path) -> Path:
        """The file that the training is kept in."""
        parts = (self.model.name, self.model.steps(self.quick), self.scheme.name, self.seed)
        name = "-".join([*map(str, parts), __version__]).replace(" ", "_")
        return folder / FOLDER / f"{name}.json"


def history(ask: Ask, run: Run) -> History:
    """The history of a training: read if it was kept, else trained now and kept."""
    path = None if ask.folder is None else run.path(ask.folder)
    if path is not None and path.exists():
        return History.from_json(json.loads(path.read_text(encoding="utf-8")))
    task = run.model.make(seed=run.seed)
    exchange, _ = exchange_of(run.scheme, task, run.model.alike)
    num_steps = run.model.steps(run.quick)
    with one_thread():
        found = train(
            task,
            exchange,
            world=NUM_RANKS,
            num_steps=num_steps,
            num_warm_up=round(WARM_UP * num_steps),
        )
    if path is not None:
        write_whole(path, json.dumps(found.to_json()).encode())
    return found


def figure12(
    ask: Ask, models: Sequence[Trained] = MODELS, schemes: Sequence[Scheme] = SCHEMES
) -> Findings:
    """Final scores of each scheme, a mean over seeds, beside those of dense training."""
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
            _row(model, scheme, [(run, one) for run, one in found.items() if run.model is model])
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
    """``lost`` is of each seed against dense training of the same seed: points, or a share."""
    own = {run.seed: one for run, one in found if run.scheme is scheme}
    dense = {run.seed: one for run, one in found if run.scheme.name == DENSE}
    pairs = [(one.scores[-1][1], dense[seed].scores[-1][1]) for seed, one in own.items()]
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
        POINTS: thinned([mean(at) for at in zip(*(h.losses for h in histories), strict=True)]),
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
        f"{name}: {FIGURE_12[name][1]:g} of {FIGURE_12[name][0]:g}" for name in model.printed
    )
    lost, density = number(ours, "mean_lost"), number(ours, "actual_density")
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
        else f"{number(ours, 'num_steps'):.0f} steps are few: at a mean of {100 * density:.1f} % of "
        f"the elements a step, an element waits {1 / density:.0f} steps; the paper trains epochs",
    )


def _ahead(model: Trained, ours: Row, rivals: Sequence[Row], about: str) -> Claim:
    """Whether a scheme ends ahead of all rivals; those that are ahead of it are the reason."""
    better = [row for row in rivals if number(row, "mean_lost") <= number(ours, "mean_lost")]
    told = ", ".join(f"{row['name']} {number(row, 'score'):.4g}" for row in rivals)
    return Claim(
        f"{about} ends ahead of {', '.join(str(row['name']) for row in rivals)}",
        PLACE,
        f"{model.name}, {ours['metric']}: {number(ours, 'score'):.4g} against {told}",
        not better,
        _why_not_ahead(model, ours, better) if better else "",
    )


def _why_not_ahead(model: Trained, ours: Row, better: Sequence[Row]) -> str:
    """How much better others are, how much more they send, and how far apart seeds lie."""
    spread = number(ours, "most_lost") - number(ours, "least_lost")
    parts = [
        f"{row['name']} is {100 * (number(ours, 'mean_lost') - number(row, 'mean_lost')):.2f} "
        f"{_unit(model)} better and sends "
        f"{number(row, 'sent_bytes') / number(ours, 'sent_bytes'):.2f} times as many bytes"
        for row in better
    ]
    return f"{'; '.join(parts)}. Its own seeds lie {100 * spread:.2f} apart"


def _unit(model: Trained) -> str:
    return "%" if model.less_is_better else "points"


draw12 = partial(draw, title="Training at density 0.01", x_label="step", y_label="loss (nats)")
