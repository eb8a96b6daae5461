"""Judgement: which of many priced plans is taken, and what is said of the choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple, get_args

from ..contract import Compressor
from ..contract.registry import load, names
from ..contract.units import format_rate, format_seconds, ratio
from ..errors import invalid
from ..exchange.pair import suited
from .data.cluster import Cluster
from .data.plan import DENSE, ExchangeSetting, Plan
from .data.profile import Profile
from .exposed import Account
from .price import fewest_messages

# ---- Fidelity ----------------------------------------------------------------------------------
#
# Which compressors a planner that chooses may take, and the evidence that admits them.
#
# ``LOSS_OVER_DENSE`` is the table of a GPT under AdamW in ``docs/measured.md``, made by
# ``gradwire bench train``: held-out loss over that of dense training, every compressor with its
# default settings through the collective that suits it, matrices only. So that is what a planner
# admits: a compressor with its defaults, its suited collective and the error feedback that it
# asks for, for matrices. ``EXACT`` needs no such evidence.

Fidelity = Literal["exact", "half", "safe", "any"]
FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)

LOSS_OVER_DENSE = {"cast16": 1.00, "fp8": 1.00, "int8": 1.00, "uniform": 1.00, "qsgd": 1.01}
"""The compressors that trained to the loss of dense training, or within 1 % of it.

In the other trainings there qsgd and uniform end up to 3 % behind."""

MOST_ERROR: dict[str, float] = {"exact": 0.01, "half": 0.01, "safe": 0.75, "any": inf}
"""The most that a step's means may be off those of dense training, as a share of their norm.

Without any loss sums are still made in another order, and those of bfloat16 are rounded to it.
In the first 25 steps of the tasks of ``gradwire bench train`` (GPT under AdamW, the others under
SGD, four ranks), the worst mean of a message of matrices was off by 0.0035 with cast16, 0.29 with
fp8, 0.21 with int8, 0.38 with qsgd and 0.49 with uniform; the average by 0.003 to 0.3.
"""

HALF = ("cast16",)
"""Compressors that send the gradient itself, in 16 bits."""

EXACT = ("lossless",)
"""Compressors that send the very bits, by fewer bytes. Where a fidelity admits more, those of
``HALF`` send less in less time."""

NO_CHOICE = ("none", "nonzero", *EXACT)
"""Compressors that "any" need not look at: what they send is dense training, by more bytes or by as
many, or ``EXACT``."""


class AdmittedExchanges(NamedTuple):
    """The exchanges that a fidelity admits on a cluster, and the compressors that it cannot."""

    exchanges: dict[str, ExchangeSetting]
    """By the compressor's name; those of ``LOSS_OVER_DENSE`` first, and in its order."""
    not_measured: tuple[str, ...]
    """Compressors that the fidelity admits, and of which the cluster knows no costs."""


def admitted(fidelity: str, cluster: Cluster) -> AdmittedExchanges:
    """The exchanges that may be chosen; raises ``InvalidSetting`` for a fidelity there is not.

    >>> admitted("half", Cluster(num_ranks=4, rate_bytes_per_s=1e9))
    AdmittedExchanges(exchanges={}, not_measured=('cast16',))
    """
    if not isinstance(fidelity, str) or fidelity not in FIDELITIES:
        accepted = ", ".join(map(repr, FIDELITIES))
        raise invalid("fidelity", fidelity, accepted, "leave it out for 'safe'")
    wanted: dict[str, tuple[str, ...]] = {
        "exact": EXACT,
        "half": HALF,
        "safe": tuple(LOSS_OVER_DENSE),
        "any": tuple(
            name
            for name in dict.fromkeys((*LOSS_OVER_DENSE, *names("compress")))
            if name not in NO_CHOICE
        ),
    }
    exchanges = {name: setting_of(name) for name in wanted[fidelity] if name in cluster.codecs}
    return AdmittedExchanges(
        exchanges, tuple(n for n in wanted[fidelity] if n not in cluster.codecs)
    )


def stricter(fidelity: str) -> str:
    """The next fidelity that admits less; "exact" for itself.

    >>> stricter("safe"), stricter("exact")
    ('half', 'exact')
    """
    return FIDELITIES[max(0, FIDELITIES.index(fidelity) - 1)]


def setting_of(compressor: str) -> ExchangeSetting:
    """A compressor as it trained: default settings, suited collective, feedback if it asks."""
    made = load("compress", compressor)()
    return ExchangeSetting(
        compressor=compressor,
        collective=type(suited(made)).__name__ if isinstance(made, Compressor) else None,
        error_feedback=made.traits.error_feedback,
    )


# ---- judgements --------------------------------------------------------------------------------


MARGIN = 0.05
"""The share of an iteration that compression must gain. Predictions of measured schedules were
within 5 % of what was measured (``docs/measured.md``), so less may be none. For the same reason
plans whose predictions lie closer together count as equally fast: the plainest of them is taken."""

MOST_RIVALS = 4
"""The most plans that are worth a try beside the chosen one."""
_FARTHEST = 2.0**12
"""Rates are looked at up to so many times the cluster's, and down to such a part of it."""


class PricedPlan(NamedTuple):
    """A plan by what it is made with, and the seconds of its iteration under the model."""

    name: str
    seconds: float
    plan: Plan
    lane_s: float = 0.0
    """Seconds of a rank's compute lane, beside which its model computes more slowly."""

    @property
    def effort(self) -> tuple[int, float]:
        """The messages of a plan, then its seconds of computations."""
        return len(self.plan.messages), self.lane_s


@dataclass(frozen=True)
class Survey:
    """The plans that were compared for one model on one cluster."""

    exact: list[PricedPlan]
    """Plans that lose nothing; that of ``ddp`` is the first."""
    lossy: list[PricedPlan]
    """The best plans of the compressors that were gone into; those nearer to dense first."""
    admits: AdmittedExchanges

    @property
    def dense(self) -> PricedPlan:
        """The fastest that loses nothing; of those that tie, the one of fewest messages.

        That of ``ddp`` is not left for less than the margin, as torch itself carries it out.
        """
        ddp_s = self.exact[0].seconds
        within_s = ((one.seconds, one.plan) for one in self.exact if one.seconds <= ddp_s)
        plan = fewest_messages(within_s, MARGIN)
        return next(one for one in self.exact if one.plan is plan)

    @property
    def compressed(self) -> PricedPlan | None:
        """The fastest with a compressor; of those that tie, the one of least effort.

        Where that is equal too, the one nearest to dense.
        """
        least_s, dense_s = min((one.seconds for one in self.lossy), default=0.0), self.dense.seconds
        most_s = dense_s * (1 - MARGIN) if pays(least_s, dense_s) else math.inf
        return _plainest(self.lossy, most_s)

    @property
    def rivals(self) -> list[PricedPlan]:
        """Plans with a compressor that may be faster than the chosen one, the fastest first.

        They are the others, as predictions leave something out: what messages that meet on a link
        take from each other, and lanes from the model beside them. There are ``MOST_RIVALS`` at
        most, and none where nothing is compressed.
        """
        chosen = self.chosen
        others = [one for one in self.lossy if one is not chosen]
        found = sorted(others, key=lambda one: one.seconds)[:MOST_RIVALS]
        return [] if chosen is self.dense else found

    @property
    def chosen(self) -> PricedPlan:
        """The dense one, unless the other gains the margin."""
        dense, other = self.dense, self.compressed
        return other if other is not None and pays(other.seconds, dense.seconds) else dense


def _plainest(plans: Sequence[PricedPlan], most_s: float = math.inf) -> PricedPlan | None:
    """The plan of least effort among those that tie with the fastest and take ``most_s`` or less;
    None if there are no plans."""
    least_s = min((one.seconds for one in plans), default=0.0)
    tied = (one for one in plans if one.seconds <= min(most_s, least_s * (1 + MARGIN)))
    return min(tied, key=lambda one: one.effort, default=None)


def pays(compressed_s: float, dense_s: float) -> bool:
    """Whether compression gains as much as it has to."""
    return compressed_s <= dense_s * (1 - MARGIN)


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
            f"{format_seconds(ddp_s)}, {ratio(ddp_s, account.iteration_s):.2f} times as long. "
            f"Computation alone takes {format_seconds(account.compute_s)}; "
            f"{format_seconds(account.exposed_s)} of communication is not hidden."
        )

    def _dense(self) -> Iterator[str]:
        dense = self.survey.dense
        yield (
            f"Uncompressed the fastest is {dense.name}: {format_seconds(dense.seconds)}, "
            f"{_shape(dense.plan)}."
        )

    def _compression(self) -> Iterator[str]:
        best, dense_s = self.survey.compressed, self.survey.dense.seconds
        asked = f"{100 * MARGIN:.0f} % is asked for, as predictions may miss by that much"
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
            yield f"Compression pays: {takes}, {gain:.0f} % less; {asked}. {self._sent(best.plan)}"
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
            for those in ([m for m in plan.messages if m.exchange != DENSE], plan.messages)
        )
        return (
            f"{100 * ratio(through, every):.3g} % of the bytes are compressed, {_shape(plan)}; the "
            "rest stays dense."
        )

    def _others(self) -> Iterator[str]:
        rest = [one for one in self.survey.lossy if one is not self.survey.compressed]
        if rest:
            each = ", ".join(f"{one.name} {format_seconds(one.seconds)}" for one in rest)
            yield f"Other compressors that were gone into: {each}."

    def _rate(self) -> Iterator[str]:
        """The rate at which the answer would be another one."""
        best, own = self.survey.compressed, self.cluster.rate_bytes_per_s
        if best is None or not self.cluster.tells_rate:
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
            listed = ", ".join(missing[:6]) + (", ..." if len(missing) > 6 else "")
            yield (
                f"Not considered, as this cluster's file has no costs of them: {listed}. gradwire "
                "profile --codecs measures them."
            )

    def _hosts(self) -> Iterator[str]:
        if self.cluster.ranks_per_host > 1:
            yield (
                f"The {self.cluster.ranks_per_host} ranks of a host add up first; only then do "
                "hosts exchange."
            )


def _shape(plan: Plan) -> str:
    overlapped = ", the next forward pass overlapped" if plan.overlap_forward else ""
    return f"{len(plan.messages)} messages, {plan.credit} at once{overlapped}"


def _turning_rate(
    cluster: Cluster, pays_at: Callable[[Cluster], bool], *, is_paying: bool
) -> float | None:
    """The rate in bytes a second at which the answer turns, within 10 %; None where it never does.

    Compression pays where links are slow. So it is looked for above the cluster's own rate where
    compression pays there, and else below.
    """

    def same(factor: float) -> bool:
        rate = cluster.rate_bytes_per_s * factor
        return pays_at(cluster.scaled(rate_bytes_per_s=rate)) is is_paying

    step = 4.0 if is_paying else 0.25
    near, far = 1.0, step
    while same(far):
        if not 1 / _FARTHEST < far < _FARTHEST:
            return None
        near, far = far, far * step
    while max(near, far) / min(near, far) > 1.1:
        middle = math.sqrt(near * far)
        near, far = (middle, far) if same(middle) else (near, middle)
    return cluster.rate_bytes_per_s * math.sqrt(near * far)
