"""auto: whatever the simulator finds fastest, compressed only where that gains beyond doubt.

Source: gradwire's own. It takes up HiPress' and Espresso's question, which gradients to compress,
    and asks the simulator.
Differences from the paper: it is of no paper.
    - Dense plans of other planners and drafts (``planning/drafts.py``) of each compressor that the
      fidelity admits are compared: how much stays dense, in how many messages, how many at once,
      and whether the next forward pass is overlapped. The plan of ``ddp`` is among them, so under
      the model it is never slower than that.
    - A compressor must gain ``MARGIN`` over the best dense plan. Of those that tie the one is taken
      that trained nearer to dense.
    - Only compressors whose costs the cluster's file holds are considered; ``gradwire plan
      --planner auto --explain`` names the others.
    - Vectors are never compressed, as in the trainings that admit a compressor
      (``planning/fidelity.py``).
    - Gradients that come as rows, which no all-reduce takes, travel as ``zen`` sends them.
Settings: fidelity, "exact", "half", "safe" or "any"; overlap_forward, whether plans may overlap the
    next forward pass, for which ``attach`` needs the optimizer.
Order: backward, or the most urgent that is ready where the next forward pass is overlapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ..data.cluster import Cluster
from ..data.plan import DENSE, Plan
from ..data.profile import Profile
from ..errors import invalid
from ..planning.drafts import Blend, best_draft, first_seconds
from ..planning.fidelity import admitted
from ..planning.judgement import Judgement, PricedPlan, Survey, pays
from ..planning.price import iteration_s
from ..planning.sparse import SparsePart
from .bytescheduler import bytescheduler
from .ddp import ddp
from .mgwfbp import mgwfbp
from .usbyte_extended import usbyte_extended

JUDGED = 2
"""The compressors that are gone into, those of the best first drafts."""


def auto(
    profile: Profile, cluster: Cluster, *, fidelity: str = "safe", overlap_forward: bool = True
) -> Plan:
    """The plan that an iteration takes least time with, under this fidelity."""
    chosen = survey(profile, cluster, fidelity, overlap_forward).chosen.plan
    settings = {"fidelity": fidelity, "overlap_forward": overlap_forward}
    return chosen.model_copy(update={"planner": "auto", "settings": settings})


def reasons(plan: Plan, profile: Profile, cluster: Cluster) -> list[str]:
    """Sentences on a plan of ``auto``: what pays, what does not, and what it would take."""
    fidelity = str(plan.settings["fidelity"])
    overlap_forward = bool(plan.settings["overlap_forward"])
    found = survey(profile, cluster, fidelity, overlap_forward)
    rest = SparsePart.of(profile, cluster, only_rows=True).rest
    overlaps = _overlaps(overlap_forward)

    def pays_at(other: Cluster) -> bool:
        dense = _dense(rest, other, overlap_forward)
        dense_s = min(iteration_s(made, rest, other) for _, made in dense)
        drafts = (best_draft(one, overlaps=overlaps) for one in _blends(rest, other, fidelity))
        return pays(min(seconds for seconds, _ in drafts), dense_s)

    return Judgement(found, profile, cluster, fidelity, pays_at).sentences()


def survey(profile: Profile, cluster: Cluster, fidelity: str, overlap_forward: bool) -> Survey:
    """All plans that are compared, those that lose nothing first.

    Gradients that come as rows take a sparse scheme in all of them. Where other gradients hold so
    many zeros that a scheme without loss is faster than dense, plans with and without it compare.
    """
    if not isinstance(overlap_forward, bool):
        raise invalid("overlap_forward", overlap_forward, "True or False", "leave it out")
    admits = admitted(fidelity, cluster)
    sparse = SparsePart.of(profile, cluster, only_rows=True)
    parts = [sparse]
    if profile.sparsity is not None and profile.sparsity.compressor is None:
        other = SparsePart.of(profile, cluster)
        parts += [other] if len(other.messages) > len(sparse.messages) else []
    exact, lossy = list[PricedPlan](), list[PricedPlan]()
    for part in parts:
        for name, made in _dense(part.rest, cluster, overlap_forward):
            exact.append(_priced(name, part.beside(made), profile, cluster))
        for name, made in _compressed(part.rest, cluster, fidelity, overlap_forward):
            lossy.append(_priced(name, part.beside(made), profile, cluster))
    order = list(admits.exchanges)
    return Survey(exact, sorted(lossy, key=lambda one: order.index(one.name)), admits)


def _priced(name: str, plan: Plan, profile: Profile, cluster: Cluster) -> PricedPlan:
    return PricedPlan(name, iteration_s(plan, profile, cluster), plan)


def _overlaps(overlap_forward: bool) -> tuple[bool, ...]:
    return (False, True) if overlap_forward else (False,)


def _dense(profile: Profile, cluster: Cluster, overlap_forward: bool) -> Iterator[tuple[str, Plan]]:
    """Plans of all-reduces, by the name of what makes them; that of ``ddp`` is the first."""
    yield "ddp", ddp(profile, cluster)
    yield "mgwfbp", mgwfbp(profile, cluster)
    dense = Blend(profile, cluster)
    yield "equal messages", dense.plan(best_draft(dense, overlaps=_overlaps(overlap_forward))[1])
    if overlap_forward:
        yield "bytescheduler", bytescheduler(profile, cluster)
        yield "usbyte_extended", usbyte_extended(profile, cluster, trials=16)


def _compressed(
    profile: Profile, cluster: Cluster, fidelity: str, overlap_forward: bool
) -> Iterator[tuple[str, Plan]]:
    """The best plans of compressors, each beside what stays dense, by the compressor's name."""
    for blend in _blends(profile, cluster, fidelity):
        plan = blend.plan(best_draft(blend, overlaps=_overlaps(overlap_forward))[1])
        if any(message.exchange != DENSE for message in plan.messages):
            yield blend.name, plan


def _blends(profile: Profile, cluster: Cluster, fidelity: str) -> list[Blend]:
    """The compressors that are worth a search on this cluster."""
    if cluster.num_ranks == 1:
        return []
    every = admitted(fidelity, cluster).exchanges.items()
    blends = [Blend(profile, cluster, name, setting) for name, setting in every]
    possible = [blend for blend in blends if blend.is_possible]
    return sorted(possible, key=first_seconds)[:JUDGED]


EXAMPLES = (auto, partial(auto, fidelity="any"), partial(auto, overlap_forward=False))
