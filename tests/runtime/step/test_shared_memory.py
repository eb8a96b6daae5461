"""Gradients whose memory others look at during the backward pass, or hold between
steps.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.contract import Exchange, Result, State
from gradwire.contract.spec import TensorSpec
from gradwire.contract.verbs import Compute, Steps
from gradwire.runtime.engine.engine import COMPUTE
from gradwire.runtime.transport.task_graph import Task
from tests.each import each
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks
from tests.runtime.training import DENSE, ONEBIT, loss_of


class erased(Exchange):
    """Makes every mean zero, so that a gradient that has its mean can be told from one
    that has not.
    """

    def init(self, spec: TensorSpec, world: int) -> State:
        return None

    def run(self, rank: int, world: int, state: State, grad_N: Tensor) -> Steps[Result]:
        mean_N = yield Compute("erase", lambda: torch.zeros_like(grad_N))
        return mean_N, grad_N, state


def drain(handle: gw.Handle) -> None:
    """Waits for all that the compute lane can do by now."""
    last = Task("last", lambda: None, COMPUTE, order=(handle.step + 1,))
    handle._engine.wait([handle._engine.begin(last)])


class Late(torch.autograd.Function):
    """The identity, whose backward waits for what was launched before it."""

    handles: ClassVar[list[gw.Handle]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        drain(Late.handles[-1])
        return grad


class Joined(nn.Module):
    """The gradients of ``top`` and ``low`` are parts of the one that ``weight``'s comes
    from.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.top, self.low = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        late: Tensor = Late.apply(x @ self.weight)  # type: ignore[no-untyped-call]
        return torch.cat([self.top, self.low]) + late


@each("cap_mb", [None, 1e-6], ids=["fused", "apart"])
def test_a_mean_is_not_written_where_the_backward_pass_still_reads(
    cap_mb: float | None,
) -> None:
    net, x = Joined(), torch.randn(8, 4)
    handle = gw.attach(
        net,
        erased(),
        **keywords(bucket_cap_mb=cap_mb, compress_if=lambda name, _: name != "weight"),
    )
    Late.handles.append(handle)
    out = net(x)
    out.square().sum().backward()
    handle.detach()
    assert net.weight.grad is not None
    assert net.top.grad is not None
    assert net.low.grad is not None
    assert torch.allclose(net.weight.grad, x.t() @ (2 * out.detach()))
    assert not net.top.grad.any()
    assert not net.low.grad.any()


def test_a_later_hook_sees_the_gradient_of_its_own_rank() -> None:
    net = nn.Linear(3, 4, bias=False)
    seen: list[Tensor] = []
    handle = gw.attach(net, erased())

    def look(weight: Tensor) -> None:
        drain(handle)
        assert weight.grad is not None
        seen.append(weight.grad.clone())

    hook = net.weight.register_post_accumulate_grad_hook(look)
    net(torch.ones(2, 3)).sum().backward()
    assert seen[0].tolist() == [[2.0] * 3] * 4
    assert net.weight.grad is not None
    assert not net.weight.grad.any()
    hook.remove()
    handle.detach()


def held(rank: int, world: int, exchange: Exchange, to_none: bool) -> bool:
    """Whether what was held of a gradient is, after three steps, what plain training
    leaves.
    """
    net = nn.Sequential(nn.Linear(13, 40), nn.ReLU(), nn.Linear(40, 5))
    weight = net.get_parameter("2.weight")
    handle = gw.attach(net, exchange)
    holds: list[tuple[Tensor, Tensor]] = []
    for step in range(3):
        net.zero_grad(set_to_none=to_none)
        loss_of(net, rank, step).backward()
        assert weight.grad is not None
        view = weight.grad.detach().view(-1)
        assert torch.equal(view, weight.grad.view(-1))
        if not to_none:
            assert all(torch.equal(other, view) for other, _ in holds)
        holds.append((view, view.clone()))
    handle.detach()
    return all(torch.equal(view, copy) for view, copy in holds) == to_none


@pytest.mark.multi
@each("exchange", [DENSE, ONEBIT], ids=["dense", "onebit"])
@each("to_none", [True, False])
def test_what_is_held_of_a_gradient_is_as_in_plain_training(
    exchange: Exchange, to_none: bool, two: Ranks
) -> None:
    """A gradient that was set to None is nobody else's; one that was zeroed is the same
    again.
    """
    assert two.run(held, exchange, to_none) == [True, True]


def test_an_earlier_hook_keeps_nothing_from_being_lent() -> None:
    net = nn.Linear(3, 4, bias=False)
    net.weight.register_post_accumulate_grad_hook(lambda weight: None)  # type: ignore[no-untyped-call]
    handle = gw.attach(net, "none")
    net(torch.ones(2, 3)).sum().backward()
    assert "scatter" not in {span.name for span in handle.trace().spans}
    handle.detach()
