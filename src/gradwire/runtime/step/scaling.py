"""StepObserver: it sees what a loss scaler does with each optimizer's step.

A scaler skips an optimizer's step where it has found an inf or a NaN in a gradient.
Only the scaler knows that: an optimizer with ``fused=True`` is called all the same, and
skips inside. So while a model is attached its scaler has an observer, one for all
models, around three methods:

* ``step(optimizer)``: the scaler's own record then says whether the step was skipped.
* ``unscale_(optimizer)``: an optimizer that is unscaled and not stepped is stepped by
  hand.
* ``update()``: it ends an iteration. If the scaler has seen no optimizer in it, the
  loop steps by hand, and no scaler decides. Nor does it decide about a parameter that
  no optimizer of this rank holds. So the means decide: see ``Watcher.end_iteration``.

Passes about which the scaler has not decided yet accumulate gradients for one step.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from ...contract import Exchange, Layout
from ...errors import InvalidSetting
from ...exchange.error_feedback import Wrapper
from ...exchange.pair import Pair
from .hooked import frame_of, living, params_of

_METHODS = ("step", "unscale_", "update")
_OWN = "_gradwire_observer"
_HIDDEN = (*_METHODS, "__getstate__", _OWN)


class Watcher(Protocol):
    """An attached model, which undoes what its optimizers did not take."""

    def decide(self, params: list[Tensor], *, is_skipped: bool) -> None:
        """Ends the step of the optimizer that holds ``params``.

        Some of them, or none, are parameters of the model.
        """

    def end_iteration(self, *, is_by_hand: bool) -> None:
        """Ends steps about which no scaler decides, as the means decide."""


def held_by_optimizers() -> set[int]:
    """The ids of the parameters that optimizers of this process hold.

    The process is searched for optimizers, which takes 0.1 s or so: torch has no list
    of them.
    """
    held: set[int] = set()
    for one in living(Optimizer):
        groups = getattr(one, "param_groups", ())
        held.update(id(param) for group in groups for param in group["params"])
    return held


def observe(scaler: GradScaler | None, watcher: Watcher) -> Callable[[], None]:
    """Reports steps' outcomes to ``watcher``, until the returned function is called.

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
    frame = frame_of(GradScaler.step.__code__)
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
        """The scaler's ``step``, whose outcome is reported to all watchers."""
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
        """The scaler's ``update``; it first ends steps by hand."""
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
        params = params_of(optimizer)
        for watcher in tuple(self.watchers):
            watcher.decide(params, is_skipped=is_skipped)

    def _state(self) -> Any:
        kind: Any = type(self._scaler)
        state = kind.__getstate__(self._scaler)
        kept = {name: value for name, value in state.items() if name not in _HIDDEN}
        return {**kept, **self._before}


def scale_of(scaler: GradScaler | None) -> float:
    """The factor on the gradients of the backward pass that runs now."""
    return 1.0 if scaler is None else float(scaler.get_scale())


def unscaling_factor(scale: float) -> float:
    """The factor that takes a scale off again.

    For a scale that has shrunk to 0 there is none: the factor is inf, and gradients
    become NaN.
    """
    return 1.0 / scale if scale else math.inf


def travels_scaled(exchange: Exchange) -> bool:
    """Whether an exchange sends the values themselves, or rows of them, and keeps
    nothing of them.

    >>> from gradwire.compress.cast16 import cast16
    >>> from gradwire.exchange.error_feedback import with_error_feedback
    >>> from gradwire.exchange.pair import pair
    >>> from gradwire.collective.allreduce import allreduce
    >>> plain = pair(cast16(dtype=torch.float16), allreduce())
    >>> travels_scaled(plain), travels_scaled(with_error_feedback(plain))
    (True, False)
    """
    if isinstance(exchange, Wrapper) and exchange.ranks_per_host > 1:  # TwoLevel
        exchange = exchange.inner
    if isinstance(exchange, Pair):
        return exchange.codec.traits.layout is Layout.DENSE
    return exchange.traits is not None and exchange.traits.lossless


def refuse_float16(messages: Sequence[Any], scaler: GradScaler | None) -> None:
    """Raises ``InvalidSetting`` where unscaled float16 would lose small elements."""
    for message in messages if scaler is not None else ():
        exchange = message.exchange
        if travels_scaled(exchange) or message.spec.dtype != torch.float16:
            continue
        raise InvalidSetting(
            f"scaler was given, and {message.names[0]} has gradients of float16, which "
            f"{exchange!r} takes without their scale: small ones would become 0; keep "
            "parameters in float32 and compute in autocast, as a GradScaler asks for, "
            "or exchange them by none or cast16"
        )
