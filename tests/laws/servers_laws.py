"""The laws of servers that hold no model, for exchanges of W workers and S servers.

A law takes a case, which may have a wrong exchange. All gradients of a case are drawn,
also those of servers, which nobody may read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gradwire.collective.casync_ps import casync_ps
from gradwire.compress.none import none
from gradwire.contract import Compressor, Exchange, Member
from gradwire.contract.spec import TensorSpec
from gradwire.contract.verbs import Recv, Send, Steps
from gradwire.exchange.by_name import definition, run_local
from gradwire.exchange.error_feedback import ErrorFeedback
from gradwire.exchange.local import drive
from gradwire.exchange.pair import pair
from gradwire_lab.laws.cases import Case, accuracy, kept_of, states_of, total_of
from gradwire_lab.laws.inputs import make_gradient
from gradwire_lab.laws.tolerance import assert_near, largest, must, same_bits

STEPS = 3
_PLAIN = none()
Wrong = Callable[[Exchange, int], Exchange]
"""Makes a wrong exchange of a right one, and of its number of servers."""


def _right(exchange: Exchange, servers: int) -> Exchange:
    return exchange


@dataclass(frozen=True, kw_only=True)
class Served:
    """A number of workers and servers, with a gradient for each of them."""

    workers: int
    servers: int
    codec: Compressor = _PLAIN
    partitions: int | None = None
    in_rounds: bool = False
    numel: int = 200
    dtype: torch.dtype = torch.float32
    kind: str = "normal"
    seed: int = 0
    wrong: Wrong = _right

    @property
    def world(self) -> int:
        return self.workers + self.servers

    @property
    def as_case(self) -> Case:
        return Case(world=self.world, numel=self.numel, dtype=self.dtype)

    @property
    def exchange(self) -> Exchange:
        collective = casync_ps(
            servers=self.servers,
            partitions=self.partitions,
            room_bytes=0 if self.in_rounds else 2**19,
        )
        return self.wrong(pair(self.codec, collective), self.servers)

    def sent_bytes(self, order: int) -> list[int]:
        """The bytes that each rank sends of a message of this order."""
        steps, _ = _steps(self.exchange, self.grads(), None, order)
        return drive(steps, seed=self.seed).sent_bytes

    def grads(self, step: int = 0) -> list[Tensor]:
        """A gradient of each rank."""
        return [
            make_gradient(
                self.kind, self.numel, self.dtype, 100 * self.seed + 10 * step + r
            )
            for r in range(self.world)
        ]

    def __str__(self) -> str:
        parts = f"{self.workers} workers, {self.servers} servers, {self.codec!r}"
        how = f"{self.numel} elements, {self.kind}, partitions {self.partitions}"
        return f"{parts}, {how}, in rounds {self.in_rounds}"


def law_the_mean_is_over_workers(case: Served) -> None:
    """Uncompressed, the mean is that of the workers' gradients."""
    plain = replace(case, codec=none())
    grads = plain.grads()
    own = grads[: case.workers]
    for mean_N, _, _ in run_local(plain.exchange, grads, seed=case.seed)[
        : case.workers
    ]:
        assert_near(
            mean_N,
            total_of(own) / case.workers,
            case.dtype,
            magnitude=largest(*own),
            terms=2 * case.world + 4,
            what="the mean against that of workers",
        )


def law_servers_gradients_are_not_read(case: Served) -> None:
    """Another gradient of a server, or a NaN, changes no bit of a mean or a residual.

    Servers' residuals are compared too.
    """
    found = []
    for spoil in (0.0, float("nan")):
        states = None
        bits: list[Tensor] = []
        for step in range(2):
            grads = case.grads(step)
            for grad_N in grads[case.workers :]:
                grad_N.fill_(spoil)
            steps, outs = _steps(ErrorFeedback(case.exchange), grads, states)
            states = drive(steps, seed=case.seed).results
            bits += outs[: case.workers]
            bits += [state.residual_N for state in states]
        found.append(bits)
    for one_N, other_N in zip(*found, strict=True):
        must(
            same_bits(one_N, other_N), "a server's gradient changed a mean or residual"
        )


def law_workers_hold_the_same_bits(case: Served) -> None:
    """All workers have the same bits, in any interleaving of ranks."""
    means = []
    for seed in range(3):
        results = run_local(case.exchange, case.grads(), seed=seed)
        means += [mean_N for mean_N, _, _ in results[: case.workers]]
    for mean_N in means:
        must(same_bits(mean_N, means[0]), "workers hold other bits")


def law_nothing_is_lost_or_made(case: Served) -> None:
    """Workers' gradients and all old residuals = W * mean + all new residuals."""
    exchange = ErrorFeedback(case.exchange)
    states = None
    old_N = torch.zeros(case.numel, dtype=torch.float64)
    for step in range(STEPS):
        grads = case.grads(step)
        for grad_N in grads[case.workers :]:
            grad_N.zero_()
        results = run_local(exchange, grads, states, seed=case.seed)
        states = states_of(results)
        kept = [kept_of(state, case.numel) for state in states]
        new_N = total_of(kept)
        assert_near(
            case.workers * results[0][0].double() + new_N,
            total_of(grads) + old_N,
            accuracy(exchange.inner, case.as_case),
            magnitude=case.world * largest(*grads, *kept),
            terms=2 * case.world + 4,
            what=f"step {step}: W * mean + new residuals",
        )
        old_N = new_N


def law_workers_and_servers_meet_only_each_other(case: Served) -> None:
    """No payload goes from a worker to a worker, or from a server to a server."""
    grads = case.grads()
    ends: list[tuple[int, int, int]] = []

    def watched(rank: int, steps: Steps[object]) -> Steps[object]:
        value = None
        while True:
            try:
                asked = steps.send(value)
            except StopIteration as stop:
                return stop.value
            for verb in asked if isinstance(asked, tuple) else (asked,):
                if isinstance(verb, Send):
                    ends.append((rank, verb.dst, verb.buf.numel()))
                elif isinstance(verb, Recv):
                    ends.append((verb.src, rank, verb.buf.numel()))
                elif hasattr(verb, "in_sizes"):
                    ends.extend((rank, to, n) for to, n in enumerate(verb.in_sizes))
            value = yield asked

    every = [
        watched(rank, definition(case.exchange, rank, case.world, state, grad_N))
        for rank, (state, grad_N) in enumerate(
            zip(_states(case.exchange, case.grads()), grads, strict=True)
        )
    ]
    drive(every, seed=case.seed)
    # sizes that vary are announced by one number for each rank
    sent = [(src, dst) for src, dst, numel in ends if numel > 1]
    if case.codec.traits.exact_size:
        must(bool(sent), "nothing was sent")
    for src, dst in sent:
        is_across = (src < case.workers) != (dst < case.workers)
        must(is_across, f"rank {src} sends rank {dst} something")


def _states(exchange: Exchange, grads: list[Tensor]) -> list[object]:
    spec = TensorSpec("", grads[0].numel(), grads[0].dtype)
    return [
        exchange.init(replace(spec, rank=rank), len(grads))
        for rank in range(len(grads))
    ]


def _steps(
    exchange: Exchange,
    grads: list[Tensor],
    states: list[object] | None,
    order: int = 0,
) -> tuple[list[Steps[object]], list[Tensor]]:
    """One step of each rank, and the tensors that get the means."""
    outs = [torch.zeros_like(grad_N) for grad_N in grads]
    before = _states(exchange, grads) if states is None else states
    world = len(grads)
    steps = [
        exchange.synchronise(
            Member(rank, world, order), before[rank], grads[rank], outs[rank]
        )
        for rank in range(world)
    ]
    return steps, outs


LAWS = tuple(law for name, law in sorted(globals().items()) if name[:4] == "law_")


# ---- wrong exchanges -----------------------------------------------------------------


@dataclass(frozen=True)
class Spoilt(Exchange):
    """A right exchange with a fault."""

    inner: Exchange
    servers: int
    fault: str

    def init(self, spec: TensorSpec, world: int) -> object:
        return self.inner.init(spec, world)

    def synchronise(self, me, state, grad_N, out_N, residual_N=None):  # type: ignore[no-untyped-def]
        is_server = me.rank >= me.world - self.servers
        if self.fault == "reads a server's gradient" and is_server:
            assert residual_N is not None
            residual_N.add_(grad_N)
        state = yield from self.inner.synchronise(me, state, grad_N, out_N, residual_N)
        match self.fault:
            case "counts servers in the mean":
                out_N.mul_((me.world - self.servers) / me.world)
            case "drops what the mean lost" if is_server and residual_N is not None:
                residual_N.zero_()
            case "one worker has other bits" if me.rank == 0:
                out_N.mul_(1 + 2**-20)
            case "sends workers' parts to workers":
                yield from _gossip(me, out_N)
        return state


def _gossip(me, out_N):  # type: ignore[no-untyped-def]
    """Rank 0 sends rank 1, a worker as it is, two numbers."""
    if me.rank == 0:
        yield Send(1, out_N[:2].clone())
    elif me.rank == 1:
        yield Recv(0, torch.empty_like(out_N[:2]))


def wrong(fault: str) -> Wrong:
    return partial(Spoilt, fault=fault)
