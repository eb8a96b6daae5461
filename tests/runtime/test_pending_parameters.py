"""A parameter whose update is pending is made at the first look at its value, and only then."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim import Optimizer

from gradwire.errors import RankFailed
from tests.each import each
from tests.runtime.between_steps import (
    BETWEEN,
    averaged,
    averaged_at_once,
    clamped,
    copied,
)
from tests.runtime.gated_models import Net
from tests.runtime.late_means import LateMeans, Loop, Make, Rig, batches, run, same
from tests.runtime.overlapped import NUM_STEPS, OPTIMIZERS, law, loss_of, momentum, usual
from tests.runtime.test_overlap_gates import begin


@each("loop", BETWEEN)
@each("make", OPTIMIZERS)
def test_weights_between_steps_have_all_updates(loop: Loop, make: Make) -> None:
    overlap = law(Net(), make, loop)
    assert overlap.fallbacks.total() == NUM_STEPS
    assert overlap.num_overlapped == 0
    assert all(BETWEEN[loop] in reason for reason in overlap.fallbacks)


def without_stand_ins(rig: Rig) -> None:
    if rig.overlap is not None:
        rig.overlap._pending_class = nn.Parameter


@each("loop", [averaged, averaged_at_once, clamped, copied])
def test_missing_stand_ins_are_found(loop: Loop) -> None:
    expected, _ = run(Net(), momentum, loop, None)
    found, _ = run(Net(), momentum, loop, LateMeans(), change=without_stand_ins)
    assert not same(found, expected)


class Moody(Net):
    """Calls its last layer in the first pass, and only uses its weight from then on."""

    num_passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_passes += 1
        if self.num_passes == 1:
            return super().forward(x)
        y = self.body(self.norm(torch.tanh(self.start(x * self.scale))))
        return F.linear(y, self.last.weight)


def test_one_that_is_used_by_hand_in_the_forward_pass_waits_for_itself() -> None:
    overlap = law(Moody(), momentum, usual)
    assert list(overlap.fallbacks) == ["last.bias took no part in the backward pass on this rank"]
    model = Moody()
    arrivals, _, _ = begin(model)
    model(batches(1)[0])
    assert arrivals.waited[-1] == ("last.weight",)


def test_one_that_is_used_without_any_forward_pass_settles() -> None:
    def loop(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
        assert isinstance(model, Net)
        for x in batches(NUM_STEPS):
            (loss_of(model, x) + model.scale.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.scale.square().sum().backward()

    overlap = law(Net(), momentum, loop)
    assert any("square at test_pending_parameters.py" in reason for reason in overlap.fallbacks)


def test_one_that_is_used_after_the_forward_pass_is_updated_there() -> None:
    """A loss that holds weights: they are pending still if no module of theirs was called."""

    class Left(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(torch.tanh(self.start(x * self.scale)))
            return y if self.last.in_features == 0 else self.body(y)  # type: ignore[no-any-return]

    def loop(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
        assert isinstance(model, Net)
        for x in batches(NUM_STEPS):
            loss = loss_of(model, x) + model.last(torch.ones(2, 16)).sum()
            (loss + model.last.weight.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert law(Left(), momentum, loop).num_overlapped == NUM_STEPS - 1


def settles_at(model: Net, look: Any) -> int:
    """How often the mean of everything is waited for, at one look after the step."""
    arrivals, _, _ = begin(model)
    look(model)
    return arrivals.num_finished


def test_what_needs_no_value_of_a_parameter_does_not_wait() -> None:
    def look(model: Net) -> None:
        weight = model.last.weight
        assert weight.shape == weight.size() == (3, 16)
        assert isinstance(weight, nn.Parameter)
        assert weight.is_leaf
        assert weight.dtype is torch.float32
        assert {weight: 1}[weight] == 1
        weight.requires_grad_(True)
        weight.requires_grad = True
        assert weight.grad is not None
        weight.grad = None
        del model.start.weight.grad
        assert model.start.weight.grad is None
        assert len(list(model.parameters())) == len(dict(model.named_parameters())) == 10
        assert sum(p.numel() for p in model.parameters()) > 0
        optim.SGD(model.parameters(), lr=0.1).zero_grad()
        model.zero_grad()

    assert settles_at(Net(), look) == 0


LOOKS: dict[str, Any] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "repr": repr,
    "norm": lambda p: p.norm(),
    "nested": lambda p: torch.cat([p, p]),
    "foreach": lambda p: torch._foreach_norm([torch.ones(2), p]),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "in place": lambda p: p.detach().add_(1),
    "set data": lambda p: setattr(p, "data", torch.ones(3, 16)),
    "storage": lambda p: p.untyped_storage(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
}


@each("look", LOOKS.values(), ids=[*LOOKS])
def test_a_look_at_a_parameter_makes_its_update(look: Any) -> None:
    model = Net()
    assert settles_at(model, lambda model: look(model.last.weight)) == 1
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert not any(param.isnan().any() for param in model.parameters())


class Named(nn.Parameter):
    """A parameter of the user's own kind."""


def test_parameters_of_another_class_are_not_overlapped() -> None:
    class Odd(Net):
        def __init__(self) -> None:
            super().__init__()
            self.last.weight = Named(self.last.weight.detach())

    overlap = law(Odd(), momentum, usual)
    assert overlap.fallbacks == {
        "last.weight is a Named, of which no stand-in can be made": NUM_STEPS
    }


# What cannot be seen ends the run, if autograd knows of it.


def test_a_view_from_before_that_is_used_in_the_forward_pass_ends_the_run() -> None:
    model = Net()
    arrivals = LateMeans()
    optimizer = momentum(model)
    rig = Rig(model, optimizer, arrivals)
    held = model.last.weight.view(-1)
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    model.last.forward = lambda y: F.linear(y, held.view(3, 16))  # type: ignore[method-assign]
    model.last._forward_pre_hooks.clear()
    with pytest.raises(RankFailed, match=r"last\.weight was used in the forward pass before its u"):
        loss_of(model, batches(1)[0]).backward()
    assert rig.overlap is not None


def test_a_view_from_before_that_is_written_to_ends_the_run() -> None:
    model = Net()
    held = model.start.weight.detach()
    begin(model)
    held.clamp_(-0.1, 0.1)
    with pytest.raises(RankFailed, match=r"start\.weight was written between optimizer\.step\(\)"):
        model(batches(1)[0])
