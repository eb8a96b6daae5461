"""A program that torchrun starts: it saves each step in one file, and dies once.

It resumes where the last file was saved, and then trains anew without a stop, to compare.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import gradwire as gw
from tests.runtime.given import SMALL
from tests.runtime.training import TOPK, Net, digest, momentum, train

NUM_STEPS, LAST = 6, 3
"""The steps of the training, and the one after which a rank dies."""


def main(folder: Path) -> None:
    start = os.environ["TORCHELASTIC_RESTART_COUNT"]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in os.environ:  # each start has a store of its own
        dist.init_process_group("gloo")
    else:
        # torch leaves addresses of ranks that are gone in the agent's store, and may try them.
        agents = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store = dist.PrefixStore(f"start {start}", agents)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    net, path = Net(), folder / "checkpoint.pt"
    optimizer = momentum(net.parameters())
    handle = gw.attach(net, TOPK, options=SMALL)
    if path.exists():
        found = torch.load(path, weights_only=True)
        net.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        handle.load_state_dict(found["gradwire"])
    began = handle.step
    while handle.step < NUM_STEPS:
        train(net, optimizer, rank, [handle.step])
        state = handle.gather_state()
        if rank == 0:
            parts = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**parts, "gradwire": state}, folder / "part")
            (folder / "part").replace(path)
        if handle.step == LAST and start == "0":
            dist.barrier()  # all has been saved
            if rank == 1:
                os._exit(3)
    handle.detach()
    whole = Net()
    gw.attach(whole, TOPK, options=SMALL)
    train(whole, momentum(whole.parameters()), rank, range(NUM_STEPS))
    same = digest(net) == digest(whole)
    (folder / f"rank-{rank}").write_text(f"start {start} began at {began}, same bits: {same}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
