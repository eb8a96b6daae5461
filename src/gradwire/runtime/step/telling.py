"""Telling: messages of figures beside those of gradients, so that all ranks know the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...contract.verbs import AllGather, Steps, Verb
from .engine import Engine
from .lanes import Task


def news(engine: Engine, verb: Verb) -> None:
    """Carries out one verb that has to wait for no gradients; all ranks call this alike."""
    engine.wait([_launched(engine, verb)])


def figures_of_all(engine: Engine, own: Sequence[float]) -> list[list[float]]:
    """Every rank's figures, in rank order."""
    return told_meanwhile(engine, own)()


def told_meanwhile(engine: Engine, own: Sequence[float]) -> Callable[[], list[list[float]]]:
    """Has ranks tell each other their figures beside what follows.

    The function returned waits until that is done, and returns all of them, in rank order.
    """
    if engine.world == 1:
        return lambda: [list(own)]
    own_R = torch.tensor(own, dtype=torch.float64, device="cpu")
    all_WR = torch.zeros(engine.world * len(own), dtype=torch.float64, device="cpu")
    end = _launched(engine, AllGather(all_WR, own_R))

    def rows() -> list[list[float]]:
        engine.wait([end])
        found: list[list[float]] = all_WR.view(engine.world, -1).tolist()
        return found

    return rows


def _launched(engine: Engine, verb: Verb) -> Task:
    def text() -> Steps[None]:
        yield verb

    return engine.launch(0, "news", text(), is_news=True)
