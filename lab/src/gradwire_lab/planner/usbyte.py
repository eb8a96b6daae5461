"""usbyte: unequal blocks in an order found by search, the next forward pass overlapped.

Source: Gao et al., "US-Byte: An Efficient Communication Framework for Scheduling
    Unequal-sized Tensor Blocks in Distributed Deep Learning" (IEEE TPDS), algorithms 1
    and 2, theorem 1.
Differences from the paper:
    - Algorithm 1 as printed loses blocks: where two operations in a row serve one
      layer, the count of the first is overwritten after it was taken off the rest. Here
      the block grows instead.
    - Flat ranges of a layer are cut, with all its tensors end to end. Sizes are exact,
      so delta t (equation 8) is not needed. A layer that mixes dtypes counts as
      several.
    - Whole layers in backward order (forward order in the second phase) stand for
      election beside algorithm 2's order. So do wfbp's messages and the sequential
      order: the paper's model knows all-reduces only, and values of 16 bits take other
      verbs. So no plan is longer than wfbp's or than the sequential one.
    - If the second phase begins with the layer that the first one ended with, the two
      blocks are one.
    One block travels at a time and no layers are merged, as in the paper:
    ``usbyte_extended`` does both.
Settings: basic_partition_bytes, the paper's S_p in bytes (a block holds one element or
    more), which the paper finds by Bayesian optimisation, as ``tune=True`` does.
Order: algorithm 2's while the backward runs, forward order after it (theorem 1); a
    layer's next forward waits for its own blocks only.
"""

from functools import partial

from gradwire.planning.buckets import buckets, check_bytes
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.planner_settings import SIZES
from gradwire.planning.price import iteration_s

from ..planning.phases import Instance, greedy, messages_of_blocks

SEARCH = {"basic_partition_bytes": SIZES}


def usbyte(
    profile: Profile, cluster: Cluster, *, basic_partition_bytes: int = 2**20
) -> Plan:
    """The plan of US-Byte for this profile and cluster; the same on every call.

    Args:
        profile: The model's layers.
        cluster: Ranks and links.
        basic_partition_bytes: The paper's S_p in bytes, by default 1 MiB.

    Returns:
        The plan.

    Raises:
        InvalidSetting: A value is out of range.

    >>> from gradwire import catalogue
    >>> profile = catalogue.load("vgg16")
    >>> cluster = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
    >>> usbyte(profile, cluster).overlap_forward
    True
    """
    check_bytes("basic_partition_bytes", basic_partition_bytes)
    cut = buckets(profile)
    instance = Instance.of(profile, cluster, cut, basic_partition_bytes)
    sequential = instance.blocks(range(len(cut)))
    schedules = [
        messages_of_blocks(cut, instance, blocks)
        for blocks in (greedy(instance).blocks, instance.uncut(), sequential)
    ]
    plans = [
        Plan(
            planner="usbyte",
            model=profile.model,
            settings={"basic_partition_bytes": basic_partition_bytes},
            messages=messages,
            overlap_forward=True,
        )
        for messages in (*schedules, wfbp(profile, cluster).messages)
    ]
    return min(plans, key=lambda plan: iteration_s(plan, profile, cluster))


EXAMPLES = (usbyte, partial(usbyte, basic_partition_bytes=64))
