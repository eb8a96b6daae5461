"""Agreement among ranks that measure: a verb now and then, and rank 0's figures at the end."""

from __future__ import annotations

from typing import TypeVar

import torch

from ...contract.verbs import Broadcast, Steps, Verb
from ...runtime.step.engine import Engine
from ..data.stored import Stored

Figures = TypeVar("Figures", bound=Stored)


def verb_text(*verbs: Verb) -> Steps[None]:
    """A text that asks for these verbs at once."""
    yield verbs


def run_verb(engine: Engine, verb: Verb) -> None:
    """Carries one verb out; all ranks call this alike."""
    engine.wait([engine.launch(0, "agree", verb_text(verb))])


def rank_0s(engine: Engine, own: Figures) -> Figures:
    """Rank 0's figures on every rank: floats differ in the last bit between machines."""
    text = torch.tensor(list(own.to_json().encode()), dtype=torch.uint8)
    size = torch.tensor([text.numel()])
    run_verb(engine, Broadcast(0, size))
    text = text if engine.rank == 0 else torch.zeros(int(size), dtype=torch.uint8)
    run_verb(engine, Broadcast(0, text))
    return type(own).parse(bytes(text.tolist()).decode(), "rank 0's figures")
