"""Replicas in one process are the replicas of any exchange: their mean is one process'
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from gradwire.compress.none import none
from gradwire.compress.topk import topk
from gradwire.contract import Exchange
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.error_feedback import residuals
from gradwire_bench.workloads.task import (
    Batch,
    TrainingTask,
    class_loss,
    mean_over,
    random_of,
)
from gradwire_bench.workloads.train import Replicas
from gradwire_lab.compress.deft import deft
from papers.workloads.kept import layer_sizes
from tests.each import each

WIDTH, CLASSES = 12, 4
WORLD = 4


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def draw(step: int, rank: int, world: int, batch: int = 8) -> Batch:
    """Which of the first inputs is the largest."""
    inputs = torch.randn(batch, WIDTH, generator=random_of(0, step, rank, world))
    return inputs, inputs[:, :CLASSES].argmax(1)


def task(seed: int = 0) -> TrainingTask:
    held_out = draw(1_000_000, 0, 1, batch=200)
    return TrainingTask(
        name="argmax",
        description="which input is the largest",
        make_model=make_model,
        make_optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        batch=draw,
        loss=class_loss,
        score=lambda model: mean_over(model, class_loss, held_out, 64),
        metric="loss",
        seed=seed,
    )


EXCHANGES: dict[str, Callable[[], Exchange]] = {
    "none": lambda: exchange_for(none()),
    "topk": lambda: exchange_for(topk(density=0.1)),
    "deft": lambda: exchange_for(deft(density=0.1, layers=layer_sizes(task()))),
}


def parameters_of(replicas: Replicas) -> torch.Tensor:
    return nn.utils.parameters_to_vector(replicas.model.parameters()).detach()


@pytest.mark.smoke
def test_dense_replicas_are_one_process_with_the_whole_batch() -> None:
    replicas = Replicas(task(), exchange_for(none()), WORLD)
    for _ in range(5):
        replicas.step()
    torch.manual_seed(0)
    model = make_model()
    optimizer = task().make_optimizer(model.parameters())
    for step in range(5):
        optimizer.zero_grad()
        class_loss(model, *task().examples(step, WORLD)).backward()
        optimizer.step()
    alone = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(parameters_of(replicas), alone, rtol=1e-4, atol=1e-6)
    assert replicas.history.actual == [1.0] * 5
    assert replicas.history.errors == [0.0] * 5


@each("as_attached", [False, True])
@each("name", EXCHANGES)
def test_nothing_is_lost_over_steps(name: str, as_attached: bool) -> None:
    """The gradients that went in are W times the means and what residuals still
    hold.
    """
    if name == "deft" and as_attached:
        return  # its layers are those of the whole model here
    replicas = Replicas(task(), EXCHANGES[name](), WORLD, as_attached=as_attached)
    given = torch.zeros_like(replicas.gradients[0], dtype=torch.float64)
    taken = torch.zeros_like(given)
    for _ in range(6):
        before = replicas.step_index
        replicas.backward()
        given += replicas.gradients.double().sum(0)
        assert replicas.step_index == before
        replicas.step()  # draws the same batches once more
        taken += WORLD * replicas.gradients[0].double()
    for states in replicas.states:
        parts = torch.split(
            taken, [message.spec.numel for message in replicas.messages]
        )
        for part, state in zip(parts, states, strict=True):
            for residual_N in residuals(state).values():
                part += residual_N
    torch.testing.assert_close(taken, given, rtol=1e-4, atol=1e-5)


def test_loss_goes_down_and_a_second_run_is_the_same() -> None:
    first, second = (Replicas(task(), EXCHANGES["deft"](), WORLD) for _ in range(2))
    for _ in range(40):
        first.step()
    for _ in range(5):
        second.step()
    losses = first.history.losses
    assert losses[:5] == second.history.losses
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
