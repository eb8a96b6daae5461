"""The plan that ``auto`` takes, made on rank 0 and told to all."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..data.cluster import Cluster
from ..data.plan import DENSE, Plan
from ..data.profile import Profile
from ..errors import InvalidSetting
from ..planner.auto import survey
from ..planner.ddp import ddp
from ..planning.fidelity import admitted
from ..planning.price import iteration_s


class Proposal(NamedTuple):
    """A plan and what steps are predicted to take, the optimizer's share left out.

    There is no plan where the planner refused; ``words`` then say why. ``rival`` is a plainer plan,
    to be tried where steps by this one take longer; None where there is none.
    """

    plan: Plan | None
    predicted_s: float
    dense_s: float
    words: str
    rival: Plan | None = None
    rival_s: float = 0.0

    def told(self) -> dict[str, Any]:
        """A form that rank 0 can tell the others."""
        plans = {name: getattr(self, name) for name in _PLANS}
        return {**self._asdict(), **{n: plan and plan.to_json() for n, plan in plans.items()}}

    @classmethod
    def of(cls, told: dict[str, Any]) -> Proposal:
        """The same as it was told."""
        plans = {name: told[name] for name in _PLANS}
        parsed = {n: plan and Plan.parse(plan, "rank 0's plan") for n, plan in plans.items()}
        return cls(**{**told, **parsed})

    def swapped(self) -> Proposal:
        """The rival in the place of the plan, and the plan in that of the rival."""
        assert self.rival is not None
        return self._replace(
            plan=self.rival, predicted_s=self.rival_s, rival=self.plan, rival_s=self.predicted_s
        )


_PLANS = ("plan", "rival")


def proposal(
    profile: Profile, cluster: Cluster, fidelity: str, *, overlap_forward: bool
) -> Proposal:
    """The plan of the planner ``auto``, or its refusal."""
    dense_s = iteration_s(ddp(profile, cluster), profile, cluster)
    try:
        found = survey(profile, cluster, fidelity, overlap_forward)
    except InvalidSetting as error:
        return Proposal(None, dense_s, dense_s, f"the planner refuses: {error}")
    (_, seconds, plan, _), rival = found.chosen, found.rival
    made = Proposal(plan, seconds, dense_s, words_of(plan))
    return made if rival is None else made._replace(rival=rival.plan, rival_s=rival.seconds)


def words_of(plan: Plan) -> str:
    """A few words for what a plan sends.

    >>> from gradwire import catalogue
    >>> words_of(ddp(catalogue.load("vgg16"), Cluster(num_ranks=2, rate_bytes_per_s=1e9)))
    '6 messages: 6 dense'
    """
    kinds: dict[str, int] = {}
    for message in plan.messages:
        own = message.exchange
        kind = DENSE if own == DENSE else plan.exchanges[own].compressor
        kinds[kind] = kinds.get(kind, 0) + 1
    shares = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    ahead = ", under the next forward pass" if plan.overlap_forward else ""
    return f"{len(plan.messages)} messages: {shares}{ahead}"


def compressors_of(fidelity: str) -> tuple[str, ...]:
    """The compressors whose costs the planner asks for; raises for a fidelity there is not."""
    return admitted(fidelity, Cluster(num_ranks=1, rate_bytes_per_s=1.0)).not_measured
