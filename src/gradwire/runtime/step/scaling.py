"""StepObserver: it sees what a loss scaler does with each optimizer's step.

A scaler skips an optimizer's step where it has found an inf or a NaN in a gradient.
Only the scaler knows that: an optimizer with ``fused=True`` is called all the same, and
skips inside. So while a model is attached its scaler has an observer, one for all
models, around three methods:

* ``step(optimizer)``: the scaler's own record then says whether the step was skipped.
* ``unscale_(optimizer)``: an optimizer that is unscaled and not stepped is stepped by
  hand.
* ``update()``: it ends an iteration. If the scaler has seen no optimizer in it, the
  loop steps by hand. Nobody can be asked then, nor about a parameter that no optimizer
  of this rank holds. So the means must tell: see ``Watcher.end_iteration``.

What was exchanged without such a word since is a step that accumulates gradients.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol
from weakref import WeakSet

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

_METHODS = ("step", "unscale_", "update")
_OWN = "_gradwire_observer"
_HIDDEN = (*_METHODS, "__getstate__", _OWN)


class Watcher(Protocol):
    """An attached model, which undoes what its optimizers did not take."""

    def decide(self, params: list[Tensor], *, is_skipped: bool) -> None:
        """Ends the step of the optimizer that holds ``params``.

        Some are the model's, or none.
        """

    def end_iteration(self, *, is_by_hand: bool) -> None:
        """Ends, by the means, steps that no scaler can be asked about."""


def held_by_optimizers() -> set[int]:
    """The ids of the parameters that optimizers of this process hold.

    The process is searched for optimizers, which takes 0.1 s or so: torch has no list
    of them.
    """
    held: set[int] = set()
    for one in gc.get_objects():
        if issubclass(type(one), Optimizer):
            groups = getattr(one, "param_groups", ())
            held.update(id(param) for group in groups for param in group["params"])
    return held


def observe(scaler: GradScaler | None, watcher: Watcher) -> Callable[[], None]:
    """Has ``watcher`` told of steps' outcomes, until the returned function is called.

    The scaler refers to the watcher weakly. A scaler that is not enabled skips nothing.
    """
    if scaler is None or not scaler.is_enabled():
        return lambda: None
    found = vars(scaler).get(_OWN)
    observer = found if isinstance(found, StepObserver) else StepObserver(scaler)
    observer.watchers.add(watcher)

    def stop() -> None:
        observer.watchers.discard(watcher)
        if not observer.watchers:
            observer.remove()

    return stop


def is_in_scaler_step() -> bool:
    """Whether an enabled loss scaler makes the optimizer's step that is under way."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not GradScaler.step.__code__:
        frame = frame.f_back
    return frame is not None and bool(frame.f_locals["self"].is_enabled())


class StepObserver:
    """Stands around the methods of one scaler; copies and pickles lack it."""

    def __init__(self, scaler: GradScaler) -> None:
        self.watchers: WeakSet[Watcher] = WeakSet()
        self._scaler = scaler
        own = vars(scaler)
        self._before = {name: own[name] for name in _METHODS if name in own}
        self._step: Callable[..., Any] = scaler.step
        self._unscale: Callable[..., None] = scaler.unscale_
        self._update: Callable[..., None] = scaler.update
        self._unscaled: dict[int, Any] = {}
        """The optimizers that were unscaled and not stepped since the last update."""
        self._has_stepped = False
        own.update(
            {
                "step": self.step,
                "unscale_": self.unscale_,
                "update": self.update,
                "__getstate__": self._state,
                _OWN: self,
            }
        )

    def remove(self) -> None:
        """Gives the scaler its own methods back."""
        own = vars(self._scaler)
        for name in _METHODS:
            if getattr(own.get(name), "__self__", None) is self:
                del own[name]
        own.update(
            {name: method for name, method in self._before.items() if name not in own}
        )
        own.pop("__getstate__", None)
        own.pop(_OWN, None)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """The scaler's ``step``, whose outcome all watchers are told."""
        returned = self._step(optimizer, *args, **kwargs)
        self._has_stepped = True
        self._unscaled.pop(id(optimizer), None)
        self._notify(optimizer)
        return returned

    def unscale_(self, optimizer: Any) -> None:
        """The scaler's ``unscale_``."""
        self._unscale(optimizer)
        self._unscaled[id(optimizer)] = optimizer

    def update(self, new_scale: Any = None) -> None:
        """The scaler's ``update``, before which steps by hand are ended."""
        unscaled = self._unscaled
        self._unscaled = {}
        has_stepped = self._has_stepped
        self._has_stepped = False
        for optimizer in unscaled.values():
            self._notify(optimizer)
        for watcher in tuple(self.watchers):
            watcher.end_iteration(is_by_hand=not unscaled and not has_stepped)
        self._update(new_scale)

    def _notify(self, optimizer: Any) -> None:
        found = self._scaler._found_inf_per_device(optimizer).values()
        is_skipped = any(bool(one) for one in found)
        params = [
            param for group in optimizer.param_groups for param in group["params"]
        ]
        for watcher in tuple(self.watchers):
            watcher.decide(params, is_skipped=is_skipped)

    def _state(self) -> Any:
        kind: Any = type(self._scaler)
        state = kind.__getstate__(self._scaler)
        kept = {name: value for name, value in state.items() if name not in _HIDDEN}
        return {**kept, **self._before}
