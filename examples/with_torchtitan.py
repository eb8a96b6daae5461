"""Local steps in the loop of torchtitan's trainer; --resume continues a checkpoint.

torchrun --nproc-per-node 2 examples/with_torchtitan.py --folder /tmp/titan --steps 20

``Trainer`` has the parts of torchtitan's trainer that matter here, by the same names:
model parts, a container of optimizers, gradient accumulation, a checkpointer with
states. torchtitan itself is not needed. ``Kept`` and ``LocalTrainer`` are all that
gradwire adds; over torchtitan derive the latter from ``torchtitan.train.Trainer``.
Among sites let torchtitan apply no ``replicate()``: gradwire exchanges in its place.

With ``--shard 2`` each site has two ranks, which hold one model by FSDP2. Over
torchtitan give ``fully_shard`` the dimension of shards alone, and not that of replicas.

torchrun --nproc-per-node 4 examples/with_torchtitan.py --folder /tmp/titan --shard 2
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import gradwire as gw


@dataclass
class Config:
    """The settings that torchtitan's ``JobConfig`` has in its sections."""

    folder: str
    steps: int
    resume: bool = False
    data_parallel_shard_degree: int = 1
    local_batch_size: int = 8
    accumulation_steps: int = 2
    max_norm: float = 1.0
    warmup_steps: int = 4
    checkpoint_interval: int = 10
    validation_freq: int = 10


class OptimizersContainer(Optimizer):
    """One optimizer of all, with an optimizer for each model part."""

    def __init__(self, model_parts: list[nn.Module], lr: float) -> None:
        self.model_parts = model_parts
        self.optimizers = [AdamW(part.parameters(), lr) for part in model_parts]
        params = [param for part in model_parts for param in part.parameters()]
        super().__init__(params, {"lr": lr})

    def step(self, *args: Any, **others: Any) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step(*args, **others)

    def zero_grad(self, *args: Any, **others: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **others)


class Checkpointer:
    """Saves and loads ``states`` by torch.distributed.checkpoint."""

    def __init__(self, config: Config, states: dict[str, Any]) -> None:
        self.config = config
        self.states = states

    def save(self, step: int, last_step: bool = False) -> None:
        if last_step or step % self.config.checkpoint_interval == 0:
            dcp.save(self.states, checkpoint_id=f"{self.config.folder}/step-{step}")

    def load(self) -> None:
        steps = [int(path.name[5:]) for path in Path(self.config.folder).glob("step-*")]
        if self.config.resume and steps:
            last = f"{self.config.folder}/step-{max(steps)}"
            dcp.load(self.states, checkpoint_id=last)


class Trainer:
    """The loop of torchtitan's trainer, for a small model."""

    def __init__(self, config: Config) -> None:
        self.config = config
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
        degree = config.data_parallel_shard_degree
        self.world_mesh = init_device_mesh(
            "cpu",
            (dist.get_world_size() // degree, degree),
            mesh_dim_names=("dp_replicate", "dp_shard"),
        )
        if degree > 1:
            fully_shard(model, mesh=self.world_mesh["dp_shard"])
        self.model_parts: list[nn.Module] = [model]
        self.optimizers = OptimizersContainer(self.model_parts, lr=1e-2)
        self.lr_schedulers = [
            LambdaLR(one, lambda step: min(1.0, (step + 1) / config.warmup_steps))
            for one in self.optimizers.optimizers
        ]
        self.step = 0
        states = {"model": model, "train_state": self}
        self.checkpointer = Checkpointer(config, states)

    def state_dict(self) -> dict[str, Any]:
        schedules = [
            schedule.state_dict()["last_epoch"] for schedule in self.lr_schedulers
        ]
        return {"step": self.step, "schedules": schedules}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        for schedule, last in zip(
            self.lr_schedulers, state_dict["schedules"], strict=True
        ):
            schedule.last_epoch = last

    def batch_generator(self) -> Iterator[Tensor]:
        place = self.step * self.config.accumulation_steps
        while True:
            seed = dist.get_world_size() * place + dist.get_rank()
            draws = torch.Generator().manual_seed(seed)
            yield torch.randn(self.config.local_batch_size, 16, generator=draws)
            place += 1

    def forward_backward_step(self, inputs: Tensor) -> Tensor:
        [model] = self.model_parts
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        loss = loss / self.config.accumulation_steps
        loss.backward()
        return loss.detach()

    def train_step(self, batches: Iterator[Tensor]) -> None:
        self.optimizers.zero_grad()
        for _ in range(self.config.accumulation_steps):
            self.forward_backward_step(next(batches))
        params = [p for part in self.model_parts for p in part.parameters()]
        nn.utils.clip_grad_norm_(params, self.config.max_norm)
        self.optimizers.step()
        for schedule in self.lr_schedulers:
            schedule.step()

    @torch.no_grad()
    def validate(self) -> float:
        [model] = self.model_parts
        inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(10**6))
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        return loss.item()

    def train(self) -> None:
        self.checkpointer.load()
        batches = self.batch_generator()
        while self.step < self.config.steps:
            self.step += 1
            self.train_step(batches)
            if self.step % self.config.validation_freq == 0:
                self.validate()
            self.checkpointer.save(self.step, last_step=self.step == self.config.steps)


class Kept:
    """What each rank has of its own, as one more state of the checkpointer."""

    def __init__(self, handle: Any, optimizers: OptimizersContainer) -> None:
        self.handle = handle
        self.optimizers = optimizers

    def state_dict(self) -> dict[str, bytes]:
        inner = [one.state_dict() for one in self.optimizers.optimizers]
        kept = {"gradwire": self.handle.state_dict(), "inner": inner}
        buffer = io.BytesIO()
        torch.save(kept, buffer)
        return {f"rank {dist.get_rank()}": buffer.getvalue()}

    def load_state_dict(self, state_dict: dict[str, bytes]) -> None:
        own = io.BytesIO(state_dict[f"rank {dist.get_rank()}"])
        kept = torch.load(own, weights_only=True)
        for one, state in zip(self.optimizers.optimizers, kept["inner"], strict=True):
            one.load_state_dict(state)
        self.handle.load_state_dict(kept["gradwire"])


class LocalTrainer(Trainer):
    """The trainer with local steps: these lines are gradwire's."""

    def __init__(self, config: Config, **settings: Any) -> None:
        super().__init__(config)
        [model] = self.model_parts
        # rank i of a site talks to rank i of the others
        sites = self.world_mesh["dp_replicate"]
        self.handle = gw.local_steps(
            model, self.optimizers, "uniform", group=sites, **settings
        )
        self.checkpointer.states["gradwire"] = Kept(self.handle, self.optimizers)

    def train(self) -> None:
        super().train()
        self.handle.end_period()  # all ranks have the same parameters now


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument(
        "--folder", required=True, help="where checkpoints are written"
    )
    options.add_argument("--steps", type=int, default=20, help="the last step")
    options.add_argument("--resume", action="store_true")
    options.add_argument("--shard", type=int, default=1, help="ranks of a site")
    options.add_argument("--quorum", type=int, help="default: all ranks in lock step")
    chosen = options.parse_args()
    dist.init_process_group("gloo")
    config = Config(chosen.folder, chosen.steps, chosen.resume, chosen.shard)
    settings: dict[str, Any] = {"quorum": chosen.quorum}
    if chosen.quorum is None:  # short periods in lock step want a slow momentum
        settings["outer"] = partial(torch.optim.SGD, lr=1.0, momentum=0.4)
    trainer = LocalTrainer(config, every=5, **settings)
    trainer.train()
    [model] = trainer.model_parts
    # all ranks of a site take part where it holds the model together
    loss = trainer.validate()
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    if dist.get_rank() == 0:
        bits = [float(param.detach().double().sum()).hex() for param in whole]
        print(f"step {trainer.handle.step}: loss {loss:.3f}")
        print("parameters", *bits)
    trainer.handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
