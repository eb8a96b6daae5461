"""Telling: messages of figures beside those of gradients, so that all ranks know the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..verbs import AllGather, Steps, Verb
from .engine import Engine


def news(engine: Engine, verb: Verb) -> None:
    """Carries out one verb that has to wait for no gradients; all ranks call this alike."""

    def text() -> Steps[None]:
        yield verb

    engine.wait([engine.launch(0, "news", text(), is_news=True)])


def figures_of_all(engine: Engine, own: Sequence[float]) -> list[list[float]]:
    """Every rank's figures, in rank order."""
    own_R = torch.tensor(own, dtype=torch.float64, device="cpu")
    all_WR = torch.zeros(engine.world * len(own), dtype=torch.float64, device="cpu")
    if engine.world == 1:
        return [list(own)]
    news(engine, AllGather(all_WR, own_R))
    rows: list[list[float]] = all_WR.view(engine.world, -1).tolist()
    return rows
