"""Lightning's Trainer, with clipping and its own checkpoints."""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from one_run import Run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire.integrations.lightning import GradwireStrategy  # gradwire


class Sums(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch, index):
        inputs = run.batch(self.global_step, 16, 16)  # loaders begin anew after a resume
        return nn.functional.mse_loss(self.net(inputs), inputs.sum(1, keepdim=True))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


run = Run()
model = Sums()
strategy = DDPStrategy()  # native
strategy = GradwireStrategy("none")  # gradwire
saver = ModelCheckpoint(run.folder, "{step}", every_n_train_steps=run.save_at, save_top_k=-1)
trainer = Trainer(
    strategy=strategy,
    accelerator="cpu",
    devices=run.world,
    max_epochs=-1,
    max_steps=run.num_steps,
    gradient_clip_val=1.0,
    callbacks=[] if run.resumes else [saver],
    enable_checkpointing=not run.resumes,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
data = DataLoader(TensorDataset(torch.zeros(100)))
last = run.folder / f"step={run.save_at}.ckpt"
trainer.fit(model, data, ckpt_path=last if run.resumes else None, weights_only=True)
