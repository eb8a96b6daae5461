"""Agreement among ranks that measure: a verb now and then, and rank 0's figures at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from ..data.stored import Stored
from ..runtime.engine import Engine
from ..verbs import AllGather, Broadcast, Steps, Verb

Figures = TypeVar("Figures", bound=Stored)


def verb_text(*verbs: Verb) -> Steps[None]:
    """A text that asks for these verbs at once."""
    yield verbs


def run_verb(engine: Engine, verb: Verb) -> None:
    """Carries one verb out; all ranks call this alike."""
    engine.wait([engine.launch(0, "agree", verb_text(verb))])


def figures_of_all(engine: Engine, own: Sequence[float]) -> list[list[float]]:
    """Every rank's figures, in rank order; all ranks call this alike, in a step too."""
    own_R = torch.tensor(own, dtype=torch.float64)
    all_WR = torch.zeros(engine.world * len(own), dtype=torch.float64)
    if engine.world == 1:
        return [list(own)]
    run_news(engine, AllGather(all_WR, own_R))
    rows: list[list[float]] = all_WR.view(engine.world, -1).tolist()
    return rows


def run_news(engine: Engine, verb: Verb) -> None:
    """Carries one verb out that waits for no gradients; all ranks call this alike."""
    engine.wait([engine.launch(0, "news", verb_text(verb), is_news=True)])


def rank_0s(engine: Engine, own: Figures) -> Figures:
    """Rank 0's figures on every rank: floats differ in the last bit between machines."""
    text = torch.tensor(list(own.to_json().encode()), dtype=torch.uint8)
    size = torch.tensor([text.numel()])
    run_verb(engine, Broadcast(0, size))
    text = text if engine.rank == 0 else torch.zeros(int(size), dtype=torch.uint8)
    run_verb(engine, Broadcast(0, text))
    return type(own).parse(bytes(text.tolist()).decode(), "rank 0's figures")
