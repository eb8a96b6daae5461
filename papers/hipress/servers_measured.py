"""Table 3 of HiPress on real ranks: servers of their own, and beside workers.

Shaped hosts replay a model whose layers are waits: links, bytes, compressor and runtime
are real. Two workers and a server, or four and two, train beside as many hosts that do
both, in turn. Messages hold 4 MiB and go through onebit. A turn attaches anew, and its
first steps do not count. This module is also the program of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gradwire.contract.units import format_rate
from gradwire.planning.data.plan import Plan, Setting
from gradwire.planning.data.profile import Profile
from gradwire.runtime.attach import attach
from gradwire.runtime.serve import serve
from gradwire.runtime.settings import FailurePolicy
from gradwire_bench.schedule.replay import Replay, VirtualDevice, scaled_profile
from gradwire_bench.schedule.schedule import BURST_S, CONGESTION_CONTROL
from gradwire_bench.schedule.sharing import keep_queues_short, share_cores
from gradwire_bench.testbed.hosts import Testbed, open_hosts
from gradwire_bench.testbed.ranks import Report, run_ranks
from gradwire_lab.planning.sparse_fusion import arrivals

from ..frame import Ask, Claim, Findings, Row
from ..rows import number
from .ablation import BULK_BYTES, CREDIT, onebit_by, plan_with, sharing
from .setting import GBIT, LOCAL

MODELS = ("resnet50", "bert_base")
ROLES = ((3, 0), (2, 1), (6, 0), (4, 2))
"""Workers and servers: those of the first hosts, with no server where all do both."""
RATE_BYTES_PER_S = 1.0 * GBIT
SCALE = 16.0
SLOWDOWN = 4.0
TURNS = 5
STEPS = 4
"""Steps of a turn that count."""
WARM_UP = 2
_FAILURE = FailurePolicy(timeout=timedelta(minutes=5))


def servers_measured(
    ask: Ask, models: Sequence[str] = MODELS, turns: int = TURNS
) -> Findings:
    """Seconds of a step, and batches of all workers in a second.

    Quick: one model on 3 hosts, in two turns.
    """
    roles: Sequence[tuple[int, int]] = ROLES
    if ask.quick:
        models = models[:1]
        roles = ROLES[:2]
        turns = 2
    link = RATE_BYTES_PER_S / (SCALE * SLOWDOWN)
    testbed = Testbed(
        hosts=max(map(sum, roles)),
        rate_bytes_per_s=link,
        burst_s=BURST_S,
        congestion_control=CONGESTION_CONTROL,
    )
    settings = {"models": models, "roles": roles, "link": link, "turns": turns}
    with open_hosts(testbed) as hosts:
        results = run_ranks(
            hosts, __name__, settings, report=ask.report, timeout_s=3600
        )
    rows: list[Row] = []
    for model in models:
        for workers, serving in roles:
            key = _key(model, workers, serving)
            turns_of_ranks = [result[key] for result in results[:workers]]
            rows.append(row_of(model, workers, serving, turns_of_ranks))
    note = (
        f"{testbed.hosts} shaped hosts at {format_rate(RATE_BYTES_PER_S)}: 1/{SCALE:g} "
        f"of the bytes, {SLOWDOWN:g} times the seconds; medians of {turns} turns with "
        "the least and the most"
    )
    return Findings(tuple(rows), tuple(claims_of(rows)), (note,))


def row_of(
    model: str,
    workers: int,
    serving: int,
    ranks: Sequence[Sequence[Sequence[tuple[float, float]]]],
) -> Row:
    """The row of these workers' turns; a step ends on the rank that ends last."""
    seconds = []
    for turn in zip(*ranks, strict=True):
        steps = zip(*turn, strict=True)
        seconds.append(
            median(max(e for _, e in one) - max(s for s, _ in one) for one in steps)
            / SLOWDOWN
        )
    return {
        "name": f"{model}, {workers} + {serving}",
        "hosts": workers + serving,
        "servers": serving,
        "step_s": median(seconds),
        "least_s": min(seconds),
        "most_s": max(seconds),
        "batches_each_second": workers / median(seconds),
    }


def claims_of(rows: Sequence[Row]) -> list[Claim]:
    """Whether as many hosts train fastest with aggregators beside workers."""
    gains = [
        number(row, "batches_each_second") / number(before, "batches_each_second")
        for before, row in zip(rows[::2], rows[1::2], strict=True)
    ]
    is_best = max(gains) < 1.0
    return [
        Claim(
            "hosts train fastest with aggregators beside workers",
            "section 6.1",
            f"servers apart train at {min(gains):.2f} to {max(gains):.2f} of it",
            is_best,
            "" if is_best else "servers compute no gradient, and their links are free",
        )
    ]


def plan_of(profile: Profile, serving: int) -> Plan:
    """Tensors share messages, which some ranks serve, or all."""
    tensors = [tensor for tensor, _ in arrivals(profile)]
    together = sharing(tensors, round(BULK_BYTES / SCALE))
    settings: dict[str, Setting] = {"servers": serving} if serving else {}
    exchange = onebit_by("casync_ps", settings)
    return plan_with(profile, together, exchange, credit=CREDIT)


def measure(settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """This rank's steps, by model and roles, in each turn; none where it serves."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    share_cores(rank, dist.get_world_size())
    keep_queues_short(settings["link"])
    groups = [dist.new_group([*range(sum(roles))]) for roles in settings["roles"]]
    found: dict[str, Any] = {}
    turns = settings["turns"] * len(settings["models"])
    for place in range(turns):
        model = settings["models"][place // settings["turns"]]
        profile = scaled_profile(LOCAL.profile(model), scale=SCALE, slowdown=SLOWDOWN)
        for (workers, serving), group in zip(settings["roles"], groups, strict=True):
            key = _key(model, workers, serving)
            report(place / turns, key)
            dist.barrier()
            plan = plan_of(profile, serving)
            if rank < workers:
                found.setdefault(key, []).append(_train(profile, plan, group))
            elif rank < workers + serving:
                with torch.device("meta"):
                    shapes = Replay(profile, VirtualDevice(rank))
                serve(shapes, plan, group=group, failure=_FAILURE)
    return found


def _key(model: str, workers: int, serving: int) -> str:
    return f"{model} {workers} {serving}"


def _train(profile: Profile, plan: Plan, group: Any) -> list[tuple[float, float]]:
    """Starts and ends of a turn's steps: a backward pass and the forward pass after
    it.
    """
    rank = dist.get_rank()
    device = VirtualDevice(rank)
    model = Replay(profile, device, seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = attach(model, plan, optimizer=optimizer, group=group, failure=_FAILURE)
    loss = model()
    ends_s = [device.free_s]
    for _ in range(WARM_UP + STEPS):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = model()
        ends_s.append(device.free_s)
    device.synchronise()
    handle.detach()
    return [*pairwise(ends_s)][WARM_UP:]
