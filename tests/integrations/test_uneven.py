"""Ranks with different numbers of batches, in each framework, with a quorum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradwire as gw
from tests.integrations.loops import DRAWS, launched, loss_of, net, skip_without
from tests.runtime.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.multi, pytest.mark.timeout(400)]

BEGIN = partial(gw.local_steps, exchange="uniform", every=3, quorum=1)
STEPS = (7, 13)
"""Batches of each rank."""


def ended(attachment: Any) -> tuple[int, int, list[Tensor], list[Tensor]]:
    handle = attachment.handle
    params = [param.detach().clone() for param in handle._model.parameters()]
    found = handle.step, handle.steps_of_all, params, [*handle.anchors().values()]
    handle.detach()
    return found


def by_accelerate(rank: int, world: int, folder: str) -> Any:
    launched(rank, world)
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from gradwire.integrations.accelerate import prepare

    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False)
    )
    attachment = prepare(accelerator, BEGIN)
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    # each rank has its own data, which Accelerate is not asked to cut
    data = DataLoader(TensorDataset(DRAWS[: 2 * STEPS[rank]]), batch_size=2)
    model, optimizer = accelerator.prepare(model, inner)
    for (inputs,) in data:
        accelerator.backward(loss_of(model, inputs))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(folder)
    return ended(attachment)


def by_fabric(rank: int, world: int, folder: str) -> Any:
    launched(rank, world)
    from lightning.fabric import Fabric

    from gradwire.integrations.lightning import GradwireFabric

    strategy = GradwireFabric(BEGIN)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    raw = net()
    model, optimizer = fabric.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.05))
    data = DataLoader(TensorDataset(DRAWS[: 2 * STEPS[rank]]), batch_size=2)
    for (inputs,) in fabric.setup_dataloaders(data, use_distributed_sampler=False):
        fabric.backward(loss_of(model, inputs))
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(Path(folder) / "fabric.ckpt", {"model": model})
    return ended(strategy.attachment)


def by_lightning(rank: int, world: int, folder: str) -> Any:
    launched(rank, world)
    from lightning.pytorch import LightningModule, Trainer

    from gradwire.integrations.lightning import GradwireStrategy

    class Sum(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return loss_of(self.net, batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    strategy = GradwireStrategy(BEGIN)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(DRAWS[: 2 * STEPS[rank]]), batch_size=2)
    trainer.fit(Sum(), data)
    trainer.save_checkpoint(Path(folder) / "last.ckpt")
    return ended(strategy.attachment)


def by_transformers(rank: int, world: int, folder: str) -> Any:
    launched(rank, world)
    from transformers import Trainer, TrainingArguments

    from gradwire.integrations.transformers import hook_trainer

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": loss_of(self.net, inputs)}

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            rows = [{"inputs": r, "labels": r.sum()} for r in DRAWS[: 2 * STEPS[rank]]]
            return DataLoader(rows, batch_size=2, collate_fn=self.data_collator)

    args = TrainingArguments(
        output_dir=folder,
        num_train_epochs=1,
        save_strategy="no",
        logging_strategy="no",
        average_tokens_across_devices=False,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    model = Sum()
    trainer = Own(
        model,
        args,
        train_dataset=[{"inputs": row, "labels": row.sum()} for row in DRAWS],
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.05), None),
    )
    attachment = hook_trainer(trainer, BEGIN)
    trainer.train()
    return ended(attachment)


@pytest.mark.parametrize(
    "train", [by_accelerate, by_fabric, by_lightning, by_transformers]
)
def test_ranks_of_other_lengths_end_with_the_same_parameters(
    train: Callable[..., Any], two: Ranks, tmp_path: Path
) -> None:
    skip_without(train)
    found = two.run(train, str(tmp_path), timeout_s=300.0)
    for rank, (step, steps_of_all, params, anchors) in enumerate(found):
        assert (step, steps_of_all) == (STEPS[rank], sum(STEPS))
        assert all(map(torch.equal, params, found[0][2]))
        assert all(map(torch.equal, params, anchors))
