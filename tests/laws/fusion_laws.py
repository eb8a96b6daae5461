"""The laws of fusion: each takes a function that cuts arrivals into groups, arrivals
and a cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise

from gradwire.exchange.sparse_schemes import TIE
from gradwire_lab.planning.sparse_fusion import Arrival, SparseCost

Groups = list[list[Arrival]]
Fuse = Callable[[Sequence[Arrival], SparseCost], Groups]

SLACK = 1e-12


def last_s(groups: Groups, cost: SparseCost) -> float:
    """The second at which the last group has arrived, by a clock: lane first, then
    link.
    """
    lane_s = link_s = 0.0
    for group in groups:
        numels = [one.tensor.numel for one in group]
        lane_s += sum(one.backward_s for one in group)
        lane_s += cost.encode_s(sum(numels))
        link_s = max(lane_s, link_s) + cost.gather_s(sum(numels))
    return link_s


def every_fusion(every: Sequence[Arrival]) -> Iterator[Groups]:
    """All ways to cut into groups of neighbours of one dtype: up to 2^(L-1)."""
    for mask in range(2 ** max(0, len(every) - 1)):
        inner = [place + 1 for place in range(len(every) - 1) if mask >> place & 1]
        cuts = [0, *inner, len(every)] if every else []
        groups = [list(every[start:stop]) for start, stop in pairwise(cuts)]
        if all(len({one.tensor.dtype for one in group}) == 1 for group in groups):
            yield groups


def law_groups_are_the_arrivals(
    fuse: Fuse, every: Sequence[Arrival], cost: SparseCost
) -> None:
    """Every tensor once, in backward order, none with one of another dtype."""
    groups = fuse(every, cost)
    assert list(chain.from_iterable(groups)) == list(every)
    assert all(groups)
    for group in groups:
        assert len({one.tensor.dtype for one in group}) == 1


def law_no_fusion_ends_earlier(
    fuse: Fuse, every: Sequence[Arrival], cost: SparseCost
) -> None:
    """By more than a tie, and none of fewer groups ties: all fusions are looked at."""
    groups = fuse(every, cost)
    ends_s = [(last_s(other, cost), len(other)) for other in every_fusion(every)]
    best_s = min((end_s for end_s, _ in ends_s), default=0.0)
    tied = [
        count for end_s, count in ends_s if end_s <= best_s * (1 + TIE) * (1 - SLACK)
    ]
    assert last_s(groups, cost) <= best_s * (1 + TIE) * (1 + SLACK), (
        "there is an earlier one"
    )
    assert len(groups) <= min(tied, default=0) or not every, (
        "there is one of fewer groups"
    )
    same = [end_s for end_s, count in ends_s if count == len(groups)]
    assert last_s(groups, cost) <= min(same, default=0.0) * (1 + SLACK), (
        "so many groups can do it"
    )


LAWS = (law_groups_are_the_arrivals, law_no_fusion_ends_earlier)
