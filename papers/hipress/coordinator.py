"""Section 3.2 of HiPress: bulk communication by a coordinator, beside static turns.

The paper gives no figure for the coordinator alone: figure 12's "bulk" is all of
section 3.2. Here each tensor is a message of its own, through onebit, and three ways
carry the same payloads. A coordinator says which of them travel when, and batches them.
Static turns are rounds that follow from ranks' numbers, with four messages under way.
Neither: a message sends all its payloads at once. "Shared" is gradwire's own way:
tensors share messages of 4 MiB, with static turns. On uneven ranks the last rank's
backward pass takes a fifth longer than the first's.

The simulator has no incast: a link loses nothing where several ranks send to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Bulk, Plan, Setting
from gradwire.planning.data.profile import Profile
from gradwire.planning.simulation.clock import Demand
from gradwire.planning.simulation.events import Timetable, Traffic, play
from gradwire.planning.simulation.supersteps import Hop
from gradwire_lab.planning.all_ranks import all_ranks
from gradwire_lab.planning.sparse_fusion import arrivals

from ..frame import Ask, Claim, Findings, Row
from .ablation import (
    AT_ONCE,
    BULK_BYTES,
    CREDIT,
    NEVER_BYTES,
    onebit_by,
    plan_with,
    sharing,
)
from .plans import SEND
from .setting import GBIT, LOCAL
from .slots import simulate_slots

RANKS = 8
MODELS = (
    ("bert_base", "casync_ps"),
    ("bert_base", "casync_ring"),
    ("resnet50", "casync_ps"),
    ("ugatit", "casync_ps"),
)
FAR_S = 0.02
LINKS = (
    (0.1, SEND.alpha_s),
    (1.0, SEND.alpha_s),
    (10.0, SEND.alpha_s),
    (0.1, FAR_S),
)
"""Gbit/s, and seconds of a hop."""
SPREADS = (0.0, 0.2)
"""How much longer the last rank's backward pass takes than the first's."""
RULES = (Bulk(), Bulk(ahead=1))
STATIC = "static turns"
COORDINATED = "coordinator"
NOT_SAID = "the paper shows bulk communication as one, on GPUs and 56 Gbit/s"


def coordinator(ask: Ask, num_ranks: int = RANKS) -> Findings:
    """Seconds of a step, sends and bytes; quick: one model at one rate."""
    cases = list(product(MODELS, LINKS, SPREADS))
    if ask.quick:
        cases = [(MODELS[2], LINKS[1], spread) for spread in SPREADS]
    rows: list[Row] = []
    for number, ((model, collective), link, spread) in enumerate(cases):
        ask.report(number / len(cases), f"{model} at {link[0]:g} Gbit/s")
        rows += rows_of(model, collective, link, spread, num_ranks)
    return Findings(
        tuple(rows),
        tuple(claims_of(rows)),
        (f"{num_ranks} simulated hosts; told: bytes of reports and plans",),
    )


def rows_of(
    model: str,
    collective: str,
    link: tuple[float, float],
    spread: float,
    num_ranks: int = RANKS,
) -> list[Row]:
    """A row for each way."""
    rate_gbit, hop_s = link
    profile = LOCAL.profile(model)
    cluster = LOCAL.cluster(num_ranks).model_copy(
        update={"rate_bytes_per_s": rate_gbit * GBIT, "hop_s": hop_s}
    )
    slower = [1.0 + spread * rank / (num_ranks - 1) for rank in range(num_ranks)]
    found: dict[str, dict[str, Any]] = {}
    for name, plan in plans_of(profile, collective).items():
        found[name] = static_figures(plan, profile, cluster, slower)
    for rules in RULES:
        plan = coordinated(profile, collective, rules)
        made = simulate_slots(plan, profile, cluster, slower)
        name = f"{COORDINATED}, {rules.ahead} ahead"
        found[name] = {
            "step_s": max(timing.iteration_s for timing in made.timings),
            "sends": made.num_batches,
            "sent_bytes": made.sent_bytes,
            "told_percent": 100 * made.told_bytes / made.sent_bytes,
        }
    return [
        {
            "name": f"{model} {collective}, {rate_gbit:g} Gbit/s, "
            f"{1000 * hop_s:g} ms, {way}",
            "model": model,
            "way": way,
            "rate_gbit": rate_gbit,
            "uneven_percent": 100 * spread,
            **figures,
        }
        for way, figures in found.items()
    ]


def plans_of(profile: Profile, collective: str, scale: float = 1.0) -> dict[str, Plan]:
    """The plans without a coordinator, for a profile of 1/``scale`` of the bytes."""
    tensors = [tensor for tensor, _ in arrivals(profile)]
    single = [(tensor,) for tensor in tensors]
    setting = AT_ONCE[collective]
    ways: dict[str, tuple[Sequence[Any], dict[str, Setting]]] = {
        STATIC: (single, {setting: 0 if collective == "casync_ps" else NEVER_BYTES}),
        "neither": (single, {setting: NEVER_BYTES}),
        "shared": (sharing(tensors, round(BULK_BYTES / scale)), {}),
    }
    if collective == "casync_ring":
        del ways["neither"]  # a ring's turns are its way
    return {
        name: plan_with(
            profile, together, onebit_by(collective, settings), credit=CREDIT
        )
        for name, (together, settings) in ways.items()
    }


def coordinated(profile: Profile, collective: str, rules: Bulk) -> Plan:
    """Each tensor by itself; a message sends all its payloads at once."""
    single = [(tensor,) for tensor, _ in arrivals(profile)]
    exchange = onebit_by(collective, {AT_ONCE[collective]: NEVER_BYTES})
    made = plan_with(profile, single, exchange, credit=CREDIT)
    return made.model_copy(update={"bulk": rules})


def static_figures(
    plan: Plan, profile: Profile, cluster: Cluster, slower: Sequence[float]
) -> dict[str, Any]:
    """The figures of a plan without a coordinator."""
    sends: list[int] = []
    sent_bytes: list[float] = []

    def carry(traffic: Traffic) -> Timetable:
        for own in traffic.supersteps:
            for superstep in (one for message in own for one in message):
                sent_bytes.append(superstep.sent_bytes)
                for verb in superstep.wire:
                    if isinstance(verb, Hop):
                        sends.append(int(verb.sends))
                    else:
                        sends.append(cluster.num_ranks - 1)
        return play(traffic)

    timings = all_ranks(Demand.of(plan, profile, cluster), slower, carry)
    return {
        "step_s": max(timing.iteration_s for timing in timings),
        "sends": sum(sends),
        "sent_bytes": int(sum(sent_bytes)),
        "told_percent": 0.0,
    }


def claims_of(rows: Sequence[Row]) -> list[Claim]:
    """Whether the coordinator saves sends and time, and costs nothing to speak of."""
    claims = []
    for spread in SPREADS:
        own = [row for row in rows if row["uneven_percent"] == 100 * spread]
        ranks = "uneven ranks" if spread else "even ranks"
        ratios = [_ratio(own, row) for row in own if row["way"] == STATIC]
        is_faster = all(ratio <= 1.0 for ratio in ratios)
        shown = f"{min(ratios):.2f} to {max(ratios):.2f} of the step's seconds"
        why = "" if is_faster else "what it is told and tells takes two latencies more"
        what = f"{ranks}: no step is slower than with static turns"
        claims.append(Claim(what, "section 3.2", shown, is_faster, why))
    told = [float(str(row["told_percent"])) for row in rows]
    claims.append(
        Claim(
            "the coordinator's load is light: below 1 % of bytes",
            "section 4.1",
            f"at most {max(told):.2f} %",
            max(told) < 1.0,
            "" if max(told) < 1.0 else "tensors are small, and each is told by itself",
        )
    )
    claims.append(
        Claim(
            "bulk communication saves 6.6 to 26.1 % of synchronisation",
            "section 6.3",
            "see figure12's bulk",
            None,
            NOT_SAID,
        )
    )
    return claims


def _ratio(rows: Sequence[Row], static: Row) -> float:
    """The seconds of the better rules over those of static turns."""
    start = str(static["name"]).removesuffix(STATIC) + COORDINATED
    times = [
        float(str(row["step_s"])) for row in rows if str(row["name"]).startswith(start)
    ]
    return min(times) / float(str(static["step_s"]))
