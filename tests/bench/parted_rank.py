"""A rank program: local steps with a quorum among hosts whose network parts and heals.

Files of a folder say what has happened, as no network connects the two sides.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradwire as gw
from tests.runtime.local_steps.test_partial_steps import prepared
from tests.runtime.training import digest, train


def run(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    failure = gw.FailurePolicy(on_failure="shrink", timeout=timedelta(seconds=40))
    net, optimizer, handle = prepared(exchange="topk", fragments=4, failure=failure)

    def train_until(ready: Callable[[], bool]) -> None:
        while not ready():
            train(net, optimizer, rank, [handle.step])

    train_until(lambda: handle.stats()["exchanges"] >= 3)
    (folder / f"{rank} has begun").touch()
    train_until(lambda: bool(handle.stats()["left"]))
    before = handle.stats()["exchanges"]
    train(net, optimizer, rank, range(handle.step, handle.step + 40))
    merged_alone = handle.stats()["exchanges"] - before
    (folder / f"{rank} has lost").touch()

    def is_whole() -> bool:
        joined = handle.stats()["joined"]
        return bool(joined) and all(one["counted_s"] for one in joined)

    train_until(is_whole)
    (folder / f"{rank} is whole").touch()
    train_until(lambda: len([*folder.glob("* is whole")]) == dist.get_world_size())
    handle.end_period()
    stats = handle.stats()
    report = {
        "bits": digest(net),
        "anchors": digest(handle.anchors().values()),
        "left": [one["ranks"] for one in stats["left"]],
        "joined": stats["joined"],
        "has_quorum": stats["has_quorum"],
        "merged_alone": merged_alone,
        "steps_of_all": handle.steps_of_all,
        "step": handle.step,
    }
    handle.detach()
    return report


if __name__ == "__main__":
    found = run(Path(sys.argv[1]))
    path = Path(sys.argv[1]) / f"report {os.environ['RANK']}.json"
    path.write_text(json.dumps(found))
