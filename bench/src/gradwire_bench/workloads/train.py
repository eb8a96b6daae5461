"""Data-parallel training in one process: any number of replicas, whose parameters are
one copy.

Replicas that begin alike and add the same mean stay alike, bit for bit, as every
exchange gives all ranks the same mean. So one model stands for all. Each rank's
gradient is computed in turn, and the local driver runs the exchange on all of them, as
it would run between machines. Every step notes figures of all ranks: density after
build-up, bytes, and the error of DEFT's equation 2.

Differences: a model's buffers, such as the running means of batch norm, see the batches
of all ranks one after another, where DistributedDataParallel spreads those of rank 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import cos, pi, sqrt

import torch
from torch import Tensor, nn

from gradwire.contract import Exchange, Member, State
from gradwire.contract.spec import NamedParam, TensorSpec
from gradwire.errors import invalid
from gradwire.exchange.error_feedback import residuals
from gradwire.exchange.local import drive
from gradwire.planning.default_fusion import default_messages
from gradwire_lab.exchange.adapt import choose_together

from ..testbed.ranks import Report
from .task import TrainingTask


@dataclass(frozen=True)
class Schedule:
    """Factors of the learning rate: linearly up to 1, then half a cosine down to 0.

    >>> schedule = Schedule(num_steps=10, num_warm_up=4)
    >>> [round(schedule(step), 2) for step in (0, 3, 4, 7, 9)]
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
    """Figures of a training, an entry for each step; plain values, which JSON can
    hold.
    """

    losses: list[float] = field(default_factory=list)
    """The losses of the steps' batches before the update, means over ranks."""
    asked: list[float] = field(default_factory=list)
    """The density asked for; 1 where nothing is selected."""
    local: list[float] = field(default_factory=list)
    """The density that a rank took, a mean over ranks."""
    actual: list[float] = field(default_factory=list)
    """The density of the mean: that of the union over ranks."""
    sent_bytes: list[float] = field(default_factory=list)
    """The bytes that a rank sent, a mean over ranks."""
    errors: list[float] = field(default_factory=list)
    """The residual's norm, a mean over ranks: DEFT, equation 2."""
    scores: list[tuple[int, float]] = field(default_factory=list)
    """Pairs of steps taken and the task's score, where it was asked for."""


class Replicas:
    """``world`` replicas of a task's model in training, whose gradients ``exchange``
    averages.

    The whole gradient is one message, so that a density is that of the model, as in the
    papers. With ``as_attached`` messages are those of ``attach``: fused by size, with
    vectors uncompressed.
    """

    def __init__(
        self,
        task: TrainingTask,
        exchange: Exchange,
        world: int,
        schedule: Schedule | None = None,
        *,
        as_attached: bool = False,
    ) -> None:
        torch.manual_seed(task.seed)
        self.task = task
        self.exchange = exchange
        self.world = world
        self.model = task.make_model()
        parameters = [
            (name, p) for name, p in self.model.named_parameters() if p.requires_grad
        ]
        self.optimizer = task.make_optimizer([p for _, p in parameters])
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._schedule = schedule
        self.step_index = 0
        self.history = History()
        self.messages = [
            _Message(members, made, world)
            for members, made in (
                default_messages(parameters, exchange, world)
                if as_attached
                else [(parameters, exchange)]
            )
        ]
        self.numel = sum(message.spec.numel for message in self.messages)

    def step(self) -> None:
        """Takes one step and notes what happened in ``history``."""
        losses = self.backward()
        sent_bytes = sum(message.average(self.step_index) for message in self.messages)
        for rank in range(self.world):
            choose_together(
                (message.exchange, message.states[rank]) for message in self.messages
            )
        self._point_at(0)
        if self._schedule is not None:
            factor = self._schedule(self.step_index)
            for group, rate in zip(
                self.optimizer.param_groups, self._rates, strict=True
            ):
                group["lr"] = factor * rate
        if self.task.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.task.max_norm)
        self.optimizer.step()
        self.step_index += 1
        self._note(losses, sent_bytes)

    def backward(self) -> list[float]:
        """Each rank's gradient of this step's batch, into ``gradients``; returns the
        losses.
        """
        losses = []
        for rank in range(self.world):
            for message in self.messages:
                message.grads_WN[rank].zero_()
            self._point_at(rank)
            batch = self.task.batch(self.step_index, rank, self.world)
            loss = self.task.loss(self.model, *batch)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        return losses

    @property
    def gradients(self) -> Tensor:
        """The ranks' gradients after ``backward``, their mean after ``step``: (world,
        numel).
        """
        return torch.cat([message.grads_WN for message in self.messages], dim=1)

    @property
    def states(self) -> list[State]:
        """The state of each rank: a tuple of the messages' states."""
        return list(zip(*(message.states for message in self.messages), strict=True))

    def score(self) -> float:
        """The task's score of the model as it is, kept in ``history``."""
        value = self.task.score(self.model)
        self.history.scores.append((self.step_index, value))
        return value

    def _point_at(self, rank: int) -> None:
        for message in self.messages:
            message.point_at(rank)

    def _note(self, losses: Sequence[float], sent_bytes: float) -> None:
        history = self.history
        messages = self.messages
        history.losses.append(sum(losses) / self.world)
        history.sent_bytes.append(sent_bytes)
        history.errors.append(sum(map(_error, self.states)) / self.world)
        for name in ("asked", "local", "actual"):
            taken = sum(
                message.density(name) * message.spec.numel for message in messages
            )
            getattr(history, name).append(taken / self.numel)


class _Message:
    """One message of all replicas: their gradients, and the state that each keeps for
    it.
    """

    def __init__(
        self, members: Sequence[NamedParam], exchange: Exchange, world: int
    ) -> None:
        self.parameters = [parameter for _, parameter in members]
        self.exchange = exchange
        self.world = world
        self.spec = message_of(self.parameters)
        self.grads_WN = torch.zeros(world, self.spec.numel)
        self._views = [views_in(grad_N, self.parameters) for grad_N in self.grads_WN]
        self._members = [Member(rank, world) for rank in range(world)]
        specs = [replace(self.spec, rank=rank) for rank in range(world)]
        self.states: list[State] = [exchange.init(spec, world) for spec in specs]

    def point_at(self, rank: int) -> None:
        """Lets the parameters' gradients be views of one rank's message: nothing is
        copied.
        """
        for parameter, view in zip(self.parameters, self._views[rank], strict=True):
            parameter.grad = view

    def average(self, seed: int) -> float:
        """Leaves the mean with every rank; returns the bytes that a rank sent, on
        average.
        """
        outcome = drive(
            [
                self.exchange.synchronise(member, state, grad_N, grad_N)
                for member, state, grad_N in zip(
                    self._members, self.states, self.grads_WN, strict=True
                )
            ],
            seed=seed,
            ranks_per_host=self.exchange.ranks_per_host,
        )
        self.states = outcome.results
        return sum(outcome.sent_bytes) / self.world

    def density(self, of: str) -> float:
        """The density ``asked`` for, ``local`` or ``actual``, of the last step."""
        taken = [
            member.selection for member in self._members if member.selection is not None
        ]
        if not taken:
            return 1.0
        if of == "local":
            return (
                sum(selection.selected for selection in taken)
                / self.spec.numel
                / len(taken)
            )
        return (taken[0].asked if of == "asked" else taken[0].arrived) / self.spec.numel


def message_of(parameters: Sequence[Tensor]) -> TensorSpec:
    """The spec of all gradients of a model, one behind the other."""
    shapes = tuple(tuple(parameter.shape) for parameter in parameters)
    return TensorSpec("gradient", sum(p.numel() for p in parameters), shapes=shapes)


def without_momentum(task: TrainingTask) -> TrainingTask:
    """The task with an optimizer that has no momentum, for exchanges that keep it
    themselves.

    Its weight decay is 1 / (1 - m) times as much for momentum m: so much did momentum
    make of it, and an exchange adds momentum to gradients only.
    """

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made = task.make_optimizer(parameters)
        for group in made.param_groups:
            if "momentum" not in group:
                raise invalid(
                    "optimizer", made, "one with a setting momentum", "use SGD"
                )
            group["weight_decay"] /= 1.0 - group["momentum"]
            group["momentum"] = 0.0
        return made

    return replace(task, make_optimizer=make_optimizer)


def train(
    task: TrainingTask,
    exchange: Exchange,
    *,
    world: int,
    num_steps: int,
    num_warm_up: int = 0,
    num_scores: int = 1,
    as_attached: bool = False,
    report: Report = lambda fraction, what: None,
) -> History:
    """The history of ``num_steps`` steps from the task's first values.

    The model is scored ``num_scores`` times, the last time at the end. The result
    depends on the arguments alone, but for how torch orders sums on several threads.
    """
    replicas = Replicas(
        task, exchange, world, Schedule(num_steps, num_warm_up), as_attached=as_attached
    )
    scored = {num_steps * (place + 1) // num_scores for place in range(num_scores)}
    for step in range(1, num_steps + 1):
        replicas.step()
        if step in scored:
            replicas.score()
        report(step / num_steps, f"{task.name}, step {step} of {num_steps}")
    return replicas.history


def views_in(grad_N: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of each parameter's piece of a message, in its shape, to be its
    gradient.
    """
    pieces = torch.split(grad_N, [parameter.numel() for parameter in parameters])
    return [
        piece.view_as(parameter)
        for piece, parameter in zip(pieces, parameters, strict=True)
    ]


def _error(state: State) -> float:
    """The norm of all residuals in a rank's state."""
    return sqrt(sum(float(part.norm()) ** 2 for part in residuals(state).values()))
