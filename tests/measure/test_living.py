"""Layers are measured in a training's own steps, which they do not change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradwire.measure.layers import LayerWatch
from tests.measure.models import TICK_S, Clock, Timed

SECOND = 1024
"""In ticks."""


class Bucketed:
    """As much of a DDP model as tells its buckets: one of all parameters, last ones
    first.
    """

    def __init__(self, model: nn.Module) -> None:
        self.reducer, self._model = self, model

    def _get_zeros_like_grad_buckets(self) -> list[Any]:
        return [self]

    def parameters(self) -> list[Tensor]:
        return list(self._model.parameters())[::-1]


def model_on(clock: Clock) -> nn.Sequential:
    return nn.Sequential(Timed(clock, 1, 3), Timed(clock, 2, 5))


def pass_through(model: nn.Module) -> None:
    model(torch.randn(6, 3)).sum().backward()


def watched(
    model: nn.Module, step: Callable[[], object], num_steps: int = 3, ddp: Any = None
) -> LayerWatch:
    watch = LayerWatch(model, dict(model.named_parameters()), ddp)
    watch.step_ended()
    for _ in range(num_steps):
        step()
        watch.step_ended()
    watch.remove()
    return watch


def ticks(watch: LayerWatch) -> tuple[list[float], list[float], float]:
    """Forward and backward of each layer, and all else of a step."""
    layers = watch.profile().layers
    forward = [layer.forward_s / TICK_S for layer in layers]
    return (
        forward,
        [layer.backward_s / TICK_S for layer in layers],
        watch.other_s / TICK_S,
    )


def test_every_layer_has_its_own_seconds(clock: Clock) -> None:
    model = model_on(clock)

    def step() -> None:
        clock.pass_by(SECOND)  # the optimizer and the next batch
        pass_through(model)

    watch = watched(model, step)
    assert [layer.name for layer in watch.profile().layers] == ["0", "1"]
    assert ticks(watch) == ([1, 2], [3, 5], SECOND)
    assert (watch.num_steps, watch.profile().batch_size) == (3, 6)
    assert [seconds / TICK_S for seconds, _ in watch.seconds] == [SECOND + 3 + 8] * 3
    assert all(1.0 < core_s < 2.0 for _, core_s in watch.seconds), (
        "this thread waited for no core"
    )


def test_of_passes_that_accumulate_the_last_one_counts(clock: Clock) -> None:
    model = model_on(clock)
    watch = watched(model, lambda: (pass_through(model), pass_through(model)))
    assert ticks(watch) == ([1, 2], [3, 5], 3 + 8)


def test_what_is_computed_again_in_the_backward_pass_counts_there(clock: Clock) -> None:
    model = model_on(clock)

    def step() -> None:
        x = torch.randn(6, 3, requires_grad=True)
        checkpoint(model, x, use_reentrant=False).sum().backward()

    profile = watched(model, step).profile()
    assert (profile.forward_s / TICK_S, profile.backward_s / TICK_S) == (3, 3 + 8)


def test_evaluation_between_steps_counts_as_no_layer(clock: Clock) -> None:
    model = model_on(clock)

    def step() -> None:
        with torch.no_grad():
            model(torch.randn(6, 3))
        pass_through(model)

    assert ticks(watched(model, step)) == ([1, 2], [3, 5], 3)


def test_nothing_is_left_behind(clock: Clock) -> None:
    model = model_on(clock)
    watch = LayerWatch(model, dict(model.named_parameters()))
    copied = copy.deepcopy(model)
    watch.remove()
    for one in (model, copied):
        assert not any(module._forward_pre_hooks for module in one.modules())
        assert not any(param._post_accumulate_grad_hooks for param in one.parameters())


def test_under_ddp_gradients_are_ready_with_their_bucket(clock: Clock) -> None:
    """Both layers' gradients are one bucket, full when the first layer's is there."""
    model = model_on(clock)

    def step() -> None:
        pass_through(model)  # of a step under no_sync
        clock.pass_by(7)
        pass_through(model)

    forward, backward, _ = ticks(watched(model, step, ddp=Bucketed(model)))
    assert (forward, backward) == ([1, 2], [0, 8])
