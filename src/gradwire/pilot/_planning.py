"""The plan that ``auto`` takes, made on rank 0 and told to all."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..data.cluster import Cluster
from ..data.plan import DENSE, Plan
from ..data.profile import Profile
from ..errors import InvalidSetting
from ..planner.auto import auto as plan_of
from ..planner.ddp import ddp
from ..planning.fidelity import admitted
from ..planning.price import iteration_s


class Proposal(NamedTuple):
    """A plan and what steps are predicted to take, the optimizer's share left out.

    There is no plan where the planner refused; ``words`` then say why.
    """

    plan: Plan | None
    predicted_s: float
    dense_s: float
    words: str

    def told(self) -> dict[str, Any]:
        """A form that rank 0 can tell the others."""
        return {**self._asdict(), "plan": None if self.plan is None else self.plan.to_json()}

    @classmethod
    def of(cls, told: dict[str, Any]) -> Proposal:
        """The same as it was told."""
        plan = told["plan"]
        return cls(**{**told, "plan": None if plan is None else Plan.parse(plan, "rank 0's plan")})


def proposal(
    profile: Profile, cluster: Cluster, fidelity: str, *, overlap_forward: bool
) -> Proposal:
    """The plan of the planner ``auto``, or its refusal."""
    dense_s = iteration_s(ddp(profile, cluster), profile, cluster)
    try:
        plan = plan_of(profile, cluster, fidelity=fidelity, overlap_forward=overlap_forward)
    except InvalidSetting as error:
        return Proposal(None, dense_s, dense_s, f"the planner refuses: {error}")
    return Proposal(plan, iteration_s(plan, profile, cluster), dense_s, words_of(plan))


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
