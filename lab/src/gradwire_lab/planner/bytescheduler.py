"""bytescheduler: blocks of one size, those of the first layers first, a few at a time.

Source: Peng et al., "A Generic Communication Scheduler for Distributed DNN Training
    Acceleration" (SOSP 2019), sections 3 and 4; figures 2c and 3b of US-Byte.
Differences from the paper: which block is the most urgent one that is ready is found
    out by playing the schedule on the profile's times, and is then fixed, so that all
    ranks issue the same order. The credit counts blocks (as in US-Byte's evaluation),
    not bytes. Both settings are given here, with US-Byte's fixed ones as defaults; the
    paper searches them, as ``tune=True`` does.
Settings: partition_bytes, the size of a block (a layer's last block may be smaller);
    credit, how many blocks are on the wire at once.
Order: that of priority scheduling; a layer's next forward waits for its own blocks
only.
"""

from __future__ import annotations

from functools import partial

from gradwire.errors import invalid
from gradwire.planning.buckets import buckets, check_bytes, check_credit
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan, PlannedMessage
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner_settings import SIZES, WholeNumbers
from gradwire.planning.simulation.closed_form import backward_ends, carry

LANES = WholeNumbers(1, 8)
"""Numbers of messages at once. Each is a channel: a process group with its own
connections.
"""

SEARCH = {"partition_bytes": SIZES, "credit": LANES}

MOST_MESSAGES = 2**18
"""The most messages of a plan. So many take half a gigabyte of memory and a minute to
price.
"""


def bytescheduler(
    profile: Profile,
    cluster: Cluster,
    *,
    partition_bytes: int = 4 * 2**20,
    credit: int = 2,
) -> Plan:
    """The plan of ByteScheduler's priority scheduling for this profile and cluster.

    Args:
        profile: The model's layers.
        cluster: Ranks and links.
        partition_bytes: Bytes of a block, from 1; default 4 MiB. A layer's last block
            may be smaller. Smaller blocks let an urgent layer wait less, and pay more
            latencies.
        credit: The number of blocks on their way at once, from 1 to 65536; default 2.
            More hide latencies, and let an urgent layer wait longer.

    Returns:
        The plan.

    Raises:
        InvalidSetting: A value is out of range, or the plan would have too many
            messages.
    """
    check_bytes("partition_bytes", partition_bytes)
    check_credit(credit)
    cut = buckets(profile)
    num_messages = sum(
        -(-tensor.numel // tensor.block_numel(partition_bytes)) for tensor in cut
    )
    if num_messages > MOST_MESSAGES:
        accepted = f"a size that cuts this model into at most {MOST_MESSAGES} messages"
        and_not = f"{accepted}, and not {num_messages}"
        raise invalid("partition_bytes", partition_bytes, and_not, "write a larger one")
    ends_s = backward_ends(profile, cluster)
    messages: list[PlannedMessage] = []
    ready_s: list[float] = []
    parts_s: list[tuple[float, float]] = []
    for bucket in cut:
        step = bucket.block_numel(partition_bytes)
        for start in range(0, bucket.numel, step):
            stop = min(start + step, bucket.numel)
            messages.append(PlannedMessage(chunks=bucket.chunks(start, stop)))
            ready_s.append(ends_s[bucket.layer])
            parts_s.append(
                cluster.parts_s("all_reduce", (stop - start) * bucket.item_bytes)
            )
    # Made in forward order, so a message's own number is its priority.
    carried = carry(ready_s, parts_s, credit, urgency=range(len(messages)))
    return Plan(
        planner="bytescheduler",
        model=profile.model,
        settings={"partition_bytes": partition_bytes, "credit": credit},
        messages=tuple(messages[i] for i in carried.order),
        credit=credit,
        overlap_forward=True,
    )


EXAMPLES = (bytescheduler, partial(bytescheduler, partition_bytes=96, credit=3))
