"""LayerTimer: charges every moment of a step to one layer's forward or backward.

A mark ends a stretch of time. In the forward pass a layer's marks are where it is entered, so what
runs between two layers (activations, residual sums, the loss) is charged to the earlier one: it
waits for no other parameters. In the backward pass a layer's marks are where a gradient of it is
ready, so what runs between two layers is charged to the later one, which waits for it. Both ways
nothing is lost and nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from time import perf_counter as clock
from typing import Any

import torch
from torch import nn


class LayerTimer:
    """Seconds of one step at a time, by layer: ``forward_s[i]`` and ``backward_s[i]``.

    ``synchronise`` waits until the device has done what was asked of it; it is called at each mark.
    ``order`` lists the parameters whose gradients became ready, in that order.
    """

    def __init__(self, num_layers: int, synchronise: Callable[[], None]) -> None:
        self._num_layers, self._synchronise = num_layers, synchronise
        self._begin()

    def _begin(self) -> None:
        self.forward_s = [0.0] * self._num_layers
        self.backward_s = [0.0] * self._num_layers
        self.order: list[str] = []
        self.num_backwards = 0
        self._entered = self._last_ready = 0
        self._depth = 0  # reentrant checkpoints call backward inside of backward
        self._synchronise()
        self._last_s = clock()

    def run(self, step: Callable[[], object]) -> None:
        """Runs one step; its seconds then stand in ``forward_s`` and ``backward_s``."""
        self._begin()
        with _watched_backward(self):
            step()
        self._charge(self.forward_s, self._entered)

    @property
    def step_s(self) -> float:
        """Seconds of the last step: what was charged, all in all."""
        return sum(self.forward_s) + sum(self.backward_s)

    def enter(self, layer: int) -> None:
        """A layer's forward begins; within a backward it is a recomputation, which counts there."""
        if not self._depth:
            self._charge(self.forward_s, self._entered)
            self._entered = layer

    def ready(self, layer: int, name: str) -> None:
        """A gradient of a layer is ready."""
        self._charge(self.backward_s, layer)
        self._last_ready = layer
        self.order.append(name)

    def backward_begins(self) -> None:
        if not self._depth:
            self._charge(self.forward_s, self._entered)
            self.num_backwards += 1
        self._depth += 1

    def backward_ends(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._charge(self.backward_s, self._last_ready)
            self._entered = 0  # what a step does afterwards, the next forward waits for

    def _charge(self, seconds: list[float], layer: int) -> None:
        self._synchronise()
        now_s = clock()
        seconds[layer] += now_s - self._last_s
        self._last_s = now_s


@contextmanager
def hooked(
    timer: LayerTimer, entries: Mapping[nn.Module, int], parameters: Mapping[str, Any]
) -> Iterator[None]:
    """Hooks that mark the entry of each module, and the gradient of each parameter by its name.

    ``entries`` maps modules to layers; ``parameters`` names to (parameter, layer).
    """
    with ExitStack() as stack:
        for module, layer in entries.items():
            stack.callback(module.register_forward_pre_hook(_entering(timer, layer)).remove)
        for name, (parameter, layer) in parameters.items():
            hook = _getting_ready(timer, layer, name)
            stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        yield


def _entering(timer: LayerTimer, layer: int) -> Callable[..., None]:
    return lambda module, inputs: timer.enter(layer)


def _getting_ready(timer: LayerTimer, layer: int, name: str) -> Callable[..., None]:
    return lambda parameter: timer.ready(layer, name)


@contextmanager
def _watched_backward(timer: LayerTimer) -> Iterator[None]:
    """Tells the timer where backward passes begin and end.

    ``loss.backward()`` looks ``torch.autograd.backward`` up at each call. No hook fires before the
    first gradient is computed, so there is no other place that knows when the loss is.
    """
    original = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        timer.backward_begins()
        try:
            original(*args, **kwargs)
        finally:
            timer.backward_ends()

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original
