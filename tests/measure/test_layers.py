"""Times are those that layers take and add up to the step; the model is left as it
was.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradwire.errors import InvalidSetting
from gradwire.measure.layers import profile
from gradwire.planning.data.profile import Profile
from tests.each import each
from tests.measure.models import TICK_S, Clock, Pause, Timed, step_of


def ticks(found: Profile) -> dict[str, tuple[float, float]]:
    return {x.name: (x.forward_s / TICK_S, x.backward_s / TICK_S) for x in found.layers}


class Calling(nn.Module):
    """Its parts, called in the order of ``run(model, x)``."""

    def __init__(
        self, run: Callable[[Any, Tensor], Tensor], **parts: nn.Module
    ) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def test_each_layer_gets_its_own_time_and_what_follows_it(clock: Clock) -> None:
    model = nn.Sequential(
        Timed(clock, 3, 5), Pause(clock, 1, 2), Timed(clock, 7, 4).bfloat16()
    )
    found = profile(model, step_of(model), iterations=2)
    assert ticks(found) == {"0": (3 + 1, 5 + 2), "2": (7, 4)}
    assert [t.dtype for x in found.layers for t in x.tensors] == ["float32", "bfloat16"]
    assert found.forward_s + found.backward_s == 22 * TICK_S


def test_time_around_the_layers_is_charged_too(clock: Clock) -> None:
    model = nn.Sequential(Pause(clock, 1, 2), Timed(clock, 3, 5))

    def step() -> None:
        clock.pass_by(10)  # before the model: the data
        loss = Pause(clock, 20, 30)(model(torch.ones(4, 3))).sum()
        loss.backward()
        clock.pass_by(40)  # after it: what the next forward waits for

    assert ticks(profile(model, step, iterations=1)) == {
        "1": (10 + 1 + 3 + 20 + 40, 30 + 5)
    }


def test_layers_come_in_the_order_of_first_calls(clock: Clock) -> None:
    parts = {"last": Timed(clock, 1, 2), "first": Timed(clock, 3, 4)}
    model = Calling(lambda own, x: own.last(own.first(x)), **parts)
    found = profile(model, step_of(model), iterations=1)
    assert ticks(found) == {"first": (3, 4), "last": (1, 2)}


def test_a_layer_called_twice_is_added_up_and_ready_once(clock: Clock) -> None:
    parts = {"cell": Timed(clock, 3, 5), "between": Timed(clock, 1, 1)}
    model = Calling(lambda own, x: own.cell(own.between(own.cell(x))), **parts)
    found = profile(model, step_of(model), iterations=1)
    # The first of the cell's two backwards makes no gradient ready: the next one,
    # between's, waits.
    assert ticks(found) == {"cell": (6, 5), "between": (1, 6)}


def test_tied_weights_are_one_tensor_in_the_layer_called_first(clock: Clock) -> None:
    parts = {
        "head": Timed(clock, 1, 2),
        "middle": Timed(clock, 10, 20),
        "stem": Timed(clock, 3, 4),
    }
    model = Calling(lambda own, x: own.head(own.middle(own.stem(x))), **parts)
    model.head.weight = model.stem.weight
    found = profile(model, step_of(model), iterations=1)
    # The head owns nothing of its own any more: its time lies with its neighbour.
    assert ticks(found) == {"stem": (3, 4), "middle": (11, 22)}
    assert [t.name for layer in found.layers for t in layer.tensors] == [
        "head.weight",  # the name that model.named_parameters() gives it
        "middle.weight",
    ]


def test_parameters_of_modules_that_are_not_called_belong_to_the_nearest_caller() -> (
    None
):
    model = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 8)
    found = profile(model, lambda: model(x).sum().backward(), iterations=1)
    layers = {
        layer.name: [tensor.name for tensor in layer.tensors] for layer in found.layers
    }
    assert list(layers) == ["self_attn", "norm1", "linear1", "linear2", "norm2"]
    assert layers["self_attn"] == [
        "self_attn.in_proj_weight",
        "self_attn.in_proj_bias",
        "self_attn.out_proj.weight",
        "self_attn.out_proj.bias",
    ]
    assert {t.name for layer in found.layers for t in layer.tensors} == {
        name for name, _ in model.named_parameters()
    }


def test_a_model_used_only_in_parts_is_measured_by_part(clock: Clock) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = Timed(clock, 2, 3), nn.Parameter(torch.ones(()))

    model = Bare()

    def step() -> None:
        clock.pass_by(1)
        (model.body(torch.ones(4, 3)) * model.scale).sum().backward()

    with pytest.raises(InvalidSetting, match="batch_size must be given"):
        profile(model, step, iterations=1)
    found = profile(model, step, iterations=1, batch_size=4, name="parts")
    assert ticks(found) == {"Bare": (1, 0), "body": (2, 3)}
    assert (found.model, found.batch_size) == ("parts", 4)


def test_recomputation_is_backward_time(clock: Clock) -> None:
    for reentrant in (False, True):
        again = partial(checkpoint, use_reentrant=reentrant)
        parts = {"stem": Timed(clock, 1, 1), "body": Timed(clock, 3, 5)}
        model = Calling(
            lambda own, x, again=again: again(own.body, own.stem(x)), **parts
        )
        found = ticks(profile(model, step_of(model), iterations=1))
        assert found == {"stem": (1, 1), "body": (3, 3 + 5)}, reentrant


def test_several_backwards_in_a_step_are_added_up(clock: Clock) -> None:
    model = nn.Sequential(Timed(clock, 3, 5))
    once = step_of(model)
    assert ticks(profile(model, lambda: (once(), once()), iterations=1)) == {
        "0": (6, 10)
    }


def test_frozen_layers_leave_their_time_to_the_one_before(clock: Clock) -> None:
    model = nn.Sequential(Timed(clock, 1, 1), Timed(clock, 4, 8))
    model[1].weight.requires_grad_(False)
    assert ticks(profile(model, step_of(model), iterations=1)) == {"0": (5, 9)}


def test_a_disturbed_step_does_not_count(clock: Clock) -> None:
    model = nn.Sequential(Timed(clock, 3, 5), Timed(clock, 2, 2))
    step, calls = step_of(model), iter(range(100))

    def disturbed() -> None:
        step()
        if next(calls) % 5 == 0:
            clock.pass_by(1000)

    assert ticks(profile(model, disturbed, iterations=9)) == {"0": (3, 5), "1": (2, 2)}


def test_layers_add_up_to_the_steps_without_hooks(clock: Clock) -> None:
    """Hooks that slow a step down by half: the layers keep their shares of what it
    really takes.
    """
    model = nn.Sequential(Timed(clock, 4, 8), Timed(clock, 12, 8))
    plain = step_of(model)

    def slower_with_hooks() -> None:
        hooked = bool(model[0]._forward_pre_hooks)
        model[0].ticks, model[1].ticks = (
            ((6, 12), (18, 12)) if hooked else ((4, 8), (12, 8))
        )
        plain()

    found = profile(model, slower_with_hooks, iterations=3)
    for times, expected in zip(ticks(found).values(), [(4, 8), (12, 8)], strict=True):
        assert times == pytest.approx(expected)


def test_a_real_model_takes_time_on_the_real_clock() -> None:
    """All that runs takes time; sums are exact."""
    model = nn.Sequential(
        nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 16), nn.BatchNorm1d(16)
    )
    x, reported = torch.randn(512, 1024), []
    found = profile(
        model,
        lambda: model(x).square().sum().backward(),
        iterations=5,
        advance=lambda amount, note: reported.append((amount, note)),
    )
    assert [layer.name for layer in found.layers] == ["0", "2", "3"]
    assert min(layer.backward_s for layer in found.layers) > 0
    assert min(layer.forward_s for layer in found.layers) > 0
    assert (found.batch_size, found.model) == (512, "Sequential")
    assert sum(amount for amount, _ in reported) == 5 + 3
    assert "cpu" in found.source
    assert "medians of 5 steps" in found.source
    assert torch.__version__ in found.source
    assert sum(layer.size_bytes for layer in found.layers) == sum(
        p.numel() * 4 for p in model.parameters()
    )


def profile_wrapped() -> None:
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    for model in (wrapped, wrapped.module):
        found = profile(model, step_of(wrapped), iterations=2)
        assert [layer.name for layer in found.layers] == ["0", "1"]
        named = dict(wrapped.module.named_parameters())
        assert [t.name for layer in found.layers for t in layer.tensors] == list(named)


def test_a_model_inside_of_ddp_is_measured(tmp_path: Path) -> None:
    """The model goes before its group, as the last reference to a group must not be a
    reducer's.

    Its destructor holds the interpreter's lock, and waits for a thread of gloo that may
    want it.
    """
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        profile_wrapped()
    finally:
        torch.distributed.destroy_process_group()


class Stateful(nn.Module):
    """Everything that a step may move: a buffer, one that is replaced, random numbers,
    its mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm, self.drop = (
            nn.Linear(6, 6),
            nn.BatchNorm1d(6),
            nn.Dropout(),
        )
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1 + random.random() + float(np.random.rand())
        self.train(bool(self.count.item() % 2 < 1))
        y: Tensor = self.drop(self.norm(self.line(x)))
        return y


def _everything(model: Stateful) -> list[Any]:
    facts: list[Any] = [p.detach().clone() for p in model.parameters()]
    facts += [b.clone() for b in model.buffers()]
    facts += [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    facts += [m.training for m in model.modules()]
    facts += [
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    ]
    facts += [
        (
            len(m._forward_pre_hooks),
            len(m._forward_hooks),
            len(m._forward_pre_hooks_with_kwargs),
        )
        for m in model.modules()
    ]
    facts += [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    return [*facts, torch.autograd.backward]


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return bool(left == right)


def _raising(step: Callable[[], object], at: int) -> Callable[[], None]:
    calls = iter(range(100))

    def step_or_raise() -> None:
        if next(calls) == at:
            raise RuntimeError("out of memory")
        step()

    return step_or_raise


@each("fails_at", [None, 0, 1, 2, 9])
def test_nothing_of_the_model_is_changed(fails_at: int | None) -> None:
    torch.manual_seed(3)
    model = Stateful()
    x = torch.randn(5, 6)
    model(x).sum().backward()
    model.line.bias.grad = None
    grad, count = model.line.weight.grad, model.count
    before = _everything(model)

    def step() -> None:
        model(x).sum().backward()

    if fails_at is None:
        profile(model, step, iterations=3)
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            profile(model, _raising(step, fails_at), iterations=3)
    after = _everything(model)
    assert all(map(_same, before, after))
    assert model.line.weight.grad is grad
    assert model.count is count


def _no_backward(model: nn.Module) -> Callable[[], object]:
    return lambda: model(torch.ones(2, 3)).sum()


def _another_model(model: nn.Module) -> Callable[[], object]:
    other = nn.Linear(3, 2)
    return lambda: other(torch.ones(2, 3)).sum().backward()


def _half(model: nn.Module) -> Callable[[], object]:
    return lambda: model[0](torch.ones(2, 3)).sum().backward()  # type: ignore[index]


def _training(model: nn.Module) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    return step


@each(
    "made, words",
    [
        (_no_backward, r"ran no backward; let it call loss\.backward"),
        (_another_model, "called no module of this model"),
        (_half, r"gave no gradient to 1\.bias, 1\.weight; set requires_grad"),
        (_training, r"changed 0\.weight, .*; leave the optimizer out"),
    ],
)
def test_wrong_steps_are_refused(
    made: Callable[[nn.Module], Callable[[], object]], words: str
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with pytest.raises(InvalidSetting, match=words):
        profile(model, made(model), iterations=1)


def test_wrong_models_and_numbers_are_refused() -> None:
    model = nn.Linear(3, 2)
    step = step_of(model)
    for wrong in 0, 2.5, "a":
        with pytest.raises(
            InvalidSetting, match=f"iterations must be .*, got '?{wrong}"
        ):
            profile(model, step, iterations=wrong)  # type: ignore[arg-type]
    for wrong in 0, -1:
        with pytest.raises(InvalidSetting, match=f"batch_size must be .*, got {wrong}"):
            profile(model, step, iterations=1, batch_size=wrong)
    with pytest.raises(InvalidSetting, match="trainable parameters"):
        profile(nn.ReLU(), step)
    compiled = nn.Linear(3, 2)
    compiled._orig_mod = model
    with pytest.raises(InvalidSetting, match=r"before torch\.compile"):
        profile(compiled, step)
