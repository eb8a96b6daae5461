"""One rank of the demo: trains one model by each method, in turn, and measures.

Methods take turns of a few steps each, so that all of them see the same moods of the
machine.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from gradwire.collective.steps.travel import sent_bytes
from gradwire.contract.registry import load
from gradwire.contract.trace.span import Span, Trace
from gradwire.contract.verbs import AllReduce
from gradwire.runtime.attach import attach
from gradwire.runtime.handle import Handle
from gradwire.runtime.settings import FailurePolicy, Options
from gradwire.runtime.transport.task_graph import wall_clock

from ..testbed.ranks import Json, Report, counted
from ..training.tasks import make_task
from ..training.trainer import TurnRun, under_ddp
from ..workloads.task import TrainingTask

COMPRESSORS = ("none", "cast16", "uniform", "onebit", "topk")
"""The compressors that the demo compares with DDP unless it is told others."""
_WARM_UP_STEPS = 3


@dataclass
class MethodRun(TurnRun):
    """One method's model on its way, and what was measured of it so far."""

    method: str = field(kw_only=True)
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sent_bytes: int = 0
    counted_steps: int = 0


def measure(settings: Json, report: Report) -> Json:
    """Trains by all methods; returns this rank's figures and one step's trace for
    each.
    """
    torch.set_num_threads(1)
    task = make_task(settings["task"])
    compressed = methods(settings["compressors"])
    failure = FailurePolicy(timeout=timedelta(seconds=settings["timeout_s"]))
    runs = [_start(method, None, task, failure) for method in ("ddp", "ddp-fp16")]
    runs += [_start(method, name, task, failure) for method, name in compressed.items()]
    rounds = settings["rounds"]
    turn = settings["steps"] // settings["rounds"]
    for index in range(rounds):
        for place, run in enumerate(runs):
            report((index + place / len(runs)) / rounds, f"training with {run.method}")
            _take_turn(run, task, turn)
    return {run.method: _result(run, task) for run in runs}


def methods(compressors: Sequence[str]) -> dict[str, str]:
    """The demo's names of compressors: what the table calls them, and the files they
    are in.
    """
    return {
        f"gradwire-{'dense' if name == 'none' else name}": name for name in compressors
    }


def _start(
    method: str, compressor: str | None, task: TrainingTask, failure: FailurePolicy
) -> MethodRun:
    torch.manual_seed(0)
    model = task.make_model()
    handle = None
    if compressor is not None:
        exchange = load("compress", compressor)()
        handle = attach(
            model, exchange, options=Options(trace_steps=2), failure=failure
        )
    else:
        is_half = method == "ddp-fp16"
        model = under_ddp(model, default_hooks.fp16_compress_hook if is_half else None)
    optimizer = task.make_optimizer(model.parameters())
    return MethodRun(model, optimizer, handle, method=method)


def _take_turn(run: MethodRun, task: TrainingTask, num_steps: int) -> None:
    def train() -> None:
        for _ in range(num_steps):
            start_s = time.perf_counter()
            run.losses.append(run.train_step(task).item())
            run.step_s.append(time.perf_counter() - start_s)

    _, moved = counted(train)
    run.sent_bytes += moved.tx_bytes
    run.counted_steps += num_steps


def _result(run: MethodRun, task: TrainingTask) -> Json:
    low, middle, high = quantiles(run.step_s[_WARM_UP_STEPS:], n=10)[1::3]
    trace = _gradwire_trace(run.handle) if run.handle else _ddp_trace(run, task)
    return {
        "step_s": middle,
        "all_step_s": run.step_s,
        "step_p20_s": low,
        "step_p80_s": high,
        "sent_bytes": run.sent_bytes / run.counted_steps,
        "density_actual": None
        if run.handle is None
        else run.handle.stats()["density_actual"],
        "loss": task.score(run.model),
        "losses": _mean_over_ranks(run.losses),
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "trace": trace.to_json(),
    }


def _mean_over_ranks(values: list[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    means: list[float] = (total / dist.get_world_size()).tolist()
    return means


def _gradwire_trace(handle: Handle) -> Trace:
    trace = handle.trace()
    return trace.only(step=trace.steps()[-1])


def _ddp_trace(run: MethodRun, task: TrainingTask) -> Trace:
    """Two more steps of the same model under DDP with a hook that notes when transfers
    end.
    """
    assert isinstance(run.model, DistributedDataParallel)
    spans: list[Span] = []
    half = run.method == "ddp-fp16"
    base = default_hooks.fp16_compress_hook if half else default_hooks.allreduce_hook
    traced = DistributedDataParallel(run.model.module)
    traced.register_comm_hook(
        None, _timed(base, spans, wire_dtype=torch.half if half else None)
    )
    for _ in range(2):  # DDP cuts its buckets anew after the first step
        spans.clear()
        rank = dist.get_rank()
        inputs, targets = task.batch(run.step, rank, dist.get_world_size())
        start_s = wall_clock()
        loss = task.loss(traced, inputs, targets)
        middle_s = wall_clock()
        loss.backward()  # type: ignore[no-untyped-call]
        end_s = wall_clock()
        run.optimizer.zero_grad()
    spans += [
        Span(rank, "forward", "forward", start_s, middle_s, step=0),
        Span(rank, "backward", "backward", middle_s, end_s, step=0),
    ]
    return Trace.of(spans)


def _timed(
    base: Callable[..., Any], spans: list[Span], *, wire_dtype: torch.dtype | None
) -> Any:
    """A comm hook that notes a span an all-reduce, with the bytes that a ring of them
    sends.

    ``wire_dtype`` is what ``base`` casts buckets to, None if it does not.
    """

    def timed_hook(state, bucket):  # type: ignore[no-untyped-def]
        start_s = wall_clock()
        buffer = bucket.buffer()
        sent = torch.empty_like(buffer, dtype=wire_dtype or buffer.dtype, device="meta")
        size_bytes = sent_bytes(AllReduce(sent), dist.get_rank(), dist.get_world_size())
        future = base(state, bucket)

        def note(done: torch.futures.Future[Tensor]) -> Tensor:
            end_s = wall_clock()
            rank = dist.get_rank()
            spans.append(
                Span(
                    rank,
                    "communication",
                    "AllReduce",
                    start_s,
                    end_s,
                    size_bytes,
                    0,
                    -1,
                )
            )
            value: Any = done.value()
            return value[0] if isinstance(value, list) else value  # type: ignore[no-any-return]

        return future.then(note)

    timed_hook.__annotations__ = {}
    return timed_hook
