"""Table 1 of SSFusion: which share of a model's tensors sends nothing in a step.

The first tensors in backward order are fused into one message, as many as the degree
says, and a sparsifier selects from all of it; each other tensor is a message of its
own. A tensor is missing on a rank in a step in which nothing of it is sent although it
is not all zeros there. Ranks train on their means, with error feedback or without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.compress.topk import topk
from gradwire.contract import Exchange
from gradwire.contract.spec import TensorSpec
from gradwire.exchange.by_name import exchange_for, run_local
from gradwire.exchange.error_feedback import ErrorFeedback, residuals
from gradwire_bench.training.tasks import make_task
from gradwire_bench.workloads.task import TrainingTask
from gradwire_lab.compress.dgc import dgc
from gradwire_lab.compress.selective import selective

from ..deft.setting import LSTM, RESNET
from ..frame import Ask, Claim, Findings, Row

DENSITY = 0.01
NUM_RANKS = 4
DEGREES = (0, 20, 40, 60, 80, 100)
"""The share of the tensors that are fused, in per cent; with 0 each is a message of its
own.
"""
NUM_STEPS = {False: 40, True: 5}
"""By ``quick``."""
SELECTIVE = "selective"


@dataclass(frozen=True)
class Model:
    """A model whose tensors are counted."""

    name: str
    make: Callable[[], TrainingTask]
    why_not: Callable[[], str | None] = lambda: None
    """A function that says why its data are not here; None where they are."""


MODELS = (
    Model("resnet18", lambda: RESNET.task(quick=False), RESNET.missing),
    Model("transformer", lambda: make_task("text")),
    Model("gpt", lambda: make_task("gpt")),
    Model("lstm", lambda: LSTM.task(quick=False)),
)


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of sparsifying a model: the tensors in per cent that are fused, and the
    exchange.
    """

    name: str
    degree: int
    exchange: Exchange

    def messages(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """The tensors of each message, those whose gradients are ready first in
        front.
        """
        backward = list(reversed(parameters))
        num_fused = round(self.degree / 100 * len(backward))
        fused = [backward[:num_fused]] if num_fused else []
        return [*fused, *([one] for one in backward[num_fused:])]


def ways(feedback: bool) -> Iterator[Way]:
    """DGC at every degree, top-k and ``selective`` on the whole model."""
    for degree in DEGREES:
        yield Way(
            name=f"dgc, {degree} % fused", degree=degree, exchange=_of(dgc, feedback)
        )
    yield Way(name="topk, 100 % fused", degree=100, exchange=_of(topk, feedback))
    for sparsifier in ("dgc", "topk"):
        made = selective(sparsifier=sparsifier, density=DENSITY)
        exchange = ErrorFeedback(made) if feedback else made
        yield Way(name=f"{SELECTIVE} ({sparsifier})", degree=100, exchange=exchange)


def _of(kind: Callable[..., Any], feedback: bool) -> Exchange:
    exchange = exchange_for(kind(density=DENSITY))
    assert isinstance(exchange, ErrorFeedback)
    return exchange if feedback else exchange.inner


def missing_rates(
    task: TrainingTask, way: Way, num_steps: int, world: int = NUM_RANKS
) -> list[float]:
    """The share of tensors that is missing in each step, a mean over ranks."""
    torch.manual_seed(task.seed)
    model = task.make_model()
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = task.make_optimizer(parameters)
    messages = way.messages(parameters)
    specs = [_spec(members) for members in messages]
    states = [[way.exchange.init(spec, world)] * world for spec in specs]
    rates = []
    for step in range(num_steps):
        grads = _gradients(task, model, messages, step, world)
        num_missing = 0
        for place, members in enumerate(messages):
            sizes = [one.numel() for one in members]
            old = [_residual(state) for state in states[place]]
            results = run_local(way.exchange, grads[place], states[place], seed=step)
            states[place] = [state for _, _, state in results]
            for pending_N, kept_N, (_, sent_N, _) in zip(
                grads[place], old, results, strict=True
            ):
                num_missing += _missing(pending_N + kept_N, sent_N, sizes)
            for one, mean_N in zip(
                members, torch.split(results[0][0], sizes), strict=True
            ):
                one.grad = mean_N.view_as(one).clone()
        if task.max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, task.max_norm)
        optimizer.step()
        rates.append(num_missing / world / len(parameters))
    return rates


def _spec(members: Sequence[nn.Parameter]) -> TensorSpec:
    shapes = tuple(tuple(one.shape) for one in members)
    return TensorSpec("message", sum(map(prod, shapes)), shapes=shapes)


def _gradients(
    task: TrainingTask,
    model: nn.Module,
    messages: Sequence[Sequence[nn.Parameter]],
    step: int,
    world: int,
) -> list[list[Tensor]]:
    """The flat gradient of each message and rank."""
    found: list[list[Tensor]] = [[] for _ in messages]
    for rank in range(world):
        model.zero_grad()
        loss = task.loss(model, *task.batch(step, rank, world))
        loss.backward()  # type: ignore[no-untyped-call]
        for own, members in zip(found, messages, strict=True):
            parts = [
                torch.zeros_like(one) if one.grad is None else one.grad
                for one in members
            ]
            own.append(torch.cat([part.flatten() for part in parts]))
    return found


def _residual(state: Any) -> Tensor:
    return next(
        (kept_N.clone() for kept_N in residuals(state).values()), torch.zeros(1)
    )


def _missing(pending_N: Tensor, sent_N: Tensor, sizes: Sequence[int]) -> int:
    """How many tensors have something to send and send nothing."""
    pairs = zip(
        torch.split(pending_N, [*sizes]), torch.split(sent_N, [*sizes]), strict=True
    )
    return sum(bool(given.any()) and not bool(sent.any()) for given, sent in pairs)


def table1(ask: Ask, models: Sequence[Model] = MODELS) -> Findings:
    """The missing rate of each way, a mean over steps, for each model whose data are
    here.
    """
    rows: list[Row] = []
    claims: list[Claim] = []
    measured = [one for one in models if one.why_not() is None]
    todo = [(model, feedback) for model in measured for feedback in (True, False)]
    for done, (model, feedback) in ask.each(todo):
        ask.report(done, model.name)
        task = model.make()
        found = [_row(model, feedback, way, task, ask.quick) for way in ways(feedback)]
        rows += found
        claims += _claims(model, feedback, found)
    lacking: list[Row] = [
        {"name": "not measured", "model": one.name, "why": one.why_not()}
        for one in models
        if one not in measured
    ]
    return Findings((*rows, *lacking), tuple(claims), complete=not lacking)


def _row(
    model: Model, feedback: bool, way: Way, task: TrainingTask, quick: bool
) -> Row:
    rates = missing_rates(task, way, NUM_STEPS[quick])
    return {
        "name": way.name,
        "model": model.name,
        "error_feedback": feedback,
        "missing_rate": mean(rates),
        "least_of_a_step": min(rates),
        "most_of_a_step": max(rates),
    }


def _claims(model: Model, feedback: bool, rows: Sequence[Row]) -> list[Claim]:
    rates = {str(row["name"]): float(str(row["missing_rate"])) for row in rows}
    fused = [rates[f"dgc, {degree} % fused"] for degree in DEGREES]
    shown = ", ".join(f"{100 * rate:.1f}" for rate in fused[1:])
    about = f"{model.name}, {'with' if feedback else 'without'} error feedback"
    rises = fused == sorted(fused) and fused[-1] > fused[0]
    alone = max(
        rate for name, rate in rates.items() if "selective" in name or " 0 %" in name
    )
    return [
        Claim(
            "no tensor is missing where each is sparsified by itself",
            "table 1",
            f"{about}: {100 * alone:.1f} % at most, tensor by tensor and with "
            "selective",
            alone == 0,
        ),
        Claim(
            "the more tensors are fused, the more are missing: from 20 to 100 %, 9.8, "
            "22.8, 47.0, 68.2 and 75.6 % (ResNet-152), and 8.6, 24.0, 42.5, 66.5 and "
            "81.2 % (BERT-large)",
            "table 1",
            f"{about}: {shown} %; top-k on all of it "
            f"{100 * rates['topk, 100 % fused']:.1f} %",
            rises,
            "" if rises else _why(fused),
        ),
    ]


def _why(fused: Sequence[float]) -> str:
    if not any(fused):
        return "of this model no tensor is missing in any step, however many are fused"
    return "the rate does not rise from each degree to the next"
