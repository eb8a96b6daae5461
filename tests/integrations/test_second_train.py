"""A Trainer that trains again goes on with its residuals, by the same DDP model or a
new one.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from tests.runtime.ranks import Ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multi,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None,
        reason="transformers is not installed; run: pip install 'gradwire[frameworks]'",
    ),
]


def trains_twice(rank: int, world: int, folder: str, wraps_again: bool) -> list[Any]:
    """Steps and residuals after each of two trainings, and the parameters at the
    end.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    # the group is there already
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from gradwire.integrations.transformers import hook_trainer

    torch.manual_seed(0)
    small = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    words = torch.randint(0, 32, (64, 8), generator=torch.Generator().manual_seed(1))
    args = TrainingArguments(
        output_dir=folder,
        max_steps=3,
        save_strategy="no",
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    data = [{"input_ids": row, "labels": row} for row in words]
    trainer = Trainer(GPT2LMHeadModel(small), args, train_dataset=data)
    attachment = hook_trainer(trainer, gw.compress.topk(density=0.01))
    trainer.train()
    steps = [attachment.handle.step]
    if wraps_again:
        trainer.accelerator.free_memory()
        trainer.model_wrapped = trainer.model
    owed = attachment.handle.residuals()
    trainer.train()
    steps += [attachment.handle.step, len(attachment.handles)]
    bits = [p.detach().clone() for p in trainer.model.parameters()]
    attachment.handle.detach()
    return [steps, any(bool(one.any()) for one in owed.values()), bits]


def prepares_two(rank: int, world: int) -> int:
    """How many models are attached once two are prepared one by one."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    from accelerate import Accelerator

    from gradwire.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True)
    attachment = prepare(accelerator, gw.compress.topk(density=0.1))
    models = [accelerator.prepare(torch.nn.Linear(8, 8)) for _ in range(2)]
    assert all(isinstance(model, DistributedDataParallel) for model in models)
    return len(attachment.handles)


def test_a_second_model_leaves_the_first_one_attached(two: Ranks) -> None:
    assert two.run(prepares_two) == [2, 2]


@pytest.mark.parametrize("wraps_again", [False, True])
def test_a_second_train_goes_on(two: Ranks, tmp_path: Path, wraps_again: bool) -> None:
    found = two.run(trains_twice, str(tmp_path), wraps_again)
    for steps, owes, bits in found:
        assert steps == [3, 6, 1]
        assert owes
        assert all(map(torch.equal, bits, found[0][2]))
