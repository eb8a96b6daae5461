"""Counting: the optimizer whose steps are local steps, also where a loop makes a new one.

The optimizer that was given counts. Others may hold parameters of the model too, and step beside
it, within it or around it. An optimizer takes the place of the one that counts if it steps twice
while that makes no step. If the two share no parameter, it takes the place after a whole period:
a loop may train one part of a model more often than another.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

_log = logging.getLogger("gradwire")


class Counts(Protocol):
    """The handle whose steps are counted."""

    def before_step(self) -> None: ...

    def after_step(self) -> None: ...

    def count_step(self, *, uncounted: int = 0) -> None: ...


class Counting:
    """Sees the steps of every optimizer of the process, and has those of one counted.

    ``params`` are the parameters that are exchanged, and ``every`` the steps of a period.
    """

    def __init__(self, optimizer: Optimizer, params: Iterable[Tensor], every: int) -> None:
        self._params = {id(param) for param in params}
        self._every, self._is_within = every, False
        self._others: Counter[int] = Counter()
        """Steps of each other optimizer since the last one that counts."""
        self._use(optimizer)

    def _use(self, optimizer: Optimizer) -> None:
        self._optimizer, self._others = optimizer, Counter()
        self._own = {id(param) for param in _params_of(optimizer)}

    def before(self, handle: Counts, optimizer: Optimizer) -> None:
        """Called before a step of any optimizer."""
        if optimizer is self._optimizer:
            self._is_within = True
            handle.before_step()
        elif self._holds(optimizer, self._params):
            handle.before_step()

    def after(self, handle: Counts, optimizer: Optimizer) -> None:
        """Called after a step of any optimizer."""
        if optimizer is self._optimizer:
            self._is_within = False
            self._others.clear()
            handle.after_step()
            handle.count_step()
        elif self._holds(optimizer, self._params):
            handle.after_step()
            if not self._is_within:
                self._note_other(handle, optimizer)

    def _note_other(self, handle: Counts, optimizer: Optimizer) -> None:
        """Notes a step of another optimizer, which may take the place of the one that counts."""
        uncounted = self._others[id(optimizer)]
        self._others[id(optimizer)] += 1
        is_shared = self._holds(optimizer, self._own)
        if uncounted >= (1 if is_shared else self._every):
            _log.warning(
                "%s counts from now on, in place of %s, which steps no more; to choose the "
                "optimizer yourself, call detach(), then gw.local_steps with it",
                type(optimizer).__name__,
                type(self._optimizer).__name__,
            )
            self._use(optimizer)
            handle.count_step(uncounted=uncounted)

    @staticmethod
    def _holds(optimizer: Any, ids: set[int]) -> bool:
        return any(id(param) in ids for param in _params_of(optimizer))


def _params_of(optimizer: Any) -> Iterable[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])
