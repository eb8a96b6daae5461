"""Training by Ray Train, two workers, gradients in 4 bits; needs pip install
"ray[train]".

A run in the same folder goes on from Ray's newest checkpoint there, also after a
failure.

python examples/with_ray.py --folder /tmp/run --steps 20 --workers 2
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from ray import train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import gradwire as gw


def loop(settings: dict[str, Any]) -> None:
    """The life of a worker; Ray has made the process group."""
    rank = train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    handle = gw.attach(
        model, gw.compress.uniform(bitwidth=4)
    )  # in place of prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["gradwire"])  # takes this worker's part

    for step in range(handle.step, handle.step + settings["steps"]):
        draws = torch.Generator().manual_seed(2 * step + rank)
        inputs = torch.randn(32, 16, generator=draws)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    everything = handle.gather_state()  # on every worker; rank 0 gets all
    sums = [float(p.detach().double().sum()).hex() for p in model.parameters()]
    sent = handle.stats()["wire_bytes_per_step"]
    metrics = {
        "step": handle.step,
        "bytes": sent,
        "loss": loss.item(),
        "sums": " ".join(sums),
    }
    with tempfile.TemporaryDirectory() as folder:
        made = None
        if rank == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**states, "gradwire": everything}, Path(folder) / "state.pt")
            made = Checkpoint.from_directory(folder)
        train.report(metrics, checkpoint=made)


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--folder", required=True, help="where Ray writes checkpoints")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--workers", type=int, default=2)
    chosen = options.parse_args()
    result = TorchTrainer(
        loop,
        train_loop_config={"steps": chosen.steps},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=chosen.workers),
        run_config=RunConfig(
            name="gradwire", storage_path=str(Path(chosen.folder).resolve())
        ),
    ).fit()
    assert result.metrics is not None
    print(f"step {result.metrics['step']}: {result.metrics['bytes']:.0f} bytes a step")
    print("parameters", result.metrics["sums"])
