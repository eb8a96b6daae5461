"""Histories of trainings that are kept in files, and the layers of tasks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from gradwire_bench.workloads.task import TrainingTask
from gradwire_bench.workloads.train import History

from ..whole import write_whole


def kept(path: Path | None, train: Callable[[], History]) -> History:
    """The history of a training: read if the file is there, else trained now and kept.

    Args:
        path: Its file, None where no history is kept.
        train: Trains.
    """
    if path is not None and path.exists():
        fields = json.loads(path.read_text(encoding="utf-8"))
        scores = [(int(step), float(score)) for step, score in fields["scores"]]
        return History(**{**fields, "scores": scores})
    found = train()
    if path is not None:
        write_whole(path, json.dumps(asdict(found)).encode())
    return found


def layer_sizes(task: TrainingTask) -> tuple[int, ...]:
    """Elements of each tensor of the task's model, in the order in which they lie in a
    message.
    """
    with torch.device("meta"):  # neither memory nor random numbers
        model = task.make_model()
    return tuple(p.numel() for p in model.parameters() if p.requires_grad)
