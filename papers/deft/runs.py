"""Trainings that DEFT's figures are made of: each is run once, kept, and used by all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gradwire._version import __version__
from gradwire.workloads.train import History, train

from ..frame import Ask, Report
from ..whole import write_whole
from .setting import DENSE, Application, method_of

WARM_UP = 0.05
"""Of the steps: the learning rate goes up before it comes down, in all trainings alike."""
SCORES = 10
FOLDER = "trainings"
"""Below the reproduction's own folder."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: all that its history follows from."""

    application: Application
    method: str
    density: float
    num_ranks: int
    num_steps: int
    quick: bool
    seed: int = 0
    batch: int | None = None
    """Examples a rank; None for the application's."""
    num_scores: int = SCORES

    @property
    def key(self) -> str:
        """The name of its file, without the ending."""
        values = {**vars(self), "application": self.application.name}.values()
        parts = [str(value) for value in values if value is not None]
        return "-".join([*parts, __version__]).replace(", ", "_").replace(" ", "_")


def run_of(ask: Ask, app: Application, method: str, density: float | None = None) -> Run:
    """The training that figures 3 to 6 share: the application's density, ranks and steps."""
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
    """What came of a training: what an earlier one left in ``ask.folder``, else trained now.

    ``done`` is which fraction of the figure was done before it, ``share`` what it is of it.
    """
    path = None if ask.folder is None else ask.folder / FOLDER / f"{run.key}.json"
    if path is not None and path.exists():
        return History.from_json(json.loads(path.read_text(encoding="utf-8")))

    def report(fraction: float, what: str) -> None:
        ask.report(done + share * fraction, f"{run.method} on {run.num_ranks} ranks: {what}")

    found = _train(run, report)
    if path is not None:
        write_whole(path, json.dumps(found.to_json()).encode())
    return found


def histories(ask: Ask, runs: Sequence[Run]) -> list[History]:
    """``history`` of each."""
    return [history(ask, run, done, 1 / len(runs)) for done, run in ask.each(runs)]


def _train(run: Run, report: Report) -> History:
    """In one thread: tensors are small, and a run gives the same bits on any number of cores."""
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
    """Torch computes in one thread inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
