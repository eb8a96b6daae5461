"""usbyte: unequal blocks in an order found by search, the next forward pass overlapped.

Source: Gao et al., "US-Byte: An Efficient Communication Framework for Scheduling Unequal-sized
    Tensor Blocks in Distributed Deep Learning" (IEEE TPDS), algorithms 1 and 2, theorem 1.
Differences from the paper:
    - Algorithm 1 as printed loses blocks: where two operations in a row serve one layer, the count
      of the first is overwritten after it was taken off the rest. Here the block grows instead.
    - Flat ranges of the layer are cut, all its tensors end to end, and sizes are exact, so that
      delta t (equation 8) is not needed. A layer that mixes dtypes counts as several.
    - Algorithm 2 is one of three starts of a hill climb over the priorities (the others: forward
      and backward order), of at most ``trials`` orders in all, because alone it is sometimes well
      behind the best order. Whole layers in backward order (forward order in the second phase)
      stand for election too. So no plan is longer than wfbp's or than the sequential one.
      ``trials=0`` leaves out the climb.
    - If the second phase begins with the layer that the first one ended with, the two blocks are
      one.
    One block travels at a time and no layers are merged, as in the paper: the lab's
    ``usbyte_extended`` does both.
Settings: basic_partition_bytes, the paper's S_p in bytes (a block holds one element or more), which
    the paper finds by Bayesian optimisation, as ``tune=True`` does; trials.
Order: found by search while the backward runs, forward order after it (theorem 1); a layer's next
    forward waits for its own blocks only.
"""

from __future__ import annotations

from functools import partial

from ...contract.bounds import check_whole
from ..buckets import buckets, check_bytes
from ..data.cluster import Cluster
from ..data.plan import Plan
from ..data.profile import Profile
from ..phases import MOST_TRIALS, Instance, messages_of_blocks, search
from ..planner_settings import SIZES
from ..price import iteration_s

SEARCH = {"basic_partition_bytes": SIZES}


def usbyte(
    profile: Profile,
    cluster: Cluster,
    *,
    basic_partition_bytes: int = 2**20,
    trials: int = 64,
) -> Plan:
    """The plan of US-Byte for this profile and cluster; the same on every call.

    Args:
        profile: The model's layers.
        cluster: Ranks and links.
        basic_partition_bytes: The paper's S_p in bytes, by default 1 MiB.
        trials: The most orders that the hill climb tries, by default 64.

    Returns:
        The plan.

    Raises:
        InvalidSetting: A value is out of range.

    >>> from gradwire import catalogue
    >>> profile = catalogue.load("vgg16")
    >>> cluster = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
    >>> usbyte(profile, cluster, trials=0).overlap_forward
    True
    """
    check_bytes("basic_partition_bytes", basic_partition_bytes)
    check_whole("trials", trials, "0 is algorithm 2 alone", least=0, most=MOST_TRIALS)
    cut = buckets(profile)
    instance = Instance.of(profile, cluster, cut, basic_partition_bytes)
    plans = [
        Plan(
            planner="usbyte",
            model=profile.model,
            settings={"basic_partition_bytes": basic_partition_bytes, "trials": trials},
            messages=messages_of_blocks(cut, instance, blocks),
            overlap_forward=True,
        )
        for blocks in (search(instance, trials), instance.uncut())
    ]
    return min(plans, key=lambda plan: iteration_s(plan, profile, cluster))


EXAMPLES = (usbyte, partial(usbyte, basic_partition_bytes=64), partial(usbyte, trials=0))
