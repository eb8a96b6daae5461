"""The reasons of the planner ``auto``: what it chose among the plans that it compared,
in words.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gradwire.contract.units import format_rate, format_seconds
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import DENSE, Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner.auto import survey
from gradwire.planning.planner.auto.judgement import MARGIN, Survey, pays

from .account import Account, ratio

_FARTHEST = 2.0**12
"""Rates are looked at up to so many times the cluster's, and down to such a part of
it.
"""


def reasons(plan: Plan, profile: Profile, cluster: Cluster) -> list[str]:
    """Sentences on a plan of ``auto``: what pays, what does not, and what it would
    take.
    """
    fidelity = str(plan.settings["fidelity"])
    overlap_forward = bool(plan.settings["overlap_forward"])
    surveyed = survey(profile, cluster, fidelity, overlap_forward)

    def pays_at(other: Cluster) -> bool:
        there = survey(profile, other, fidelity, overlap_forward)
        best = there.compressed
        return best is not None and pays(best.seconds, there.dense.seconds)

    return Judgement(surveyed, profile, cluster, fidelity, pays_at).sentences()


@dataclass(frozen=True)
class Judgement:
    """The choice among the plans of a survey, in words."""

    survey: Survey
    profile: Profile
    cluster: Cluster
    fidelity: str
    pays_at: Callable[[Cluster], bool]
    """Whether compression would pay on a cluster of another rate."""

    def sentences(self) -> list[str]:
        """At most ten: what pays, what does not, and what it would take."""
        return [
            *self._times(),
            *self._dense(),
            *self._compression(),
            *self._others(),
            *self._rate(),
            *self._not_measured(),
            *self._hosts(),
        ]

    def _times(self) -> Iterator[str]:
        account = Account.of(self.survey.chosen.plan, self.profile, self.cluster)
        ddp_s = self.survey.exact[0].seconds
        yield (
            f"This plan takes {format_seconds(account.iteration_s)}, DDP's buckets "
            f"{format_seconds(ddp_s)}, {ratio(ddp_s, account.iteration_s):.2f} times "
            f"as long. Computation alone takes {format_seconds(account.compute_s)}; "
            f"{format_seconds(account.exposed_s)} of communication is not hidden."
        )

    def _dense(self) -> Iterator[str]:
        dense = self.survey.dense
        yield (
            f"Uncompressed the fastest is {dense.name}: "
            f"{format_seconds(dense.seconds)}, {_shape(dense.plan)}."
        )

    def _compression(self) -> Iterator[str]:
        best = self.survey.compressed
        dense_s = self.survey.dense.seconds
        asked = (
            f"{100 * MARGIN:.0f} % is asked for, as predictions may miss by that much"
        )
        if best is None:
            yield (
                "One rank sends nothing."
                if self.cluster.num_ranks == 1
                else f"Fidelity {self.fidelity!r} leaves no compressor to choose here."
            )
            return
        gain = 100 * (1 - ratio(best.seconds, dense_s))
        takes = f"{best.name} takes {format_seconds(best.seconds)}"
        if pays(best.seconds, dense_s):
            yield (
                f"Compression pays: {takes}, {gain:.0f} % less; {asked}. "
                f"{self._sent(best.plan)}"
            )
        elif gain > 0:
            yield f"Compression does not pay: {takes}, {gain:.1f} % less, and {asked}."
        else:
            yield f"Compression does not pay: {takes}, no less."

    def _sent(self, plan: Plan) -> str:
        """How much of the gradients the plan compresses, and where the rest goes."""
        sizes = {
            t.name: t.size_bytes // t.numel
            for layer in self.profile.layers
            for t in layer.tensors
            if t.numel
        }
        through, every = (
            sum(sizes[c.tensor] * c.numel for m in those for c in m.chunks)
            for those in (
                [m for m in plan.messages if m.exchange != DENSE],
                plan.messages,
            )
        )
        return (
            f"{100 * ratio(through, every):.3g} % of the bytes are compressed, "
            f"{_shape(plan)}; the rest stays dense."
        )

    def _others(self) -> Iterator[str]:
        rest = [
            priced
            for priced in self.survey.lossy
            if priced is not self.survey.compressed
        ]
        if rest:
            each = ", ".join(
                f"{priced.name} {format_seconds(priced.seconds)}" for priced in rest
            )
            yield f"Other compressors that were gone into: {each}."

    def _rate(self) -> Iterator[str]:
        """The rate at which the answer would be another one."""
        best = self.survey.compressed
        own = self.cluster.rate_bytes_per_s
        if best is None or not self.cluster.has_rate:
            return
        paying = pays(best.seconds, self.survey.dense.seconds)
        rate = _turning_rate(self.cluster, self.pays_at, is_paying=paying)
        if paying:
            yield (
                "It would pay at any rate that was looked at."
                if rate is None
                else f"It would no longer pay above about {format_rate(rate)}."
            )
        else:
            yield (
                f"It would pay at no rate down to {format_rate(own / _FARTHEST)}."
                if rate is None
                else f"It would pay below about {format_rate(rate)}."
            )

    def _not_measured(self) -> Iterator[str]:
        missing = self.survey.admits.not_measured
        if missing:
            listed = ", ".join(missing[:6])
            if len(missing) > 6:
                listed += ", ..."
            yield (
                "Not considered, as this cluster's file has no costs of them: "
                f"{listed}. gradwire profile --codecs measures them."
            )

    def _hosts(self) -> Iterator[str]:
        if self.cluster.ranks_per_host > 1:
            yield (
                f"The {self.cluster.ranks_per_host} ranks of a host add up first; only "
                "then do hosts exchange."
            )


def _shape(plan: Plan) -> str:
    overlapped = ", the next forward pass overlapped" if plan.overlap_forward else ""
    return f"{len(plan.messages)} messages, {plan.credit} at once{overlapped}"


def _turning_rate(
    cluster: Cluster, pays_at: Callable[[Cluster], bool], *, is_paying: bool
) -> float | None:
    """The rate in bytes a second at which the answer turns, within 10 %; None where it
    never does.

    Compression pays where links are slow. So it is looked for above the cluster's own
    rate where compression pays there, and else below.
    """

    def same(factor: float) -> bool:
        rate = cluster.rate_bytes_per_s * factor
        return pays_at(cluster.scaled(rate_bytes_per_s=rate)) is is_paying

    step = 4.0 if is_paying else 0.25
    near = 1.0
    far = step
    while same(far):
        if not 1 / _FARTHEST < far < _FARTHEST:
            return None
        near = far
        far = far * step
    while max(near, far) / min(near, far) > 1.1:
        middle = math.sqrt(near * far)
        if same(middle):
            near = middle
        else:
            far = middle
    return cluster.rate_bytes_per_s * math.sqrt(near * far)
