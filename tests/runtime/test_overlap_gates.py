"""What a gate before a layer waits for, what ends a run, and how an overlap comes and goes."""

from __future__ import annotations

import copy
import gc
import logging
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.errors import RankFailed
from gradwire.runtime.overlap.pending import PendingGrad
from tests.runtime.gated_models import Attention, Net, Tied
from tests.runtime.late_means import LateMeans, Make, Rig, batches, run, same
from tests.runtime.overlapped import (
    NUM_STEPS,
    clipped,
    evaluating,
    law,
    loss_of,
    momentum,
    usual,
)

# What a gate waits for.


def begin(model: nn.Module, make: Make = momentum) -> tuple[LateMeans, Rig, Optimizer]:
    """One step of training; all its updates are on their way."""
    arrivals = LateMeans()
    optimizer = make(model)
    rig = Rig(model, optimizer, arrivals)
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    assert arrivals.waited == []
    return arrivals, rig, optimizer


def test_each_layer_waits_for_its_own_parameters_alone() -> None:
    model = Net()
    arrivals, _, _ = begin(model)
    model(batches(1)[0])
    assert arrivals.waited == [
        ("scale",),
        ("start.weight", "start.bias"),
        ("norm.weight", "norm.bias"),
        ("body.0.weight", "body.0.bias"),
        ("body.2.weight",),
        ("last.weight", "last.bias"),
    ]
    assert arrivals.num_finished == 0


def test_what_has_arrived_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    arrivals, rig, _ = begin(model)
    assert rig.overlap is not None
    made: list[int] = []
    apply = rig.overlap._stepper.apply
    monkeypatch.setattr(
        rig.overlap._stepper,
        "apply",
        lambda asked, params: (made.append(len(params)), apply(asked, params)),
    )
    arrivals.deliver("start.weight", "start.bias", "norm.weight", "last.weight")
    model(batches(1)[0])
    assert arrivals.waited[:2] == [("scale",), ("norm.bias",)]
    assert made == [4, 1, 2, 2, 1]


def test_modules_that_are_not_called_are_waited_for_around_them() -> None:
    model = Attention()
    arrivals, _, _ = begin(model)
    model(batches(1)[0])
    assert arrivals.waited[0] == ("extra.0", "extra.1")
    attention = next(
        names for names in arrivals.waited if "layer.self_attn.in_proj_weight" in names
    )
    assert "layer.self_attn.out_proj.weight" in attention


def test_shared_weights_wait_at_their_first_use() -> None:
    model = Tied()
    arrivals, _, _ = begin(model)
    model(batches(1)[0])
    assert arrivals.waited[1:] == [("one.weight", "one.bias"), ("two.bias",)]


def test_gradients_are_the_means_once_a_layer_was_entered() -> None:
    model = Net()
    _, _, optimizer = begin(model)
    model.start(torch.ones(1, 13))
    assert type(model.start.weight.grad) is Tensor
    assert isinstance(model.last.weight.grad, PendingGrad)
    optimizer.zero_grad()
    model.last(torch.ones(1, 16))
    assert model.last.weight.grad is None
    assert optimizer.state[model.last.weight]["momentum_buffer"].isfinite().all()


def test_a_gradient_is_freed_once_it_was_applied_and_cleared() -> None:
    model = Net()
    arrivals, _, optimizer = begin(model)
    arrivals.deliver("scale")
    gone = weakref.ref(arrivals.grads.pop("scale"))
    optimizer.zero_grad()
    assert gone() is not None
    model(batches(1)[0])
    assert gone() is None


def test_a_copy_of_the_model_has_all_updates_and_no_gates() -> None:
    model = Net()
    arrivals, _, _ = begin(model)
    twin = copy.deepcopy(model)
    assert (arrivals.waited, arrivals.num_finished) == ([], 1)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in twin.modules())
    assert all(type(p) is nn.Parameter for p in (*twin.parameters(), *model.parameters()))
    assert same(twin.state_dict(), model.state_dict())


class Methods(nn.Module):
    """Used through a method, so the root and its own parameter are never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(13))
        self.inner = nn.Linear(13, 5)

    def features(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale)  # type: ignore[no-any-return]


def through_a_method(model: nn.Module, optimizer: Optimizer, rig: Rig) -> None:
    assert isinstance(model, Methods)
    for x in batches(NUM_STEPS):
        model.features(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_parameters_of_no_called_module_are_updated_in_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    law(Methods(), momentum, through_a_method)
    assert "waits for the gradients of 1 parameters (scale" in caplog.text
    run(Methods(), momentum, through_a_method, arrivals := LateMeans())
    assert arrivals.waited[:2] == [("scale",), ("inner.weight", "inner.bias")]


# What is not used, and what takes turns.


def test_one_that_is_not_used_is_updated_all_the_same() -> None:
    def loop(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[Tensor]:
        assert isinstance(model, Net)
        seen = []
        for x in batches(NUM_STEPS):
            optimizer.zero_grad()
            hidden = model(x)
            seen.append(model.last.weight.detach().clone())
            loss = hidden.square().mean()
            loss.backward()
            optimizer.step()
        return seen

    law(Net(), momentum, loop)


def test_branches_that_take_turns() -> None:
    class Branches(Net):
        turn = 0

        def forward(self, x: Tensor) -> Tensor:
            self.turn += 1
            y = self.norm(torch.tanh(self.start(x * self.scale)))
            return self.last(self.body[0](y) if self.turn % 2 else self.body[2](y))  # type: ignore[no-any-return]

    overlap = law(Branches(), momentum, usual)
    assert overlap.fallbacks.total() == NUM_STEPS


def test_written_by_hand_after_synchronize_is_right() -> None:
    def loop(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[Tensor]:
        average = [p.detach().clone() for p in model.parameters()]
        for x in batches(NUM_STEPS):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
            rig.settle()
            with torch.no_grad():
                for mean, param in zip(average, model.parameters(), strict=True):
                    param.clamp_(-0.2, 0.2)
                    mean.lerp_(param, 0.5)
        return average

    law(Net(), momentum, loop)


def test_a_lost_peer_is_told_at_the_gate_and_at_a_look() -> None:
    model = Net()
    arrivals, rig, _ = begin(model)
    arrivals.lost = RankFailed("rank 1 of 2 stopped answering", ranks=(1,), step=4)
    with pytest.raises(RankFailed) as caught:
        model(batches(1)[0])
    assert caught.value is arrivals.lost
    assert model.last.weight.grad is not None
    with pytest.raises(RankFailed):
        model.last.weight.grad.sum()
    with pytest.raises(RankFailed):
        rig.settle()
    assert rig.overlap is not None
    with pytest.raises(RankFailed):
        rig.overlap.detach()
    assert all(type(param) is nn.Parameter for param in model.parameters())
    model(batches(1)[0])  # The gates are gone.


# Coming and going.


def test_detach_leaves_model_and_optimizer_as_they_were() -> None:
    model = Net()
    plain, optimizer = copy.deepcopy(model), momentum(model)
    before = set(vars(optimizer)), [len(m._forward_pre_hooks) for m in model.modules()]
    arrivals = LateMeans()
    rig = Rig(model, optimizer, arrivals)
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    assert rig.overlap is not None
    rig.overlap.detach()
    assert arrivals.num_finished == 1
    assert (
        set(vars(optimizer)) - {"_opt_called"},
        [len(m._forward_pre_hooks) for m in model.modules()],
    ) == before
    assert not any(m._forward_hooks or m._state_dict_pre_hooks for m in model.modules())
    expected = momentum(plain)
    loss_of(plain, batches(1)[0]).backward()
    for param in plain.parameters():
        assert param.grad is not None
        param.grad.mul_(0.75)
    expected.step()
    assert same(model.state_dict(), plain.state_dict())
    assert same(optimizer.state_dict(), expected.state_dict())


def test_a_dropped_model_is_freed() -> None:
    model = Net()
    _, rig, optimizer = begin(model)
    held, gone = model.last.weight.grad, weakref.ref(model)
    weight = model.last.weight
    del model, rig, optimizer
    gc.collect()
    assert gone() is None
    assert held is not None
    with pytest.raises(ValueError, match="never arrived"):
        held.sum()
    with pytest.raises(ValueError, match="last update was never made"):
        weight.sum()


def test_a_fall_back_is_logged_once_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    run(Net(), momentum, clipped, LateMeans())
    (record,) = caplog.records
    assert record.name == "gradwire"
    assert record.levelno == logging.WARNING
    assert "clip_grad_norm_ at overlapped.py" in record.getMessage()
    assert "optimizer=None" in record.getMessage()
    caplog.clear()
    run(Net(), momentum, usual, LateMeans())
    run(Net(), momentum, evaluating, LateMeans())
    assert not caplog.records
