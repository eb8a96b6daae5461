"""Figure 12 of HiPress: what each optimisation saves, each added to those before it,
measured.

The paper trains VGG19 with CaSync-PS and Bert-base with CaSync-Ring on 16 machines.
Here both are replayed on shaped hosts: links, bytes, compressor and runtime are real,
layers are waits. Each optimisation is switched by what a plan says:

- default: every tensor goes by an all-reduce of its own, uncompressed, one at a time;
- codec: through onebit, encoded by the backward pass, which waits;
- pipelining: encoded on the compute lane, four messages under way at a time;
- bulk: small tensors share messages; so few bytes are too few for rounds or halves;
- planner: ``secopa`` says what is compressed, and into how many partitions.

This module is also the program of the ranks.
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
from gradwire.measure.codecs import measure_codecs
from gradwire.measure.links import measure_cluster
from gradwire.planning.catalogue import load
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import (
    DENSE,
    Chunk,
    ExchangeSetting,
    Plan,
    PlannedMessage,
    Setting,
)
from gradwire.planning.data.profile import Profile, ProfiledTensor
from gradwire.runtime.engine.engine import Engine
from gradwire.runtime.engine.plain import values_of_all
from gradwire.runtime.liveness.membership import join
from gradwire_bench.schedule.replay import scaled_profile
from gradwire_bench.schedule.schedule import BURST_S, CONGESTION_CONTROL
from gradwire_bench.schedule.schedule_rank import replay
from gradwire_bench.schedule.sharing import keep_queues_short, share_cores
from gradwire_bench.testbed.hosts import Testbed, shaped_hosts
from gradwire_bench.testbed.ranks import Report, run_ranks
from gradwire_lab.planner.secopa import secopa
from gradwire_lab.planning.sparse_fusion import arrivals

from ..frame import Ask, Claim, Findings, Row

HOSTS = 4
RATE_BYTES_PER_S = 10e9 / 8
"""The slower network of the paper's local cluster (figure 15). With its 56 Gbit/s so
few hosts hide nearly all of an all-reduce behind the backward pass, and nothing is left
to save.
"""
SCALE = 64.0
SLOWDOWN = 4.0
BULK_BYTES = 4 * 2**20
"""Bytes that messages of small tensors hold at least, at full size."""
CREDIT = 4
NEVER_BYTES = 2**40
"""More bytes than any message has: nothing goes in rounds or halves."""
SAVED = {
    "vgg19": {"codec": 41.2, "pipelining": 7.8, "bulk": 26.1, "planner": 19.9},
    "bert_base": {"codec": 10.0, "pipelining": 10.6, "bulk": 6.6, "planner": 7.4},
}
"""Percent of the cost of synchronisation that each optimisation saves: section 6.3."""
COLLECTIVES = {"vgg19": "casync_ps", "bert_base": "casync_ring"}
AT_ONCE = {"casync_ps": "room_bytes", "casync_ring": "half_bytes"}
"""The setting that says which messages go in rounds or halves."""
DIRECTION = "each optimisation lowers what synchronisation adds to an iteration"
OTHERWISE = "the paper's share is of 16 machines with GPUs; here waits stand for those"


def figure12(ask: Ask) -> Findings:
    """Seconds of an iteration with each optimisation added; quick: VGG19 on two
    hosts.
    """
    models = ("vgg19",) if ask.quick else tuple(SAVED)
    link = RATE_BYTES_PER_S / (SCALE * SLOWDOWN)
    settings = {"models": models, "link": link, "turns": 1 if ask.quick else 3}
    testbed = Testbed(
        hosts=2 if ask.quick else HOSTS,
        rate_bytes_per_s=link,
        burst_s=BURST_S,
        congestion_control=CONGESTION_CONTROL,
    )
    with shaped_hosts(testbed) as hosts:
        results = run_ranks(
            hosts, __name__, settings, report=ask.report, timeout_s=3600
        )
    rows = [
        row
        for model in models
        for row in rows_of(model, [result[model] for result in results])
    ]
    note = (
        f"{testbed.hosts} shaped hosts at {format_rate(RATE_BYTES_PER_S)}: 1/{SCALE:g} "
        f"of the bytes, {SLOWDOWN:g} times the seconds; synchronisation is an "
        "iteration less its computation"
    )
    claims = [claim for model in models for claim in claims_of(model, rows)]
    return Findings(tuple(rows), tuple(claims), (note,))


def rows_of(model: str, ranks: Sequence[dict[str, Any]]) -> list[Row]:
    """A row for each plan; an iteration's time is that of the rank that ends last."""
    rows: list[Row] = []
    small = scaled_profile(load(model), scale=SCALE, slowdown=SLOWDOWN)
    compute_s = small.forward_s + small.backward_s
    for name in ranks[0]:
        iterations = zip(*(rank[name]["iterations"] for rank in ranks), strict=True)
        step_s = median(
            max(e for _, e in one) - max(s for s, _ in one) for one in iterations
        )
        before = float(str(rows[-1]["synchronisation_s"])) if rows else None
        left_s = max(0.0, step_s - compute_s)
        rows.append(
            {
                "name": f"{model} {name}",
                "model": model,
                "added": name,
                "step_s": step_s,
                "compute_s": compute_s,
                "synchronisation_s": left_s,
                "saved_percent": 100 * (1 - left_s / before) if before else None,
                "saved_percent_paper": SAVED[model].get(name),
                "messages": ranks[0][name]["messages"],
            }
        )
    return rows


def claims_of(model: str, rows: Sequence[Row]) -> list[Claim]:
    """Whether each step saves something, and the paper's share beside ours."""
    own = [row for row in rows if row["model"] == model]
    left_s = [float(str(row["synchronisation_s"])) for row in own]
    falls = all(after < before for before, after in pairwise(left_s))
    shown = ", ".join(f"{seconds:.3f} s" for seconds in left_s)
    grown = [str(a["added"]) for b, a in pairwise(own) if _left(a) >= _left(b)]
    why = "" if falls else f"{', '.join(grown)} saved nothing here"
    claims = [Claim(f"{model}: {DIRECTION}", "figure 12", shown, falls, why)]
    for row in own[1:]:
        ours = row["saved_percent"]
        claims.append(
            Claim(
                f"{row['name']} saves {row['saved_percent_paper']} % of it",
                "section 6.3",
                "nothing was left to save" if ours is None else f"{ours:.1f} %",
                None,
                OTHERWISE,
            )
        )
    return claims


def _left(row: Row) -> float:
    return float(str(row["synchronisation_s"]))


def plans_of(profile: Profile, cluster: Cluster, collective: str) -> dict[str, Plan]:
    """The plan of each step, for a scaled profile and the cluster measured here."""
    tensors = [tensor for tensor, _ in arrivals(profile)]
    single = [(tensor,) for tensor in tensors]
    bulk_bytes = max(1, round(BULK_BYTES / SCALE))
    at_once: dict[str, Setting] = {AT_ONCE[collective]: NEVER_BYTES}
    planned = secopa(
        profile, cluster, collective=collective, bulk_bytes=bulk_bytes, credit=CREDIT
    )
    return {
        "default": plan_with(profile, single),
        "codec": plan_with(
            profile, single, onebit_by(collective, at_once), inline=True
        ),
        "pipelining": plan_with(
            profile, single, onebit_by(collective, at_once), credit=CREDIT
        ),
        "bulk": plan_with(
            profile,
            sharing(tensors, bulk_bytes),
            onebit_by(collective, {}),
            credit=CREDIT,
        ),
        "planner": planned,
    }


def onebit_by(collective: str, settings: dict[str, Setting]) -> ExchangeSetting:
    """onebit by a collective with these settings, with error feedback."""
    return ExchangeSetting(
        compressor="onebit",
        collective=collective,
        collective_settings=settings,
        error_feedback=True,
    )


def plan_with(
    profile: Profile,
    together: Sequence[Sequence[ProfiledTensor]],
    exchange: ExchangeSetting | None = None,
    *,
    inline: bool = False,
    credit: int = 1,
) -> Plan:
    """A message for each of ``together``; ``inline``: the backward pass waits for
    encodes.
    """
    name = DENSE if exchange is None else exchange.compressor
    messages = tuple(
        PlannedMessage(
            chunks=tuple(
                Chunk(tensor=one.name, start=0, stop=one.numel) for one in tensors
            ),
            exchange=name,
            inline=tuple(one.name for one in tensors) if inline else (),
        )
        for tensors in together
    )
    return Plan(
        planner="ablation",
        model=profile.model,
        messages=messages,
        credit=credit,
        exchanges={} if exchange is None else {name: exchange},
    )


def sharing(
    tensors: Sequence[ProfiledTensor], bulk_bytes: int
) -> list[list[ProfiledTensor]]:
    """Tensors in order; a message is closed once it holds so many bytes."""
    found: list[list[ProfiledTensor]] = [[]]
    for tensor in tensors:
        if sum(one.size_bytes for one in found[-1]) >= bulk_bytes:
            found.append([])
        found[-1].append(tensor)
    return found


def measure(settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """This rank's iterations of every model under each plan; rank 0 plans for all."""
    torch.set_num_threads(1)
    share_cores(dist.get_rank(), dist.get_world_size())
    keep_queues_short(settings["link"])
    report(0.0, "measuring the links")
    cluster = _measured_cluster(settings["link"])
    found: dict[str, Any] = {}
    for model in settings["models"]:
        small = scaled_profile(load(model), scale=SCALE, slowdown=SLOWDOWN)
        plans: dict[str, Plan] = {}
        if dist.get_rank() == 0:
            plans = plans_of(small, cluster, COLLECTIVES[model])
        texts = values_of_all({name: plan.to_json() for name, plan in plans.items()})[0]
        agreed = {name: Plan.parse(text) for name, text in texts.items()}
        runs = replay(small, agreed, settings["turns"], 2, report)
        found[model] = {
            name: {"iterations": run.iterations, "messages": len(run.plan.messages)}
            for name, run in runs.items()
        }
    return found


def _measured_cluster(link: float) -> Cluster:
    engine = Engine(
        join(None),
        num_channels=CREDIT,
        timeout=timedelta(minutes=5),
        on_span=lambda span: None,
    )
    try:
        cluster = measure_cluster(
            engine, rate_bytes_per_s=link, verbs=("all_reduce", "send"), budget_s=0.2
        )
    finally:
        engine.close()
    if dist.get_rank() == 0:
        codecs = measure_codecs(["onebit"], world=dist.get_world_size())
        cluster = cluster.model_copy(update={"codecs": codecs})
    return cluster
