"""Synchroniser: from "this gradient is ready" to "all gradients are means".

Messages are launched in issue order, each as soon as it and all before it are complete: gradients
may become ready in any order, on each rank in another, and still every rank launches alike.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from ..collective._verbs import AllReduce, Steps
from .engine import Engine
from .lanes import Task
from .messages import Grads, Message
from .sparse_message import SparseMessage


class Synchroniser:
    """One rank's view of the messages of a model.

    ``begin`` opens a step, ``ready`` hands in gradients, ``finish`` hands in those that will not
    come and waits. Means are written into the gradients that were handed in.
    """

    def __init__(self, engine: Engine, messages: Sequence[Message | SparseMessage]) -> None:
        self.engine = engine
        self.messages = list(messages)
        self._message_of = {name: m for m in self.messages for name in m.names}
        self.names = list(self._message_of)
        self._lock = threading.Lock()
        self._used = torch.zeros(len(self.names), dtype=torch.int32)
        self.open = False
        self.grads: Grads = {}
        self._missing: list[int] = []
        self._ends: list[Task] = []

    def begin(self, step: int) -> None:
        """Opens a step; no gradient of it has been handed in."""
        self.engine.check()
        self.engine.begin_step(step)
        self.grads = {}
        self._missing = [len(m.names) for m in self.messages]
        self._ends = []
        self.open = True

    def ready(self, name: str, grad: Tensor | None) -> None:
        """Hands in one gradient (None: it counts as zero) and launches what became complete."""
        self.engine.check()
        with self._lock:
            if name in self.grads:
                return
            self.grads[name] = grad
            self._missing[self._message_of[name].index] -= 1
            while len(self._ends) < len(self.messages) and not self._missing[len(self._ends)]:
                message = self.messages[len(self._ends)]
                end = self.engine.launch(
                    message.index, f"message {message.index}", message.text(self.grads)
                )
                self._ends.append(end)

    def abandon(self, name: str) -> None:
        """A gradient came a second time in one step: the step can neither be ended nor repeated.

        Alone, nobody is held up by the old attempt, and it is forgotten.
        """
        if self.engine.world > 1:
            raise self.engine.give_up(
                f"the gradient of {name} came twice, so an earlier backward pass raised before its "
                "end, or the parameter is shared by segments of a reentrant activation checkpoint "
                "(use_reentrant=False is accepted)"
            )
        self.open = False

    @property
    def complete(self) -> bool:
        """Whether all messages of the open step have been launched."""
        return len(self._ends) == len(self.messages)

    def ends_of(self, names: Sequence[str]) -> list[int]:
        """Indices of the messages that carry any of ``names``."""
        return sorted({self._message_of[name].index for name in names})

    def end(self, index: int) -> Task | None:
        """The end of a launched message, or None if it has not been launched."""
        return self._ends[index] if index < len(self._ends) else None

    def all_ends(self) -> list[Task]:
        """Ends of the messages launched so far."""
        return list(self._ends)

    def is_sparse(self, name: str) -> bool:
        """Whether a parameter's gradients are row-sparse by announcement of its module."""
        return isinstance(self._message_of[name], SparseMessage)

    def mean(self, name: str) -> Tensor:
        """The mean of one parameter, for those that handed in None."""
        return self._message_of[name].mean(name)

    def finish(self) -> set[str]:
        """Waits for all means; returns the names that handed in None but have a gradient now.

        A parameter that no rank used is not among them: its gradient stays None on every rank, as
        in plain training, and what is pending for it stays pending.
        """
        used = self._launch_presence()
        self.engine.wait(self._ends)
        self.open = False
        absent = [name for name in self.names if self.grads[name] is None]
        arrived = dict(zip(self.names, used.tolist(), strict=True))
        for name in absent:
            message = self._message_of[name]
            if not arrived[name] and isinstance(message, Message):
                message.take_back(name)
        return {name for name in absent if arrived[name]}

    def _launch_presence(self) -> Tensor:
        """Counts the ranks that used each parameter, while the last messages are on their way."""
        flags = [int(self.grads[name] is not None) for name in self.names]
        self._used.copy_(torch.tensor(flags, dtype=torch.int32))
        if self.engine.world > 1:
            index = len(self.messages)
            self._ends.append(
                self.engine.launch(index, "presence", _sum_flags(self._used), is_news=True)
            )
        return self._used


def _sum_flags(flags: Tensor) -> Steps[None]:
    yield AllReduce(flags)
