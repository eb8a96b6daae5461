"""Periods: what a step takes where ranks exchange pseudo-gradients once in so many local steps.

It changes what is computed, so it is priced only for a period that the user gives. Whatever travels
does so behind a local step, with no computation beside it (``local_steps(delay=0)``): matrices
through one exchange and vectors dense, in the best number of equal messages. The outer optimizer's
step is not counted.
"""

from __future__ import annotations

from math import floor

from ..contract.bounds import check_whole
from ..contract.units import format_seconds
from .data.cluster import Cluster
from .data.plan import DENSE, ExchangeSetting, Plan
from .data.profile import Profile
from .drafts import CREDITS, NUMBERS, Blend, Draft, first_seconds
from .judgement import admitted
from .price import iteration_s


def exchange_s(
    profile: Profile, cluster: Cluster, exchange: tuple[str, ExchangeSetting] | None = None
) -> float:
    """Seconds that all pseudo-gradients of a model take through an exchange; None is dense."""
    blend = _alone(profile, cluster, exchange)
    return min(
        blend.seconds(Draft(0.0, count, count, True, credit, False))
        for count in NUMBERS
        for credit in CREDITS
    )


def period_sentences(plan: Plan, profile: Profile, cluster: Cluster, period: int) -> list[str]:
    """Sentences on local steps with this period, beside a step of ``plan``.

    Exchanges are the dense one and the fastest of those that a plan of ``auto`` may choose from;
    beside another planner's plan, of those in it. Raises ``InvalidSetting`` for a period below 1.
    """
    check_whole("period", period, "write 20", least=1)
    fidelity = plan.settings.get("fidelity")
    every = plan.exchanges if fidelity is None else admitted(str(fidelity), cluster).exchanges
    blends = [(one, _alone(profile, cluster, one)) for one in every.items()]
    possible = [(first_seconds(blend), one) for one, blend in blends if blend.is_possible]
    chosen = [min(possible, key=lambda one: one[0])[1]] if possible else []
    compute_s = profile.forward_s + profile.backward_s
    plan_s = iteration_s(plan, profile, cluster)
    found = [
        f"Local steps are another algorithm. With a period of {period} a step computes for "
        f"{format_seconds(compute_s)}; the plan takes {format_seconds(plan_s)}."
    ]
    for one in (None, *chosen):
        alone_s = exchange_s(profile, cluster, one)
        found.append(
            f"Pseudo-gradients take {format_seconds(alone_s)} {_way(one)}, with nothing to hide "
            f"them: {format_seconds(compute_s + alone_s / period)} a step, "
            f"{_turning(alone_s, plan_s - compute_s)}."
        )
    return found


def _alone(
    profile: Profile, cluster: Cluster, exchange: tuple[str, ExchangeSetting] | None
) -> Blend:
    """The model without its computations, and without rows: pseudo-gradients travel whole."""
    still = {"forward_s": 0.0, "backward_s": 0.0}
    layers = tuple(layer.model_copy(update=still) for layer in profile.layers)
    alone = profile.model_copy(update={"layers": layers, "sparsity": None})
    return Blend(alone, cluster, () if exchange is None else (exchange,))


def _way(exchange: tuple[str, ExchangeSetting] | None) -> str:
    return DENSE if exchange is None else f"through {exchange[0]}"


def _turning(alone_s: float, exposed_s: float) -> str:
    """The least period that is faster than a plan of which so many seconds are not hidden."""
    if exposed_s <= 1e-9 or alone_s <= 0:
        return "and no period is faster than the plan"
    return f"faster than the plan from a period of {floor(alone_s / exposed_s) + 1} on"
