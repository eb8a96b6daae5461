"""What an optimizer did not take is put back, parameter by parameter; what it took stays sent.

The account: W x the sum of means that were taken + the residuals = the sum of gradients of the
steps that were taken. A step is what one optimizer does with one or several backward passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, Optimizer

import gradwire as gw
from tests.each import each
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks
from tests.runtime.training import ddp

pytestmark = pytest.mark.multi


TOPK = gw.compress.topk(density=0.1)


class Pair(nn.Module):
    """Two layers, for two optimizers, whose gradients are drawn and not computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(31))
        self.b = nn.Parameter(torch.zeros(17))

    def forward(self, drawn_a: Tensor, drawn_b: Tensor) -> Tensor:
        return self.a @ drawn_a + self.b @ drawn_b


def drawn(rank: int, step: int, infinite: str = "") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = torch.randn(31, generator=generator), torch.randn(17, generator=generator)
    for part, name in zip(found, "ab", strict=True):
        if name in infinite and rank == 0:
            part[step % 7] = torch.inf
    return found


class Account:
    """What gradients and means add up to in the steps that parameters took."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.pending = {param: torch.zeros_like(param) for param in params}
        self.given = {param: torch.zeros_like(param, dtype=torch.float64) for param in self.pending}
        self.means = {param: torch.zeros_like(param, dtype=torch.float64) for param in self.pending}

    def note(self, param: Tensor, grad: Tensor) -> None:
        self.pending[param] += grad

    def decide(self, grads: dict[Tensor, Tensor], *, is_taken: bool) -> None:
        for param, grad in grads.items():
            if is_taken:
                self.given[param] += self.pending[param]
                self.means[param] += grad
            self.pending[param].zero_()
            param.grad = None

    def error(self, residuals: dict[Tensor, Tensor]) -> float:
        """The largest part of a parameter's gradient sum, over all ranks, that is off."""
        errors = []
        for param, given in self.given.items():
            kept = residuals[param].double().view_as(given)
            both = torch.stack([given, kept])
            dist.all_reduce(both)
            off = dist.get_world_size() * self.means[param] + both[1] - both[0]
            errors.append(float(off.norm() / both[0].norm().clamp(min=1e-9)))
        return max(errors)


def residuals_of(*handles: Any) -> dict[Tensor, Tensor]:
    found = {}
    for handle in handles:
        for name, param in handle.synchroniser.params.items():
            zero = torch.zeros_like(param)
            found[param] = handle.residuals().get(name, zero)
    return found


def sgd(params: Iterable[Tensor], is_fused: bool = False) -> Optimizer:
    params = list(params)
    return Adam(params, lr=0.01, fused=True) if is_fused else SGD(params, lr=0.01)


def stepped(scaler: GradScaler, optimizer: Optimizer, account: Account) -> None:
    """One step of an optimizer by the scaler, which skips what is not finite."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = {param: param.grad / scaler.get_scale() for param in params if param.grad is not None}
    before = [param.detach().clone() for param in params]
    scaler.step(optimizer)
    is_taken = all(bool(grad.isfinite().all()) for grad in grads.values())
    are_as_before = all(map(torch.equal, params, before))
    assert is_taken or are_as_before, "torch skips what is not finite"
    account.decide(grads, is_taken=is_taken)


def several_optimizers(
    rank: int, world: int, exchange: Any, way: str, is_fused: bool
) -> tuple[float, str]:
    """An account where a step's inf is in one optimizer's parameters, in both's, in none."""
    net = Pair()
    model: Any = ddp(net) if way == "ddp" else net
    optimizers = [sgd([net.a], is_fused), sgd([net.b], is_fused)]
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    settings = {"on_failure": "shrink"} if way == "shrink" else {}
    handle = gw.attach(model, exchange, scaler=scaler, **keywords(compress_if=every, **settings))
    account = Account([net.a, net.b])
    for step, infinite in enumerate(["", "b", "a", "", "ab", "b", "", "a", "b"]):
        a, b = drawn(rank, step, infinite)
        account.note(net.a, a)
        account.note(net.b, b)
        scaler.scale(model(a, b)).backward()
        for optimizer in optimizers:
            stepped(scaler, optimizer, account)
        scaler.update()
    error = account.error(residuals_of(handle))
    handle.detach()
    return error, repr(sorted(vars(scaler)))


def every(name: str, param: Tensor) -> bool:
    return True


@each(
    "exchange, way, is_fused",
    [
        (TOPK, "module", False),
        (TOPK, "module", True),
        ("onebit", "ddp", False),
        ("onebit", "shrink", False),
        ("powersgd", "module", False),
    ],
)
def test_of_several_optimizers_only_the_skipped_one_is_undone(
    exchange: Any, way: str, is_fused: bool, two: Ranks
) -> None:
    bare = repr(sorted(vars(used_scaler())))
    for error, left in two.run(several_optimizers, exchange, way, is_fused):
        assert error < 1e-5
        assert left == bare, "detach gives the scaler its own methods back"


def used_scaler() -> GradScaler:
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return scaler
