"""Encodes that a plan does elsewhere than on the compute lane at a message's launch.

``PlannedMessage.inline`` are done by the thread of the backward pass itself. Where gradients are
encoded on the device that computes them, that is what happens anyway, and papers compare with it.
On a host the compute lane does the same work beside the backward pass.
``PlannedMessage.early`` are done on the compute lane, one for each tensor as it comes.

Either is a task with a lane. Where an exchange encodes each tensor by itself, there is a task for
each when its gradient is ready (``encode_on_lane``). Where it encodes a message as one, the text is
``begun`` inline when the message is launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..verbs import Compute, Steps
from .driver import INLINE
from .engine import Engine
from .lanes import Task


@contextmanager
def _as_on_a_lane() -> Iterator[None]:
    """A block that sees nothing of what the caller's thread has set for its own tensors.

    What is not set is not undone: all of it took 0.28 ms a message, more than the encode itself.
    """
    with ExitStack() as undo:
        undo.enter_context(torch.no_grad())
        if torch._C._len_torch_function_stack():  # where a default device is, too
            undo.enter_context(torch.device("cpu"))
        if torch.is_inference_mode_enabled():
            undo.enter_context(torch.inference_mode(False))
        if torch.is_autocast_enabled("cpu"):
            undo.enter_context(torch.autocast("cpu", enabled=False))
        yield


def encode_on_lane(engine: Engine, task: Task) -> Task:
    """Has a task done on its lane; an inline one here and now, and its error is raised."""
    if task.lane != INLINE:
        return engine.begin(task)
    with _as_on_a_lane():
        return engine.do_inline(task)


def begun(engine: Engine, step: int, message: int, text: Steps[Any]) -> Steps[Any]:
    """The rest of a message's text, whose computations up to its first other verb are done.

    They are done in the caller's thread. What that has set for its own tensors (a default device,
    autocast) does not reach them. An error in one of them ends the run, as on a lane, and is
    raised.
    """
    value: Any = None
    with _as_on_a_lane():
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
            found = tuple(engine.do_inline(task).result for task in tasks)
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
