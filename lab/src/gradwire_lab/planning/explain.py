"""Why a plan takes the time it takes, in words and figures, and what other planners
would take.

All figures are predictions: an iteration on a cluster whose ranks are alike and whose
links carry the bytes per second that the cluster file says.
"""

import math
from collections.abc import Callable, Iterator
from itertools import compress

from gradwire.cli.report.table import Row
from gradwire.contract.registry import load, names
from gradwire.contract.units import format_bytes, format_rate, format_seconds
from gradwire.errors import InvalidSetting
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import DENSE, Plan
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner_settings import with_settings
from gradwire.planning.price import iteration_s

from . import auto_reasons
from .account import Account, ratio
from .scheme_reasons import explain_scheme, schemes_of

WORTH = 0.02
"""A gain below this share is called none, as predictions are hardly more exact."""

MOST_WAITS = 3
"""The most waits that are told one by one."""
_SPREAD = 1000.0
_STEPS = 24
"""The rates looked at go from a thousandth of the cluster's to a thousand times it, in
``_STEPS`` steps.
"""

REASONS: dict[str, Callable[[Plan, Profile, Cluster], list[str]]] = {
    "auto": auto_reasons.reasons
}
"""Planners that have compared plans already, and the function that says what they
found.
"""

Planned = Callable[[Cluster], float]
"""Seconds of an iteration that a planner gives for a cluster."""


def explain(plan: Plan, profile: Profile, cluster: Cluster) -> list[str]:
    """Sentences: the bound, what is not hidden and why, whether scheduling helps at
    all.

    How a planner of ``REASONS`` chose is said in words of its own.
    """
    if plan.planner in REASONS:
        return REASONS[plan.planner](plan, profile, cluster)
    account = Account.of(plan, profile, cluster)
    return [
        *_bounds(account, cluster),
        *_waits(account),
        *_faults(account),
        *_scaling(account, profile, cluster),
        *_schemes(profile, cluster),
        *_helps(plan, profile, cluster),
    ]


def alternatives(plan: Plan, profile: Profile, cluster: Cluster) -> list[Row]:
    """A row for ``plan`` and one for every other planner with its default settings,
    fastest first.

    ``sends`` is what gradients become: "dense", or the compressors that they go
    through. ``speedup_vs_wfbp`` is the gain over wfbp, ``why`` the dearest cause of
    what the planner loses against the fastest of those that send the same. Rows of
    planners that refuse, and of plans that cannot be simulated, come last, and say only
    that.
    """
    accounts: dict[str, Account] = {}
    left_out: list[Row] = []
    for name in dict.fromkeys((*names("planner"), plan.planner)):
        try:
            if name == plan.planner:
                made = plan
            else:
                made = load("planner", name)(profile, cluster)
        except InvalidSetting as error:  # as of an unmeasured compressor
            left_out.append({"name": name, "why": f"no plan: {error}"})
            continue
        try:
            accounts[name] = Account.of(made, profile, cluster)
        except InvalidSetting as error:  # as of more ranks than can be played
            if name == plan.planner:
                raise
            why_not = f"not simulated: {error}"
            left_out.append({"name": name, "sends": _sends(made), "why": why_not})
    wfbp_s = accounts["wfbp"].iteration_s
    best: dict[str, Account] = {}
    for one in sorted(accounts.values(), key=lambda account: account.iteration_s):
        best.setdefault(_sends(one.plan), one)
    rows: list[Row] = [
        {
            "name": name,
            "simulated_s": account.iteration_s,
            "sends": _sends(account.plan),
            "exposed_s": account.exposed_s,
            "messages": len(account.plan.messages),
            "latency_s": account.latency_s,
            "speedup_vs_wfbp": ratio(wfbp_s, account.iteration_s),
            "why": why(account, best[_sends(account.plan)]),
        }
        for name, account in accounts.items()
    ]
    return sorted(rows, key=lambda row: float(str(row["simulated_s"]))) + left_out


def _sends(plan: Plan) -> str:
    used = {message.exchange for message in plan.messages} - {DENSE}
    return (
        ", ".join(sorted({plan.exchanges[name].compressor for name in used})) or DENSE
    )


def why(account: Account, best: Account) -> str:
    """The dearest cause that keeps a plan from the bound, or from a better plan if
    there is one.
    """
    if account.iteration_s <= account.bound_s * (1 + WORTH):
        return "nothing: within 2 % of the bound"
    costs = _costs(account)
    others = _costs(best)
    fastest = account.iteration_s <= best.iteration_s
    if not fastest:
        costs = {cause: seconds - others[cause] for cause, seconds in costs.items()}
    cause, seconds = max(costs.items(), key=lambda cost: cost[1])
    if seconds < WORTH / 2 * account.iteration_s:
        cause = "what comes last has little left to hide it"
    else:
        cause = f"{cause}, {format_seconds(seconds)}"
    return cause if not fastest else f"the fastest; {cause}"


def _costs(account: Account) -> dict[str, float]:
    """Seconds of an iteration that each cause may cost; some of them may overlap."""
    timing = account.timing
    profile = account.profile
    after_s = max(timing.message_end_s, default=0.0) - timing.backward_end_s[0]
    waits_s = 0.0
    if not account.plan.overlap_forward:
        waits_s = min(after_s, profile.forward_s)
    return {
        "the link: its bytes take longer than all that could hide them": (
            account.transfer_s - account.compute_s
        ),
        "latency of more messages, one behind the other": account.latency_s
        / account.plan.credit,
        "the head of the line keeps others waiting": account.idle_though_ready()[0],
        "the next forward waits for all messages": waits_s,
    }


def _bounds(account: Account, cluster: Cluster) -> Iterator[str]:
    profile = account.profile
    total_bytes = sum(account.message_bytes)
    others = [m.exchange != DENSE for m in account.plan.messages]
    dense_bytes = total_bytes - sum(compress(account.message_bytes, others))
    yield (
        f"Computation alone takes {format_seconds(account.compute_s)}: backward "
        f"{format_seconds(profile.backward_s)}, forward "
        f"{format_seconds(profile.forward_s)}."
    )
    if not all(others) or not others:
        yield (
            "Communication alone takes "
            f"{format_seconds(account.latency_s + account.transfer_s)}: "
            f"{len(others) - sum(others)} messages of "
            f"{format_seconds(cluster.alpha_s)} latency each "
            f"({format_seconds(account.latency_s)}), {format_bytes(dense_bytes)} of "
            f"gradients ({format_seconds(account.transfer_s)})."
        )
    if any(others):
        yield (
            f"{sum(others)} messages go by other exchanges ({_sends(account.plan)}), "
            f"which no bound below counts: {format_bytes(total_bytes - dense_bytes)} "
            "of gradients."
        )
    if account.timing.inline_s:
        yield (
            "Encoding within the backward pass makes it "
            f"{format_seconds(account.timing.inline_s)} "
            "longer, which no bound below counts."
        )
    if account.timing.early_s:
        yield (
            "Encoding tensors as they come takes "
            f"{format_seconds(account.timing.early_s)} of the "
            "compute lane, before their messages are whole."
        )
    larger = "computation" if account.bound_s <= account.compute_s else "communication"
    yield (
        f"No plan takes less than {format_seconds(account.bound_s)}, the {larger}. "
        f"This one takes {format_seconds(account.iteration_s)}: "
        f"{format_seconds(account.exposed_s)} of communication is not hidden."
    )


def _waits(account: Account) -> Iterator[str]:
    waits = account.waits()
    timing = account.timing
    plan = account.plan
    for wait in waits[:MOST_WAITS]:
        layer = account.profile.layers[wait.layer].name
        start_s = timing.message_start_s[wait.message]
        end_s = timing.message_end_s[wait.message]
        size = format_bytes(account.message_bytes[wait.message])
        what = f"message {wait.message}"
        if plan.overlap_forward:
            what = f"its message {wait.message}"
        yield (
            f"Forward of {layer} waits {format_seconds(wait.seconds)} for {what} "
            f"({size}), on the wire from {format_seconds(start_s)} to "
            f"{format_seconds(end_s)}; the backward pass ends at "
            f"{format_seconds(timing.backward_end_s[0])}."
        )
    if len(waits) > MOST_WAITS:
        rest_s = sum(wait.seconds for wait in waits[MOST_WAITS:])
        more = len(waits) - MOST_WAITS
        yield f"{more} more layers wait {format_seconds(rest_s)} together."


def _faults(account: Account) -> Iterator[str]:
    """Orders that are sound and yet cannot overlap what they might."""
    plan = account.plan
    timing = account.timing
    idle_s, head = account.idle_though_ready()
    if idle_s > WORTH * account.iteration_s:
        yield (
            f"The link stands idle for {format_seconds(idle_s)} while gradients are "
            f"ready: message {head} is next in the order and its own are not."
        )
    if plan.messages and min(timing.message_start_s) >= timing.backward_end_s[0] > 0:
        yield (
            "Nothing is sent before the backward pass has ended, so nothing of it "
            "hides anything."
        )
    if not plan.overlap_forward:
        yield "The next forward pass hides nothing: it waits for all messages."
    if account.latency_s / plan.credit > max(
        account.transfer_s, WORTH * account.iteration_s
    ):
        yield (
            "The messages' latencies take longer than their bytes: fewer, larger ones "
            "would help, or more at once. usbyte_extended merges layers and sends "
            "several blocks at once."
        )


def _scaling(account: Account, profile: Profile, cluster: Cluster) -> Iterator[str]:
    ranks = cluster.num_ranks
    if not account.iteration_s:
        yield (
            "The profile's layers take no time at all, so there is nothing to compare "
            "with."
        )
        return
    speedup = ranks * account.compute_s / account.iteration_s
    samples_per_s = ranks * profile.batch_size / account.iteration_s
    yield (
        f"{ranks} ranks do {speedup:.2f} times the work of one "
        f"({100 * speedup / ranks:.0f} % of ideal): "
        f"{samples_per_s:.4g} samples a second."
    )


def _helps(plan: Plan, profile: Profile, cluster: Cluster) -> Iterator[str]:
    """At which rates the planner gains anything over wfbp, and from which rate ranks
    do.
    """
    if plan.planner not in names("planner") or cluster.num_ranks == 1:
        return
    if not cluster.has_rate:
        yield (
            "What it gains at other rates is not told: the measured all-reduce takes "
            "no longer for more bytes."
        )
        return
    planner = with_settings(plan.planner, **plan.settings)

    def planned_s(at: Cluster) -> float:
        return iteration_s(planner(profile, at), profile, at)

    def wfbp_s(at: Cluster) -> float:
        return iteration_s(load("planner", "wfbp")(profile, at), profile, at)

    if plan.planner != "wfbp":
        yield from _gain(plan.planner, planned_s, wfbp_s, cluster)
    yield from _break_even(planned_s, profile, cluster)


def _gain(
    name: str, planned_s: Planned, wfbp_s: Planned, cluster: Cluster
) -> Iterator[str]:
    rates = [
        cluster.rate_bytes_per_s * _SPREAD ** (2 * step / _STEPS - 1)
        for step in range(_STEPS + 1)
    ]
    at = [cluster.scaled(rate_bytes_per_s=rate) for rate in rates]
    gains = [ratio(wfbp_s(account), planned_s(account)) - 1 for account in at]
    worth = [place for place, gain in enumerate(gains) if gain >= WORTH]
    if not worth:
        yield (
            f"At no rate does {name} gain 2 % over wfbp: this schedule does not help "
            "this model."
        )
        return
    best = max(worth, key=gains.__getitem__)
    yield (
        f"{name} gains most over wfbp, {100 * gains[best]:.0f} %, near "
        f"{format_rate(rates[best])}."
    )
    if worth[0] > 0:
        yield (
            f"Below {format_rate(rates[worth[0] - 1])} it gains less than 2 %: "
            "the link takes far "
            "longer than all computation that could hide it. Send fewer bytes instead."
        )
    if worth[-1] < _STEPS:
        yield (
            f"Above {format_rate(rates[worth[-1] + 1])} it gains less than 2 %: bytes "
            "cost next to nothing there, and what is left it does not shorten."
        )


def _break_even(
    planned_s: Planned, profile: Profile, cluster: Cluster
) -> Iterator[str]:
    """The rate at which all ranks together do the work of one, by bisection."""
    ranks = cluster.num_ranks
    alone_s = profile.forward_s + profile.backward_s

    def pays(factor: float) -> bool:
        at = cluster.scaled(rate_bytes_per_s=cluster.rate_bytes_per_s * factor)
        return planned_s(at) <= ranks * alone_s

    low = 1 / _SPREAD
    high = _SPREAD
    if not pays(high):
        yield (
            f"At no rate do {ranks} ranks do more than one: latency alone takes too "
            "long."
        )
        return
    if pays(low):
        return
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        if pays(middle):
            high = middle
        else:
            low = middle
    rate = format_rate(cluster.rate_bytes_per_s * high)
    yield f"Below {rate} {ranks} ranks together do less than one alone."


MOST_EXPLAINED = 12


def _schemes(profile: Profile, cluster: Cluster) -> Iterator[str]:
    """Why each tensor takes its scheme: the largest first; nothing without a measured
    sparsity.
    """
    if profile.sparsity is None:
        return
    chosen = schemes_of(profile, cluster)
    if profile.sparsity.compressor is not None:
        yield (
            f"The sparse gradient is the part that {profile.sparsity.compressor} takes."
        )
    largest = sorted(chosen, key=lambda name: -chosen[name][0].dense_bytes)
    for name in largest[:MOST_EXPLAINED]:
        at, choice = chosen[name]
        yield from explain_scheme(name, choice, at)
    if len(largest) > MOST_EXPLAINED:
        yield (
            f"{len(largest) - MOST_EXPLAINED} smaller tensors are chosen for in the "
            "same way."
        )
