"""LayerwiseStep: one optimizer step in several calls, bit for bit as in one.

Every optimizer of ``torch.optim`` but LBFGS treats each parameter by itself: the update
of one depends on that parameter, its gradient, its entry in ``optimizer.state`` and its
group's hyper-parameters, and on nothing of the others. So a step may be cut by
parameters. A test holds every optimizer in ``torch.optim`` to that; any other class is
not trusted to do so.

``replace_step`` puts a function in the place of ``optimizer.step``. It works with
learning-rate schedulers that are made before it and after it.
"""

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

from ..step.hooked import OBSERVES, untraced

_SEPARABLE = (
    "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop "
    "SGD SparseAdam"
)
SEPARABLE = frozenset(_SEPARABLE.split())
"""Classes of ``torch.optim`` that treat every parameter by itself."""

OptimizerStep = Callable[..., Any]


class StepRequest(NamedTuple):
    """A step asked of ``optimizer.step()``: the hyper-parameters at that moment.

    ``values`` holds the values of each group; ``group_of`` gives the number of each
    parameter's group.
    """

    values: list[dict[str, Any]]
    group_of: dict[Tensor, int]


class LayerwiseStep:
    """Applies ``optimizer`` to some of its parameters at a time.

    State stays in ``optimizer.state``; the user's groups are never written, so
    schedulers and state_dict do not notice.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._why_not = _why_not(optimizer)

    def refusal(self) -> str | None:
        """The reason why the next step must be whole; None if it can be cut."""
        optimizer = self._optimizer
        if self._why_not is not None:
            return self._why_not
        hooks = (
            *optimizer._optimizer_step_pre_hooks.values(),
            *optimizer._optimizer_step_post_hooks.values(),
            *_torch_optimizer._global_optimizer_pre_hooks.values(),
            *_torch_optimizer._global_optimizer_post_hooks.values(),
        )
        if not all(hasattr(hook, OBSERVES) for hook in hooks):
            return "the optimizer has step hooks, which must run around one whole step"
        if any(group.get("differentiable") for group in optimizer.param_groups):
            return "a group of the optimizer is differentiable=True"
        if getattr(optimizer, "grad_scale", None) is not None:
            return "a loss scaler hands its scale to the optimizer"
        return None

    def record(self) -> StepRequest:
        """The step that would be made now."""
        groups = self._optimizer.param_groups
        return StepRequest(
            [
                {key: _kept(group[key]) for key in group if key != "params"}
                for group in groups
            ],
            {param: i for i, group in enumerate(groups) for param in group["params"]},
        )

    def apply(self, asked: StepRequest, params: Iterable[Tensor]) -> None:
        """Makes the step ``asked`` for ``params``, each from its ``.grad``.

        It may be called in the midst of a forward pass, also under autocast or
        inference mode.
        """
        members: dict[int, list[Tensor]] = {}
        for param in params:
            members.setdefault(asked.group_of[param], []).append(param)
        optimizer = self._optimizer
        groups = optimizer.param_groups
        optimizer.param_groups = [
            {**asked.values[i], "params": members[i]} for i in members
        ]
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
    """A context without autocast, inference mode and dispatch modes.

    State made in inference mode is of no use outside of it. Selective activation
    checkpointing, a dispatch mode, would take the step's operators for operators of the
    forward pass.
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
    """A copy of a hyper-parameter, which later changes of the group do not reach."""
    return value.clone() if isinstance(value, Tensor) else value


def _why_not(optimizer: Optimizer) -> str | None:
    """The reason why no step of this optimizer can be cut; None if steps can."""
    kind = type(optimizer)
    if (
        kind.__name__ not in SEPARABLE
        or getattr(torch.optim, kind.__name__, None) is not kind
    ):
        return (
            f"{kind.__module__}.{kind.__qualname__} may look at several parameters at "
            "once (known not to are the classes of torch.optim except LBFGS)"
        )
    step: Any = getattr(optimizer.step, "__func__", optimizer.step)
    while step is not kind.step:
        # functools.wraps copies marks from one wrapper to the next: globals tell who it
        # is.
        if getattr(step, "__globals__", {}).get("__name__") not in _KNOWN_WRAPPERS:
            return "optimizer.step was replaced by a function that is not torch's"
        step = step.__wrapped__
    return None


_KNOWN_WRAPPERS = (lr_scheduler.__name__, __name__)


def replace_step(
    optimizer: Optimizer, serve: Callable[..., Any]
) -> tuple[OptimizerStep, Callable[[], None]]:
    """Makes ``optimizer.step(...)`` call ``serve(...)`` from now on.

    Returns the old step, and a function that puts it back. The new step is a bound
    method, as a scheduler wraps ``step.__func__``. A scheduler that did so before has
    left marks on the old function, which the new one takes over. A scheduler that does
    so later keeps a reference to the new step, which, once the old one is back, only
    calls that.
    """
    before = optimizer.step
    had_own = "step" in vars(optimizer)
    is_active = True

    @untraced  # the user may compile the step
    def served(*args: Any, **kwargs: Any) -> Any:
        return serve(*args, **kwargs)

    @functools.wraps(getattr(before, "__func__", before))
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return served(*args, **kwargs) if is_active else before(*args, **kwargs)

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
