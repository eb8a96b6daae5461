"""Trainings that figure 12 of SSFusion is made of: models, schemes, and what each ended
with.

All schemes take the same batches, steps, learning rates and first values, and nothing
is tuned for any of them. A planner's scheme trains on the groups that it makes of a
model with the same tensors, all enlarged to the size of one of the paper's
(``Trained.alike``), whose seconds they share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch

from gradwire.contract import Exchange
from gradwire.contract.registry import load
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.planned import exchanges_of
from gradwire.planning import catalogue
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from gradwire.version import __version__
from gradwire_bench.training.tasks import make_task
from gradwire_bench.workloads import fashion_mnist
from gradwire_bench.workloads.task import TrainingTask
from gradwire_bench.workloads.train import History, train

from ..deft.runs import one_thread
from ..frame import Ask
from ..workloads.applications import fashion_convnet, text_lstm
from ..workloads.kept import kept
from .grouped import Grouped
from .printed import CUPCAKE, OKTOPK, OMGS, SPARDL
from .setting import DENSITY, LOCAL, LOCAL_RANKS, SPARSIFIER

NUM_RANKS = 4
SEEDS = {False: (0, 1, 2), True: (0,)}
"""By ``quick``."""
WARM_UP = 0.1
"""The share of the steps in which the learning rate goes up before it comes down."""
DENSE = "dense"
SSFUSION = "SSFusion"
APART = "tensor by tensor"
FOLDER = "trainings"


@dataclass(frozen=True)
class Trained:
    """A model that is trained here, and how long."""

    name: str
    make: Callable[..., TrainingTask]
    num_steps: int
    num_quick_steps: int
    alike: str
    """The catalogued model whose elements and seconds its tensors share when groups are
    made.
    """
    printed: tuple[str, ...]
    """The trainings of figure 12 that it stands for; none where the paper has no such
    model.
    """
    less_is_better: bool
    missing: Callable[[], str | None] = lambda: None
    """A function that says why its data are not here and how to get them; None if they
    are.
    """

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
    Trained(
        "gpt", partial(make_task, "gpt"), 200, 20, "gpt2_large", (), less_is_better=True
    ),
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
"""HiPress and Espresso sparsify tensor by tensor, so the row of that name is theirs
too.
"""


def enlarged(task: TrainingTask, model: str) -> Profile:
    """A profile of a task's tensors, all enlarged by one factor to the size of a
    catalogued model.

    That model's seconds are shared among them by elements.
    """
    like = catalogue.load(model)
    with torch.device("meta"):
        parameters = [
            one for one in task.make_model().named_parameters() if one[1].requires_grad
        ]
    numels = [prod(one.shape) for _, one in parameters]
    whole = like.size_bytes // 4
    layers = []
    for (name, _), numel in zip(parameters, numels, strict=True):
        share = numel / sum(numels)
        layers.append(
            Layer(
                name=name,
                tensors=(
                    ProfiledTensor(name=name, shape=(max(1, round(share * whole)),)),
                ),
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
    """The exchange that carries out a plan of whole tensors, for a model with as many
    tensors.
    """
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
        parts = (
            self.model.name,
            self.model.steps(self.quick),
            self.scheme.name,
            self.seed,
        )
        name = "-".join([*map(str, parts), __version__]).replace(" ", "_")
        return folder / FOLDER / f"{name}.json"


def history(ask: Ask, run: Run) -> History:
    """The history of a training: read if it was kept, else trained now and kept."""
    path = None if ask.folder is None else run.path(ask.folder)
    return kept(path, partial(_train, run))


def _train(run: Run) -> History:
    task = run.model.make(seed=run.seed)
    exchange, _ = exchange_of(run.scheme, task, run.model.alike)
    num_steps = run.model.steps(run.quick)
    with one_thread():
        return train(
            task,
            exchange,
            world=NUM_RANKS,
            num_steps=num_steps,
            num_warm_up=round(WARM_UP * num_steps),
        )
