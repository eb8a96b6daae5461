"""Fine-tunes a language model's adapters over two sites: LoRA by PEFT, a mean in 4 bits
once in 20 steps.

torchrun --nproc-per-node 2 examples/with_peft.py

Two far hosts on one machine:

gradwire testbed run --hosts 2 --rate 50mbit --delay 40 -- python examples/with_peft.py
"""

from __future__ import annotations

import argparse
import inspect
import tarfile
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import gradwire as gw

CONTEXT = 64
SIZES = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=172,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=CONTEXT,
)


def windows(text: str, count: int, seed: int) -> Tensor:
    """Random windows of a text, as bytes."""
    bytes_N = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(bytes_N) - CONTEXT, (count,), generator=generator)
    return torch.stack([bytes_N[at : at + CONTEXT].long() for at in starts.tolist()])


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--base-steps", type=int, default=100)
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--folder", help="where rank 0 saves the adapters")
    chosen = options.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    # The base model, which a real job loads from disk: each site has the same.
    torch.manual_seed(0)
    base = LlamaForCausalLM(SIZES)
    optimizer = torch.optim.AdamW(base.parameters(), 3e-3)
    prose = "".join(topics.values())
    for step in range(chosen.base_steps):
        optimizer.zero_grad()
        words = windows(prose, 16, step)
        base(input_ids=words, labels=words).loss.backward()
        optimizer.step()
    optimizer.zero_grad()

    torch.manual_seed(chosen.seed)
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))
    optimizer, handle = gw.recipes.lora(model, lr=3e-3)
    sources = inspect.getsource(argparse) + inspect.getsource(inspect)
    start_s = time.perf_counter()
    for step in range(chosen.steps):
        optimizer.zero_grad()
        place = dist.get_world_size() * (chosen.seed * chosen.steps + step) + rank
        words = windows(sources, chosen.batch, place)  # each site has its own
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()
    handle.end_period()  # all sites have the same adapters now
    seconds = time.perf_counter() - start_s
    if rank == 0:
        held_out = windows(inspect.getsource(tarfile), 256, 0)
        with torch.no_grad():
            loss = model(input_ids=held_out, labels=held_out).loss.item()
        stats = handle.stats()
        waited = stats["wait_s_per_step"] * chosen.steps / seconds
        print(
            f"loss {loss:.3f}, {stats['wire_bytes_per_step']:.0f} bytes a step, "
            f"{seconds:.1f} s, of which {waited:.0%} waited for the other site"
        )
        if chosen.folder:
            model.save_pretrained(chosen.folder)
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
