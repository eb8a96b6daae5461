"""Every optimizer of torch.optim, stepped in random parts, does bit for bit what whole
steps do.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradwire.runtime.overlap.stepping import SEPARABLE, LayerwiseStep, replace_step
from tests.each import each
from tests.runtime.overlap.late_means import same

SHAPES = [(7, 5), (9,), (1,), (16, 3), (4, 4), (33,), (2, 8), (5,)]
MATRICES = [(7, 5), (16, 3), (4, 4), (2, 8), (3, 9)]
NUM_STEPS = 7

CASES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {}),
    "SGD momentum": (
        optim.SGD,
        {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.02},
    ),
    "SGD maximize": (optim.SGD, {"momentum": 0.5, "maximize": True, "foreach": True}),
    "SGD fused": (optim.SGD, {"momentum": 0.9, "fused": True}),
    "SGD tensor rate": (optim.SGD, {"lr": torch.tensor(0.05), "momentum": 0.9}),
    "Adam": (optim.Adam, {"weight_decay": 0.01}),
    "Adam amsgrad": (optim.Adam, {"amsgrad": True, "foreach": True}),
    "Adam single": (optim.Adam, {"foreach": False, "maximize": True}),
    "Adam fused": (optim.Adam, {"fused": True, "amsgrad": True}),
    "Adam tensor rate": (optim.Adam, {"lr": torch.tensor(0.01), "fused": True}),
    "AdamW": (optim.AdamW, {"weight_decay": 0.1}),
    "RMSprop": (
        optim.RMSprop,
        {"momentum": 0.9, "centered": True, "weight_decay": 0.01},
    ),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "Adagrad fused": (optim.Adagrad, {"fused": True}),
    "Adadelta": (optim.Adadelta, {"foreach": True}),
    "Adafactor": (optim.Adafactor, {"weight_decay": 0.01}),
    "Adamax": (optim.Adamax, {"foreach": True}),
    "NAdam": (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (optim.RAdam, {"foreach": True}),
    "ASGD": (optim.ASGD, {"t0": 2}),
    "Rprop": (optim.Rprop, {}),
    "Muon": (optim.Muon, {"momentum": 0.9}),
    "SparseAdam": (optim.SparseAdam, {}),
}


def build(case: str) -> tuple[list[nn.Parameter], Optimizer]:
    """Parameters and an optimizer of them in three groups with rates of their own."""
    kind, settings = CASES[case]
    torch.manual_seed(3)
    shapes = MATRICES if kind in (optim.Muon, optim.SparseAdam) else SHAPES
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    groups: list[dict[str, Any]] = [
        {"params": params[:2]},
        {"params": params[2:4], "lr": 0.003},
        {"params": params[4:], "lr": 0.02},
    ]
    if isinstance(settings.get("lr"), Tensor):
        groups = [
            {**group, "lr": torch.tensor(0.01 * i)} for i, group in enumerate(groups, 1)
        ]
    return params, kind(groups, **copy.deepcopy(settings))


def give_gradients(case: str, params: list[nn.Parameter], step: int) -> None:
    """The gradients of one step; now and then a parameter has none."""
    torch.manual_seed(100 + step)
    for i, param in enumerate(params):
        grad = torch.randn(param.shape)
        param.grad = grad.to_sparse(1) if case == "SparseAdam" else grad
        # torch's own fused SGD raises where some parameters of a group have no momentum
        # yet.
        if (i + step) % 5 == 4 and not (case == "SGD fused" and step == 0):
            param.grad = None


def change_rates(optimizer: Optimizer, factor: float) -> None:
    """What a scheduler does."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].mul_(factor)
        else:
            group["lr"] *= factor


def parts(params: list[nn.Parameter], seed: int) -> Iterator[list[nn.Parameter]]:
    """The parameters in random order, in parts of random sizes."""
    chance = random.Random(seed)
    order = chance.sample(params, len(params))
    while order:
        size = chance.randint(1, len(order))
        yield order[:size]
        order = order[size:]


def whole(case: str) -> dict[str, Any]:
    params, optimizer = build(case)
    for step in range(NUM_STEPS):
        give_gradients(case, params, step)
        optimizer.step()
        change_rates(optimizer, 0.8)
    return {"params": [p.detach() for p in params], "state": optimizer.state_dict()}


Apply = Callable[[LayerwiseStep, Any, list[nn.Parameter]], None]


def in_parts(
    case: str,
    seed: int,
    apply: Apply = LayerwiseStep.apply,
    record: Callable[[LayerwiseStep], Any] = LayerwiseStep.record,
) -> dict[str, Any]:
    """Rates change after the step was asked for and before its parts are made."""
    params, optimizer = build(case)
    stepper = LayerwiseStep(optimizer)
    for step in range(NUM_STEPS):
        give_gradients(case, params, step)
        assert stepper.refusal() is None
        asked = record(stepper)
        groups = optimizer.param_groups
        change_rates(optimizer, 0.8)
        for part in parts(params, seed * 100 + step):
            apply(stepper, asked, part)
        assert optimizer.param_groups is groups
    return {"params": [p.detach() for p in params], "state": optimizer.state_dict()}


@each("case", CASES)
def test_parts_make_the_whole_step(case: str) -> None:
    expected = whole(case)
    for seed in range(2):
        assert same(in_parts(case, seed), expected)


def test_every_class_of_torch_optim_is_known() -> None:
    classes = {
        name
        for name, kind in vars(optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer)
    }
    assert classes - {"Optimizer", "LBFGS"} == SEPARABLE
    assert {kind.__name__ for kind, _ in CASES.values()} == SEPARABLE


@each("case", ["SGD momentum", "SGD tensor rate", "Adam fused"])
def test_the_law_bites(case: str) -> None:
    def twice(stepper: LayerwiseStep, asked: Any, part: list[nn.Parameter]) -> None:
        stepper.apply(asked, [*part, part[0]][-1:])
        stepper.apply(asked, part)

    def none_of_the_last(
        stepper: LayerwiseStep, asked: Any, part: list[nn.Parameter]
    ) -> None:
        stepper.apply(asked, part[:-1])

    def live(stepper: LayerwiseStep) -> Any:
        return stepper.record()._replace(values=stepper._optimizer.param_groups)

    expected = whole(case)
    assert not same(in_parts(case, 0, apply=twice), expected)
    assert not same(in_parts(case, 0, apply=none_of_the_last), expected)
    assert not same(in_parts(case, 0, record=live), expected)


def test_groups_are_the_users_again_after_a_step_that_raised() -> None:
    params, optimizer = build("SGD")
    groups = optimizer.param_groups
    stepper = LayerwiseStep(optimizer)
    asked = stepper.record()
    asked.values[0]["lr"] = "fast"
    params[0].grad = torch.ones(params[0].shape)
    with pytest.raises(TypeError):
        stepper.apply(asked, params[:1])
    assert optimizer.param_groups is groups


def one() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


class Own(optim.SGD):
    """A class whose step is unknown here, though its name is not."""


Own.__name__ = Own.__qualname__ = "SGD"


def hooked(before: bool) -> Optimizer:
    optimizer = optim.SGD([one()])
    if before:
        optimizer.register_step_pre_hook(lambda *_: None)
    else:
        optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def patched() -> Optimizer:
    optimizer = optim.SGD([one()])
    inner = optimizer.step
    optimizer.step = lambda closure=None: inner(closure)  # type: ignore[method-assign,assignment]
    return optimizer


def scaled() -> Optimizer:
    optimizer = optim.SGD([one()], fused=True)
    optimizer.grad_scale = torch.ones(1)  # type: ignore[attr-defined]
    return optimizer


REFUSED: dict[str, tuple[Callable[[], Optimizer], str]] = {
    "LBFGS": (lambda: optim.LBFGS([one()]), "LBFGS may look at several"),
    "own class": (lambda: Own([one()]), "SGD may look at several"),
    "pre hook": (lambda: hooked(True), "step hooks"),
    "post hook": (lambda: hooked(False), "step hooks"),
    "patched": (patched, "was replaced"),
    "differentiable": (
        lambda: optim.SGD([one()], differentiable=True),
        "differentiable",
    ),
    "scaled": (scaled, "loss scaler"),
}


@each("name", REFUSED)
def test_what_cannot_be_cut_is_refused_with_its_reason(name: str) -> None:
    make, reason = REFUSED[name]
    assert reason in str(LayerwiseStep(make()).refusal())


def test_hooks_of_all_optimizers_are_noticed() -> None:
    stepper = LayerwiseStep(optim.SGD([one()]))
    assert stepper.refusal() is None
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        assert "step hooks" in str(stepper.refusal())
    finally:
        handle.remove()


@each("early", [False, True])
def test_schedulers_and_replaced_steps_go_together(early: bool) -> None:
    param = one()
    optimizer = optim.SGD([param], lr=1.0)
    if early:
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    calls: list[dict[str, Any]] = []

    def serve(**given: Any) -> None:
        calls.append(given)
        optimizer._opt_called = True  # type: ignore[attr-defined]

    _, put_back = replace_step(optimizer, serve)
    if not early:
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step(closure=None)
    # warns, which is an error here, if it believes that step() was not called
    scheduler.step()
    assert calls == [{"closure": None}]
    put_back()
    param.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((2,), 0.5))
    assert calls == [{"closure": None}]
    assert LayerwiseStep(optimizer).refusal() is None
