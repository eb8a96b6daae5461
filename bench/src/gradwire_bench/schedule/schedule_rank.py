"""One rank of ``bench schedule``: replays one profile under each planner, in turn.

The cluster is measured first, through the runtime's own engine. Rank 0 plans on its
figures and hands the plans out. Planners then take turns of a few iterations each, so
that all of them see the same moods of the machine.
"""

import inspect
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

from gradwire.contract.registry import load
from gradwire.contract.trace.span import Span, Trace
from gradwire.measure.codecs import measure_codecs
from gradwire.measure.links import measure_cluster
from gradwire.planning.data.check import check
from gradwire.planning.data.cluster import Cluster, Host, VerbName
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.make_plan import plan as plan_for
from gradwire.runtime.attach import attach
from gradwire.runtime.engine.engine import Engine
from gradwire.runtime.engine.plain import values_of_all
from gradwire.runtime.grid.shards import TORCHRUN, ranks_of_each_host
from gradwire.runtime.handle import Handle, synchroniser_of
from gradwire.runtime.liveness.membership import join
from gradwire.runtime.settings import FailurePolicy, Options
from gradwire_lab.planning.tune import tune

from ..testbed.counters import own_counters
from ..testbed.ranks import Json, Report, part_of
from .replay import Memory, Replay, VirtualDevice, scaled_profile
from .sharing import keep_queues_short, share_cores

WARM_UP = 1
"""Iterations of each turn that are not measured."""
SIZES_BYTES = tuple(2**power for power in (11, 13, 15, 16, 17, 18, 19, 20, 21))
"""Sizes at which latencies decide, sizes at which bytes do, and the bend between: the
bytes of a message of 32 KiB hide behind the latencies of its hops.
"""
_TIMEOUT = timedelta(minutes=5)


@dataclass
class ReplayRun:
    """One row's model on its way, and what was measured of it so far."""

    plan: Plan
    model: Replay
    device: VirtualDevice
    optimizer: torch.optim.Optimizer
    handle: Handle
    iterations: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each, on the clock that all ranks of this machine share."""
    sent_bytes: list[float] = field(default_factory=list)
    """Bytes of one iteration, a figure a turn."""
    busy_cores: list[float] = field(default_factory=list)
    """Cores that this rank kept busy, a figure a turn."""
    num_batches: float = 0.0
    """Batches of an iteration that a coordinator had this rank send."""
    told_bytes: float = 0.0
    """Bytes of reports and plans that this rank sent in an iteration."""
    trace: Trace = field(default_factory=Trace)


def measure(settings: Json, report: Report) -> Json:
    """This rank's figures by model: the cluster, and plan, times, bytes and trace of
    each row.
    """
    torch.set_num_threads(1)
    share_cores(dist.get_rank(), dist.get_world_size())
    keep_queues_short(settings["rate_bytes_per_s"])
    profiles = [Profile.parse(text) for text in settings["profiles"]]
    figures = {}
    for index, profile in enumerate(profiles):
        name = profile.model
        within = part_of(report, index, len(profiles), f"{name}: ")
        figures[name] = _measure_one(profile, settings, within)
    return figures


def _measure_one(profile: Profile, settings: Json, report: Report) -> Json:
    report(0.0, "measuring the links")
    cluster = _measured_cluster(
        settings["rate_bytes_per_s"], compressors_of(settings["rows"])
    )
    report(0.1, "planning")
    plans = _agreed_plans(profile, cluster, settings)
    small = scaled_profile(
        profile, scale=settings["scale"], slowdown=settings["slowdown"]
    )
    runs = replay(small, plans, settings["turns"], settings["iterations"], report)
    return {
        "cluster": cluster.to_json(),
        "rows": {
            name: {
                "plan": run.plan.to_json(),
                "iterations": run.iterations,
                "sent_bytes": run.sent_bytes,
                "busy_cores": mean(run.busy_cores),
                "trace": run.trace.to_json(),
            }
            for name, run in runs.items()
        },
    }


def compressors_of(rows: Sequence[Json]) -> list[str]:
    """The compressors, by name, that planners of these rows let gradients go
    through.
    """
    chosen = [
        {**_defaults(load("planner", row["planner"])), **row["settings"]}
        for row in rows
    ]
    named = {
        settings.get("compressor") or settings.get("sparsifier") for settings in chosen
    }
    return sorted(str(name) for name in named if name is not None)


def _measured_cluster(rate_bytes_per_s: float, compressors: Sequence[str]) -> Cluster:
    """The cluster that the runtime's own engine measures here, and what compressors
    cost.

    Gathers are measured where something is compressed, as selected elements travel by
    them. All ranks measure compressors at the same time, as they encode at the same
    time in a step: ranks that share a core wait for each other.
    """
    count = ranks_of_each_host(TORCHRUN, who := join(None))
    engine = Engine(
        who,
        num_channels=4,
        timeout=_TIMEOUT,
        on_span=lambda span: None,
        ranks_per_host=count,
    )
    try:
        cluster = measure_cluster(
            engine,
            rate_bytes_per_s=rate_bytes_per_s,
            sizes_bytes=SIZES_BYTES,
            verbs=("all_reduce", "all_gather") if compressors else ("all_reduce",),
        )
    finally:
        engine.close()
    if compressors:
        codecs = measure_codecs(compressors, world=who.world // count)
        cluster = cluster.model_copy(update={"codecs": codecs})
    return cluster


def _agreed_plans(
    profile: Profile, cluster: Cluster, settings: Json
) -> dict[str, Plan]:
    """Every row's plan for the scaled profile, made on rank 0."""
    made = {}
    if dist.get_rank() == 0:
        made = {
            row["name"]: make_plan(profile, cluster, row, settings)
            for row in settings["rows"]
        }
    texts = values_of_all({name: plan.to_json() for name, plan in made.items()})[0]
    return {name: Plan.parse(text) for name, text in texts.items()}


def make_plan(profile: Profile, cluster: Cluster, row: Json, settings: Json) -> Plan:
    """The plan of one row for the scaled profile; sizes in ``row`` mean the profile at
    full size.

    ``row`` names a ``planner`` and its ``settings``, and tells whether to ``tune`` the
    others. They are tuned at full size on the cluster that is to it what the measured
    one is to the scaled profile, and their sizes are then scaled.
    """
    scale = settings["scale"]
    slowdown = settings["slowdown"]
    planner = load("planner", row["planner"])
    chosen = {**_defaults(planner), **row["settings"]}
    if row["tune"]:
        bound = partial(planner, **row["settings"])
        full_size = at_full_size(cluster, scale=scale, slowdown=slowdown)
        chosen |= tune(bound, profile, full_size, trials=settings["trials"]).settings
    small = scaled_profile(profile, scale=scale, slowdown=slowdown)
    bytes_scaled = {
        name: max(1, round(value / scale)) if name.endswith("_bytes") else value
        for name, value in chosen.items()
        if value is not None
    }
    return plan_for(planner, small, cluster, **bytes_scaled)


def stretched(line: LineFit, factor: float) -> LineFit:
    """The line of sizes ``factor`` times as large that take the same seconds.

    >>> line = LineFit(alpha_s=1.0, per_unit_s=2.0, samples=((1, 3.0),))
    >>> stretched(line, 2.0).samples
    ((2, 3.0),)
    """
    samples = tuple((round(factor * size), seconds) for size, seconds in line.samples)
    per_unit_s = line.per_unit_s / factor
    return line.model_copy(update={"per_unit_s": per_unit_s, "samples": samples})


def at_full_size(cluster: Cluster, *, scale: float, slowdown: float) -> Cluster:
    """The cluster on which the profile itself takes 1/``slowdown`` of what it takes
    here scaled.
    """

    def full_line(line: LineFit) -> LineFit:
        return stretched(line.times(1 / slowdown), scale)

    def full(level: Cluster | Host, **lines: dict[VerbName, LineFit]) -> Json:
        rate = level.rate_bytes_per_s * scale * slowdown
        every = {}
        for name, own in lines.items():
            every[name] = {v: full_line(line) for v, line in own.items()}
        return {"rate_bytes_per_s": rate, "hop_s": level.hop_s / slowdown, **every}

    host = cluster.host
    if host is not None:
        line = None
        if host.line is not None:
            line = full_line(host.line)
        host = host.model_copy(update={**full(host, shares=host.shares), "line": line})
    figures = full(cluster, collectives=cluster.collectives)
    figures["latency_s"] = cluster.latency_s / slowdown
    return cluster.model_copy(update={**figures, "host": host})


def _defaults(planner: Any) -> Json:
    parameters = inspect.signature(planner).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def replay(
    profile: Profile,
    plans: dict[str, Plan],
    turns: int,
    iterations: int,
    report: Report,
) -> dict[str, ReplayRun]:
    """Replays a profile under plans by turns, so many iterations of each in each
    turn.
    """
    with _attached(profile, plans) as runs:
        steps = [(turn, name) for turn in range(turns) for name in runs]
        for place, (_, name) in enumerate(steps):
            report(0.2 + 0.8 * place / len(steps), name)
            _take_turn(runs[name], iterations)
    return runs


@contextmanager
def _attached(
    profile: Profile, plans: dict[str, Plan]
) -> Iterator[dict[str, ReplayRun]]:
    runs: dict[str, ReplayRun] = {}
    memory: Memory = {}
    seed = None
    if any(plan.exchanges for plan in plans.values()):
        seed = dist.get_rank()
    try:
        for name, plan in plans.items():
            check(plan, profile)
            runs[name] = _start(profile, plan, memory, seed)
        yield runs
    finally:
        for run in runs.values():
            run.handle.detach()


def _start(profile: Profile, plan: Plan, memory: Memory, seed: int | None) -> ReplayRun:
    """A row's model, attached. All rows draw gradients, or none: they share one
    ``memory``.
    """
    device = VirtualDevice(dist.get_rank())
    rank = dist.get_rank()
    model = Replay(profile, device, gradient=float(rank), seed=seed, memory=memory)
    # A rate of 0: parameters stay what they are however long it runs, and every update
    # is made.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    handle = attach(
        model,
        plan,
        optimizer=optimizer,
        mesh=TORCHRUN,
        failure=FailurePolicy(timeout=_TIMEOUT),
        options=Options(trace_steps=2),
    )
    engine = synchroniser_of(handle).engine
    device.inline_s = lambda: engine.inline_s
    return ReplayRun(plan, model, device, optimizer, handle)


def _take_turn(run: ReplayRun, iterations: int) -> None:
    """Iterations as the simulator counts them: a backward pass and the forward pass
    after it.
    """
    before = own_counters()  # before any rank sends
    dist.barrier()
    start_s = time.perf_counter()
    busy_s = time.process_time()
    loss = run.model()
    ends_s = [run.device.free_s]
    for _ in range(WARM_UP + iterations):
        run.device.take_spans()
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        loss = run.model()
        ends_s.append(run.device.free_s)
    run.device.synchronise()
    dist.barrier()
    sent_bytes = own_counters().since(before).tx_bytes
    run.busy_cores.append(
        (time.process_time() - busy_s) / (time.perf_counter() - start_s)
    )
    run.iterations += list(itertools.pairwise(ends_s))[WARM_UP:]
    run.sent_bytes.append(sent_bytes / (WARM_UP + iterations))
    if (slots := synchroniser_of(run.handle).engine.slots) is not None:
        num_iterations = len(run.sent_bytes) * (WARM_UP + iterations)
        run.num_batches = slots.num_batches / num_iterations
        run.told_bytes = slots.told_bytes / num_iterations
    run.trace = _trace(run, *run.iterations[-1])


def _trace(run: ReplayRun, start_s: float, end_s: float) -> Trace:
    """The last iteration: layers of the device, and what the runtime did meanwhile."""
    inside: list[Span] = run.device.take_spans()
    inside += [
        span
        for span in run.handle.trace().spans
        if span.message >= 0 and start_s <= span.start_s <= end_s
    ]
    return Trace.of(inside)
