"""Encodes that a plan does elsewhere than on the compute lane at a message's launch.

``PlannedMessage.inline`` are done by the thread of the backward pass itself. Where gradients are
encoded on the device that computes them, that is what happens anyway, and papers compare with it.
On a host the compute lane does the same work beside the backward pass.
``PlannedMessage.early`` are done on the compute lane, one for each tensor as it comes. Where
gradients are encoded on a device, they are done by the host all the same, as papers offload them:
on a lane of their own, from pinned memory (see `offload`).

Each is a task with a lane. Where an exchange encodes each tensor by itself, there is a task for
each when its gradient is ready (``encode_ahead``). Where it encodes a message as one, the text is
``begun`` inline when the message is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ...contract.verbs import Compute, Steps
from ..device.offload import Offload
from ..device.streams import Copying, SideStream
from .driver import INLINE, OFFLOAD
from .engine import Engine
from .lanes import Task
from .messages import Grads, Message
from .wire import as_on_a_lane


def encode_ahead(
    engine: Engine,
    step: int,
    message: Message,
    name: str,
    grads: Grads,
    copying: Copying,
    side: SideStream | None,
) -> Task:
    """Has the tensor ``name`` encoded where the plan says, before its message is launched.

    What is inline is done here and now, and its error is raised. ``side`` is the stream that it is
    launched on, where a device encodes.
    """
    index, lane = message.index, message.lanes[name]
    encode = partial(message.encode_ahead, name, grads, copying)

    def task(what: str, work: Callable[[], None], lane: str) -> Task:
        of = (step, index)
        return Task(f"{what} {name}", work, lane, order=of, step=step, message=index)

    if lane == OFFLOAD:
        assert side is not None, "only what lies on a device is offloaded"
        way = Offload(message.encode_on_host(name, grads, copying), index, name, side)
        with as_on_a_lane():
            engine.do_inline(task("copy", way.leave, INLINE))
        made = task("encode", way.encode, lane)
    else:
        made = task("encode", encode if side is None else side.on(encode), lane)
    if lane != INLINE:
        return engine.begin(made)
    with as_on_a_lane():
        return engine.do_inline(made)


def begun(
    engine: Engine, step: int, message: int, text: Steps[Any], side: SideStream | None = None
) -> Steps[Any]:
    """The rest of a message's text, whose computations up to its first other verb are done.

    They are done in the caller's thread, or launched there on ``side`` where a device encodes. What
    that has set for its own tensors (a default device, autocast) does not reach them. An error in
    one of them ends the run, as on a lane, and is raised.
    """
    value: Any = None
    with as_on_a_lane(side):
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
            # No tuple of a generator: a thread that walks through all objects while it fills, as
            # attach does, would break it (CPython's "bad argument to internal function").
            found = [engine.do_inline(task).result for task in tasks]
            value = tuple(found) if isinstance(asked, tuple) else found[0]


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
