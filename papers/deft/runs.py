"""Trainings that DEFT's figures are made of: each is run once, kept, and used by all of
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from gradwire.version import __version__
from gradwire_bench.workloads.train import History, train

from ..frame import Ask, Report
from ..workloads.kept import kept
from .setting import DENSE, Application, method_of

WARM_UP = 0.05
"""The share of the steps in which the learning rate goes up before it comes down."""
SCORES = 10
FOLDER = "trainings"
"""The folder of kept trainings, below the reproduction's own."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: all the settings that its history follows from."""

    application: Application
    method: str
    density: float
    num_ranks: int
    num_steps: int
    quick: bool
    seed: int = 0
    batch: int | None = None
    """The number of examples in a rank's batch; None for the application's own."""
    num_scores: int = SCORES

    @property
    def key(self) -> str:
        """The name of the training's file, without the ending."""
        values = {**vars(self), "application": self.application.name}.values()
        parts = [str(value) for value in values if value is not None]
        return "-".join([*parts, __version__]).replace(", ", "_").replace(" ", "_")


def run_of(
    ask: Ask, app: Application, method: str, density: float | None = None
) -> Run:
    """The training that figures 3 to 6 share: the application's density, ranks and
    steps.
    """
    density = app.density if density is None else density
    return Run(
        application=app,
        method=method,
        density=1.0 if method == DENSE else density,
        num_ranks=app.ranks(ask.quick),
        num_steps=app.steps(ask.quick),
        quick=ask.quick,
    )


def history(ask: Ask, run: Run, done: float = 0.0, share: float = 1.0) -> History:
    """The history of a training, read from ``ask.folder`` if it was kept there, else
    trained now.

    ``done`` is the fraction of the figure that was done before this training, and
    ``share`` the fraction that this training is.
    """
    path = None if ask.folder is None else ask.folder / FOLDER / f"{run.key}.json"

    def report(fraction: float, what: str) -> None:
        ask.report(
            done + share * fraction, f"{run.method} on {run.num_ranks} ranks: {what}"
        )

    return kept(path, partial(_train, run, report))


def histories(ask: Ask, runs: Sequence[Run]) -> list[History]:
    """The ``history`` of each run."""
    return [history(ask, run, done, 1 / len(runs)) for done, run in ask.each(runs)]


def _train(run: Run, report: Report) -> History:
    """Trains in one thread, as tensors are small.

    So a run gives the same bits on any number of cores.
    """
    task = run.application.task(run.quick, run.seed, run.batch)
    task, exchange = method_of(run.method, run.density, run.num_steps, task)
    with one_thread():
        return train(
            task,
            exchange,
            world=run.num_ranks,
            num_steps=run.num_steps,
            num_warm_up=round(WARM_UP * run.num_steps),
            num_scores=run.num_scores,
            report=report,
        )


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which torch computes in one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
