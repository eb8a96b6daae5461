"""DEFT's setting: its three applications in a size for two cores, and the methods it
compares.

Source: Yoon and Oh, DEFT, section 5.1 and table 2; densities of section 5.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire.contract import Exchange
from gradwire.contract.registry import load
from gradwire.exchange.by_name import exchange_for
from gradwire_bench.workloads import fashion_mnist
from gradwire_bench.workloads.task import TrainingTask
from gradwire_bench.workloads.train import (
    message_of,
    views_in,
    without_momentum,
)
from gradwire_lab.exchange.deep_gradient_compression import deep_gradient_compression

from ..workloads import movielens
from ..workloads.applications import (
    fashion_convnet,
    fashion_resnet,
    movielens_ncf,
    text_lstm,
)
from ..workloads.kept import layer_sizes

DENSE = "dense"
FULL_DGC = "dgc in full"
"""The name of DGC with momentum correction, factor masking and density warm-up; ``dgc``
alone is its selection only.
"""
UNMASKED_DGC = "dgc in full, unmasked"
"""The name of full DGC without factor masking."""
SELECTIVE = "topk by tensor"
"""The name of ``selective`` with top-k: in each tensor, where ``topk`` selects in the
whole.
"""
TUNED = "hardthreshold"
"""The sparsifier that is given a threshold, here one that fits the first gradient."""
DENSITY_WARM_UP = 0.1
"""The share of the steps in which full DGC's density comes down."""
METHODS = (DENSE, "topk", "cltk", "deft")
"""The methods that section 5 compares."""


@dataclass(frozen=True)
class Application:
    """An application of table 2, as it is trained here."""

    name: str
    title: str
    density: float
    """The density that section 5 sets."""
    metric: str
    make: Callable[..., TrainingTask]
    """A function that makes the task from ``seed`` and the sizes in ``full`` or
    ``quick``.
    """
    full: dict[str, Any] = field(hash=False)
    quick: dict[str, Any] = field(hash=False)
    num_steps: int
    num_quick_steps: int
    num_ranks: int = 16
    """The number of ranks in the full size, by default the paper's."""
    num_quick_ranks: int = 8
    missing: Callable[[], str | None] = lambda: None
    """A function that says why its data are not here and how to get them; None if they
    are.
    """
    less_is_better: bool = False

    def task(
        self, quick: bool, seed: int = 0, batch: int | None = None
    ) -> TrainingTask:
        """The task in its quick or full size; ``batch``, if given, replaces a rank's
        batch size.
        """
        sizes = self.quick if quick else self.full
        return self.make(
            **(sizes if batch is None else sizes | {"batch": batch}), seed=seed
        )

    def steps(self, quick: bool) -> int:
        return self.num_quick_steps if quick else self.num_steps

    def ranks(self, quick: bool) -> int:
        return self.num_quick_ranks if quick else self.num_ranks


RESNET = Application(
    "resnet18",
    "computer vision",
    0.01,
    "accuracy",
    fashion_resnet,
    full={"width": 8, "stem_stride": 2, "batch": 8, "num_held_out": 2000},
    quick={"width": 4, "stem_stride": 2, "batch": 2, "num_held_out": 300},
    num_steps=800,
    num_quick_steps=40,
    missing=fashion_mnist.missing,
)
LSTM = Application(
    "lstm",
    "language modelling",
    0.001,
    "perplexity",
    text_lstm,
    full={
        "vocabulary": 5000,
        "embedding": 64,
        "hidden": 128,
        "batch": 4,
        "num_held_out": 200,
    },
    quick={
        "vocabulary": 1000,
        "embedding": 64,
        "hidden": 128,
        "batch": 1,
        "num_held_out": 50,
    },
    num_steps=800,
    num_quick_steps=40,
    less_is_better=True,
)
NCF = Application(
    "ncf",
    "recommendation",
    0.1,
    "hit rate at 10",
    movielens_ncf,
    full={"factors": 32, "batch": 128},
    quick={"factors": 16, "batch": 32},
    num_steps=800,
    num_quick_steps=40,
    missing=movielens.missing,
)
APPLICATIONS = (RESNET, LSTM, NCF)
TRAINED = (
    replace(
        LSTM,
        name="lstm, 4 ranks",
        full={"vocabulary": 2000, "embedding": 64, "hidden": 128, "batch": 4},
        num_steps=2500,
        num_ranks=4,
        num_quick_ranks=4,
    ),
    replace(
        RESNET,
        name="convnet, 4 ranks",
        make=fashion_convnet,
        full={"batch": 16},
        quick={"width": 4, "batch": 4, "num_held_out": 1000},
        num_steps=3000,
        num_ranks=4,
        num_quick_ranks=4,
    ),
    replace(
        RESNET,
        name="resnet18, 4 ranks",
        full={"width": 8, "stem_stride": 2, "batch": 8},
        num_steps=2000,
        num_ranks=4,
        num_quick_ranks=4,
    ),
)
"""The applications that are trained to the end on fewer ranks, by more methods than the
paper's.
"""


def present(apps: Sequence[Application]) -> tuple[Application, ...]:
    """The applications whose data this machine has."""
    return tuple(one for one in apps if one.missing() is None)


def accumulated(
    task: TrainingTask, rank: int = 0, world: int = 1, num_steps: int = 4
) -> Tensor:
    """The sum of the gradients of ``num_steps`` batches, as a rank holds it if little
    was sent.
    """
    torch.manual_seed(task.seed)
    model = task.make_model()
    parameters = list(model.parameters())
    grad_N = torch.zeros(message_of(parameters).numel)
    for parameter, view in zip(parameters, views_in(grad_N, parameters), strict=True):
        parameter.grad = view
    for step in range(num_steps):
        task.loss(model, *task.batch(step, rank, world)).backward()  # type: ignore[no-untyped-call]
    return grad_N


def tuned(task: TrainingTask, density: float) -> float:
    """The threshold that a ``density`` share of the first gradient's magnitudes
    reach.
    """
    grad_N = accumulated(task, num_steps=1)
    kept = max(1, round(density * grad_N.numel()))
    return float(grad_N.abs().topk(kept).values[-1])


def method_of(
    method: str, density: float, num_steps: int, task: TrainingTask
) -> tuple[TrainingTask, Exchange]:
    """The exchange of a method at a density, and the task with the optimizer that goes
    with it.

    Sparsifiers have error feedback, as in algorithm 1 of the paper.
    """
    if method == DENSE:
        return task, exchange_for(load("compress", "none")())
    if method in (FULL_DGC, UNMASKED_DGC):
        exchange = deep_gradient_compression(
            density=density,
            warmup_steps=round(DENSITY_WARM_UP * num_steps),
            masking=method == FULL_DGC,
        )
        return without_momentum(task), exchange
    if method == SELECTIVE:
        return task, exchange_for(
            load("compress", "selective")(sparsifier="topk", density=density)
        )
    if method == TUNED:
        threshold = tuned(task, density)
        return task, exchange_for(load("compress", method)(threshold=threshold))
    kind = partial(load("compress", method), density=density)
    return task, exchange_for(
        kind(layers=layer_sizes(task)) if method == "deft" else kind()
    )
