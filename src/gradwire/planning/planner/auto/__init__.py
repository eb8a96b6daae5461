"""auto: the fastest plan by the simulator, compressed only where that surely gains.

Source: gradwire's own. It takes up HiPress' and Espresso's question, which gradients to
    compress, and asks the simulator.
Differences from the paper: it is of no paper.
    - Dense plans of other planners are compared with candidates of each compressor that
      the fidelity admits (``planning/planner/auto/candidates.py``). Candidates differ
      in how much stays dense, in how many messages, how many at once, and whether the
      next forward pass is overlapped. The plan of ``ddp`` is among them, so under the
      model it is never slower than that.
    - What ``attach`` does with a compressor and no plan is among them too, below 16
      ranks. With more, messages of equal length were predicted to be faster by up to 5
      %.
    - A compressor must gain ``MARGIN`` over the best dense plan. Several plans may lie
      within ``MARGIN`` of the least seconds. Of these the plan of fewest messages is
      taken, then of least computation, then the one that trained nearer to dense.
    - Only compressors whose costs the cluster's file holds are considered;
      ``gradwire plan --planner auto --explain`` names the others.
    - Vectors are never compressed, as in the trainings that admit a compressor
      (``planning/planner/auto/judgement.py``).
    - Gradients that come as rows, which no all-reduce takes, travel as ``zen`` sends
      them.
Settings: fidelity, "exact", "half", "safe" or "any"; overlap_forward, whether plans may
    overlap the next forward pass, for which ``attach`` needs the optimizer.
Order: backward, or the most urgent that is ready where the next forward pass is
overlapped.
"""

from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from operator import itemgetter
from typing import NamedTuple

from ....contract.registry import extension
from ....errors import invalid
from ...data.cluster import Cluster
from ...data.plan import DENSE, Plan
from ...data.profile import Profile
from ...simulation.clock import run_on_clock
from ..ddp import ddp
from ..mgwfbp import mgwfbp
from .candidates import DEFAULT, Blend, best_candidate, first_seconds
from .judgement import PricedPlan, Survey, admitted

JUDGED = 2
"""The number of compressors that are searched: the ones with the best first candidates.
"""
NOT_WHILE_TRAINING = "write gw.pilot.auto(), which compares plans in real steps too"
"""The reason why attach takes no name of this planner, and the remedy."""
PLAIN = 3
MANY = 16
"""The number of compressors whose default plan in ``attach`` is compared too, and the
number of ranks from which on it is not.
"""


def auto(
    profile: Profile,
    cluster: Cluster,
    *,
    fidelity: str = "safe",
    overlap_forward: bool = True,
) -> Plan:
    """The plan that an iteration takes least time with, under this fidelity.

    Args:
        profile: The model's layers.
        cluster: Ranks, links, and the measured costs of compressors.
        fidelity: "exact", "half", "safe" (the default) or "any": how much a compressor
            may lose.
        overlap_forward: Whether plans may overlap the next forward pass, by default
            True.

    Returns:
        The plan.

    Raises:
        InvalidSetting: A value is not accepted.

    >>> from gradwire import catalogue
    >>> profile = catalogue.load("vgg16")
    >>> cluster = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
    >>> auto(profile, cluster, fidelity="exact").exchanges
    {}
    """
    chosen = survey(profile, cluster, fidelity, overlap_forward).chosen.plan
    settings = {"fidelity": fidelity, "overlap_forward": overlap_forward}
    return chosen.model_copy(update={"planner": "auto", "settings": settings})


class ProfilePart(NamedTuple):
    """The tensors to plan for, and what puts the messages of others beside theirs."""

    rest: Profile
    beside: Callable[[Plan], Plan]


def survey(
    profile: Profile, cluster: Cluster, fidelity: str, overlap_forward: bool
) -> Survey:
    """All plans that are compared; lossless plans come first.

    Gradients that come as rows take a sparse scheme in all of them. Other gradients may
    hold many zeros, so that a scheme without loss is faster than dense. Then plans with
    and without this scheme are compared.
    """
    if not isinstance(overlap_forward, bool):
        raise invalid(
            "overlap_forward", overlap_forward, "True or False", "leave it out"
        )
    admits = admitted(fidelity, cluster)
    parts = [ProfilePart(profile, lambda plan: plan)]
    if profile.sparsity is not None:
        parts = extension("sparse_parts", "a profile's sparsity")(profile, cluster)
    exact = []
    lossy = []
    for part in parts:
        for name, made in _dense(part.rest, cluster, overlap_forward):
            exact.append(_priced(name, part.beside(made), profile, cluster))
        for name, made in _compressed(part.rest, cluster, fidelity, overlap_forward):
            lossy.append(_priced(name, part.beside(made), profile, cluster))
    order = list(admits.exchanges)

    def farthest(plan: PricedPlan) -> int:
        # A model without gradients has plans without exchanges.
        return max(
            (order.index(name) for name in plan.plan.exchanges if name in order),
            default=-1,
        )

    return Survey(exact, sorted(lossy, key=farthest), admits)


def _priced(name: str, plan: Plan, profile: Profile, cluster: Cluster) -> PricedPlan:
    timing = run_on_clock(plan, profile, cluster)
    return PricedPlan(name, timing.iteration_s, plan, timing.lane_s + timing.inline_s)


def _overlaps(overlap_forward: bool) -> tuple[bool, ...]:
    return (False, True) if overlap_forward else (False,)


def _dense(
    profile: Profile, cluster: Cluster, overlap_forward: bool
) -> Iterator[tuple[str, Plan]]:
    """Plans of all-reduces by the name of their maker, with that of ``ddp`` first."""
    yield "ddp", ddp(profile, cluster)
    yield "mgwfbp", mgwfbp(profile, cluster)
    dense = Blend(profile, cluster)
    # each, as sparse messages may join them
    for overlaps in _overlaps(overlap_forward):
        yield "equal messages", dense.plan(best_candidate(dense, (overlaps,))[1])


def _compressed(
    profile: Profile, cluster: Cluster, fidelity: str, overlap_forward: bool
) -> Iterator[tuple[str, Plan]]:
    """Compressors' best plans by name, each beside the part that stays dense."""
    overlaps = _overlaps(overlap_forward)
    possible = [
        (first_seconds(candidate), candidate)
        for candidate in _possible(profile, cluster, fidelity)
    ]
    best = [
        candidate
        for seconds, candidate in sorted(possible, key=itemgetter(0))
        if seconds < inf
    ]
    made = [
        (candidate.name, candidate.plan(best_candidate(candidate, overlaps)[1]))
        for candidate in best[:JUDGED]
    ]
    plain = best[:PLAIN] if cluster.num_ranks < MANY else []
    whole = [candidate for candidate in plain if candidate.seconds(DEFAULT) < inf]
    made += [
        (f"{candidate.name} by default fusion", candidate.plan(DEFAULT))
        for candidate in whole
    ]
    for name, plan in made:
        if any(message.exchange != DENSE for message in plan.messages):
            yield name, plan


def _possible(profile: Profile, cluster: Cluster, fidelity: str) -> list[Blend]:
    """The compressors that this cluster can be planned with, nearest to dense first."""
    if cluster.num_ranks == 1:
        return []
    every = admitted(fidelity, cluster).exchanges.items()
    blends = [Blend(profile, cluster, *settings) for settings in every]
    return [blend for blend in blends if blend.is_possible]


EXAMPLES = (auto, partial(auto, fidelity="any"), partial(auto, overlap_forward=False))
