"""Layers are measured in a training's own steps, which they do not change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradwire.planning.measure import layers
from gradwire.planning.measure.layers import LayerWatch


class Clock:
    """Seconds that pass only where a model says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Slow(torch.autograd.Function):
    """The same values; takes seconds forward, and others backward."""

    @staticmethod
    def forward(ctx, x, clock, forward_s, backward_s):  # type: ignore[no-untyped-def]
        ctx.clock, ctx.backward_s = clock, backward_s
        clock.now_s += forward_s
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.clock.now_s += ctx.backward_s
        return grad, None, None, None


class Layer(nn.Module):
    """A layer whose weight takes part last forward, so that its gradient is ready first."""

    def __init__(self, clock: Clock, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.clock, self.forward_s, self.backward_s = clock, forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        taken: Tensor = Slow.apply(self.linear(x), self.clock, self.forward_s, self.backward_s)  # type: ignore[no-untyped-call]
        return taken


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(layers, "clock", found)
    return found


class Bucketed:
    """As much of a DDP model as tells its buckets: one of all parameters, last ones first."""

    def __init__(self, model: nn.Module) -> None:
        self.reducer, self._model = self, model

    def _get_zeros_like_grad_buckets(self) -> list[Any]:
        return [self]

    def parameters(self) -> list[Tensor]:
        return list(self._model.parameters())[::-1]


def model_on(clock: Clock) -> nn.Sequential:
    return nn.Sequential(Layer(clock, 1.0, 3.0), Layer(clock, 2.0, 5.0))


def watched(model: nn.Module, step: Callable[[], object], num_steps: int = 3) -> LayerWatch:
    watch = LayerWatch(model, dict(model.named_parameters()))
    watch.step_ended()
    for _ in range(num_steps):
        step()
        watch.step_ended()
    watch.remove()
    return watch


def test_every_layer_has_its_own_seconds(clock: Clock) -> None:
    model = model_on(clock)

    def step() -> None:
        clock.now_s += 7.0  # the optimizer and the next batch
        model(torch.randn(6, 4)).sum().backward()

    watch = watched(model, step)
    profile = watch.profile()
    assert [layer.name for layer in profile.layers] == ["0.linear", "1.linear"]
    assert [layer.forward_s for layer in profile.layers] == [1.0, 2.0]
    assert [layer.backward_s for layer in profile.layers] == [3.0, 5.0]
    assert (watch.other_s, watch.num_steps, profile.batch_size) == (7.0, 3, 6)
    assert [seconds for seconds, _ in watch.seconds] == [7.0 + 3.0 + 8.0] * 3
    assert all(7.0 < core_s < 8.0 for _, core_s in watch.seconds), "this thread waited for no core"


def test_of_passes_that_accumulate_the_last_one_counts(clock: Clock) -> None:
    model = model_on(clock)

    def step() -> None:
        for _ in range(2):
            model(torch.randn(6, 4)).sum().backward()

    watch = watched(model, step)
    assert watch.profile().forward_s == 3.0
    assert watch.other_s == 3.0 + 8.0


def test_what_is_computed_again_in_the_backward_pass_counts_there(clock: Clock) -> None:
    model = model_on(clock)

    def step() -> None:
        x = torch.randn(6, 4, requires_grad=True)
        checkpoint(model, x, use_reentrant=False).sum().backward()

    profile = watched(model, step).profile()
    # Of the last layer nothing is needed a second time.
    assert (profile.forward_s, profile.backward_s) == (3.0, 1.0 + 8.0)


def test_evaluation_between_steps_counts_as_no_layer(clock: Clock) -> None:
    model = model_on(clock)

    def step() -> None:
        with torch.no_grad():
            model(torch.randn(6, 4))
        model(torch.randn(6, 4)).sum().backward()

    watch = watched(model, step)
    assert (watch.profile().forward_s, watch.other_s) == (3.0, 3.0)


def test_nothing_is_left_behind(clock: Clock) -> None:
    model = model_on(clock)
    watch = LayerWatch(model, dict(model.named_parameters()))
    copied = copy.deepcopy(model)
    watch.remove()
    for one in (model, copied):
        assert not any(module._forward_pre_hooks for module in one.modules())
        assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def test_under_ddp_gradients_are_ready_with_their_bucket(clock: Clock) -> None:
    """Both layers' gradients are one bucket, full when the first layer's is there."""
    model = model_on(clock)
    ddp: Any = Bucketed(model)
    watch = LayerWatch(model, dict(model.named_parameters()), ddp)
    watch.step_ended()
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()  # of a step under no_sync
        clock.now_s += 7.0
        model(torch.ones(2, 4)).sum().backward()
        watch.step_ended()
    found = watch.profile()
    assert [layer.forward_s for layer in found.layers] == [1.0, 2.0]
    assert [layer.backward_s for layer in found.layers] == [0.0, 8.0]
    watch.remove()
