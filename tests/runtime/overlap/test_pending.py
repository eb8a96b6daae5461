"""A pending gradient settles at the first look at its values, and only then."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim import Optimizer

from gradwire.errors import RankFailed
from gradwire.runtime.overlap.pending import (
    PendingGrad,
    PendingPass,
    pending,
    stands_for,
)
from tests.each import each
from tests.runtime.overlap.between_steps import (
    BETWEEN,
    averaged,
    averaged_at_once,
    clamped,
    copied,
)
from tests.runtime.overlap.gated_models import Net
from tests.runtime.overlap.late_means import (
    LateMeans,
    Loop,
    Make,
    Rig,
    batches,
    run,
    same,
)
from tests.runtime.overlap.overlapped import (
    NUM_STEPS,
    OPTIMIZERS,
    law,
    loss_of,
    momentum,
    usual,
)
from tests.runtime.overlap.test_overlap import begin

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class Stage:
    """A parameter whose gradient is NaN until it is settled, then all threes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.reasons: list[str] = []
        self.plain = torch.full((2, 3), float("nan"), dtype=dtype)
        self.param = nn.Parameter(torch.ones(2, 3, dtype=dtype))
        self.round = PendingPass(self._settle)
        self.param.grad = pending(self.plain, self.round)

    def _settle(self, reason: str) -> None:
        self.reasons.append(reason)
        self.plain.fill_(3.0)
        self.round.is_over = True

    @property
    def grad(self) -> Tensor:
        assert self.param.grad is not None
        return self.param.grad


@pytest.fixture
def stage() -> Stage:
    return Stage()


@each("dtype", DTYPES)
def test_a_parameter_of_any_dtype_takes_it_and_gives_it_back(
    dtype: torch.dtype,
) -> None:
    stage = Stage(dtype)
    gc.collect()
    assert stands_for(stage.param.grad, stage.plain)
    assert not stands_for(stage.param.grad, stage.plain.clone())
    assert not stands_for(stage.plain, stage.plain)
    assert stage.reasons == []


def test_what_needs_no_value_does_not_wait(stage: Stage) -> None:
    grad = stage.grad
    assert grad.shape == grad.size() == (2, 3)
    assert grad.dtype is torch.float32
    assert grad.device == stage.plain.device
    assert grad.layout is torch.strided
    assert (grad.dim(), grad.ndim, grad.numel(), torch.numel(grad), len(grad)) == (
        2,
        2,
        6,
        6,
        2,
    )
    assert grad.stride() == (3, 1)
    assert grad.is_contiguous()
    assert grad.is_floating_point()
    assert not grad.is_sparse
    assert not grad.is_cuda
    assert not grad.requires_grad
    assert grad.grad_fn is None
    assert {grad: 1}[grad] == 1
    assert isinstance(grad, Tensor)
    assert stage.reasons == []


LOOKS: dict[str, Callable[[Stage], Any]] = {
    "sum": lambda s: s.grad.sum(),
    "item": lambda s: s.grad[0, 0].item(),
    "repr": lambda s: repr(s.grad),
    "float": lambda s: float(s.grad.max()),
    "numpy": lambda s: s.grad.numpy(),
    "data_ptr": lambda s: s.grad.data_ptr(),
    "data": lambda s: s.grad.data,
    "detach": lambda s: s.grad.detach(),
    "dlpack": lambda s: torch.from_dlpack(s.grad),
    "storage": lambda s: s.grad.untyped_storage(),
    "deepcopy": lambda s: copy.deepcopy(s.grad),
    "pickle": lambda s: pickle.dumps(s.grad),
    "save": lambda s: torch.save({"grad": s.grad}, io.BytesIO()),
    "out": lambda s: torch.add(s.plain, 1, out=s.grad),
    "right operand": lambda s: 2 * s.grad,
    "other is plain": lambda s: torch.ones(2, 3) @ s.grad.T,
    "nested": lambda s: torch.stack([torch.cat([s.grad, s.grad])]),
    "foreach": lambda s: torch._foreach_norm([torch.ones(2), s.grad]),
    "foreach in place": lambda s: torch._foreach_mul_([s.grad], 2.0),
    "set item": lambda s: s.grad.__setitem__(0, 1.0),
    "zero": lambda s: s.grad.zero_(),
    "requires_grad": lambda s: s.grad.requires_grad_(False),
    "clip by norm": lambda s: nn.utils.clip_grad_norm_([s.param], 1.0),
    "clip by value": lambda s: nn.utils.clip_grad_value_([s.param], 1.0),
    "adamw": lambda s: torch.optim.AdamW([s.param], fused=True).step(),
    "module to": lambda s: nn.ParameterList([s.param]).to(torch.float64),
}


@each("look", LOOKS.values(), ids=[*LOOKS])
def test_a_look_at_values_settles_first(look: Callable[[Stage], Any]) -> None:
    stage = Stage()
    given = look(stage)
    assert len(stage.reasons) == 1
    assert not stage.plain.isnan().any()
    assert not isinstance(given, PendingGrad)
    if isinstance(given, Tensor):
        assert not given.isnan().any()


def test_what_is_written_into_it_is_written_into_the_gradient(stage: Stage) -> None:
    held = stage.grad
    held.mul_(2)
    assert torch.equal(stage.plain, torch.full((2, 3), 6.0))
    held += 1  # no longer pending, and still the same storage
    assert torch.equal(stage.plain, torch.full((2, 3), 7.0))
    assert len(stage.reasons) == 1


def test_autograd_adds_to_it_only_after_it_has_settled(stage: Stage) -> None:
    stage.param.mul(5.0).sum().backward()
    assert torch.equal(stage.plain, torch.full((2, 3), 8.0))
    assert len(stage.reasons) == 1


def test_the_reason_names_what_the_user_called_and_where() -> None:
    def reason(look: Callable[[Stage], Any]) -> str:
        stage = Stage()
        look(stage)
        return stage.reasons[0]

    assert reason(LOOKS["clip by norm"]).startswith(
        "clip_grad_norm_ at test_pending.py:"
    )
    assert reason(LOOKS["sum"]).startswith("sum at test_pending.py:")
    assert reason(LOOKS["foreach"]).startswith("_foreach_norm at test_pending.py:")
    assert reason(LOOKS["repr"]).startswith("__repr__ at test_pending.py:")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    reported = reason(lambda s: scaler.unscale_(torch.optim.SGD([s.param])))
    assert reported.startswith("unscale_ at test_pending.py:")


def test_what_settling_raises_comes_through() -> None:
    def settle(reason: str) -> None:
        raise OSError("no network")

    grad = pending(torch.ones(2), PendingPass(settle))
    with pytest.raises(OSError, match="no network"):
        grad.sum()
    with pytest.raises(OSError, match="no network"):
        repr(grad)


# ---- A parameter whose update is pending ---------------------------------------------


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
    assert list(overlap.fallbacks) == [
        "last.bias took no part in the backward pass on this rank"
    ]
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
    assert any("square at test_pending.py" in reason for reason in overlap.fallbacks)


def test_one_that_is_used_after_the_forward_pass_is_updated_there() -> None:
    """A loss that holds weights: they are pending still if no module of theirs was
    called.
    """

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
        assert (
            len(list(model.parameters())) == len(dict(model.named_parameters())) == 10
        )
        assert sum(p.numel() for p in model.parameters()) > 0
        optim.SGD(model.parameters(), lr=0.1).zero_grad()
        model.zero_grad()

    assert settles_at(Net(), look) == 0


LOOKS_AT_A_PARAMETER: dict[str, Any] = {
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


@each("look", LOOKS_AT_A_PARAMETER.values(), ids=[*LOOKS_AT_A_PARAMETER])
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
    with pytest.raises(
        RankFailed, match=r"last\.weight was used in the forward pass before its u"
    ):
        loss_of(model, batches(1)[0]).backward()
    assert rig.overlap is not None


def test_a_view_from_before_that_is_written_to_ends_the_run() -> None:
    model = Net()
    held = model.start.weight.detach()
    begin(model)
    held.clamp_(-0.1, 0.1)
    with pytest.raises(
        RankFailed, match=r"start\.weight was written between optimizer\.step\(\)"
    ):
        model(batches(1)[0])
