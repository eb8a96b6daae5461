"""usbyte_extended: US-Byte with merged layers and several blocks at once.

Source: US-Byte, as in ``usbyte``; neither extension is the paper's.
Differences from the paper: those of ``usbyte``, and
    - Neighbouring layers smaller than some size are one layer to the algorithms, which
      the paper names as its limitation (section 7.2). Sizes tried are multiples of
      alpha / beta, the bytes that cost as much as a message does for being one. Many
      small layers at many ranks are nothing but latency: on 128 ranks at 10 Gbit it
      makes the catalogue's ResNet-50 4.8 times as fast.
    - Up to ``credit`` blocks travel at once, and all but one of their latencies cost
      nothing. Algorithms 1 and 2 know one block at a time; they are asked with alpha /
      credit, and what they give is carried out on lanes.
    - The plan is the best one found with or without either, priced by the simulator;
      that of ``usbyte`` is always among them. Of those that tie it is the one of fewest
      messages.
Settings: basic_partition_bytes, as in ``usbyte``; credit, 1 for merged layers alone.
    ``tune=True`` searches S_p and credit.
Order: as in ``usbyte``.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from gradwire.planning.buckets import Bucket, buckets
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan, Setting
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner_settings import SIZES
from gradwire.planning.price import fewest_messages, iteration_s

from ..planning.curves import check_credit
from ..planning.phases import Instance, greedy, messages_of_blocks
from .bytescheduler import LANES
from .usbyte import usbyte

SEARCH = {"basic_partition_bytes": SIZES, "credit": LANES}

MERGED = (1 / 8, 1 / 2, 2, 8)
"""Shares of alpha / beta below which layers are merged."""


def usbyte_extended(
    profile: Profile,
    cluster: Cluster,
    *,
    basic_partition_bytes: int = 2**20,
    credit: int = 2,
) -> Plan:
    """The best plan with layers merged or not, and one block or ``credit`` blocks at a
    time.

    Args:
        profile: The model's layers.
        cluster: Ranks and links.
        basic_partition_bytes: The paper's S_p in bytes, from 1; default 1 MiB. Blocks
            are multiples of it. A smaller one gives finer blocks, and takes longer to
            plan.
        credit: The most blocks on their way at once, from 1 to 65536; default 2. With 1
            layers are merged, and blocks travel one by one.

    Returns:
        The plan.

    Raises:
        InvalidSetting: A value is out of range.
    """
    check_credit(credit)
    settings: dict[str, Setting] = {
        "basic_partition_bytes": basic_partition_bytes,
        "credit": credit,
    }
    papers = usbyte(
        profile, cluster, basic_partition_bytes=basic_partition_bytes
    ).model_copy(update={"planner": "usbyte_extended", "settings": settings})
    plans = [papers]
    ways = list(itertools.product(_cuts(profile, cluster), sorted({1, credit})))
    for cut, lanes in ways[1:]:  # the first is the paper's
        instance = Instance.of(profile, cluster, cut, basic_partition_bytes)
        # Each block waits for its own latency while the others use the link.
        instance = replace(instance, alpha_s=instance.alpha_s / lanes)
        for blocks in (greedy(instance).blocks, instance.uncut()):
            messages = messages_of_blocks(cut, instance, blocks)
            plans.append(
                papers.model_copy(update={"messages": messages, "credit": lanes})
            )
    priced = [(iteration_s(plan, profile, cluster), plan) for plan in plans]
    return fewest_messages(plan for plan in priced if plan[0] <= priced[0][0])


def _cuts(profile: Profile, cluster: Cluster) -> list[list[Bucket]]:
    """The layers, and the layers merged up to several sizes."""
    every = buckets(profile)
    if not cluster.beta_s_per_byte:  # then no size costs as much as a message does
        return [every, merged_buckets(every, math.inf)]
    dear_bytes = cluster.alpha_s / cluster.beta_s_per_byte
    return [every, *(merged_buckets(every, share * dear_bytes) for share in MERGED)]


def merged_buckets(cut: Sequence[Bucket], size_bytes: float) -> list[Bucket]:
    """Neighbours of one dtype in one bucket, as long as each is smaller than
    ``size_bytes``.
    """
    buckets: list[Bucket] = []
    for bucket in cut:
        last = buckets[-1] if buckets else None
        small = (
            last is not None and max(last.size_bytes, bucket.size_bytes) < size_bytes
        )
        if last is not None and small and last.dtype == bucket.dtype:
            buckets[-1] = Bucket(last.layer, last.tensors + bucket.tensors)
        else:
            buckets.append(bucket)
    return buckets


EXAMPLES = (usbyte_extended, partial(usbyte_extended, credit=3))
