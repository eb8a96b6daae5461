"""Trainers: models that train on real ranks, by gradwire's methods and by what torch
itself has.

Whatever is not an exchange beneath an optimizer is a line in ``OTHERS``: a function
that starts it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from gradwire.compress.none import none
from gradwire.contract import Compressor
from gradwire.contract.registry import load
from gradwire.errors import InvalidSetting, invalid
from gradwire.runtime.attach import attach
from gradwire.runtime.local_steps import recipes
from gradwire_lab.compress.sparseloco import sparseloco

from ..workloads.task import TrainingTask
from ..workloads.train import Schedule
from .methods import method
from .peers import PEERS, joined
from .trainer import Trainer, rate_of_adamw, under_ddp, under_powersgd

RANK = 4
"""The rank of PowerSGD: that of gradwire's default."""
PERIOD = 20
"""Local steps between two exchanges, where a method takes local steps and its name says
no other period behind an @.
"""

Start = Callable[[TrainingTask, int, int], Trainer]
"""A function that makes a trainer of a task for so many steps; all ranks call it
together. The last argument is the period of local steps.
"""


def start(name: str, task: TrainingTask, num_steps: int) -> Trainer:
    """The trainer of a name in ``OTHERS`` or ``PEERS``, or of a method of
    ``methods``.
    """
    base, period = split_period(name)
    if base in OTHERS:
        return OTHERS[base](task, num_steps, period)
    if base in PEERS:
        plain = _first_values(task)
        return joined(base, _trainer(task, plain, plain, num_steps), period)
    recipe = method(name)(task, num_steps)
    return _attached(recipe.exchange)(recipe.task, num_steps, period)


def check_trainer(name: str) -> None:
    """Raises ``InvalidSetting`` for a name of no trainer."""
    base, _ = split_period(name)
    if base in OTHERS or base in PEERS:
        return
    try:
        method(name)
    except InvalidSetting as error:
        raise invalid(
            "method", name, f"{', '.join((*OTHERS, *PEERS))} or a method", str(error)
        ) from None


def split_period(name: str) -> tuple[str, int]:
    """A trainer's name without its period, and the period.

    A period divides ``PERIOD``, so that all ranks hold one model wherever models are
    scored. Raises ``InvalidSetting`` for another one, and where a trainer has none.

    >>> split_period("local_steps-4bit@5"), split_period("topk")
    (('local_steps-4bit', 5), ('topk', 20))
    """
    base, at, period = name.partition("@")
    if not at:
        return name, PERIOD
    if base not in LOCAL:
        raise invalid(
            "method", name, f"a period behind {', '.join(LOCAL)} alone", f"write {base}"
        )
    if not period.isdecimal() or not int(period) or PERIOD % int(period):
        accepted = f"a number that divides {PERIOD}"
        raise invalid("local steps", period, accepted, f"write {base}@{PERIOD // 4}")
    return base, int(period)


def _first_values(task: TrainingTask) -> nn.Module:
    torch.manual_seed(task.seed)
    return task.make_model()


def _trainer(
    task: TrainingTask, model: nn.Module, plain: nn.Module, num_steps: int
) -> Trainer:
    optimizer = task.make_optimizer(plain.parameters())
    return Trainer(task, model, plain, optimizer, Schedule(num_steps, num_steps // 10))


def _hooked(wrap: Callable[[nn.Module], nn.Module]) -> Start:
    """Trainers of a model that is wrapped."""

    def begin(task: TrainingTask, num_steps: int, period: int) -> Trainer:
        plain = _first_values(task)
        return _trainer(task, wrap(plain), plain, num_steps)

    return begin


def _ddp_powersgd(task: TrainingTask, num_steps: int, period: int) -> Trainer:
    """Torch's PowerSGD, which begins with the full learning rate."""
    wrap = partial(under_powersgd, first=num_steps // 10, rank=RANK)
    return _hooked(wrap)(task, num_steps, period)


def _ddp_local_sgd(task: TrainingTask, num_steps: int, period: int) -> Trainer:
    """Torch's post-local SGD: DDP at first, then ``period`` local steps between two
    averages.

    Averages fall on multiples of ``period``, where models are scored.
    """
    first = period * max(1, round(num_steps / 10 / period)) - 1
    alone, _ = dist.new_subgroups(group_size=1)  # type: ignore[no-untyped-call]
    state = PostLocalSGDState(  # type: ignore[no-untyped-call]
        None, alone, first, post_local_gradient_allreduce=False
    )
    wrap = partial(under_ddp, hook=post_localSGD_hook, state=state)
    made = _hooked(wrap)(task, num_steps, period)
    averager = PeriodicModelAverager(period=period, warmup_steps=first)
    made.after_step = lambda: averager.average_parameters(made.plain.parameters())
    return made


def _attached(exchange: Any) -> Start:
    """Trainers whose gradients go through an exchange, or by gradwire's own choice."""

    def wrap(model: nn.Module) -> nn.Module:
        attach(model, exchange)
        return model

    return _hooked(wrap)


def _with_muon(start: Start) -> Start:
    """Trainers with Muon in place of the task's optimizer."""

    def begin(task: TrainingTask, num_steps: int, period: int) -> Trainer:
        made = start(task, num_steps, period)
        return replace(made, optimizer=_muon(made))

    return begin


def _muon(made: Trainer) -> recipes.MuonWithAdamW:
    """Muon for all matrices but embeddings: on small vocabularies it suits the output
    layer too (docs/measured.md).
    """
    rate = rate_of_adamw(made.optimizer)
    return recipes.MuonWithAdamW(made.plain, rate, head=nn.Identity())


def _locally(
    recipe: Callable[..., recipes.Started], compressor: Compressor, **more: Any
) -> Start:
    """Trainers of local steps by a recipe, with the task's optimizer or the recipe's
    Muon.
    """

    def begin(task: TrainingTask, num_steps: int, period: int) -> Trainer:
        plain = _first_values(task)
        made = _trainer(task, plain, plain, num_steps)
        own = _muon(made) if recipe is recipes.muloco else made.optimizer
        settings = {"lr": rate_of_adamw(made.optimizer), "every": period, **more}
        optimizer, _ = recipe(plain, own, exchange=compressor, **settings)
        return replace(made, optimizer=optimizer)

    return begin


DDP = "ddp"
"""The trainer that others are compared with."""
_FOUR_BITS: Compressor = load("compress", "uniform")(bitwidth=4)
OTHERS: dict[str, Start] = {
    DDP: _hooked(under_ddp),
    "ddp-fp16": _hooked(partial(under_ddp, hook=default_hooks.fp16_compress_hook)),
    "ddp-powersgd": _ddp_powersgd,
    "ddp-local_sgd": _ddp_local_sgd,
    "auto": _attached("auto"),
    "local_steps": _locally(recipes.diloco, none()),
    "local_steps-4bit": _locally(recipes.diloco, _FOUR_BITS),
    "local_steps-sparse": _locally(recipes.diloco, sparseloco()),
    "slowmo-4bit": _locally(recipes.diloco, _FOUR_BITS, outer=recipes.SLOWMO),
    "ddp-muon": _with_muon(_hooked(under_ddp)),
    "muon-4bit": _with_muon(_attached(_FOUR_BITS)),
    "muloco-4bit": _locally(recipes.muloco, _FOUR_BITS),
}
"""Trainers by name, beside the methods: torch's own, and what takes local steps. Those
of the names ``local_steps`` have DiLoCo's outer optimizer. Muon beneath local steps is
MuLoCo's recipe (Thérien et al., arXiv 2505.23725).
"""
LOCAL = (
    "ddp-local_sgd",
    "local_steps",
    "local_steps-4bit",
    "local_steps-sparse",
    "slowmo-4bit",
    "muloco-4bit",
    "peer-accelerate",
    "peer-torchft-local_sgd",
    "peer-torchft-diloco",
)
"""Trainers that take local steps: their names may have a period behind them."""
