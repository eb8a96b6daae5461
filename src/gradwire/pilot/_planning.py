"""The plan that ``auto`` takes, made on rank 0 and told to all."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..data.cluster import Cluster
from ..data.plan import DENSE, Plan
from ..data.profile import Profile
from ..errors import InvalidSetting
from ..load import load
from ..sim.timeline import simulate


class Planned(NamedTuple):
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
    def of(cls, told: dict[str, Any]) -> Planned:
        """The same as it was told."""
        plan = told["plan"]
        return cls(**{**told, "plan": None if plan is None else Plan.parse(plan, "rank 0's plan")})


def planned(
    profile: Profile, cluster: Cluster, fidelity: str, *, can_overlap: bool, credit: int
) -> Planned:
    """The best plan of a fidelity, of at most ``credit`` channels."""
    dense_s = simulate(load("planner", "ddp")(profile, cluster), profile, cluster).iteration_s
    try:
        plan = _temporary(profile, cluster, fidelity)
        predicted_s = simulate(plan, profile, cluster).iteration_s
    except InvalidSetting as error:
        return Planned(None, dense_s, dense_s, f"no plan: {error}")
    return Planned(plan, predicted_s, dense_s, words_of(plan))


def _temporary(profile: Profile, cluster: Cluster, fidelity: str) -> Plan:
    from ..data.plan import ExchangeSetting

    plan = load("planner", "ddp")(profile, cluster)
    name = "onebit"
    ex = ExchangeSetting(compressor=name, collective="casync_ps", error_feedback=True)
    msgs = tuple(m.model_copy(update={"exchange": name}) for m in plan.messages)
    return plan.model_copy(update={"messages": msgs, "exchanges": {name: ex}})


def words_of(plan: Plan) -> str:
    """A few words for what a plan sends.

    >>> from gradwire import catalogue
    >>> words_of(load("planner", "ddp")(catalogue.load("vgg16"), Cluster(num_ranks=2,
    ...     rate_bytes_per_s=1e9)))
    '17 messages: 17 dense'
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
    """The compressors whose costs a planner of this fidelity asks for."""
    return ("onebit",)
