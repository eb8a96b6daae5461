"""One rank of ``bench train --rate``: trains one model by each method, in turn, against
the clock.

Methods take turns of a few steps each, so that all of them see the same moods of the
machine. The clock stands still, and no byte is counted, while models are scored.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ..report.live import write_points
from ..testbed.ranks import Json, Report, counted
from .tasks import make_task
from .trainer import Trainer
from .trainers import start


def measure(settings: Json, report: Report) -> list[list[dict[str, float]]]:
    """The points of each of ``settings["entrants"]``: pairs of a method and a factor of
    the rate.

    A point has the steps done, this rank's seconds and bytes up to there, and rank 0's
    held-out loss. Rank 0 writes all points to the file ``settings["live"]``, if any.
    """
    torch.set_num_threads(1)
    sys.path += settings["peers"]
    steps = settings["steps"]
    every = settings["every"]
    live = None
    if dist.get_rank() == 0:
        live = settings["live"]
    entrants = settings["entrants"]
    trainers = [_started(settings, name, factor) for name, factor in entrants]
    points: list[list[dict[str, float]]] = [[_point(trainer)] for trainer in trainers]
    for turn in range(steps // every):
        for place, trainer in enumerate(trainers):
            done = (turn + place / len(trainers)) * every / steps
            report(done, f"{entrants[place][0]}, step {turn * every} of {steps}")
            seconds, moved = counted(partial(_take_steps, trainer, every))
            last = points[place][-1]
            sent_bytes = last["sent_bytes"] + moved.tx_bytes
            points[place].append(_point(trainer, last["seconds"] + seconds, sent_bytes))
            if live:
                write_points(Path(live), points)
    return points


def _started(settings: Json, name: str, factor: float) -> Trainer:
    task = make_task(
        settings["task"],
        settings["optimizer"],
        times_rate=factor,
        seed=settings["seed"],
    )
    return start(name, task, settings["steps"])


def _take_steps(trainer: Trainer, num_steps: int) -> None:
    """Takes steps, up to the end of all ranks' last one."""
    for _ in range(num_steps):
        trainer.step()
    dist.barrier()


def _point(
    trainer: Trainer, seconds: float = 0.0, sent_bytes: float = 0.0
) -> dict[str, float]:
    """All ranks hold one model here; rank 0 scores it, as the others would find the
    same.
    """
    loss = 0.0
    if dist.get_rank() == 0:
        loss = trainer.task.score(trainer.plain)
    return {
        "step": trainer.steps_done,
        "seconds": seconds,
        "sent_bytes": sent_bytes,
        "loss": loss,
    }
