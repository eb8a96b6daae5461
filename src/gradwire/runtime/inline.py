"""Inline: a text's first computations done by the thread of the backward pass itself.

A plan asks for it (``PlannedMessage.inline``). Where gradients are encoded on the device that
computes them, that is what happens anyway, and papers compare with it. On a host the compute lane
does the same work beside the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch

from ..verbs import Compute, Steps
from .driver import INLINE
from .engine import Engine
from .lanes import Task


@torch.no_grad()
def begun(engine: Engine, step: int, message: int, text: Steps[Any]) -> Steps[Any]:
    """The rest of a message's text, whose computations up to its first other verb are done.

    They are done in the caller's thread. What that has set for its own tensors (a default device,
    autocast) does not reach them. An error in one of them ends the run, as on a lane, and is
    raised.
    """
    value: Any = None
    with torch.device("cpu"), torch.inference_mode(False), torch.autocast("cpu", enabled=False):
        while True:
            try:
                asked = text.send(value)
            except StopIteration as stop:
                return _returning(stop.value)
            verbs = asked if isinstance(asked, tuple) else (asked,)
            computes = [verb for verb in verbs if isinstance(verb, Compute)]
            if len(computes) < len(verbs):
                return _going_on(text, asked)
            tasks = [Task(v.name, v.fn, INLINE, step=step, message=message) for v in computes]
            found = tuple(map(engine.do_inline, tasks))
            value = found if isinstance(asked, tuple) else found[0]


def _going_on(text: Steps[Any], asked: Any) -> Steps[Any]:
    """The rest of a text that has asked for ``asked`` already."""
    while True:
        value = yield asked
        try:
            asked = text.send(value)
        except StopIteration as stop:
            return stop.value


def _returning(value: Any) -> Steps[Any]:
    """The rest of a text that has ended already."""
    return value
    yield
