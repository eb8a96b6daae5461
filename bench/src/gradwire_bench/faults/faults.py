"""``bench faults``: ranks that train are killed, cut off or spoilt, and what becomes of
the others.

Every trial is a few processes of its own, on shaped hosts where links fail. All of it
is drawn from the seed and the trial's number: the fault, its victims, the point where
it strikes, and how the model is trained. Trials mostly wait, so several run at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from statistics import median

from gradwire.cli.report.table import Row
from gradwire.contract.bounds import check_whole
from gradwire.errors import invalid

from ..errors import TestbedUnavailable
from ..testbed.hosts import Testbed, available
from ..testbed.wide_area import NEAR, WideArea
from .accidents import (
    KINDS,
    LINKS,
    LOCAL,
    LOCAL_KINDS,
    PARTITIONS,
    WAYS,
    Accident,
    drawn,
)
from .faults_judge import COLUMNS, Flaws, judge
from .faults_trial import Trials

_Z = 1.96


@dataclass(frozen=True)
class FaultsBench:
    """The settings of ``bench faults``; ``at_once`` trials run at one time.

    ``only`` are the kinds of faults that are drawn (all that this machine can do, where
    it is empty), ``number`` a single trial that is to be repeated. The ranks attach
    with ``timeout_s`` and ``check_every``. With a ``wide_area`` all trials run on hosts
    with such links, without it only those whose links fail.
    """

    trials: int
    seed: int
    at_once: int = 4
    only: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()
    number: int | None = None
    timeout_s: float = 5.0
    check_every: int | None = 1
    wide_area: WideArea = NEAR

    def __post_init__(self) -> None:
        check_whole("trials", self.trials, "write --trials 24")
        check_whole("at_once", self.at_once, "write --at-once 4")
        for what, given, known in (
            ("only", self.only, self.kinds),
            ("way", self.ways, (*WAYS, LOCAL)),
        ):
            for name in given:
                if name not in known:
                    raise invalid(
                        what, name, f"one of {', '.join(known)}", "or leave it out"
                    )
        if not 2 <= self.timeout_s < math.inf:
            raise invalid(
                "timeout", self.timeout_s, "at least 2 seconds", "write --timeout 5"
            )
        # refuses a slow host that there is not
        self.testbed  # noqa: B018

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of faults that these ways know."""
        if self.ways == (LOCAL,):
            return LOCAL_KINDS
        return KINDS

    @property
    def testbed(self) -> Testbed:
        """The hosts of a trial, as many as the largest one needs; one has the store."""
        return Testbed(hosts=max(PARTITIONS.values()) + 1, wide_area=self.wide_area)


def accidents_of(settings: FaultsBench) -> list[Accident]:
    """The trials of these settings, each drawn from the seed and its number alone.

    >>> print(*accidents_of(FaultsBench(trials=2, seed=1, only=("kill",))), sep="\\n")
    trial 0: kill of rank 0, during a verb of step 3, allgather_sparse
    trial 1: kill of rank 0, after a verb of step 3, omnireduce
    """
    numbers = range(settings.trials) if settings.number is None else (settings.number,)
    names = (
        settings.only or settings.kinds,
        settings.ways or WAYS,
        settings.timeout_s,
        settings.check_every,
    )
    return [drawn(settings.seed, number, *names) for number in numbers]


def run(
    settings: FaultsBench, report: Callable[[float, str], None]
) -> tuple[list[Row], list[str]]:
    """A row for each kind of fault and one for all, and a note for each trial that went
    wrong.

    Where no shaped hosts can be made, trials whose links would fail are left out, which
    a note says.
    """
    accidents = accidents_of(settings)
    notes = []
    is_near = settings.wide_area == NEAR
    on_hosts = [
        accident for accident in accidents if accident.kind in LINKS or not is_near
    ]
    if on_hosts and not (can := available(None if is_near else settings.testbed)):
        if len(on_hosts) == len(accidents):
            raise TestbedUnavailable(f"there are no such links here: {can.reason}")
        accidents = [accident for accident in accidents if accident.kind not in LINKS]
        notes = [f"no trials of links: {can.reason}"]
    judged = _judged(settings, accidents, report)
    for accident in accidents:
        notes += [
            f"{accident}: {text}" for text in judged[accident.number].wrong.values()
        ]
    kinds = dict.fromkeys(accident.kind for accident in accidents)
    of_kind = {k: [judged[a.number] for a in accidents if a.kind == k] for k in kinds}
    rows = [_row(kind, flaws) for kind, flaws in of_kind.items()]
    return [*rows, _row("all", [*judged.values()])], notes


def _judged(
    settings: FaultsBench,
    accidents: Sequence[Accident],
    report: Callable[[float, str], None],
) -> dict[int, Flaws]:
    """The flaws of every trial by its number."""
    judged: dict[int, Flaws] = {}
    made = Trials(settings.testbed)
    round_trip_s = 2 * (settings.wide_area.delay_s + settings.wide_area.jitter_s)
    with made as trials, ThreadPoolExecutor(settings.at_once) as pool:
        running = {
            pool.submit(trials.observe, accident): accident for accident in accidents
        }
        try:
            for done in as_completed(running):
                accident = running[done]
                seen = done.result()
                judged[accident.number] = judge(accident, seen, round_trip_s)
                wrong = sum(bool(flaws.wrong) for flaws in judged.values())
                what = f"{len(judged)} of {len(accidents)} trials, {wrong} wrong"
                report(len(judged) / len(accidents), what)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return judged


def _row(name: str, flaws: Sequence[Flaws]) -> Row:
    counts: Row = {
        column: sum(column in flaw.wrong for flaw in flaws) for column in COLUMNS
    }
    misnamed = sum("misnamed" in flaw.wrong for flaw in flaws)
    return {
        "name": name,
        "trials": len(flaws),
        **counts,
        "misnamed_at_most": round(most_likely(misnamed, len(flaws)), 4),
        **_spread("", [flaw.detect_s for flaw in flaws]),
        **_spread("next_", [flaw.next_s for flaw in flaws]),
    }


def _spread(prefix: str, seconds: Sequence[float | None]) -> Row:
    known = [one for one in seconds if one is not None]
    return {
        f"{prefix}median_s": round(median(known), 1) if known else None,
        f"{prefix}worst_s": round(max(known), 1) if known else None,
    }


def most_likely(count: int, trials: int) -> float:
    """The upper end of Wilson's interval of 95 % of a share that was ``count`` of
    ``trials``.

    >>> round(most_likely(0, 500), 4), round(most_likely(1, 10), 3)
    (0.0076, 0.404)
    """
    share = count / trials
    square = _Z * _Z
    spread = math.sqrt(share * (1 - share) / trials + square / (4 * trials * trials))
    return min(
        1.0, (share + square / (2 * trials) + _Z * spread) / (1 + square / trials)
    )
