"""Hooks into a plain nn.Module: gradients as autograd accumulates them, and the end of backward."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from .handle import Handle
from .hooked import Hooked
from .lanes import wall_clock
from .strangers import Strangers


class ModuleHooks:
    """Feeds one plain module's gradients to its handle's synchroniser."""

    def __init__(
        self,
        handle: Handle,
        params: list[tuple[str, Tensor]],
        strangers: Strangers,
    ) -> None:
        self._handle = handle
        self._params = dict(params)
        self._opening = threading.Lock()  # autograd has one thread a device
        self._strangers = strangers
        self._end: Callable[[], object] = lambda: None
        self._hooks = [self._hook(name, param) for name, param in params]
        handle.on_detach(self._remove)

    def _remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, name: str, param: Any) -> Any:
        # The garbage collector does not see what a parameter's hooks refer to: were it this
        # object, and through it the parameters, a dropped model would never be freed.
        this = weakref.ref(self)

        def hook(param: Tensor) -> None:
            hooks = this()
            if hooks is None or not hooks._handle.attached:
                return
            if hooks._handle.syncing:
                hooks._accept(name, param)
            elif hooks._handle.overlap is not None:
                hooks._handle.overlap.begin_backward()
                hooks._handle.overlap.check(name)

        return param.register_post_accumulate_grad_hook(hook)

    def _accept(self, name: str, param: Tensor) -> None:
        """Takes the gradient that autograd has just accumulated."""
        synchroniser = self._handle.synchroniser
        with self._opening:
            self._begin_backward(name)
        synchroniser.ready(name, self._expected(name, param))

    def _begin_backward(self, name: str) -> None:
        """Opens a step, if this is the first gradient of a backward pass."""
        synchroniser, overlap = self._handle.synchroniser, self._handle.overlap
        if overlap is not None:
            overlap.begin_backward()
            overlap.check(name)
        if synchroniser.open and (name in synchroniser.grads or self._end() is None):
            synchroniser.abandon(name)
        if not synchroniser.open:
            self._refuse_wrong_step()
            self._handle.begin_step()
            self._queue_end()

    def _queue_end(self) -> None:
        """Has autograd call back when this backward pass has ended, still inside backward().

        Autograd drops the callback if the backward pass raises; so the next one notices that.
        """

        def end() -> None:
            self._end_backward()

        self._end = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _refuse_wrong_step(self) -> None:
        """Refuses a backward pass that must not begin a step, before anything is launched.

        The other ranks are told.
        """
        self._strangers.before_backward()
        if _is_inside_a_segment():
            raise self.give_up(
                "a backward pass began inside a segment of a reentrant activation checkpoint, "
                "where no step can end; use_reentrant=False is accepted"
            )

    def _expected(self, name: str, param: Tensor) -> Tensor | None:
        """The gradient in the form its messages read; no other rank takes part in this.

        A sparse gradient is made dense if its module did not announce one. A gradient that is cut
        into flat ranges is made contiguous.
        """
        synchroniser, grad = self._handle.synchroniser, param.grad
        if grad is not None and grad.is_sparse and not synchroniser.is_sparse(name):
            grad = param.grad = grad.to_dense()
        if grad is not None and synchroniser.is_cut(name) and not grad.is_contiguous():
            grad = param.grad = grad.contiguous()
        return grad

    def _end_backward(self) -> None:
        synchroniser, overlap = self._handle.synchroniser, self._handle.overlap
        grads = {name: self._expected(name, param) for name, param in self._params.items()}
        for name, grad in grads.items():
            # A gradient that accumulated under no_sync counts, though no hook brought it today.
            synchroniser.ready(name, grad)
        synchroniser.close()
        self._handle.mark_backward(wall_clock())
        if overlap is None:
            self.finish()
        else:
            overlap.defer(grads)

    # What an overlap asks of the step that is going on.

    def arrived(self, name: str) -> bool:
        """Whether a parameter's mean is complete."""
        return self._handle.synchroniser.arrived(name)

    def wait(self, names: Sequence[str]) -> None:
        """Blocks until the means of ``names`` are there."""
        start_s = wall_clock()
        self._handle.synchroniser.wait(names)
        self._handle.mark_wait(start_s, wall_clock())

    def finish(self) -> None:
        """Waits for all means of the step and puts them where the training loop looks for them."""
        synchroniser, start_s = self._handle.synchroniser, wall_clock()
        if not synchroniser.open:
            return
        arrived = synchroniser.finish()
        for name, param in self._params.items():
            if name in arrived:
                param.grad = synchroniser.mean(name)
            elif synchroniser.is_sparse(name):
                param.grad = synchroniser.grads[name]
        self._handle.mark_wait(start_s, wall_clock())
        self._handle.end_step()

    def give_up(self, text: str) -> BaseException:
        """Fails on behalf of this rank and tells the others; returns the error to raise."""
        return self._handle.give_up(text)


def _is_inside_a_segment() -> bool:
    """Whether this thread is in the nested backward pass of a reentrant checkpoint."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.backward.__code__:
        frame = frame.f_back
    return frame is not None


def time_forward(handle: Handle, model: nn.Module) -> None:
    """Notes when forward passes of ``model`` start and end, for the trace."""
    started: list[float] = []

    def before(module: nn.Module, args: Any) -> None:
        started.clear()  # of a forward pass that raised
        if torch.is_grad_enabled():
            started.append(wall_clock())

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if started:
            handle.mark_forward(started.pop(), wall_clock())

    handle.on_detach(Hooked(model.register_forward_pre_hook, before).remove)
    handle.on_detach(Hooked(model.register_forward_hook, after).remove)
