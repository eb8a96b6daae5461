"""Counting: the optimizer whose steps are local steps, even if a loop makes a new one.

The optimizer that was given counts. Others may hold parameters of the model too, and
step beside it, within it or around it. An optimizer takes the place of the one that
counts if it steps twice while that makes no step. If the two share no parameter, it
takes the place after a whole period: a loop may train one part of a model more often
than another.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ...errors import log
from ..step.hooked import params_of


class Counting:
    """Sees the steps of every optimizer of the process, and counts one optimizer's.

    ``params`` are the parameters that are exchanged, and ``every`` is the steps of a
    period.

    >>> from torch import nn, optim
    >>> model = nn.Linear(2, 1)
    >>> first, second = (optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    >>> counting = Counting(first, model.parameters(), every=4)
    >>> order = (first, second, first, second, second)
    >>> [counting.leaves(optimizer) for optimizer in order]
    [1, 0, 1, 0, 2]
    """

    def __init__(
        self, optimizer: Optimizer, params: Iterable[Tensor], every: int
    ) -> None:
        self._params = {id(param) for param in params}
        self._every = every
        self._is_within = False
        self._others: Counter[int] = Counter()
        """Steps of each other optimizer since the last one that counts."""
        self._use(optimizer)

    def _use(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._others = Counter()
        self._own = {id(param) for param in params_of(optimizer)}

    def enters(self, optimizer: Optimizer) -> bool:
        """Notes that an optimizer is about to step.

        Returns whether it holds parameters of the model.
        """
        if optimizer is self._optimizer:
            self._is_within = True
            return True
        return self._holds(optimizer, self._params)

    def leaves(self, optimizer: Optimizer) -> int | None:
        """Notes that an optimizer has stepped.

        Returns:
            The local steps to count, as some may not have been counted before; None if
            the optimizer holds no parameters of the model.
        """
        if optimizer is self._optimizer:
            self._is_within = False
            self._others.clear()
            return 1
        if not self._holds(optimizer, self._params):
            return None
        if self._is_within:
            return 0
        self._others[id(optimizer)] += 1
        num_steps = self._others[id(optimizer)]
        most = 1 if self._holds(optimizer, self._own) else self._every
        if num_steps <= most:
            return 0
        log.warning(
            "%s counts from now on, in place of %s, which steps no more; to choose the "
            "optimizer yourself, call detach(), then gw.local_steps with it",
            type(optimizer).__name__,
            type(self._optimizer).__name__,
        )
        self._use(optimizer)
        return num_steps

    @staticmethod
    def _holds(optimizer: Any, ids: set[int]) -> bool:
        return any(id(param) in ids for param in params_of(optimizer))
