"""Accelerate: a loop that accumulates and clips, with its own checkpoints."""

import torch
from accelerate import Accelerator
from one_run import Run
from torch import nn

from gradwire.integrations.accelerate import prepare  # gradwire

run = Run()
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
gradwire = prepare(accelerator, "none")  # gradwire
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
if run.resumes:
    accelerator.load_state(run.folder)
for step in range(run.save_at if run.resumes else 0, run.num_steps):
    if step == run.save_at and not run.resumes:
        accelerator.save_state(run.folder)
    for part in range(2):
        with accelerator.accumulate(model):
            inputs = run.batch(2 * step + part, 16, 16)
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
