"""Section 3.2 of HiPress on real ranks: a coordinator, static turns, and neither.

Shaped hosts replay a model whose layers are waits: links, bytes, compressor and runtime
are real. Ways and plans are those of the simulated figure (``coordinator.py``). Bytes
are 1/4 of the model's, and seconds are four times as long, so that two cores can carry
8 hosts. This module is also the program of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gradwire.contract.units import format_rate
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire_bench.schedule.replay import scaled_profile
from gradwire_bench.schedule.schedule import BURST_S, CONGESTION_CONTROL
from gradwire_bench.schedule.schedule_rank import replay
from gradwire_bench.schedule.sharing import keep_queues_short, share_cores
from gradwire_bench.testbed.hosts import Testbed, shaped_hosts
from gradwire_bench.testbed.ranks import Report, part_of, run_ranks

from ..frame import Ask, Claim, Findings, Row
from .coordinator import (
    COORDINATED,
    RANKS,
    RULES,
    SPREADS,
    STATIC,
    coordinated,
    static_figures,
)
from .coordinator import plans_of as plans_without
from .setting import GBIT, LOCAL

MODELS = (("resnet50", "casync_ps"), ("bert_base", "casync_ring"))
RATE_BYTES_PER_S = 0.1 * GBIT
SCALE = 4.0
SLOWDOWN = 4.0


def slots_measured(ask: Ask) -> Findings:
    """Seconds of a step, sends and bytes; quick: one model on 3 hosts."""
    models = MODELS[:1] if ask.quick else MODELS
    link = RATE_BYTES_PER_S / (SCALE * SLOWDOWN)
    testbed = Testbed(
        hosts=3 if ask.quick else RANKS,
        rate_bytes_per_s=link,
        burst_s=BURST_S,
        congestion_control=CONGESTION_CONTROL,
    )
    settings = {"models": models, "link": link, "turns": 1 if ask.quick else 3}
    with shaped_hosts(testbed) as hosts:
        results = run_ranks(
            hosts, __name__, settings, report=ask.report, timeout_s=3600
        )
    rows: list[Row] = []
    for model, spread in product(models, SPREADS):
        key = f"{model[0]} {spread:g}"
        rows += rows_of(model, spread, [result[key] for result in results])
    note = (
        f"{testbed.hosts} shaped hosts at {format_rate(RATE_BYTES_PER_S)}: 1/{SCALE:g} "
        f"of the bytes, {SLOWDOWN:g} times the seconds; bytes are counted on the links"
    )
    return Findings(tuple(rows), tuple(claims_of(rows)), (note,))


def rows_of(
    model: tuple[str, str], spread: float, ranks: Sequence[dict[str, Any]]
) -> list[Row]:
    """A row for each way; a step ends on the rank that ends last."""
    (name, collective) = model
    profile = profile_of_rank(name, 0, spread, 1)
    cluster = LOCAL.cluster(len(ranks))
    rows: list[Row] = []
    for way, plan in plans_of(profile, collective).items():
        own = [rank[way] for rank in ranks]
        steps = zip(*(one["iterations"] for one in own), strict=True)
        step_s = median(
            max(end for _, end in one) - max(start for start, _ in one) for one in steps
        )
        sends = sum(one["batches"] for one in own)
        if plan.bulk is None:
            sends = static_figures(plan, profile, cluster, ())["sends"]
        rows.append(
            {
                "name": f"{name} {collective}, {100 * spread:g} % apart, {way}",
                "model": name,
                "way": way,
                "uneven_percent": 100 * spread,
                "step_s": step_s / SLOWDOWN,
                "sends": round(sends),
                "link_bytes": round(sum(median(one["sent_bytes"]) for one in own)),
            }
        )
    return rows


def claims_of(rows: Sequence[Row]) -> list[Claim]:
    """Whether the coordinator is as fast as static turns, on even and uneven ranks."""
    claims = []
    for spread in SPREADS:
        own = [row for row in rows if row["uneven_percent"] == 100 * spread]
        ratios = []
        for static in own:
            if static["way"] == STATIC:
                times = [
                    float(str(row["step_s"]))
                    for row in own
                    if row["model"] == static["model"]
                    and str(row["way"]).startswith(COORDINATED)
                ]
                ratios.append(min(times) / float(str(static["step_s"])))
        is_faster = max(ratios) <= 1.0
        what = f"ranks {100 * spread:g} % apart: no step is slower than by static turns"
        shown = f"{min(ratios):.2f} to {max(ratios):.2f} of the seconds"
        why = "" if is_faster else "what it is told and tells takes two latencies more"
        claims.append(Claim(what, "section 3.2", shown, is_faster, why))
    return claims


def plans_of(profile: Profile, collective: str) -> dict[str, Plan]:
    """The plan of each way, for a scaled profile."""
    plans = plans_without(profile, collective, scale=SCALE)
    for rules in RULES:
        name = f"{COORDINATED}, {rules.ahead} ahead"
        plans[name] = coordinated(profile, collective, rules)
    return plans


def profile_of_rank(model: str, rank: int, spread: float, world: int) -> Profile:
    """The scaled profile of a rank, whose backward pass may take longer."""
    small = scaled_profile(LOCAL.profile(model), scale=SCALE, slowdown=SLOWDOWN)
    factor = 1.0 + spread * rank / max(1, world - 1)
    layers = tuple(
        layer.model_copy(update={"backward_s": factor * layer.backward_s})
        for layer in small.layers
    )
    return small.model_copy(update={"layers": layers})


def measure(settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """This rank's iterations, bytes and batches of every model and spread."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    world = dist.get_world_size()
    share_cores(rank, world)
    keep_queues_short(settings["link"])
    cases = list(product(settings["models"], SPREADS))
    found: dict[str, Any] = {}
    for place, ((model, collective), spread) in enumerate(cases):
        within = part_of(report, place, len(cases), f"{model}: ")
        small = profile_of_rank(model, rank, spread, world)
        plans = plans_of(small, collective)
        runs = replay(small, plans, settings["turns"], 2, within)
        found[f"{model} {spread:g}"] = {
            way: {
                "iterations": run.iterations,
                "sent_bytes": run.sent_bytes,
                "batches": run.num_batches,
            }
            for way, run in runs.items()
        }
    return found
