"""Figure 10 of HiPress: how much of an iteration a GPU computes the model in,
simulated.

The paper reads a GPU's use off a profiler. Here a simulated GPU computes the model or
waits, so a window's use is the share of its seconds in which the GPU computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gradwire.planning.simulation.clock import Timing, run_on_clock

from ..frame import Ask, Claim, Findings, Row
from ..links import united
from ..rows import POINTS, draw, mean, number
from .printed import RING
from .setting import EC2_AS_TABLE_1, HOSTS, Site
from .systems import SYSTEMS, TRAINED

MODELS = {"bert_large": "figure 9d", "ugatit": "figure 9c"}
"""The models, and the figure whose fastest HiPress is taken."""
NUM_WINDOWS = 50
"""Windows of an iteration, each with a use of its own."""


def figure10(
    ask: Ask, models: Sequence[str] = tuple(MODELS), num_hosts: int = HOSTS
) -> Findings:
    """The use of a GPU in one iteration of Ring and of the fastest HiPress."""
    rows = list[Row]()
    claims = list[Claim]()
    site = EC2_AS_TABLE_1
    for done, model in ask.each(models):
        ask.report(done, f"use of a GPU, {model}")
        every = (name for name in TRAINED[model] if name.startswith("HiPress"))
        found = [_row(site, model, num_hosts, name) for name in every]
        best = min(found, key=lambda row: number(row, "iteration_s"))
        ring = _row(site, model, num_hosts, RING)
        rows += [ring, best]
        claims += [_sparser(ring, best), _drops(ring), _peak(ring, best)]
    note = (
        f"simulated: {num_hosts} hosts, {site.name}; from the start of a backward pass "
        f"to the end of the next forward pass, in {NUM_WINDOWS} windows; compression "
        "takes none of the GPU"
    )
    return Findings(tuple(rows), tuple(claims), (note,))


def _row(site: Site, model: str, num_hosts: int, name: str) -> Row:
    system = SYSTEMS[name]
    profile = site.profile(model)
    cluster = site.cluster(
        num_hosts, is_push_pull=system.is_push_pull, slower=system.slower
    )
    timing = run_on_clock(system.plan(profile, cluster), profile, cluster)
    uses = window_uses(timing)
    width_s = timing.iteration_s / NUM_WINDOWS
    link = zip(timing.message_start_s, timing.message_end_s, strict=True)
    sends = shares(united(link), timing.iteration_s, NUM_WINDOWS)
    idle = [sent for use, sent in zip(uses, sends, strict=True) if use == 0.0]
    return {
        "name": name,
        "application": model,
        "iteration_s": timing.iteration_s,
        "mean_use": mean(uses),
        "most_use": max(uses),
        "idle_windows": len(idle),
        "idle_windows_that_send": sum(sent > 0 for sent in idle),
        POINTS: [
            [1e3 * width_s * (place + 0.5), use] for place, use in enumerate(uses)
        ],
    }


def window_uses(timing: Timing, num_windows: int = NUM_WINDOWS) -> list[float]:
    """The share of each window of an iteration in which the model's layers are
    computed.
    """
    backward = zip(timing.backward_start_s, timing.backward_end_s, strict=True)
    forward = zip(timing.forward_start_s, timing.forward_end_s, strict=True)
    return shares(united([*backward, *forward]), timing.iteration_s, num_windows)


def shares(
    stretches: Sequence[tuple[float, float]], whole_s: float, num_windows: int
) -> list[float]:
    """The share of each window that is covered by some stretches of time."""
    found = []
    width_s = whole_s / num_windows
    for place in range(num_windows):
        from_s = place * width_s
        to_s = (place + 1) * width_s
        parts_s = (
            min(end_s, to_s) - max(start_s, from_s) for start_s, end_s in stretches
        )
        found.append(min(1.0, sum(max(0.0, part_s) for part_s in parts_s) / width_s))
    return found


def _sparser(ring: Row, best: Row) -> Claim:
    model = ring["application"]
    place = f"section 6.2.1, {MODELS[str(ring['application'])]}"
    own = number(best, "mean_use")
    other = number(ring, "mean_use")
    is_sparser = other < own
    return Claim(
        f"{model}: the use of the GPU is more sparse under Ring than under HiPress",
        place,
        f"{100 * other:.0f} % under {RING}, {100 * own:.0f} % under {best['name']}",
        is_sparser,
        "" if is_sparser else "Ring's messages are as well hidden on these links",
    )


def _drops(ring: Row) -> Claim:
    idle = number(ring, "idle_windows")
    sent = number(ring, "idle_windows_that_send")
    return Claim(
        f"{ring['application']}: under Ring the use drops to zero while "
        "gradients travel",
        "section 6.2.1",
        f"{idle:.0f} of {NUM_WINDOWS} windows are without use, and in {sent:.0f} "
        "gradients travel",
        sent > 0,
        "" if sent else "every message is hidden behind computation",
    )


def _peak(ring: Row, best: Row) -> Claim:
    most = ", ".join(f"{100 * number(one, 'most_use'):.0f} %" for one in (ring, best))
    why = "a simulated GPU computes or waits, so its peak is 100 % by construction"
    return Claim("both use nearly 100 % at the peak", "section 6.2.1", most, None, why)


draw10 = partial(
    draw,
    title="Use of a GPU in an iteration",
    x_label="milliseconds",
    y_label="share of a window",
)
