"""The loop of each framework, as tests run it on two ranks.

Each loop trains a small model by local steps, accumulates gradients over two batches,
and lets the framework step a schedule. It saves by the framework's own call, and
resumes by it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from gradwire.integrations.framework_attachment import FrameworkAttachment
from tests.runtime.meshes import mesh
from tests.runtime.training import digest

DRAWS = torch.randn(128, 16, generator=torch.Generator().manual_seed(1))
"""Rows of inputs; a row's target is its sum."""
RATE = 0.05
HALVED_AFTER = 6
"""Optimizer steps until the schedule halves the rate."""


def skip_without(train: Callable[..., Any]) -> None:
    """Skips a test if the framework of a loop is not installed."""
    name = train.__name__.removeprefix("by_")
    if importlib.util.find_spec({"fabric": "lightning"}.get(name, name)) is None:
        pytest.skip("run: pip install 'gradwire[frameworks]'")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))


def inner_of(model: nn.Module) -> torch.optim.SGD:
    """The framework's optimizer, which notes the parameters' bits after each step."""
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    seen: list[str] = []
    inner.register_step_post_hook(lambda *_: seen.append(digest(model)))
    inner.seen = seen  # type: ignore[attr-defined]
    return inner


def placed(in_hosts: bool) -> dict[str, Any]:
    """The arguments of islands: two hosts of two ranks, within which DDP averages."""
    if not in_hosts:
        return {}
    return {"mesh": mesh(), "process_group": mesh().get_group("local")}


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))


def batch(step: int, part: int, rank: int) -> Tensor:
    return DRAWS[(step * 8 + part * 4 + rank * 2) % 128 :][:2]


def launched(rank: int, world: int) -> None:
    """What a launcher leaves in the environment; the group is there already."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@contextmanager
def restored() -> Iterator[list[dict[str, Any]]]:
    """The states that handles have just after a framework has resumed."""
    found: list[dict[str, Any]] = []
    load = FrameworkAttachment.load_state_dict

    def noted(attachment: FrameworkAttachment, states: Any) -> None:
        load(attachment, states)
        found.extend(handle.state_dict() for handle in attachment.handles)

    with patch.object(FrameworkAttachment, "load_state_dict", noted):
        yield found


def reported(attachment: FrameworkAttachment, inner: Any) -> dict[str, Any]:
    """What a test compares; all ranks call it."""
    handle: Any = attachment.handle
    found = {
        "step": handle.step,
        "exchanges": handle.stats()["exchanges"],
        "params": [param.detach().clone() for param in handle._model.parameters()],
        "anchors": [anchor.clone() for anchor in handle.anchors().values()],
        "rate": inner.param_groups[0]["lr"],
        "seen": inner.seen,
        "state": handle.state_dict(),
        "residuals": handle.residuals(),
        "steps of all": getattr(handle, "steps_of_all", None),
    }
    handle.detach()
    return found


def by_accelerate(
    rank: int,
    world: int,
    begin: Any,
    folder: str,
    steps: int,
    resumes: bool,
    in_hosts: bool = False,
) -> dict[str, Any]:
    launched(rank, world)
    from accelerate import Accelerator

    from gradwire.integrations.accelerate import prepare

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False
    )
    attachment = prepare(accelerator, begin, **placed(in_hosts))
    model = net()
    inner = inner_of(model)
    schedule = StepLR(inner, HALVED_AFTER, gamma=0.5)
    model, optimizer, schedule = accelerator.prepare(model, inner, schedule)
    if resumes:
        accelerator.load_state(folder)
    for step in range(attachment.handle.step, steps):
        for part in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch(step, part, rank)))
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
    accelerator.save_state(folder)
    return reported(attachment, inner)


def by_fabric(
    rank: int,
    world: int,
    begin: Any,
    folder: str,
    steps: int,
    resumes: bool,
    in_hosts: bool = False,
) -> dict[str, Any]:
    launched(rank, world)
    from lightning.fabric import Fabric

    from gradwire.integrations.lightning import GradwireFabric

    strategy = GradwireFabric(begin, **placed(in_hosts))
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    raw = net()
    inner = inner_of(raw)
    schedule = StepLR(inner, HALVED_AFTER, gamma=0.5)
    model, optimizer = fabric.setup(raw, inner)
    kept = {"model": model, "optimizer": optimizer, "schedule": schedule}
    path = Path(folder) / "fabric.ckpt"
    if resumes:
        fabric.load(path, kept)
    for step in range(strategy.attachment.handle.step, steps):
        for part in range(2):
            with fabric.no_backward_sync(model, enabled=part == 0):
                fabric.backward(loss_of(model, batch(step, part, rank)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    fabric.save(path, kept)
    return reported(strategy.attachment, inner)


def by_transformers(
    rank: int,
    world: int,
    begin: Any,
    folder: str,
    steps: int,
    resumes: bool,
    in_hosts: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    launched(rank, world)
    from transformers import Trainer, TrainingArguments

    from gradwire.integrations.transformers import hook_trainer

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": loss_of(self.net, inputs)}

    usual = {"save_strategy": "steps", "save_steps": 4}
    settings = {**usual, "average_tokens_across_devices": False, **settings}
    args = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        **settings,
        logging_steps=100,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    data = [{"inputs": row, "labels": row.sum()} for row in DRAWS]
    model = Sum()
    inner = inner_of(model)
    schedule = StepLR(inner, HALVED_AFTER, gamma=0.5)
    trainer = Trainer(
        model,
        args,
        train_dataset=data,
        eval_dataset=data[:8],
        optimizers=(inner, schedule),
    )
    attachment = hook_trainer(trainer, begin, **placed(in_hosts))
    if rank == 0:
        attachment.log_to(trainer, every=1)
    trainer.train(resume_from_checkpoint=resumes or None)
    rows = trainer.state.log_history
    logged = [row["gradwire/step"] for row in rows if "gradwire/step" in row]
    assert logged or rank > 0
    return reported(attachment, inner)


def by_lightning(
    rank: int,
    world: int,
    begin: Any,
    folder: str,
    steps: int,
    resumes: bool,
    in_hosts: bool = False,
    **settings: Any,
) -> dict[str, Any]:
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
            inner = inner_of(self)
            schedule = StepLR(inner, HALVED_AFTER, gamma=0.5)
            return [inner], [{"scheduler": schedule, "interval": "step"}]

    strategy = GradwireStrategy(begin, **placed(in_hosts))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world,
        max_epochs=steps // 4,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    # four optimizer steps of two batches on each rank
    data = DataLoader(TensorDataset(DRAWS[: 16 * world]), batch_size=2, shuffle=False)
    path, model = Path(folder) / "last.ckpt", Sum()
    trainer.fit(
        model, data, data, ckpt_path=path if resumes else None, weights_only=True
    )
    trainer.save_checkpoint(path)
    return reported(strategy.attachment, trainer.optimizers[0])
