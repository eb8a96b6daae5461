"""bytescheduler: blocks of one fixed size, those of the first layers first, a few at a time.

Source: Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration"
    (SOSP 2019), sections 3 and 4; figures 2c and 3b of US-Byte.
Differences from the paper: which block is the most urgent one that is ready is found out by playing
    the schedule on the profile's times, and is then fixed, so that all ranks issue the same order.
    The credit counts blocks (as in US-Byte's evaluation), not bytes. Both settings are given here,
    with US-Byte's fixed ones as defaults; the paper searches them, as ``tune=True`` does.
Settings: partition_bytes, the size of a block (a layer's last block may be smaller); credit, how
    many blocks are on the wire at once.
Order: that of priority scheduling; a layer's next forward waits for its own blocks only.
"""

from __future__ import annotations

from functools import partial

from ..buckets import buckets, check_bytes, check_count, check_credit
from ..clock.clock import ByPriority, backward_ends, carry
from ..data.cluster import Cluster
from ..data.plan import Plan, PlannedMessage
from ..data.profile import Profile
from ..settings import LANES, SIZES

SEARCH = {"partition_bytes": SIZES, "credit": LANES}


def bytescheduler(
    profile: Profile,
    cluster: Cluster,
    *,
    partition_bytes: int = 4 * 2**20,
    credit: int = 2,
) -> Plan:
    """The plan of ByteScheduler's priority scheduling for this profile and cluster."""
    check_bytes("partition_bytes", partition_bytes)
    check_credit(credit)
    cut = buckets(profile)
    num_messages = sum(-(-one.numel // one.block_numel(partition_bytes)) for one in cut)
    check_count("partition_bytes", partition_bytes, num_messages)
    ends_s = backward_ends(profile)
    messages: list[PlannedMessage] = []
    ready_s: list[float] = []
    parts_s: list[tuple[float, float]] = []
    for bucket in cut:
        step = bucket.block_numel(partition_bytes)
        for start in range(0, bucket.numel, step):
            stop = min(start + step, bucket.numel)
            messages.append(PlannedMessage(chunks=bucket.chunks(start, stop)))
            ready_s.append(ends_s[bucket.layer])
            parts_s.append(cluster.parts_s("all_reduce", (stop - start) * bucket.item_bytes))
    # Made in forward order, so a message's own number is its priority.
    line = ByPriority(ready_s, range(len(messages)))
    carried = carry(line, parts_s, credit)
    return Plan(
        planner="bytescheduler",
        model=profile.model,
        settings={"partition_bytes": partition_bytes, "credit": credit},
        messages=tuple(messages[i] for i in carried.order),
        credit=credit,
        overlap_forward=True,
    )


EXAMPLES = (bytescheduler, partial(bytescheduler, partition_bytes=96, credit=3))
