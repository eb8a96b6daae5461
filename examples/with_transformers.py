"""Training by Transformers' Trainer, a hundredth of each gradient; --resume goes on.

torchrun --nproc-per-node 2 examples/with_transformers.py --folder /tmp/run --steps 20
"""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gradwire as gw
from gradwire.integrations.transformers import hook_trainer

options = argparse.ArgumentParser()
options.add_argument("--folder", required=True, help="where checkpoints are written")
options.add_argument("--steps", type=int, default=20, help="the last step")
options.add_argument("--resume", action="store_true")
chosen = options.parse_args()

torch.manual_seed(0)
small = GPT2Config(
    vocab_size=64,
    n_positions=16,
    n_embd=32,
    n_layer=2,
    n_head=2,
    bos_token_id=0,
    eos_token_id=0,
)
model = GPT2LMHeadModel(small)
words = torch.randint(0, 64, (256, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in words]
args = TrainingArguments(
    output_dir=chosen.folder,
    max_steps=chosen.steps,
    save_steps=5,
    per_device_train_batch_size=4,
    use_cpu=True,
    lr_scheduler_type="constant",  # the default would end with --steps
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model, args, train_dataset=data)
gradwire = hook_trainer(trainer, gw.compress.topk(density=0.01))
trainer.train(resume_from_checkpoint=chosen.resume)

if trainer.is_world_process_zero():
    stats = gradwire.handle.stats()
    bits = [float(p.detach().double().sum()).hex() for p in model.parameters()]
    print(
        f"step {trainer.state.global_step}: {stats['wire_bytes_per_step']:.0f} "
        "bytes a step"
    )
    print("parameters", *bits)
