"""LocalGradients: an optimizer step that would take ranks apart is refused at once.

Ranks whose optimizers step with other gradients hold other parameters from then on.
Nothing fails there, and the comparison of parameters comes many steps later and knows
no cause. Two mistakes lead to it:

* The first micro-batch of a step is averaged, and later ones are added under
  ``no_sync``.
* A backward pass brings gradients that ``DistributedDataParallel`` does not see; see
  `bypass`.

Gradients under ``no_sync`` alone are no mistake: somebody may average parameters by
hand.

A third mistake is a loss scaler that was not given to ``attach``. Residuals would have
its scale, which changes, and steps that it skips would not be undone.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...contract.spec import NamedParam
from .hooked import observing, params_of
from .progress import Progress
from .scaling import is_in_scaler_step

_MIXED = (
    "{name} was averaged, and a later backward pass under no_sync added this rank's "
    "own gradient; optimizer.step() would take other gradients on each rank. Let the "
    "last backward pass before optimizer.step() be the one outside of no_sync"
)


_OTHER_SCALER = (
    "a GradScaler steps the optimizer, and attach was not given it: residuals would "
    "have its scale, which changes; write gw.attach(model, exchange, scaler=scaler)"
)


class LocalGradients:
    """The gradients that this rank has added, and that no exchange has averaged since.

    Every optimizer of the process is looked at before it steps; with a closure, after
    it. Ranks that compare no parameters (``check_every=None``) may step apart.

    Args:
        progress: The progress of the attached model.
        params: The parameters that are exchanged.
    """

    def __init__(self, progress: Progress, params: Sequence[NamedParam]) -> None:
        self._progress = progress
        self._ids = frozenset(id(param) for _, param in params)
        self._num_exchanges = self._num_at_step = 0
        """The exchanges so far, and those before the last step of their optimizers."""
        self._kept: dict[Tensor, tuple[int, str]] = {}
        """The number of exchanges before no_sync kept a gradient, and its name."""
        self._missed: dict[Tensor, str] = {}
        """The reasons why gradients were not averaged without a no_sync."""
        this = weakref.ref(self)
        hooks = [
            register_optimizer_step_pre_hook(_observer(this, is_after=False)),
            register_optimizer_step_post_hook(_observer(this, is_after=True)),
        ]
        self.remove = weakref.finalize(self, _remove, hooks)

    def exchange(self) -> None:
        """Notes that all that has accumulated is averaged now."""
        self._num_exchanges += 1
        self._kept.clear()
        self._missed.clear()

    def keep(self, name: str, param: Tensor) -> None:
        """Notes a gradient that no_sync keeps on this rank."""
        self._kept[param] = (self._num_exchanges, name)

    def miss(self, param: Tensor, why: str) -> None:
        """Notes a gradient that nobody averages, and the reason."""
        self._missed[param] = why

    def look(self, optimizer: Optimizer) -> None:
        """Raises ``LoopMistake``, on all ranks, if an optimizer takes ranks apart."""
        params = params_of(optimizer)
        if not any(id(param) in self._ids for param in params):
            return
        self._refuse_other_scaler()
        synchroniser = self._progress.synchroniser
        # ranks hold parameters alike, and compare them
        refuses = synchroniser.engine.world > 1 and synchroniser.check.every is not None
        if refuses and (self._kept or self._missed):
            for param in params:
                if param.grad is not None and (why := self._reason(param)):
                    raise self._progress.give_up(f"{why} (check_every=None allows it)")
        self._num_at_step = self._num_exchanges

    def _refuse_other_scaler(self) -> None:
        """Raises ``LoopMistake`` if a scaler makes this step that nobody gave."""
        progress = self._progress
        if progress.knows_scaler or not progress.synchroniser.keeps_state:
            return
        if is_in_scaler_step():
            raise progress.give_up(_OTHER_SCALER)

    def _reason(self, param: Tensor) -> str:
        num_exchanges, name = self._kept.get(param, (0, ""))
        if num_exchanges > self._num_at_step:
            return _MIXED.format(name=name)
        return self._missed.get(param, "")


def _observer(this: Callable[[], LocalGradients | None], *, is_after: bool) -> Any:
    """A hook of all optimizers, before a step or after it."""

    def observe(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # A closure makes the gradients within the step.
        has_closure = any(map(callable, (*args, *kwargs.values())))
        own = this()
        if own is not None and has_closure is is_after:
            own.look(optimizer)

    return observing(observe)


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
