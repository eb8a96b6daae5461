"""Trainers: models that train on real ranks, by gradwire's methods and by what torch itself has.

Whatever is not an exchange beneath an optimizer is a line in ``OTHERS``: a function that starts it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from ..compress.none import none
from ..compress.sparseloco import sparseloco
from ..contract import Compressor
from ..errors import InvalidSetting, invalid
from ..load import load
from ..runtime.attach import attach
from ..runtime.local_steps import local_steps
from ..workloads.task import TrainingTask
from ..workloads.train import Schedule
from .methods import method
from .peers import PEERS, RANK, joined
from .trainer import Trainer

PERIOD = 20
"""Local steps between two averages of parameters, where a method takes local steps."""


Start = Callable[[TrainingTask, int], Trainer]
"""A function that makes a trainer of a task for so many steps; all ranks call it together."""


def start(name: str, task: TrainingTask, num_steps: int) -> Trainer:
    """The trainer of a name in ``OTHERS`` or ``PEERS``, or of a method of ``bench.methods``."""
    if name in OTHERS:
        return OTHERS[name](task, num_steps)
    if name in PEERS:
        plain = _first_values(task)
        return joined(name, _trainer(task, plain, plain, num_steps), PERIOD)
    recipe = method(name)(task, num_steps)
    plain = _first_values(task)
    attach(plain, recipe.exchange)
    return _trainer(recipe.task, plain, plain, num_steps)


def check_trainer(name: str) -> None:
    """Raises ``InvalidSetting`` for a name of no trainer."""
    if name in OTHERS or name in PEERS:
        return
    try:
        method(name)
    except InvalidSetting as error:
        raise invalid(
            "method", name, f"{', '.join((*OTHERS, *PEERS))} or a method", str(error)
        ) from None


def _first_values(task: TrainingTask) -> nn.Module:
    torch.manual_seed(task.seed)
    return task.make_model()


def _trainer(task: TrainingTask, model: nn.Module, plain: nn.Module, num_steps: int) -> Trainer:
    optimizer = task.make_optimizer(plain.parameters())
    return Trainer(task, model, plain, optimizer, Schedule(num_steps, num_steps // 10))


def _ddp(
    task: TrainingTask, num_steps: int, state: object = None, hook: Any = None, **settings: Any
) -> Trainer:
    plain = _first_values(task)
    model = DistributedDataParallel(plain, **settings)
    if hook is not None:
        model.register_comm_hook(state, hook)
    return _trainer(task, model, plain, num_steps)


def _ddp_fp16(task: TrainingTask, num_steps: int) -> Trainer:
    return _ddp(task, num_steps, None, default_hooks.fp16_compress_hook)


def _ddp_powersgd(task: TrainingTask, num_steps: int) -> Trainer:
    """Torch's PowerSGD, which begins with the full learning rate, in one bucket.

    With more buckets it hangs on gloo: collectives of one bucket wait in callbacks for another's.
    """
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=RANK, start_powerSGD_iter=num_steps // 10
    )
    return _ddp(task, num_steps, state, powerSGD_hook.powerSGD_hook, bucket_cap_mb=1e6)


def _ddp_local_sgd(task: TrainingTask, num_steps: int) -> Trainer:
    """Torch's post-local SGD: DDP at first, then ``PERIOD`` local steps between two averages.

    Averages fall on multiples of ``PERIOD``, where models are scored.
    """
    first = PERIOD * max(1, round(num_steps / 10 / PERIOD)) - 1
    alone, _ = dist.new_subgroups(group_size=1)  # type: ignore[no-untyped-call]
    state = PostLocalSGDState(  # type: ignore[no-untyped-call]
        None, alone, first, post_local_gradient_allreduce=False
    )
    made = _ddp(task, num_steps, state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=first)
    made.after_step = lambda: averager.average_parameters(made.plain.parameters())
    return made


def _local_steps(
    task: TrainingTask, num_steps: int, compressor: Compressor | None = None
) -> Trainer:
    """DiLoCo: ``PERIOD`` local steps, then pseudo-gradients are exchanged."""
    plain = _first_values(task)
    made = _trainer(task, plain, plain, num_steps)
    local_steps(plain, made.optimizer, none() if compressor is None else compressor, every=PERIOD)
    return made


def _local_steps_4bit(task: TrainingTask, num_steps: int) -> Trainer:
    return _local_steps(task, num_steps, load("compress", "uniform")(bitwidth=4))


def _local_steps_sparse(task: TrainingTask, num_steps: int) -> Trainer:
    """SparseLoCo: 2 bits of each element that is kept."""
    return _local_steps(task, num_steps, sparseloco())


def _auto(task: TrainingTask, num_steps: int) -> Trainer:
    """Gradwire's own choice, which begins with dense steps that measure."""
    plain = _first_values(task)
    attach(plain, "auto")
    return _trainer(task, plain, plain, num_steps)


DDP = "ddp"
"""The trainer that others are compared with."""
OTHERS: dict[str, Start] = {
    DDP: _ddp,
    "ddp-fp16": _ddp_fp16,
    "ddp-powersgd": _ddp_powersgd,
    "ddp-local_sgd": _ddp_local_sgd,
    "auto": _auto,
    "local_steps": _local_steps,
    "local_steps-4bit": _local_steps_4bit,
    "local_steps-sparse": _local_steps_sparse,
}
"""Trainers by name, beside the methods: torch's own, and what takes local steps."""
