"""auto: whatever the simulator finds fastest, compressed only where that gains beyond doubt.

Source: gradwire's own. It takes up HiPress' and Espresso's question, which gradients to compress,
    and asks the simulator.
Differences from the paper: it is of no paper.
    - Dense plans of other planners and drafts (``planning/drafts.py``) of each compressor that the
      fidelity admits are compared: how much stays dense, in how many messages, how many at once,
      and whether the next forward pass is overlapped. The plan of ``ddp`` is among them, so under
      the model it is never slower than that.
    - A compressor must gain ``MARGIN`` over the best plan that sends no less exactly.
    - Only compressors whose costs the cluster's file holds are considered; ``gradwire plan
      --planner auto --explain`` names the others.
    - Vectors are never compressed, as in the trainings that admit a compressor
      (``planning/fidelity.py``).
Settings: fidelity, "exact", "half", "safe" or "any"; overlap_forward, whether plans may overlap the
    next forward pass, for which ``attach`` needs the optimizer.
Order: backward, or the most urgent that is ready where the next forward pass is overlapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from ..data.cluster import Cluster
from ..data.plan import DENSE, Plan
from ..data.profile import Profile
from ..errors import invalid
from ..planning.drafts import Blend, best_draft, first_seconds
from ..planning.fidelity import AdmittedExchanges, admitted
from ..planning.price import fewest_messages, iteration_s
from .bytescheduler import bytescheduler
from .ddp import ddp
from .mgwfbp import mgwfbp
from .usbyte_extended import usbyte_extended

MARGIN = 0.05
"""The share of an iteration that compression must gain. Predictions of measured schedules were
within 5 % of what was measured (``docs/measured.md``), so less may be none."""

JUDGED = 2
"""The compressors that are gone into, those of the best first drafts."""


def auto(
    profile: Profile, cluster: Cluster, *, fidelity: str = "safe", overlap_forward: bool = True
) -> Plan:
    """The plan that an iteration takes least time with, under this fidelity."""
    if not isinstance(overlap_forward, bool):
        raise invalid("overlap_forward", overlap_forward, "True or False", "leave it out")
    admits = admitted(fidelity, cluster)
    chosen = _dense(profile, cluster, overlap_forward)
    if cluster.num_ranks > 1:
        chosen = _least((chosen, *_compressed(profile, cluster, admits, overlap_forward)))
    settings = {"fidelity": fidelity, "overlap_forward": overlap_forward}
    return chosen.plan.model_copy(update={"planner": "auto", "settings": settings})


class _Priced(NamedTuple):
    seconds: float
    plan: Plan


def _least(found: tuple[_Priced, ...]) -> _Priced:
    """The first one, which is dense, unless another one gains the margin."""
    dense, *others = found
    best = min(others, key=lambda one: one.seconds, default=dense)
    return best if best.seconds <= dense.seconds * (1 - MARGIN) else dense


def _dense(profile: Profile, cluster: Cluster, overlap_forward: bool) -> _Priced:
    """The best dense plan; of those that tie, the one of fewest messages."""
    plans = [ddp(profile, cluster), mgwfbp(profile, cluster)]
    plans += [_of_blend(Blend(profile, cluster), overlap_forward)]
    if overlap_forward:
        plans += [
            bytescheduler(profile, cluster),
            usbyte_extended(profile, cluster, trials=16),
        ]
    priced = [(iteration_s(plan, profile, cluster), plan) for plan in plans]
    best = fewest_messages(found for found in priced if found[0] <= priced[0][0])
    return _Priced(iteration_s(best, profile, cluster), best)


def _compressed(
    profile: Profile, cluster: Cluster, admits: AdmittedExchanges, overlap_forward: bool
) -> Iterator[_Priced]:
    """The best plans with compressors, each of one and of what stays dense."""
    blends = [Blend(profile, cluster, name, one) for name, one in admits.exchanges.items()]
    blends = [blend for blend in blends if blend.is_possible]
    overlaps = (False, True) if overlap_forward else (False,)
    for blend in sorted(blends, key=first_seconds)[:JUDGED]:
        plan = blend.plan(best_draft(blend, overlaps=overlaps)[1])
        if any(message.exchange != DENSE for message in plan.messages):
            yield _Priced(iteration_s(plan, profile, cluster), plan)


def _of_blend(blend: Blend, overlap_forward: bool) -> Plan:
    overlaps = (False, True) if overlap_forward else (False,)
    return blend.plan(best_draft(blend, overlaps=overlaps)[1])


EXAMPLES = (auto, partial(auto, fidelity="any"), partial(auto, overlap_forward=False))
