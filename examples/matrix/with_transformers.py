"""Transformers' Trainer on a small GPT-2, with its own checkpoints."""

import torch
from one_run import Run
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gradwire.integrations.transformers import hook_trainer  # gradwire

run = Run()
small = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)
model = GPT2LMHeadModel(small)
words = torch.randint(32, (64, 8), generator=torch.Generator().manual_seed(run.seed))
args = TrainingArguments(
    output_dir=run.folder,
    max_steps=run.num_steps,
    save_steps=run.save_at,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model, args, train_dataset=[{"input_ids": one, "labels": one} for one in words])
gradwire = hook_trainer(trainer, "none")  # gradwire
last = run.folder / f"checkpoint-{run.save_at}"
trainer.train(resume_from_checkpoint=str(last) if run.resumes else None)
