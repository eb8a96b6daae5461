"""The ways in which US-Byte's text can be read, and the three planners compared under
one of them.

The paper's own figures do not follow from its equations (see ``most_over_wfbp``). So
readings of the paper are data here, and figures 10 and 18 show the result of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal

from gradwire.contract.registry import load
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.price import iteration_s
from gradwire.planning.simulation.clock import run_on_clock
from gradwire_lab.planning.tune import tune

from .printed import plan_as_printed
from .setting import (
    A_1_S,
    A_BY_DOUBLING_S,
    B_1_S_PER_BYTE,
    MBIT,
    RANKS,
    RATE_1,
    profile_of,
)

Variant = Literal["sound", "printed", "merged", "free"]
"""The variant of US-Byte. sound: each element is in one block; printed: algorithm 1 as
printed, which loses blocks; merged: small layers are merged, which the paper leaves to
later work (section 7.2); free: merged, and with a credit like ByteScheduler's.
"""


@dataclass(frozen=True)
class Reading:
    """One way to read the paper: the sizes and costs of messages, and the variant of
    US-Byte.
    """

    name: str
    a_s: Callable[[int], float]
    """The seconds that an all-reduce among so many ranks costs, whatever its size."""
    b_s_per_byte: Callable[[int], float]
    partition_bytes: int = 4 * MBIT
    credit: int = 2
    """ByteScheduler's credit. Latencies of messages under way at once overlap, so at 1
    none does. It is not searched for, where the other settings are.
    """
    by_tensor: bool = False
    usbyte: Variant = "sound"

    def cluster(self, num_ranks: int) -> Cluster:
        line = LineFit(
            alpha_s=self.a_s(num_ranks), per_unit_s=self.b_s_per_byte(num_ranks)
        )
        return Cluster(
            num_ranks=num_ranks,
            rate_bytes_per_s=RATE_1,
            collectives={"all_reduce": line},
            source=f"US-Byte, cluster 1, read as: {self.name}",
        )


def by_hops(num_ranks: int) -> float:
    """The constant a by equation 14: 2(N-1) times the cost of a hop, 910.5 us at 8
    nodes.
    """
    return A_1_S * (num_ranks - 1) / (RANKS - 1)


def by_doublings(num_ranks: int) -> float:
    """The constant a as the published code's list continues it, scaled to 910.5 us at 8
    nodes.
    """
    two, _, eight = A_BY_DOUBLING_S
    growth = (eight - two) / 2
    return A_1_S / eight * (two + growth * (math.log2(num_ranks) - 1))


def from_rate(num_ranks: int) -> float:
    """The constant b of a ring on links of 10 Gbit/s."""
    return 2 * (num_ranks - 1) / num_ranks / RATE_1


def as_printed(num_ranks: int) -> float:
    """The constant b of figure 9a, brought from 8 nodes to other numbers by equation
    14.
    """
    return B_1_S_PER_BYTE * (num_ranks - 1) / num_ranks * RANKS / (RANKS - 1)


def half_the_rate(num_ranks: int) -> float:
    """The constant b of a ring where half of the link's rate arrives."""
    return 2 * from_rate(num_ranks)


OURS = Reading("our model", by_hops, from_rate)
"""The reading we stand by: equation 14 for a, the link for b, S_p = 4 Mbit, credit
2.
"""

PRINTED_B = replace(OURS, name="b as printed", b_s_per_byte=as_printed)
HALF_RATE = replace(OURS, name="half the rate arrives", b_s_per_byte=half_the_rate)
DOUBLINGS = replace(OURS, name="a grows by doublings", a_s=by_doublings)
IN_TURN = replace(OURS, name="latencies in turn", credit=1)
MEGABYTES = replace(OURS, name="S_p in megabytes", partition_bytes=32 * MBIT)
BY_TENSOR = replace(OURS, name="a layer is a tensor", by_tensor=True)
LOSSY = replace(OURS, name="algorithm 1 as printed", usbyte="printed")
MERGED = replace(OURS, name="layers merged", usbyte="merged")
FREE = replace(OURS, name="with gradwire's extensions", usbyte="free")
"""Our reading with layers merged, and US-Byte with a credit: ``usbyte_extended``."""


def combinations() -> list[Reading]:
    """All readings that differ from ours in two or more points that can be combined."""
    choices = (
        (PRINTED_B, HALF_RATE, None),
        (DOUBLINGS, None),
        (IN_TURN, None),
        (MEGABYTES, None),
        (BY_TENSOR, None),
        (LOSSY, MERGED, None),
    )
    picked = ([one for one in way if one is not None] for way in product(*choices))
    return [combined(*ways) for ways in picked if len(ways) > 1]


def combined(*ways: Reading) -> Reading:
    """One reading that differs from ours in all points in which the given ones
    differ.
    """
    changed = {
        name: value
        for way in ways
        for name, value in vars(way).items()
        if value != getattr(OURS, name)
    }
    return replace(OURS, **{**changed, "name": " + ".join(way.name for way in ways)})


@dataclass(frozen=True)
class Compared:
    """The seconds of one iteration under the three planners, and the messages that they
    sent.
    """

    seconds: dict[str, float]
    """The seconds by planner: usbyte, bytescheduler, wfbp."""
    fraction_sent: float
    """The basic blocks in US-Byte's plan over all of the model's."""
    settings: str
    most_over_wfbp: float | None
    """The bound by ``most_over_wfbp``; None where blocks are merged or lost, as it
    fails there.
    """

    def over(self, planner: str) -> float:
        """US-Byte's improvement in speed over a planner: 0.11 is 11 %."""
        return self.seconds[planner] / self.seconds["usbyte"] - 1


def compare(reading: Reading, model: str, num_ranks: int, trials: int = 0) -> Compared:
    """The three planners under one reading; with ``trials`` their settings are searched
    for.
    """
    profile = profile_of(model, reading.by_tensor)
    cluster = reading.cluster(num_ranks)
    plan, rival = _plans(reading, profile, cluster, trials)
    basic_bytes = int(plan.settings["basic_partition_bytes"])
    seconds = {
        "usbyte": iteration_s(plan, profile, cluster),
        "bytescheduler": iteration_s(rival, profile, cluster),
        "wfbp": iteration_s(wfbp(profile, cluster), profile, cluster),
    }
    sent = 1.0
    if reading.usbyte == "printed":
        lossy = plan_as_printed(profile, cluster, basic_bytes)
        seconds["usbyte"] = lossy.iteration_s
        sent = lossy.fraction_sent
    size = rival.settings["partition_bytes"]
    credit = rival.settings["credit"]
    most = most_over_wfbp(profile, cluster) if reading.usbyte == "sound" else None
    return Compared(
        seconds=seconds,
        fraction_sent=sent,
        settings=f"US-Byte {basic_bytes} B; ByteScheduler {size} B, credit {credit}",
        most_over_wfbp=most,
    )


def _plans(
    reading: Reading, profile: Profile, cluster: Cluster, trials: int
) -> tuple[Plan, Plan]:
    """US-Byte's plan and ByteScheduler's."""
    ours = load("planner", "usbyte")
    other = load("planner", "bytescheduler")
    if reading.usbyte == "merged":
        ours = partial(load("planner", "usbyte_extended"), credit=1)
    elif reading.usbyte == "free":
        ours = load("planner", "usbyte_extended")
    if not trials:
        size = reading.partition_bytes
        if reading.usbyte == "free":
            ours = partial(ours, credit=reading.credit)
        return (
            ours(profile, cluster, basic_partition_bytes=size),
            other(profile, cluster, partition_bytes=size, credit=reading.credit),
        )
    if reading.credit == 1:
        other = partial(other, credit=1)
    return (
        tune(ours, profile, cluster, trials=trials),
        tune(other, profile, cluster, trials=trials),
    )


def most_over_wfbp(profile: Profile, cluster: Cluster) -> float:
    """The most that equations 1 to 12 let US-Byte gain over WFBP, whatever the
    schedule: below 1.

    Let C be the seconds of WFBP's messages, one for each layer: an all-reduce each, or
    the verbs of 16-bit values. WFBP takes no longer than backward + C + forward.
    US-Byte sends one block at a time and no fewer blocks than layers, so it takes at
    least C, and at least backward + forward. The ratio is therefore never above 2: an
    improvement of 100 %.
    """
    compute_s = profile.forward_s + profile.backward_s
    timing = run_on_clock(wfbp(profile, cluster), profile, cluster)
    sent_s = sum(timing.message_end_s) - sum(timing.message_start_s)
    return (compute_s + sent_s) / max(compute_s, sent_s) - 1


def needed_messages(
    reading: Reading, model: str, num_ranks: int, usbyte_s: float, improvement: float
) -> tuple[int, int]:
    """The messages that WFBP sends, and how many it must send for US-Byte to gain
    ``improvement``.

    The second number assumes that none of WFBP's communication hides behind the
    backward pass, so it is the least.
    """
    profile = profile_of(model, reading.by_tensor)
    cluster = reading.cluster(num_ranks)
    compute_s = profile.forward_s + profile.backward_s
    bytes_s = cluster.beta_s_per_byte * profile.size_bytes
    latency_s = (1 + improvement) * usbyte_s - compute_s - bytes_s
    sent = sum(1 for layer in profile.layers if layer.size_bytes)
    return sent, max(0, math.ceil(latency_s / cluster.alpha_s))
