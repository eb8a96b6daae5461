"""Training by Lightning, its gradients through PowerSGD; --resume goes on from the
checkpoint.

python examples/with_lightning.py --folder /tmp/run --epochs 4
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradwire as gw
from gradwire.integrations.lightning import GradwireStrategy


class Sum(LightningModule):
    """Learns the sum of sixteen numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        inputs = batch[0]
        return nn.functional.mse_loss(self.net(inputs), inputs.sum(1, keepdim=True))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument(
        "--folder", required=True, help="where the checkpoint is written"
    )
    options.add_argument(
        "--epochs", type=int, default=4, help="the number of epochs in all"
    )
    options.add_argument("--resume", action="store_true")
    chosen = options.parse_args()
    strategy = GradwireStrategy(gw.compress.powersgd(rank=2))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=chosen.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Sum()
    inputs = torch.randn(160, 16, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(inputs), batch_size=16, shuffle=False)
    path = Path(chosen.folder) / "last.ckpt"
    trainer.fit(
        model, data, ckpt_path=path if chosen.resume else None, weights_only=True
    )
    trainer.save_checkpoint(path)
    if trainer.is_global_zero:
        stats = strategy.attachment.handle.stats()
        bits = [float(p.detach().double().sum()).hex() for p in model.parameters()]
        print(
            f"step {trainer.global_step}: {stats['wire_bytes_per_step']:.0f} "
            "bytes a step"
        )
        print("parameters", *bits)


if __name__ == "__main__":
    main()
