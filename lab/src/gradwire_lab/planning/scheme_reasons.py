"""Why a sparse tensor takes its scheme, in words."""

from collections.abc import Iterator

from gradwire.contract.units import format_seconds
from gradwire.exchange.sparse_schemes import (
    TIE,
    Prediction,
    SchemeChoice,
    SchemeInputs,
)
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.profile import Profile

from .sparse import scheme_of


def schemes_of(
    profile: Profile, cluster: Cluster
) -> dict[str, tuple[SchemeInputs, SchemeChoice]]:
    """The setting of each profiled sparse tensor here, and the scheme chosen for it."""
    sparsity = profile.sparsity
    if sparsity is None:
        return {}
    tensors = profile.tensors
    return {
        one.name: scheme_of(one, tensors[one.name], sparsity, cluster)
        for one in sparsity.tensors
    }


def explain_scheme(name: str, choice: SchemeChoice, at: SchemeInputs) -> Iterator[str]:
    """Lines that say a tensor's scheme, its time, the runner-up, and why."""
    best, runner_up, *_ = choice.predictions
    units = at.units
    what = "elements" if units.width == 1 else f"rows of {units.width}"
    gamma = units.gamma(at.world)
    measured = " (extrapolated)" if units.is_extrapolated(at.world) else ""
    yield (
        f"{name}: {100 * units.density:.3g} % of its {what} are non-zero on a rank, "
        f"{100 * units.density * gamma:.3g} % in the sum of {at.world}{measured}. "
        f"It takes {best.scheme}, {format_seconds(best.seconds)}; the runner-up is "
        f"{runner_up.scheme} with {format_seconds(runner_up.seconds)}, "
        f"{_why(best, runner_up)}."
    )


def _why(best: Prediction, other: Prediction) -> str:
    """The runner-up's largest loss of time, or that both are one prediction."""
    lost_s = other.seconds - best.seconds
    if lost_s <= TIE * best.seconds:
        return (
            "which is the same within what is known; of equals the simpler one is taken"
        )
    causes = {
        f"whose bytes {other.why}take": other.transfer_s - best.transfer_s,
        "whose rounds take": other.latency_s - best.latency_s,
        "whose work on the host takes": other.host_s - best.host_s,
    }
    cause, seconds = max(causes.items(), key=lambda cause: cause[1])
    return f"{cause} {format_seconds(seconds)} longer"
