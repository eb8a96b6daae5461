"""LayerwiseStep: one optimizer step in several calls, bit for bit as in one.

Every optimizer of ``torch.optim`` but LBFGS treats each parameter by itself: what it does to one
depends on that parameter, its gradient, its entry in ``optimizer.state`` and its group's
hyper-parameters, and on nothing of the others. So a step may be cut by parameters. The test beside
this file holds that of every optimizer in ``torch.optim``; any other class is not trusted to.

``replace_step`` puts a function in the place of ``optimizer.step`` that learning-rate schedulers
made before and after it go along with.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as _torch_optimizer
from torch.utils._python_dispatch import _disable_current_modes

from .hooked import untraced

_SEPARABLE = (
    "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop SGD "
    "SparseAdam"
)
SEPARABLE = frozenset(_SEPARABLE.split())
"""Classes of ``torch.optim`` that treat every parameter by itself."""

Step = Callable[..., Any]


class Asked(NamedTuple):
    """What ``optimizer.step()`` was asked for: hyper-parameters as they were at that moment.

    ``values`` are those of each group; ``group_of`` gives the group's number of each parameter.
    """

    values: list[dict[str, Any]]
    group_of: dict[Tensor, int]


class LayerwiseStep:
    """Applies ``optimizer`` to some of its parameters at a time.

    State stays in ``optimizer.state``; the user's groups are never written, so schedulers and
    state_dict do not notice.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._why_not = _why_not(optimizer)

    def refusal(self) -> str | None:
        """Why the next step must be whole, or None if it can be cut."""
        optimizer = self._optimizer
        if self._why_not is not None:
            return self._why_not
        if (
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or _torch_optimizer._global_optimizer_pre_hooks
            or _torch_optimizer._global_optimizer_post_hooks
        ):
            return "the optimizer has step hooks, which must run around one whole step"
        if any(group.get("differentiable") for group in optimizer.param_groups):
            return "a group of the optimizer is differentiable=True"
        if getattr(optimizer, "grad_scale", None) is not None:
            return "a loss scaler hands its scale to the optimizer"
        return None

    def record(self) -> Asked:
        """The step that would be made now."""
        groups = self._optimizer.param_groups
        return Asked(
            [{key: _kept(group[key]) for key in group if key != "params"} for group in groups],
            {param: i for i, group in enumerate(groups) for param in group["params"]},
        )

    def apply(self, asked: Asked, params: Iterable[Tensor]) -> None:
        """Makes the step ``asked`` for ``params``, each from its ``.grad``.

        This may be in the midst of a forward pass, whatever that runs in.
        """
        members: dict[int, list[Tensor]] = {}
        for param in params:
            members.setdefault(asked.group_of[param], []).append(param)
        optimizer = self._optimizer
        groups = optimizer.param_groups
        optimizer.param_groups = [{**asked.values[i], "params": members[i]} for i in members]
        try:
            with _outside_of_forward():
                type(optimizer).step(optimizer)
        finally:
            optimizer.param_groups = groups


def in_autocast() -> bool:
    """Whether autocast would choose the dtypes of a step that is made now."""
    return any(map(torch.is_autocast_enabled, _AUTOCAST))


_AUTOCAST = ("cpu", "cuda")


@contextmanager
def _outside_of_forward() -> Iterator[None]:
    """Neither autocast nor inference mode, and seen by no dispatch mode.

    Inference mode would make state that is of no use outside of it; selective activation
    checkpointing, which is a dispatch mode, takes the operators it sees for the forward pass's.
    """
    with ExitStack() as stack:
        for device in _AUTOCAST:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        yield


def _kept(value: Any) -> Any:
    """A hyper-parameter that later changes of the group do not reach."""
    return value.clone() if isinstance(value, Tensor) else value


def _why_not(optimizer: Optimizer) -> str | None:
    """Why no step of this optimizer can be cut, or None."""
    kind = type(optimizer)
    if kind.__name__ not in SEPARABLE or getattr(torch.optim, kind.__name__, None) is not kind:
        return (
            f"{kind.__module__}.{kind.__qualname__} may look at several parameters at once (known "
            f"not to are the classes of torch.optim except LBFGS)"
        )
    step: Any = getattr(optimizer.step, "__func__", optimizer.step)
    while step is not kind.step:
        # functools.wraps copies marks from one wrapper to the next: globals tell who it is.
        if getattr(step, "__globals__", {}).get("__name__") not in _KNOWN_WRAPPERS:
            return "optimizer.step was replaced by a function that is not torch's"
        step = step.__wrapped__
    return None


_KNOWN_WRAPPERS = (lr_scheduler.__name__, __name__)


def replace_step(
    optimizer: Optimizer, serve: Callable[..., Any]
) -> tuple[Step, Callable[[], None]]:
    """From now on ``optimizer.step(...)`` is ``serve(...)``.

    Returns the step that was there, and what puts it back. A scheduler wraps ``step.__func__`` in
    its place, so it is a bound method; one that did so before has left marks on the function, which
    the new one takes over, and one that does so later keeps the new one, which then only passes on.
    """
    before = optimizer.step
    had_own = "step" in vars(optimizer)
    is_active = True
    serve = untraced(serve)  # so that the user may compile the step

    @functools.wraps(getattr(before, "__func__", before))
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return serve(*args, **kwargs) if is_active else before(*args, **kwargs)

    def put_back() -> None:
        nonlocal is_active
        is_active = False
        if getattr(optimizer.step, "__func__", None) is not step:
            return
        if had_own:
            optimizer.step = before  # type: ignore[method-assign]
        else:
            del optimizer.step

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    return before, put_back
