"""The law of steps that optimizers did not take, for an exchange in messages of two
optimizers.

It takes an exchange without error feedback, and a case.
"""

import random
from itertools import accumulate

import torch
from torch import Tensor

from gradwire.contract import Exchange
from gradwire.contract.state import leaves
from gradwire.exchange.error_feedback import ErrorFeedback
from gradwire.exchange.local import drive
from gradwire.runtime.step.backup import Backup
from gradwire.runtime.step.layout import ParamRange
from gradwire.runtime.step.messages import Message, Placement

from .cases import Case, accuracy, kept_of
from .tolerance import assert_near, largest, must, same_bits

NUM_PASSES = 8


class Job:
    """Every rank's message of a case, with the parameters of several optimizers.

    It keeps the account of each parameter: what ranks gave, and what means brought.
    """

    make_backup: type[Backup] = Backup

    def __init__(self, exchange: Exchange, case: Case) -> None:
        self.case = case
        self.exchange = exchange
        ends = [*accumulate(torch.Size(shape).numel() for shape in case.spec.shapes)]
        starts = [0, *ends[:-1]]
        self.ranges = [*zip(starts, ends, strict=True)]
        self.names = [f"parameter {place}" for place in range(len(self.ranges))]
        ranges = []
        for name, shape in zip(self.names, case.spec.shapes, strict=True):
            param = torch.zeros(shape, dtype=case.dtype)
            ranges.append(ParamRange.whole(name, param))
        placement = Placement(order=1 + case.seed)
        self.messages = [
            Message(0, ranges, exchange, rank, case.world, placement)
            for rank in range(case.world)
        ]
        for message in self.messages:
            message.backup = self.make_backup(message, message.names)
        self.given_N = torch.zeros(case.numel, dtype=torch.float64)
        self.means_N = torch.zeros_like(self.given_N)
        self.pending_N = torch.zeros_like(self.given_N)
        self.arrived_N = torch.zeros_like(self.given_N)
        self.size = 1.0

    def make_pass(self, step: int) -> None:
        """One exchanged backward pass, whose mean no optimizer has taken yet."""
        grads = self.case.grads(step)
        self.size = max(self.size, largest(*grads))
        self.pending_N += torch.stack([grad_N.double() for grad_N in grads]).sum(0)
        steps = []
        for message, grad_N in zip(self.messages, grads, strict=True):
            message.begin_step(looks=True, confirms=False)
            parts = zip(self.names, self.ranges, self.case.spec.shapes, strict=True)
            grads_of: dict[str, Tensor | None] = {}
            for name, (start, stop), shape in parts:
                grads_of[name] = grad_N[start:stop].view(shape)
            steps.append(message.steps(grads_of))
        drive(steps, seed=step, ranks_per_host=self.exchange.ranks_per_host)
        for message in self.messages:
            message.backup.end_pass()
        self.arrived_N += self.messages[0].buffer.flat_N.double()

    def decide(self, places: list[int], *, is_skipped: bool) -> None:
        """Ends a step of an optimizer that holds the parameters at these places."""
        names = [self.names[place] for place in places]
        for message in self.messages:
            message.backup.decide(names, is_skipped=is_skipped)
        for place in places:
            part = slice(*self.ranges[place])
            if not is_skipped:
                self.given_N[part] += self.pending_N[part]
                self.means_N[part] += self.arrived_N[part]
            self.pending_N[part] = 0
            self.arrived_N[part] = 0

    def kept_N(self) -> Tensor:
        """The residuals of all ranks, added up."""
        numel = self.case.numel
        kept = [kept_of(message.state, numel) for message in self.messages]
        return torch.stack(kept).sum(0)


def law_what_is_not_taken_is_put_back(
    exchange: Exchange, case: Case, job: type[Job] = Job
) -> bool:
    """W * means that were taken + residuals = the gradients of the steps that were
    taken.

    Over any sequence of passes, skipped steps and optimizers, where a message holds
    parameters of two. A step that all of them skipped leaves no trace in the state.

    To do: keep what belongs to an element in a field that ends in _N, with an element
    for each of the gradient; put back the fields of skipped parameters, and no others.
    """
    if not case.numel or exchange.ranks_per_host > 1:
        return False
    draw = random.Random(case.seed)
    exchange_job = job(ErrorFeedback(exchange), case)
    every = [*range(len(exchange_job.names))]
    optimizers = [every[::2], every[1::2]]
    for step in range(NUM_PASSES):
        exchange_job.make_pass(step)
        for places in optimizers:
            if draw.random() < 0.7:  # else the next pass accumulates
                exchange_job.decide(places, is_skipped=draw.random() < 0.5)
    for places in optimizers:
        exchange_job.decide(places, is_skipped=False)
    kept = [kept_of(m.state, case.numel) for m in exchange_job.messages]
    size = max(exchange_job.size, largest(*kept))
    assert_near(
        case.world * exchange_job.means_N + exchange_job.kept_N(),
        exchange_job.given_N,
        accuracy(exchange, case),
        magnitude=case.world * size,
        terms=NUM_PASSES * (case.world + 4),
        what="W * means taken + residuals against gradients of the steps taken",
    )
    before = [t.clone() for m in exchange_job.messages for _, t in leaves(m.state)]
    for step in range(NUM_PASSES, NUM_PASSES + 2):
        exchange_job.make_pass(step)
    for places in optimizers:
        exchange_job.decide(places, is_skipped=True)
    after = [t for m in exchange_job.messages for _, t in leaves(m.state)]
    must(all(map(same_bits, before, after)), "a step that all skipped left a trace")
    return True


LAWS = (law_what_is_not_taken_is_put_back,)
