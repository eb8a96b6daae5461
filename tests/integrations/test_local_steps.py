"""Local steps through each framework's adapter: ranks agree at its checkpoints, and go
on there.

An evaluation changes nothing.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from tests.runtime.ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.multi, pytest.mark.timeout(400)]

BEGIN = partial(gw.recipes.diloco, every=3, exchange="uniform")
DRAWS = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))


def launched(rank: int, world: int) -> None:
    """What a launcher leaves in the environment; the group is there already."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def by_accelerate(
    rank: int, world: int, folder: str, steps: int, resumes: bool
) -> list[Any]:
    launched(rank, world)
    from accelerate import Accelerator

    from gradwire.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True)
    attachment = prepare(accelerator, BEGIN)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    if resumes:
        accelerator.load_state(folder)
    for step in range(attachment.handle.step, steps):
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, DRAWS[step * 4 + rank * 2 :][:2]))
        optimizer.step()
    accelerator.save_state(folder)
    return reported(attachment, model)


def by_transformers(
    rank: int, world: int, folder: str, steps: int, resumes: bool, **settings: Any
) -> list[Any]:
    launched(rank, world)
    from transformers import Trainer, TrainingArguments

    from gradwire.integrations.transformers import hook_trainer

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": loss_of(self.net, inputs)}

    begin = settings.pop("begin", BEGIN)
    settings = {"save_strategy": "steps", "save_steps": 4, **settings}
    args = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        **settings,
        logging_steps=100,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        optim="sgd",
        lr_scheduler_type="constant",
        learning_rate=0.05,
        ddp_find_unused_parameters=False,
    )
    data = [{"inputs": row, "labels": row.sum()} for row in DRAWS]
    trainer = Trainer(Sum(), args, train_dataset=data, eval_dataset=data[:8])
    attachment = hook_trainer(trainer, begin)
    if rank == 0:
        attachment.log_to(trainer, every=1)
    trainer.train(resume_from_checkpoint=resumes or None)
    logged = [
        row["gradwire/step"]
        for row in trainer.state.log_history
        if "gradwire/step" in row
    ]
    assert logged or rank > 0
    return reported(attachment, trainer.model)


def by_lightning(
    rank: int, world: int, folder: str, steps: int, resumes: bool, **settings: Any
) -> list[Any]:
    launched(rank, world)
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from gradwire.integrations.lightning import GradwireStrategy

    class Sum(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return loss_of(self.net, batch[0])

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.log(
                "sum", sum(param.sum() for param in self.parameters()), sync_dist=True
            )

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    strategy = GradwireStrategy(settings.pop("begin", BEGIN))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=steps // 4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    data = DataLoader(TensorDataset(DRAWS[:16]), batch_size=2, shuffle=False)
    path, model = Path(folder) / "last.ckpt", Sum()
    trainer.fit(
        model, data, data, ckpt_path=path if resumes else None, weights_only=True
    )
    trainer.save_checkpoint(path)
    return reported(strategy.attachment, model)


def reported(attachment: Any, model: nn.Module) -> list[Any]:
    handle = attachment.handle
    bits = [param.detach().clone() for param in model.parameters()]
    anchors = list(handle.anchors().values())
    found = [handle.step, handle.stats()["exchanges"], bits, anchors]
    handle.detach()
    return found


@pytest.mark.parametrize("train", [by_accelerate, by_transformers, by_lightning])
def test_ranks_agree_at_checkpoints_and_go_on_there(
    train: Callable[..., list[Any]], two: Ranks, tmp_path: Path
) -> None:
    if importlib.util.find_spec(train.__name__.removeprefix("by_")) is None:
        pytest.skip("run: pip install 'gradwire[frameworks]'")
    for place, (steps, resumes, exchanges) in enumerate([(4, False, 2), (8, True, 2)]):
        found = two.run(train, str(tmp_path), steps, resumes)
        for step, num_exchanges, bits, anchors in found:
            assert (step, num_exchanges) == (steps, exchanges), place
            assert all(map(torch.equal, bits, found[0][2]))
            assert all(map(torch.equal, bits, anchors))
        parted = found
    whole = two.run(train, str(tmp_path / "whole"), 8, False)
    # others saved once, and so exchanged in other steps
    if train is not by_transformers:
        assert whole[0][:2] == [8, 3]
    else:
        assert whole[0][:2] == [8, 4]
        assert all(map(torch.equal, whole[0][2], parted[0][2]))


def evaluates(
    rank: int, world: int, folder: str, train: Callable[..., list[Any]], every: int
) -> None:
    """Trains with an evaluation in each of ``every`` steps, and without any."""
    begin = partial(gw.recipes.localsgd, every=16)
    off: dict[str, Any] = {"begin": begin}
    on: dict[str, Any] = {"begin": begin}
    if train is by_transformers:
        off |= {"save_strategy": "no"}
        on |= {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": every}
    else:
        off |= {"limit_val_batches": 0}
        on |= {"val_check_interval": every}
    expected = [40, 3]
    *counts, bits, anchors = train(rank, world, folder, 40, False, **off)
    assert counts == expected, counts
    assert all(param.isfinite().all() for param in bits)
    found = train(rank, world, folder, 40, False, **on)
    assert found[:2] == expected, found[:2]
    assert all(map(torch.equal, found[2], bits))
    assert all(map(torch.equal, found[3], anchors))


@pytest.mark.parametrize(
    ("train", "every"), [(by_transformers, 16), (by_transformers, 5), (by_lightning, 2)]
)
def test_an_evaluation_changes_nothing(
    train: Callable[..., list[Any]], every: int, two: Ranks, tmp_path: Path
) -> None:
    if importlib.util.find_spec(train.__name__.removeprefix("by_")) is None:
        pytest.skip("run: pip install 'gradwire[frameworks]'")
    two.run(evaluates, str(tmp_path), train, every)
