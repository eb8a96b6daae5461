"""What torch.compile makes of loops, models and steps, while the forward pass is
overlapped.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradwire as gw
from tests.runtime.overlap.late_means import Loop, Rig, batches
from tests.runtime.overlap.overlapped import NUM_STEPS, law, loss_of, usual

# What torch's compiler imports the first time makes a class with what torch itself
# deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0"),
]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_step(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[float]:
    optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
    return usual(model, optimizer, rig)


def compiled_around_step(
    model: nn.Module, optimizer: Optimizer, rig: Rig
) -> list[float]:
    @torch.compile(backend="eager")
    def advance() -> None:
        optimizer.step()

    losses = []
    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        advance()
        losses.append(loss.item())
    return losses


def compiled_model(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[float]:
    return usual(torch.compile(model, backend="eager"), optimizer, rig)  # type: ignore[arg-type]


def compiled_average(model: nn.Module, optimizer: Optimizer, rig: Rig) -> list[Tensor]:
    average = [p.detach().clone() for p in model.parameters()]

    @torch.compile(backend="eager")
    def update() -> None:
        with torch.no_grad():
            for mean, param in zip(average, model.parameters(), strict=True):
                mean.lerp_(param, 0.5)

    for x in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        update()
    return average


def at_once(model: nn.Module) -> Optimizer:
    """As torch 2.9 compiles every SGD: parameter by parameter its eager step rounds
    otherwise.
    """
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 8), nn.Linear(8, 3))


@pytest.mark.parametrize("loop", [compiled_step, compiled_around_step, compiled_model])
def test_compiled_loops_overlap_every_forward_pass(loop: Loop) -> None:
    overlap = law(small(), at_once, loop)
    assert overlap.num_overlapped >= NUM_STEPS - 1
    assert not overlap.fallbacks


def test_a_compiled_average_settles() -> None:
    assert law(small(), at_once, compiled_average).fallbacks.total() == NUM_STEPS


def test_a_step_that_was_compiled_before_is_made_whole() -> None:
    def compiled(model: nn.Module) -> Optimizer:
        optimizer = at_once(model)
        optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
        return optimizer

    overlap = law(small(), compiled, usual)
    assert list(overlap.fallbacks) == [
        "optimizer.step was replaced by a function that is not torch's"
    ]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_autograd_is_refused_by_name() -> None:
    """Its backward pass calls nothing at its end, so the step would never be
    exchanged.
    """
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    handle = gw.attach(net, "topk")

    def step(x: Tensor) -> None:
        net(x).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(step, backend="eager")
        with pytest.raises(
            gw.RankFailed, match="compiled autograd runs this backward pass"
        ):
            compiled(torch.ones(2, 4))
    handle.detach()
