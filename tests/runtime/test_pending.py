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
from torch import Tensor, nn

from gradwire.runtime.overlap.pending import PendingGrad, PendingPass, pending, stands_for
from tests.each import each

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
def test_a_parameter_of_any_dtype_takes_it_and_gives_it_back(dtype: torch.dtype) -> None:
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
    assert (grad.dim(), grad.ndim, grad.numel(), torch.numel(grad), len(grad)) == (2, 2, 6, 6, 2)
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

    assert reason(LOOKS["clip by norm"]).startswith("clip_grad_norm_ at test_pending.py:")
    assert reason(LOOKS["sum"]).startswith("sum at test_pending.py:")
    assert reason(LOOKS["foreach"]).startswith("_foreach_norm at test_pending.py:")
    assert reason(LOOKS["repr"]).startswith("__repr__ at test_pending.py:")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    told = reason(lambda s: scaler.unscale_(torch.optim.SGD([s.param])))
    assert told.startswith("unscale_ at test_pending.py:")


def test_what_settling_raises_comes_through() -> None:
    def settle(reason: str) -> None:
        raise OSError("no network")

    grad = pending(torch.ones(2), PendingPass(settle))
    with pytest.raises(OSError, match="no network"):
        grad.sum()
    with pytest.raises(OSError, match="no network"):
        repr(grad)
