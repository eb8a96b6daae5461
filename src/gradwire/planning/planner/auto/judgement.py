"""Judgement: which of many priced plans is taken, and what is said of the choice."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple, get_args

from ....contract import Compressor
from ....contract.registry import load, names
from ....errors import invalid
from ....exchange.pair import suited
from ...data.cluster import Cluster
from ...data.plan import ExchangeSetting, Plan
from ...price import fewest_messages

# ---- Fidelity ------------------------------------------------------------------------
#
# Which compressors a planner that chooses may take, and the evidence that admits them.
#
# ``LOSS_OVER_DENSE`` is the table of a GPT under AdamW in ``docs/measured.md``, made by
# ``gradwire bench train``: held-out loss over that of dense training, every compressor
# with its default settings through the collective that suits it, matrices only. So that
# is what a planner admits: a compressor with its defaults, its suited collective and
# the error feedback that it asks for, for matrices. ``EXACT`` needs no such evidence.

Fidelity = Literal["exact", "half", "safe", "any"]
FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)

LOSS_OVER_DENSE = {
    "cast16": 1.00,
    "fp8": 1.00,
    "int8": 1.00,
    "uniform": 1.00,
    "qsgd": 1.01,
}
"""The compressors that trained to the loss of dense training, or within 1 % of it.

In the other trainings there qsgd and uniform end up to 3 % behind."""

MOST_ERROR: dict[str, float] = {"exact": 0.01, "half": 0.01, "safe": 0.75, "any": inf}
"""The most that a step's means may be off dense training's, as a share of their norm.

Without any loss sums are still made in another order, and sums of bfloat16 are rounded
to it. In the first 25 steps of the tasks of ``gradwire bench train`` (GPT under AdamW,
the others under SGD, four ranks), the worst mean of a message of matrices was off by
0.0035 with cast16, 0.29 with fp8, 0.21 with int8, 0.38 with qsgd and 0.49 with uniform;
the average by 0.003 to 0.3.
"""

HALF = ("cast16",)
"""Compressors that send the gradient itself, in 16 bits."""

EXACT = ("lossless",)
"""Compressors that send the very bits, by fewer bytes. If a fidelity admits more, the
compressors of ``HALF`` send less in less time.
"""

NO_CHOICE = ("none", "nonzero", *EXACT)
"""Compressors that "any" need not look at: what they send is dense training, by more
bytes or by as many, or ``EXACT``.
"""


class AdmittedExchanges(NamedTuple):
    """The exchanges that a fidelity admits on a cluster, and unmeasured compressors."""

    exchanges: dict[str, ExchangeSetting]
    """By the compressor's name.

    The compressors of ``LOSS_OVER_DENSE`` come first, in its order.
    """
    not_measured: tuple[str, ...]
    """Installed compressors that the fidelity admits, and whose costs are unknown."""


def admitted(fidelity: str, cluster: Cluster) -> AdmittedExchanges:
    """The exchanges that may be chosen.

    Raises ``InvalidSetting`` for a fidelity there is not.

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
    installed = names("compress")
    admits = [name for name in wanted[fidelity] if name in installed]
    exchanges = {name: setting_of(name) for name in admits if name in cluster.codecs}
    return AdmittedExchanges(
        exchanges, tuple(name for name in admits if name not in cluster.codecs)
    )


def stricter(fidelity: str) -> str:
    """The next fidelity that admits less; "exact" for itself.

    >>> stricter("safe"), stricter("exact")
    ('half', 'exact')
    """
    return FIDELITIES[max(0, FIDELITIES.index(fidelity) - 1)]


def setting_of(compressor: str) -> ExchangeSetting:
    """A compressor as it trained.

    It has default settings, a suited collective, and feedback if it asks.
    """
    made = load("compress", compressor)()
    return ExchangeSetting(
        compressor=compressor,
        collective=type(suited(made)).__name__
        if isinstance(made, Compressor)
        else None,
        error_feedback=made.traits.error_feedback,
    )


# ---- judgements ----------------------------------------------------------------------


MARGIN = 0.05
"""The share of an iteration that compression must gain. Predictions of measured
schedules were within 5 % of what was measured (``docs/measured.md``), so less may be
none. For the same reason plans whose predictions lie closer together count as equally
fast: the plainest of them is taken.
"""

MOST_RIVALS = 4
"""The most plans that are worth a try beside the chosen one."""


class PricedPlan(NamedTuple):
    """A named plan, and the seconds of its iteration under the model."""

    name: str
    seconds: float
    plan: Plan
    lane_s: float = 0.0
    """Seconds in which a rank encodes, decodes and merges."""


@dataclass(frozen=True)
class Survey:
    """The plans that were compared for one model on one cluster."""

    exact: list[PricedPlan]
    """Plans that lose nothing; that of ``ddp`` is the first."""
    lossy: list[PricedPlan]
    """The best plans of the compressors that were gone into.

    The ones nearer to dense come first.
    """
    admits: AdmittedExchanges

    @property
    def dense(self) -> PricedPlan:
        """The fastest that loses nothing; among ties the one with fewest messages.

        That of ``ddp`` is not left for less than the margin, as torch itself carries it
        out.
        """
        ddp_s = self.exact[0].seconds
        within_s = (
            (priced.seconds, priced.plan)
            for priced in self.exact
            if priced.seconds <= ddp_s
        )
        plan = fewest_messages(within_s, MARGIN)
        return next(priced for priced in self.exact if priced.plan is plan)

    @property
    def compressed(self) -> PricedPlan | None:
        """The fastest with a compressor; of ties, the one of least effort.

        Where that is equal too, the one nearest to dense.
        """
        least_s = min((priced.seconds for priced in self.lossy), default=0.0)
        dense_s = self.dense.seconds
        most_s = dense_s * (1 - MARGIN) if pays(least_s, dense_s) else inf
        return _plainest(self.lossy, most_s)

    @property
    def rivals(self) -> list[PricedPlan]:
        """Plans with compressors that may be faster than the chosen one, fastest first.

        They are the others, as predictions leave something out: what messages that meet
        on a link take from each other, and lanes from the model beside them. There are
        ``MOST_RIVALS`` at most, and none where nothing is compressed.
        """
        chosen = self.chosen
        others = [priced for priced in self.lossy if priced is not chosen]
        rivals = sorted(others, key=lambda priced: priced.seconds)[:MOST_RIVALS]
        return [] if chosen is self.dense else rivals

    @property
    def chosen(self) -> PricedPlan:
        """The dense one, unless the other gains the margin."""
        dense = self.dense
        other = self.compressed
        return (
            other if other is not None and pays(other.seconds, dense.seconds) else dense
        )


def _plainest(plans: Sequence[PricedPlan], most_s: float) -> PricedPlan | None:
    """The plan of least effort among those that tie with the fastest and take
    ``most_s`` or less; None if there are no plans.
    """
    least_s = min((priced.seconds for priced in plans), default=0.0)
    tied = (
        priced
        for priced in plans
        if priced.seconds <= min(most_s, least_s * (1 + MARGIN))
    )
    return min(
        tied,
        key=lambda priced: (len(priced.plan.messages), priced.lane_s),
        default=None,
    )


def pays(compressed_s: float, dense_s: float) -> bool:
    """Whether compression gains as much as it has to."""
    return compressed_s <= dense_s * (1 - MARGIN)
