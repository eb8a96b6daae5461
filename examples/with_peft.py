"""Fine-tunes a language model's adapters over two sites: LoRA by PEFT, a mean in 4 bits
once in 20 steps.

torchrun --nproc-per-node 2 examples/with_peft.py

Two far hosts on one machine, beside one machine that trains on the same tokens:

gradwire testbed run --hosts 2 --rate 50mbit --delay 40 -- \\
    python examples/with_peft.py --width 256 --compare
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import tarfile
import time
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import gradwire as gw

CONTEXT = 64
RATE = 3e-3
SOURCES = inspect.getsource(argparse) + inspect.getsource(inspect)


def windows(text: str, count: int, seed: int) -> Tensor:
    """Random windows of a text, as bytes."""
    bytes_N = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(bytes_N) - CONTEXT, (count,), generator=generator)
    return torch.stack([bytes_N[at : at + CONTEXT].long() for at in starts.tolist()])


def trained_base(width: int, num_steps: int) -> LlamaForCausalLM:
    """The base model, which a real job loads from disk: each site has the same."""
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=43 * width // 16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
    )
    base = LlamaForCausalLM(sizes)
    optimizer = torch.optim.AdamW(base.parameters(), RATE)
    prose = "".join(topics.values())
    for step in range(num_steps):
        optimizer.zero_grad()
        words = windows(prose, 16, step)
        base(input_ids=words, labels=words).loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return base


def adapted(base: LlamaForCausalLM, seed: int) -> Any:
    """The base model with new adapters."""
    torch.manual_seed(seed)
    return get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))


class Data:
    """The batches of all sites: each site has its own in each step."""

    def __init__(self, chosen: argparse.Namespace, num_sites: int) -> None:
        self._first = chosen.seed * chosen.steps
        self._batch = chosen.batch
        self._num_sites = num_sites

    def of_site(self, step: int, site: int) -> Tensor:
        place = self._num_sites * (self._first + step) + site
        return windows(SOURCES, self._batch, place)

    def of_all(self, step: int) -> Tensor:
        return torch.cat([self.of_site(step, site) for site in range(self._num_sites)])


def held_out_loss(model: Any) -> float:
    words = windows(inspect.getsource(tarfile), 256, 0)
    with torch.no_grad():
        loss: float = model(input_ids=words, labels=words).loss.item()
    return loss


def by_one_machine(model: Any, data: Data, num_steps: int) -> float:
    """The loss of one machine that trains on the batches of all sites."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, RATE)
    for step in range(num_steps):
        optimizer.zero_grad()
        words = data.of_all(step)
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()
    return held_out_loss(model)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--base-steps", type=int, default=100)
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--width", type=int, default=64, help="of the base model")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--quorum", type=int, help="sites that a mean waits for")
    options.add_argument(
        "--compare", action="store_true", help="also train on one machine"
    )
    options.add_argument("--folder", help="where rank 0 saves the adapters")
    chosen = options.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = Data(chosen, dist.get_world_size())
    model = adapted(trained_base(chosen.width, chosen.base_steps), chosen.seed)

    # the lines of gradwire: this one, and end_period at the end
    optimizer, handle = gw.recipes.lora(model, lr=RATE, quorum=chosen.quorum)
    steps_s = []
    start_s = time.perf_counter()
    for step in range(chosen.steps):
        optimizer.zero_grad()
        words = data.of_site(step, rank)
        model(input_ids=words, labels=words).loss.backward()
        begin_s = time.perf_counter()
        optimizer.step()
        steps_s.append(time.perf_counter() - begin_s)
    begin_s = time.perf_counter()
    handle.end_period()  # all sites have the same adapters now
    end_s = time.perf_counter()

    if rank == 0:
        loss = held_out_loss(model)
        # An optimizer's step without an exchange is computation.
        alone_s = statistics.median(steps_s)
        waited_s = sum(max(0.0, took_s - alone_s) for took_s in steps_s)
        waited = (waited_s + end_s - begin_s) / (end_s - start_s)
        print(
            f"loss {loss:.3f}, {handle.stats()['wire_bytes_per_step']:.0f} bytes a "
            f"step, {end_s - start_s:.1f} s, of which {1 - waited:.1%} computing"
        )
        if chosen.folder:
            model.save_pretrained(chosen.folder)
    handle.detach()
    if rank == 0 and chosen.compare:
        again = adapted(trained_base(chosen.width, chosen.base_steps), chosen.seed)
        alone = by_one_machine(again, data, chosen.steps)
        print(f"one machine on equal tokens: loss {alone:.3f}, {loss / alone - 1:+.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
