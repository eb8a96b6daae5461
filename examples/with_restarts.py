"""Ends its training although rank 0 is killed, as torchrun starts all ranks again.

torchrun --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:29500
    --max-restarts 2 examples/with_restarts.py --folder /tmp/restarts

The agent of torchrun holds the store, so the store outlives rank 0. Rank 0 saves all
that a start goes on from in one file. To show a restart, it kills itself in the first
start.
"""

import argparse
import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw

NUM_STEPS = 100
KILLED_BEFORE = 45
SAVED_EVERY = 20


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # the agent's store, in which each start has a part of its own
    port = int(os.environ["MASTER_PORT"])
    agents = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)
    store = dist.PrefixStore(f"start {start}", agents)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    failure = gw.FailurePolicy(timeout=timedelta(minutes=2))
    handle = gw.attach(model, gw.compress.topk(density=0.25), failure=failure)
    file = folder / "state.pt"
    if file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["ranks"])
        print(f"rank {rank}: start {start} goes on from step {handle.step}", flush=True)
    weights = torch.linspace(-1, 1, 64).unsqueeze(1)
    draws = torch.Generator().manual_seed(1000 * start + rank)
    for step in range(handle.step, NUM_STEPS):
        if (rank, start, step) == (0, 0, KILLED_BEFORE):
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = torch.randn(32, 64, generator=draws)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs @ weights)
        loss.backward()
        optimizer.step()
        if (step + 1) % SAVED_EVERY == 0:
            states = handle.gather_state()
            if rank == 0:
                kept = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "ranks": states,
                }
                torch.save(kept, file.with_suffix(".new"))
                file.with_suffix(".new").replace(file)
    if rank == 0:
        print(f"loss {loss.item():.3f} after {handle.step} steps", flush=True)
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", type=Path, required=True)
    main(options.parse_args().folder)
