"""Data-parallel training in one process: any number of replicas, whose parameters are one copy.

Replicas that begin alike and add the same mean stay alike, bit for bit: that is the law of every
exchange. So one model stands for all; each rank's gradient is computed in turn, and the exchange
runs on all of them by the local driver, as it would between machines. What only one process can
see at once is noted every step: density after build-up, bytes, and the error of DEFT's equation 2.

Differences: a model's buffers, such as the running means of batch norm, see the batches of all
ranks one after another, where DistributedDataParallel spreads those of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import cos, pi, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from ..collective._local import drive
from ..contract import Exchange, Member, State
from ..errors import invalid
from ..exchange import residuals, synchronise
from ..spec import TensorSpec
from .task import Task

Report = Callable[[float, str], None]
"""Tells how far a training is: (fraction done in [0, 1], what is going on)."""


@dataclass(frozen=True)
class Schedule:
    """Factors of the learning rate: linearly up to 1, then half a cosine down to 0.

    >>> [round(Schedule(num_steps=10, num_warm_up=4)(step), 2) for step in (0, 3, 4, 7, 9)]
    [0.25, 1.0, 1.0, 0.5, 0.07]
    """

    num_steps: int
    num_warm_up: int = 0

    def __call__(self, step: int) -> float:
        if step < self.num_warm_up:
            return (step + 1) / self.num_warm_up
        done = (step - self.num_warm_up) / max(1, self.num_steps - self.num_warm_up)
        return 0.5 * (1 + cos(pi * min(1.0, done)))


@dataclass
class History:
    """What happened, an entry a step; plain values, so that it goes into a JSON file and back."""

    losses: list[float] = field(default_factory=list)
    """Mean over ranks, of the batch before the step."""
    asked: list[float] = field(default_factory=list)
    """Density asked for; 1 where nothing is selected."""
    local: list[float] = field(default_factory=list)
    """Mean over ranks of the density that each took."""
    actual: list[float] = field(default_factory=list)
    """Density of the mean: of the union over ranks."""
    sent_bytes: list[float] = field(default_factory=list)
    """Mean over ranks."""
    errors: list[float] = field(default_factory=list)
    """Mean over ranks of the residual's norm: DEFT, equation 2."""
    scores: list[tuple[int, float]] = field(default_factory=list)
    """(steps taken, the task's score), where it was asked for."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> History:
        scores = [(int(step), float(score)) for step, score in kept["scores"]]
        return cls(**{**kept, "scores": scores})


class Replicas:
    """``world`` replicas of a task's model on their way, averaged by ``exchange``.

    The whole gradient is one message, so that a density is that of the model, as in the papers.
    """

    def __init__(
        self, task: Task, exchange: Exchange, world: int, schedule: Schedule | None = None
    ) -> None:
        torch.manual_seed(task.seed)
        self.task, self.exchange, self.world = task, exchange, world
        self.model = task.make_model()
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = task.make_optimizer(self._parameters)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._schedule = schedule
        self.step_index = 0
        self.history = History()
        self.spec = message_of(self._parameters)
        self._grads_WN = torch.zeros(world, self.spec.numel)
        self._views = [views_in(grad_N, self._parameters) for grad_N in self._grads_WN]
        self._members = [Member(rank, world) for rank in range(world)]
        self.states: list[State] = [exchange.init(self.spec, world) for _ in range(world)]

    def step(self) -> None:
        """Takes one step and notes what happened in ``history``."""
        losses = self.backward()
        sent_bytes = self._exchange()
        self._point_at(0)
        if self._schedule is not None:
            factor = self._schedule(self.step_index)
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = factor * rate
        self.optimizer.step()
        self.step_index += 1
        self._note(losses, sent_bytes)

    def backward(self) -> list[float]:
        """Each rank's gradient of this step's batch, into ``gradients``; returns the losses."""
        self._grads_WN.zero_()
        losses = []
        for rank in range(self.world):
            self._point_at(rank)
            batch = self.task.batch(self.step_index, rank, self.world)
            loss = self.task.loss(self.model, *batch)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        return losses

    @property
    def gradients(self) -> Tensor:
        """(world, numel): what ``backward`` left, and after ``step`` the mean on every rank."""
        return self._grads_WN

    def score(self) -> float:
        """The task's score of the model as it is, kept in ``history``."""
        value = self.task.score(self.model)
        self.history.scores.append((self.step_index, value))
        return value

    def _point_at(self, rank: int) -> None:
        """Lets the parameters' gradients be views of one rank's message: nothing is copied."""
        for parameter, view in zip(self._parameters, self._views[rank], strict=True):
            parameter.grad = view

    def _exchange(self) -> float:
        outcome = drive(
            [
                synchronise(self.exchange, member, state, grad_N, grad_N)
                for member, state, grad_N in zip(
                    self._members, self.states, self._grads_WN, strict=True
                )
            ],
            seed=self.step_index,
        )
        self.states = outcome.results
        return sum(outcome.sent_bytes) / self.world

    def _note(self, losses: Sequence[float], sent_bytes: float) -> None:
        history, numel = self.history, self.spec.numel
        history.losses.append(sum(losses) / self.world)
        history.sent_bytes.append(sent_bytes)
        history.errors.append(sum(map(_error, self.states)) / self.world)
        found = [member.selection for member in self._members]
        taken = [one for one in found if one is not None]
        dense = not taken
        history.asked.append(1.0 if dense else taken[0].asked / numel)
        history.local.append(1.0 if dense else sum(s.selected for s in taken) / numel / len(taken))
        history.actual.append(1.0 if dense else taken[0].arrived / numel)


def message_of(parameters: Sequence[Tensor]) -> TensorSpec:
    """The spec of all gradients of a model, one behind the other."""
    shapes = tuple(tuple(parameter.shape) for parameter in parameters)
    return TensorSpec("gradient", sum(p.numel() for p in parameters), shapes=shapes)


def layer_sizes(task: Task) -> tuple[int, ...]:
    """Elements of each tensor of the task's model, in the order in which they lie in a message."""
    with torch.device("meta"):  # neither memory nor random numbers
        model = task.make_model()
    return tuple(p.numel() for p in model.parameters() if p.requires_grad)


def without_momentum(task: Task) -> Task:
    """The task with an optimizer that has no momentum, for exchanges that keep it themselves.

    Its weight decay is what momentum m made of it, 1 / (1 - m) times as much: an exchange adds
    momentum to gradients only.
    """

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made = task.make_optimizer(parameters)
        for group in made.param_groups:
            if "momentum" not in group:
                raise invalid("optimizer", made, "one with a setting momentum", "use SGD")
            group["weight_decay"] /= 1.0 - group["momentum"]
            group["momentum"] = 0.0
        return made

    return replace(task, make_optimizer=make_optimizer)


def train(
    task: Task,
    exchange: Exchange,
    *,
    world: int,
    num_steps: int,
    num_warm_up: int = 0,
    num_scores: int = 1,
    report: Report = lambda fraction, what: None,
) -> History:
    """``num_steps`` steps from the task's first values; scored ``num_scores`` times, the last time
    at the end.

    A pure function of its arguments, but for how torch orders sums on several threads.
    """
    replicas = Replicas(task, exchange, world, Schedule(num_steps, num_warm_up))
    scored = {num_steps * (place + 1) // num_scores for place in range(num_scores)}
    for step in range(1, num_steps + 1):
        replicas.step()
        if step in scored:
            replicas.score()
        report(step / num_steps, f"{task.name}, step {step} of {num_steps}")
    return replicas.history


def views_in(grad_N: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Each parameter's piece of a message, in its shape: what its gradient is to be."""
    pieces = torch.split(grad_N, [parameter.numel() for parameter in parameters])
    return [piece.view_as(one) for piece, one in zip(pieces, parameters, strict=True)]


def _error(state: State) -> float:
    """The norm of what a rank has not delivered yet."""
    return sqrt(sum(float(part.norm()) ** 2 for part in residuals(state).values()))
