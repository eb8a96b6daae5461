"""The plan that a pilot takes, made on rank 0 and announced to all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import sqrt
from typing import NamedTuple

from pydantic import TypeAdapter

from ..errors import InvalidSetting
from ..planning.data.cluster import Cluster
from ..planning.data.plan import DENSE, Plan
from ..planning.data.profile import Profile
from ..planning.planner.auto import survey
from ..planning.planner.auto.judgement import MARGIN, admitted
from ..planning.planner.ddp import ddp
from ..planning.price import iteration_s


class Proposal(NamedTuple):
    """A plan and what steps are predicted to take, the optimizer's share left out.

    There is no plan where the planner refused; ``words`` then say why. ``rivals`` are
    other plans, to be tried where steps by this one take longer, and what is predicted
    for them, the fastest first.
    """

    plan: Plan | None
    predicted_s: float
    dense_s: float
    words: str
    rivals: tuple[tuple[Plan, float], ...] = ()
    link_factor: float = 1.0
    """How many times as long as measured messages take, by what dense steps took."""

    def announced(self) -> str:
        """A text that rank 0 can announce to the others."""
        return _FORM.dump_json(self).decode()

    @classmethod
    def of(cls, announced: str) -> Proposal:
        """The same as it was announced."""
        return _FORM.validate_json(announced)

    def next_rival(self) -> Proposal:
        """The first rival in place of the plan, and before the other rivals."""
        (plan, seconds), *others = self.rivals
        words = words_of(plan)
        return self._replace(
            plan=plan, predicted_s=seconds, words=words, rivals=tuple(others)
        )


_FORM = TypeAdapter(Proposal)

MOST_FACTOR = 4.0
"""The most that messages may take longer or shorter in training than when timed."""


Chosen = tuple[Plan, float, tuple[tuple[Plan, float], ...]]
"""A plan, the seconds that are predicted of it, and its rivals."""


def proposal(
    profile: Profile,
    cluster: Cluster,
    choose: Callable[[Profile, Cluster], Chosen],
    *,
    taken_s: float | None = None,
) -> Proposal:
    """The plan that ``choose`` makes, or its refusal.

    ``taken_s`` are those of a dense step.
    """
    factor = 1.0 if taken_s is None else link_factor(profile, cluster, taken_s)
    cluster = cluster.slower(factor)
    dense_s = iteration_s(ddp(profile, cluster), profile, cluster)
    try:
        plan, seconds, rivals = choose(profile, cluster)
    except InvalidSetting as error:
        return Proposal(
            None, dense_s, dense_s, f"the planner refuses: {error}", link_factor=factor
        )
    except Exception as error:
        # a user's planner: the other ranks wait for this rank's word
        words = f"the planner fails: {type(error).__name__}: {error}"
        return Proposal(None, dense_s, dense_s, words, link_factor=factor)
    return Proposal(plan, seconds, dense_s, words_of(plan), rivals, factor)


def surveyed(
    fidelity: str, overlap_forward: bool, profile: Profile, cluster: Cluster
) -> Chosen:
    """The choice of the planner ``auto``."""
    choice = survey(profile, cluster, fidelity, overlap_forward)
    _, seconds, plan, _ = choice.chosen
    return plan, seconds, tuple((rival.plan, rival.seconds) for rival in choice.rivals)


def link_factor(profile: Profile, cluster: Cluster, taken_s: float) -> float:
    """The factor on messages' seconds by which a dense step takes ``taken_s``.

    Messages are timed while nothing else happens, and layers in the steps themselves.
    So where a step takes another time than predicted it is by its messages, which share
    cores with the model and with each other. 1 where the prediction is near enough, or
    where no factor explains it.

    >>> from gradwire import catalogue
    >>> cluster = Cluster(num_ranks=4, rate_bytes_per_s=1e8)
    >>> profile = catalogue.load("vgg16")
    >>> slower = cluster.slower(2.0)
    >>> taken_s = iteration_s(ddp(profile, slower), profile, slower)
    >>> round(link_factor(profile, cluster, taken_s), 2)
    2.0
    """

    def predicted_s(factor: float) -> float:
        links = cluster.slower(factor)
        return iteration_s(ddp(profile, links), profile, links)

    low = 1 / MOST_FACTOR
    high = MOST_FACTOR
    is_near = abs(predicted_s(1.0) - taken_s) <= MARGIN * taken_s
    if is_near or not predicted_s(low) < taken_s < predicted_s(high):
        return 1.0
    while high > low * 1.001:
        middle = sqrt(low * high)
        if predicted_s(middle) < taken_s:
            low = middle
        else:
            high = middle
    return sqrt(low * high)


def words_of(plan: Plan) -> str:
    """A few words for what a plan sends.

    >>> from gradwire import catalogue
    >>> cluster = Cluster(num_ranks=2, rate_bytes_per_s=1e9)
    >>> words_of(ddp(catalogue.load("vgg16"), cluster))
    '6 messages: 6 dense'
    """
    names = {name: made.compressor for name, made in plan.exchanges.items()}
    kinds = Counter(names.get(m.exchange, DENSE) for m in plan.messages)
    shares = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    ahead = ", under the next forward pass" if plan.overlap_forward else ""
    return f"{len(plan.messages)} messages: {shares}{ahead}"


def compressors_of(fidelity: str) -> tuple[str, ...]:
    """The compressors whose costs the planner asks for.

    Raises for a fidelity there is not.
    """
    return admitted(fidelity, Cluster(num_ranks=1, rate_bytes_per_s=1.0)).not_measured
