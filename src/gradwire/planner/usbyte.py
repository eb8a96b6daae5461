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
    - ``merge`` (off as in the paper, whose section 7.2 names this as its limitation): neighbouring
      layers smaller than some size are one layer to the algorithms. Sizes tried are multiples of
      alpha / beta, the bytes that cost as much as a message does for being one. Many small layers
      at many ranks are nothing but latency: on 128 ranks at 10 Gbit it makes the catalogue's
      ResNet-50 4.8 times as fast.
    - ``credit`` (1 as in the paper): with more, up to so many blocks travel at once, and all but
      one of their latencies cost nothing. Algorithms 1 and 2 know one block at a time; they are
      asked with alpha / credit, and what they give is carried out on lanes.
    - With either setting the plan is the best one found, priced by the simulator; the paper's own
      is always among them. Of those that tie it is the one of fewest messages.
Settings: basic_partition_bytes, the paper's S_p in bytes (a block holds one element or more), which
    the paper finds by Bayesian optimisation, as ``tune=True`` does; merge; credit; trials.
Order: found by search while the backward runs, forward order after it (theorem 1); a layer's next
    forward waits for its own blocks only.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ..bounds import check_whole
from ..cost.cluster import Cluster
from ..cost.profile import Profile
from ..errors import invalid
from ._buckets import Bucket, buckets, check_bytes, check_credit, merged
from ._phases import Block, Instance
from ._price import fewest_messages, iteration_s
from ._space import FLAG, LANES, SIZES
from ._types import Message, Plan, Setting

SEARCH = {"basic_partition_bytes": SIZES, "merge": FLAG, "credit": LANES}

MOST_TRIALS = 10_000
"""Orders that a search may price: a second or more a hundred, of large models."""

MERGED = (1 / 8, 1 / 2, 2, 8)
"""Shares of alpha / beta below which layers are merged."""


def usbyte(
    profile: Profile,
    cluster: Cluster,
    *,
    basic_partition_bytes: int = 2**20,
    merge: bool = False,
    credit: int = 1,
    trials: int = 64,
) -> Plan:
    """The plan of US-Byte for this profile and cluster; the same on every call."""
    check_bytes("basic_partition_bytes", basic_partition_bytes)
    check_credit(credit)
    check_whole("trials", trials, "0 is algorithm 2 alone", least=0, most=MOST_TRIALS)
    if not isinstance(merge, bool):
        raise invalid("merge", merge, "True or False", "which sizes are merged is found by itself")
    settings: dict[str, Setting] = {
        "basic_partition_bytes": basic_partition_bytes,
        "merge": merge,
        "credit": credit,
        "trials": trials,
    }
    every = buckets(profile)
    cuts = [every]
    if merge and cluster.beta_s_per_byte:
        dear_bytes = cluster.alpha_s / cluster.beta_s_per_byte
        cuts += [merged(every, share * dear_bytes) for share in MERGED]
    ways = list(itertools.product(cuts, sorted({1, credit})))
    plans: list[Plan] = []
    for cut, lanes in ways:
        instance = Instance.of(profile, cluster, cut, basic_partition_bytes, lanes)
        budget = trials // len(ways) if plans else trials  # the paper's own plan comes first
        orders = (_search(instance, budget), instance.uncut())
        plans += [_plan(profile, cut, instance, blocks, lanes, settings) for blocks in orders]
    priced = [(iteration_s(plan, profile, cluster), plan) for plan in plans]
    own = min(priced[:2], key=lambda found: found[0])  # the first way is the paper's
    if len(ways) == 1:
        return own[1]
    return fewest_messages(found for found in priced if found[0] <= own[0])


def _plan(
    profile: Profile,
    cut: Sequence[Bucket],
    instance: Instance,
    blocks: Sequence[Block],
    credit: int,
    settings: dict[str, Setting],
) -> Plan:
    messages = []
    for index, first, count, _, _ in blocks:
        bucket, step = cut[index], instance.basic_bytes[index] // cut[index].item_bytes
        stop = min((first + count) * step, bucket.numel)
        messages.append(Message(chunks=bucket.chunks(first * step, stop)))
    return Plan(
        planner="usbyte",
        model=profile.model,
        settings=settings,
        messages=tuple(messages),
        credit=credit,
        overlap_forward=True,
    )


@dataclass(frozen=True)
class _Found:
    """Priorities (a place for each bucket, the smallest is the most urgent) and what they give."""

    place: list[int]
    blocks: list[Block]
    iteration_s: float

    @classmethod
    def of(cls, instance: Instance, place: list[int]) -> _Found:
        blocks = instance.blocks(place)
        return cls(place, blocks, instance.iteration_s(blocks))


def greedy(instance: Instance) -> _Found:
    """Algorithm 2: from the last layer to the first, a higher priority is kept if it helps."""
    found = _Found.of(instance, list(range(len(instance.layer))))
    raised = len(found.place) - 1
    while raised > 0:
        above = _raise_to(instance, found.blocks, raised)
        if above < raised:
            trial = found.place[:]
            trial[raised] = trial[above]
            trial[above:raised] = [place + 1 for place in trial[above:raised]]
            other = _Found.of(instance, trial)
            if other.iteration_s < found.iteration_s:
                found, raised = other, above
        raised -= 1
    return found


def _raise_to(instance: Instance, blocks: list[Block], raised: int) -> int:
    """The first bucket that is ready while ``raised`` would be sent whole (equation 13)."""
    backward_s = instance.layer_ends_s[0]
    start_s = next(block.start_s for block in blocks if block.bucket == raised)
    if start_s >= backward_s:
        return raised
    end_s = start_s + instance.alpha_s + instance.beta_s_per_byte * instance.size_bytes[raised]
    above = raised
    while above > 0 and instance.layer_ends_s[instance.layer[above - 1]] < end_s:
        above -= 1
    return above


def _search(instance: Instance, trials: int) -> list[Block]:
    """The blocks of algorithm 2's priorities, or of better ones found by climbing."""
    found = greedy(instance)
    if trials:
        forward = list(range(len(found.place)))
        tried: set[tuple[int, ...]] = set()
        starts = [found, *(_Found.of(instance, place) for place in (forward[::-1], forward))]
        ends = [_climb(instance, start, trials, tried) for start in starts]
        found = min(ends, key=lambda end: end.iteration_s)
    return found.blocks


def _climb(instance: Instance, found: _Found, trials: int, tried: set[tuple[int, ...]]) -> _Found:
    """Goes from priorities to better neighbours until there are none, or all trials are spent.

    ``tried`` is shared among climbs: what another climb has seen is no better than its own end.
    """
    draw = random.Random(0)  # any order of neighbours will do, but the same one on every rank
    better: _Found | None = found
    while better is not None:
        found, better = better, None
        for place in _neighbours(found.place, draw, trials):
            if len(tried) >= trials:
                return found
            if tuple(place) in tried:
                continue
            tried.add(tuple(place))
            other = _Found.of(instance, place)
            if other.iteration_s < found.iteration_s:
                better = other
                break
    return found


def _neighbours(place: list[int], draw: random.Random, most: int) -> Iterator[list[int]]:
    """Priorities in which one bucket stands elsewhere: ``most`` of them, each drawn once."""
    size = len(place)
    order = sorted(range(size), key=place.__getitem__)
    for move in draw.sample(range(size * size), min(most, size * size)):
        source, target = divmod(move, size)
        if source != target:
            moved = order[:]
            moved.insert(target, moved.pop(source))
            elsewhere = [0] * size
            for spot, bucket in enumerate(moved):
                elsewhere[bucket] = spot
            yield elsewhere


EXAMPLES = (
    usbyte,
    partial(usbyte, basic_partition_bytes=64),
    partial(usbyte, trials=0),
    partial(usbyte, merge=True, credit=3, trials=8),
)
