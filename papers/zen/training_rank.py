"""A rank of ``training``: it trains by each scheme in turn, and times whole steps.

Embeddings whose gradient is sparse by itself are a message of their own, and all other
gradients one that is summed by an all-reduce; under a sparsifier all gradients are one
message. Messages leave when backward is over, and the runtime's engine carries them.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.contract import Exchange, Member
from gradwire.exchange.error_feedback import with_error_feedback
from gradwire.exchange.pair import pair
from gradwire.kernels.libraries import backend
from gradwire.runtime.engine.engine import Engine
from gradwire.runtime.liveness.membership import join
from gradwire_bench.micro import sparse_rank
from gradwire_bench.micro.sparse_rank import DENSE
from gradwire_bench.schedule.sharing import share_cores
from gradwire_bench.testbed.ranks import Report
from gradwire_bench.workloads.task import TrainingTask
from gradwire_bench.workloads.train import message_of, views_in
from gradwire_lab.compress.dgc import dgc

from ..workloads import applications


def exchange_of(scheme: str, density: float | None) -> Exchange:
    """The exchange of a scheme: of all that is not zero, or of DGC's selection at a
    density.
    """
    if density is None or scheme == DENSE:
        return sparse_rank.exchange_of(scheme)
    codec = dgc(density=density)
    return with_error_feedback(pair(codec, sparse_rank.SCHEMES[scheme]))


class _Message:
    """Some parameters' gradients, and the exchange that they take."""

    def __init__(
        self, parameters: list[torch.nn.Parameter], exchange: Exchange, engine: Engine
    ) -> None:
        spec = message_of(parameters)
        self.grad_N = torch.zeros(spec.numel)
        for parameter, view in zip(
            parameters, views_in(self.grad_N, parameters), strict=True
        ):
            parameter.grad = view
        self.exchange = exchange
        self.member = Member(engine.rank, engine.world)
        self.state = exchange.init(spec, engine.world)


class _Side:
    """The model that one scheme trains."""

    def __init__(
        self, scheme: str, settings: dict[str, Any], task: TrainingTask, engine: Engine
    ) -> None:
        torch.manual_seed(task.seed)
        self.task = task
        self.engine = engine
        self.model = task.make_model()
        named = dict(self.model.named_parameters())
        self.optimizer = task.make_optimizer(named.values())
        exchange = exchange_of(scheme, settings["density"])
        sparse = named.pop(settings["parameter"]) if settings["parameter"] else None
        dense = exchange_of(DENSE, None) if sparse is not None else exchange
        self.messages = [_Message(list(named.values()), dense, engine)]
        if sparse is not None:
            self.messages.append(_Message([sparse], exchange, engine))

    def step(self, index: int) -> tuple[float, float, float]:
        """Takes one step; returns its seconds, those of forward and backward, and its
        loss.
        """
        batch = self.task.batch(index, self.engine.rank, self.engine.world)
        for message in self.messages:
            message.grad_N.zero_()
        dist.barrier()
        start_s = time.perf_counter()
        loss = self.task.loss(self.model, *batch)
        loss.backward()  # type: ignore[no-untyped-call]
        computed_s = time.perf_counter() - start_s
        ends = [
            self.engine.launch(
                place,
                "gradient",
                one.exchange.synchronise(one.member, one.state, one.grad_N, one.grad_N),
            )
            for place, one in enumerate(self.messages)
        ]
        self.engine.wait(ends)
        for message, end in zip(self.messages, ends, strict=True):
            message.state = end.result
        self.optimizer.step()
        return time.perf_counter() - start_s, computed_s, loss.item()


def measure(settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """The steps of each scheme, each its seconds, those of computing, and its loss."""
    torch.set_num_threads(1)
    backend()
    share_cores(dist.get_rank(), dist.get_world_size())
    engine = Engine(
        join(None),
        num_channels=2,
        timeout=timedelta(minutes=2),
        on_span=lambda span: None,
    )
    task = getattr(applications, settings["task"])(**settings["sizes"])
    sides = {
        scheme: _Side(scheme, settings, task, engine) for scheme in settings["schemes"]
    }
    found: dict[str, list[tuple[float, float, float]]] = {
        scheme: [] for scheme in sides
    }
    num_steps = settings["num_steps"] + 1
    for index in range(num_steps):
        for scheme, side in sides.items():
            report(index / num_steps, scheme)
            found[scheme].append(side.step(index))
    engine.close()
    return {"steps": found}
