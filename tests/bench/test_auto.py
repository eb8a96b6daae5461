"""bench auto: its cells, and the rows that follow from what ranks measured."""

from __future__ import annotations

import torch

from gradwire_bench.auto.auto import MODELS
from gradwire_bench.training.tasks import make_task
from tests.each import each


@each("model", MODELS)
def test_every_model_learns_from_its_batches(model: str) -> None:
    task = make_task(MODELS[model])
    torch.manual_seed(0)
    net = task.make_model()
    loss = task.loss(net, *task.batch(0, 0, 4))
    loss.backward()
    assert all(param.grad is not None for param in net.parameters())
    assert not torch.equal(task.batch(0, 0, 4)[0], task.batch(0, 1, 4)[0])
