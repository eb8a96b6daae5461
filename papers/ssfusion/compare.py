"""Iterations of all schemes under the model: rows, ranges of improvements, and where
time goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import DENSE, ExchangeSetting, Plan, PlannedMessage
from gradwire.planning.data.profile import Profile
from gradwire.planning.simulation.clock import Timing, run_on_clock
from gradwire_lab.planning.account import bytes_of_messages

from ..frame import Ask, Claim, Row
from ..links import link_s, merged
from ..rows import number
from .contenders import (
    COMMON,
    CONTENDERS,
    LACKING,
    RIVALS,
    SSFUSION,
    UNCOMPRESSED,
    Choice,
    Contender,
)
from .printed import Range
from .setting import Reading

SLACK = 0.005
"""How far beyond a printed range ours may end and be within it: half of a printed per
cent.
"""
PARTS = {
    "compute_s": "computation",
    "selection_s": "selection",
    "communication_s": "communication",
}
"""The parts that an iteration's seconds are the sum of, in words."""
UNPRINTED = frozenset({"density", "sparsifier", "link_s", "fraction_dense"})
"""Keys of rows that only the files show."""


@dataclass(frozen=True)
class Case:
    """One comparison: what is trained, where, and what all schemes have in common."""

    reading: Reading
    model: str
    num_ranks: int
    choice: Choice = COMMON

    @property
    def name(self) -> str:
        literal = ", equation 2 as printed" if self.choice.bound == "none" else ""
        return f"{self.reading.name}{literal}"


def compared(
    ask: Ask, cases: Sequence[Case], contenders: Sequence[Contender] = CONTENDERS
) -> list[Row]:
    """A row for each case and scheme."""
    rows: list[Row] = []
    for done, case in ask.each(cases):
        ask.report(done, f"{case.model} on {case.num_ranks} GPUs, {case.name}")
        profile = case.reading.profile(case.model)
        rows += [row_of(case, profile, one) for one in contenders]
    return rows


def row_of(case: Case, profile: Profile, contender: Contender) -> Row:
    """One iteration of a scheme: its samples a second, and where its seconds go.

    The seconds of computation, selection and communication add up to the iteration.
    Selection is what lengthens the backward pass, and what runs behind it while nothing
    is on the link.
    """
    cluster = case.reading.cluster(case.num_ranks, on_gpu=contender.on_gpu)
    plan = contender.plan(profile, cluster, case.choice)
    timing = run_on_clock(plan, profile, cluster)
    compute_s = profile.forward_s + profile.backward_s
    behind_s = selected_behind_s(timing)
    return {
        "name": contender.name,
        "reading": case.name,
        "model": case.model,
        "num_ranks": case.num_ranks,
        "density": case.choice.density,
        "sparsifier": case.choice.sparsifier,
        "num_messages": len(plan.messages),
        "throughput": case.num_ranks * profile.batch_size / timing.iteration_s,
        "iteration_s": timing.iteration_s,
        "compute_s": compute_s,
        "selection_s": timing.inline_s + behind_s,
        "communication_s": timing.iteration_s - compute_s - timing.inline_s - behind_s,
        "link_s": link_s(timing),
        "fraction_dense": dense_share(plan, profile, cluster, timing),
    }


def selected_behind_s(timing: Timing) -> float:
    """Seconds after the backward pass in which the compute lane works and the link does
    not.
    """
    from_s = timing.backward_end_s[0]
    works = merged(timing.spans, "compute", from_s)
    wires = merged(timing.spans, "communication", from_s)
    both = sum(
        max(0.0, min(end_s, other_end_s) - max(start_s, other_s))
        for start_s, end_s in works
        for other_s, other_end_s in wires
    )
    return sum(end_s - start_s for start_s, end_s in works) - both


def dense_share(
    plan: Plan, profile: Profile, cluster: Cluster, timing: Timing
) -> float:
    """The share of the bytes that a rank sends that are of tensors sent whole."""
    sizes = {one.name: one.numel for layer in profile.layers for one in layer.tensors}
    whole = sent = 0.0
    sizes_bytes = bytes_of_messages(plan, profile)
    for number_, message in enumerate(plan.messages):
        if message.exchange == DENSE:
            own = float(cluster.wire_bytes(sizes_bytes[number_]))
            whole = whole + own
            sent = sent + own
            continue
        own = float(
            sum(one.size_bytes for one in timing.spans if one.message == number_)
        )
        dense = _dense_numel(message, plan.exchanges[message.exchange], sizes)
        whole = whole + 4.0 * dense * (cluster.num_ranks - 1)
        sent = sent + own
    return whole / sent if sent else 0.0


def _dense_numel(
    message: PlannedMessage, exchange: ExchangeSetting, sizes: dict[str, int]
) -> int:
    """Elements that a message of ``selective`` sends dense: those of its smallest
    tensors.
    """
    num_dense = exchange.settings.get("num_dense", 0) if exchange.sparsifier else 0
    return sum(
        sorted(sizes[chunk.tensor] for chunk in message.chunks)[: int(num_dense)]
    )


def over(rows: Sequence[Row], ours: str, others: Sequence[str]) -> dict[str, float]:
    """By how much a scheme's throughput exceeds that of each other one, by what is
    compared.
    """
    found = {}
    for case, own in _by_case(rows).items():
        for other in others:
            if ours in own and other in own:
                gain = (
                    number(own[ours], "throughput") / number(own[other], "throughput")
                    - 1
                )
                found[f"{other}, {case}"] = gain
    return found


def _by_case(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        case = f"{row['model']} on {row['num_ranks']} GPUs"
        found.setdefault(case, {})[str(row["name"])] = row
    return found


def range_of(gains: Iterable[float]) -> Range:
    """The least and the largest of some figures."""
    every = list(gains)
    return min(every), max(every)


def shown(values: Range) -> str:
    """A range of shares in per cent.

    >>> shown((0.287, 0.742))
    '28.7 to 74.2 %'
    """
    return f"{100 * values[0]:.1f} to {100 * values[1]:.1f} %"


def is_within(found: Range, stated: Range) -> bool:
    """Whether a range lies within a printed one, to half a per cent."""
    return stated[0] - SLACK <= found[0] and found[1] <= stated[1] + SLACK


def improvement(
    rows: Sequence[Row],
    stated: Range,
    says: str,
    place: str,
    *,
    ours: str = SSFUSION,
    others: Sequence[str] | None = None,
    reason: Callable[[Sequence[Row], str], str] | None = None,
    missing: str = "",
) -> Claim:
    """A printed range of improvements over ``others``, by default all of the paper's,
    beside ours.

    ``rows`` are what is compared with it and nothing else. Where a scheme is not here,
    a range within the printed one shows nothing, as that scheme could widen it. So
    could ``missing``: what the paper compares and these rows do not, in words.
    """
    wanted = (*RIVALS, *LACKING) if others is None else tuple(others)
    says = f"{says} by {shown(stated)}"
    gains = over(rows, ours, wanted)
    if not gains:
        return Claim(
            says, place, "not measured", None, f"{', '.join(wanted)}: no planner of it"
        )
    found = range_of(gains.values())
    least = min(gains, key=gains.__getitem__)
    most = max(gains, key=gains.__getitem__)
    in_words = f"{shown(found)} (least over {least}, most over {most})"
    lacking = [name for name in wanted if name in LACKING]
    if is_within(found, stated):
        wider = [f"{name} (no planner of it)" for name in lacking]
        wider += [missing] if missing else []
        why = f"could widen the range: {', '.join(wider)}" if wider else ""
        return Claim(says, place, in_words, None if wider else True, why)
    make = difference if reason is None else reason
    side = least if found[0] < stated[0] - SLACK else most
    other, _, case = side.partition(", ")
    own = _by_case(rows)[case]
    return Claim(says, place, in_words, False, make([own[ours], own[other]], case))


def difference(pair: Sequence[Row], case: str) -> str:
    """Where the seconds of one scheme's iteration differ most from another's."""
    ours, other = pair
    more = {key: number(ours, key) - number(other, key) for key in PARTS}
    key = max(more, key=lambda one: abs(more[one]))
    spent = ", ".join(f"{PARTS[part]} {_ms(number(ours, part))}" for part in PARTS)
    return (
        f"{case} {ours['name']} spends {spent}; {other['name']} spends "
        f"{_ms(number(other, key))} "
        f"on {PARTS[key]}, the largest difference. {_most(ours, other)}"
    )


def _most(ours: Row, other: Row) -> str:
    """The most that communicating for nothing would gain over another scheme."""
    least_s = number(ours, "compute_s") + number(ours, "selection_s")
    most = number(other, "iteration_s") / least_s - 1
    return (
        f"If nothing took time on the link, {ours['name']} would gain "
        f"{100 * most:.1f} % there"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def where(rows: Sequence[Row], **wanted: object) -> list[Row]:
    """The rows of these values."""
    return [
        row for row in rows if all(row[key] == value for key, value in wanted.items())
    ]


def readings(rows: Sequence[Row]) -> list[str]:
    """The readings of some rows."""
    return list(dict.fromkeys(str(row["reading"]) for row in rows))


def dense_notes(rows: Sequence[Row]) -> list[str]:
    """A sentence for each reading: how often whole gradients are faster than every
    other scheme.
    """
    found = []
    for name in readings(rows):
        cases = _by_case(where(rows, reading=name))
        ahead = [
            case
            for case, own in cases.items()
            if min(number(own[plain], "iteration_s") for plain in UNCOMPRESSED)
            < min(
                number(row, "iteration_s")
                for one, row in own.items()
                if one not in UNCOMPRESSED
            )
        ]
        found.append(
            f"{name}: in {len(ahead)} of {len(cases)} comparisons plain all-reduces "
            "are faster than every other scheme under the model"
        )
    return found
