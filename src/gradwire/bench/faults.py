"""``bench faults``: ranks that train are killed, stopped or spoilt, and what becomes of the others.

Every trial is four processes of its own. All of it is drawn from the seed and the trial's number:
the fault, its victims, the point where it strikes, and how the model is trained. Trials mostly
wait, so several run at once.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ..bounds import check_whole
from ..errors import invalid
from .faults_rank import DDP, NUM_STEPS, POINTS, WAYS, WORLD, Ending, live
from .striking import PAYLOADS, Accident

BENIGN = ("straggle", "pause")
"""Faults that end before the time-out does, after half of it: nobody may notice."""
PAUSES = {"pause": 0.5, "pause long": 2.0}
"""Seconds, in time-outs, after which a stopped process goes on."""
WHOLE = (*BENIGN, *PAYLOADS)
"""Faults that leave every process alive."""
KINDS = (
    "kill",
    "stop",
    "raise",
    "return",
    "straggle",
    "kill two",
    "pause",
    "pause long",
    *PAYLOADS,
)
GRACE_S = 5.0
"""Seconds after the time-out in which every survivor must have ended."""
_START_S = 60.0
_LEFT_S = 10.0
"""Seconds that a process may take to end once its training has ended."""
_PRELOADED = ["torch", "torch._dynamo", "gradwire.bench.faults_rank"]
_Z = 1.96
_WHENS = ("before", "during", "after")


@dataclass(frozen=True)
class FaultsBench:
    """The settings of ``bench faults``; ``at_once`` trials run at one time.

    ``only`` are the kinds of faults that are drawn (all where it is empty), ``number`` a single
    trial that is to be repeated. The ranks attach with ``timeout_s`` and ``check_every``.
    """

    trials: int
    seed: int
    at_once: int = 4
    only: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()
    number: int | None = None
    timeout_s: float = 5.0
    check_every: int | None = 1

    def __post_init__(self) -> None:
        check_whole("trials", self.trials, "write --trials 24")
        check_whole("at_once", self.at_once, "write --at-once 4")
        for what, given, known in (("only", self.only, KINDS), ("way", self.ways, WAYS)):
            for name in given:
                if name not in known:
                    raise invalid(what, name, f"one of {', '.join(known)}", "or leave it out")
        if not 2 <= self.timeout_s < math.inf:
            raise invalid("timeout", self.timeout_s, "at least 2 seconds", "write --timeout 5")


class Aftermath(NamedTuple):
    """The outcome of a trial, before it is judged.

    ``struck_s`` are the times at which the fault struck, by rank, ``endings`` how each training
    ended (None for one that did not say), ``exit_codes`` those of its processes, None for one that
    had to be killed though its training had ended. ``last_lines`` are the ends of their output.
    """

    struck_s: dict[int, float]
    endings: tuple[Ending | None, ...]
    exit_codes: tuple[int | None, ...]
    last_lines: tuple[str, ...]


class Flaws(NamedTuple):
    """All that is wrong with a trial, in words, by column; and the seconds to detect."""

    wrong: dict[str, str]
    detect_s: float | None


def accident_of(settings: FaultsBench, number: int) -> Accident:
    """The trial of a number, drawn from the seed and the number alone.

    >>> settings = FaultsBench(trials=24, seed=3)
    >>> accident_of(settings, 5) == accident_of(settings, 5)
    True
    """
    draw = random.Random(f"{settings.seed}/{number}")
    kinds = settings.only or KINDS
    kind, way = kinds[number % len(kinds)], draw.choice(settings.ways or WAYS)
    points = [point for point in POINTS if point != "broadcast" or way != DDP]
    point = "verb" if kind in PAYLOADS or draw.random() < 0.6 else draw.choice(points)
    if kind == "return":
        point = draw.choice(("rendezvous", "step", "step", "step"))
    return Accident(
        number=number,
        way=way,
        kind=kind,
        victims=tuple(sorted(draw.sample(range(WORLD), 2 if kind == "kill two" else 1))),
        point=point,
        when=draw.choice(_WHENS),
        # DDP's second forward pass has a collective of its own, by its own group's time-out.
        step=draw.randint(2 if way == DDP else 1, NUM_STEPS - 2),
        message=draw.random(),
        verb=draw.random(),
        bit=draw.random(),
        timeout_s=settings.timeout_s,
        check_every=settings.check_every,
    )


def run(
    settings: FaultsBench, report: Callable[[float, str], None]
) -> tuple[list[dict[str, object]], list[str]]:
    """A row for each kind of fault, and a note for each trial in which something was wrong."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    numbers = range(settings.trials) if settings.number is None else (settings.number,)
    accidents = [accident_of(settings, number) for number in numbers]
    judged: dict[int, Flaws] = {}
    with ThreadPoolExecutor(settings.at_once) as pool:
        running = {pool.submit(observe, accident): accident for accident in accidents}
        try:
            for done in as_completed(running):
                accident = running[done]
                judged[accident.number] = judge(accident, done.result())
                report(len(judged) / len(accidents), accident.kind)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    notes = [
        f"{told(accident)}: {text}"
        for accident in accidents
        for text in judged[accident.number].wrong.values()
    ]
    kinds = dict.fromkeys(accident.kind for accident in accidents)
    of_kind = {k: [judged[a.number] for a in accidents if a.kind == k] for k in kinds}
    return [_row(kind, found) for kind, found in of_kind.items()], notes


def told(accident: Accident) -> str:
    """A trial in words.

    >>> told(accident_of(FaultsBench(trials=1, seed=1), 0)).partition(",")[0]
    'trial 0: kill of rank 3'
    """
    who = " and ".join(map(str, accident.victims))
    verb = f"{accident.when} a verb of step {accident.step}"
    where = {"verb": verb, "step": f"before step {accident.step}"}.get(
        accident.point, f"at {accident.point}"
    )
    return f"trial {accident.number}: {accident.kind} of rank {who}, {where}, {accident.way}"


_COLUMNS = {
    "hangs": "did not end",
    "late": f"ended more than {GRACE_S:g} s after the time-out",
    "raw": "an error that is none of gradwire's, or a process that died",
    "diverged": "parameters that differ without an error",
    "misnamed": "an error that does not name the victims, or names others",
    "apart": "steps that differ by more than 1",
    "left": "a process that did not end with its training",
    "not_struck": "the fault did not strike",
}
"""The things that may be wrong with a trial: a column of the table for each."""


def _row(kind: str, found: Sequence[Flaws]) -> dict[str, object]:
    seconds = [one.detect_s for one in found if one.detect_s is not None]
    counts: dict[str, object] = {
        column: sum(column in one.wrong for one in found) for column in _COLUMNS
    }
    misnamed = sum("misnamed" in one.wrong for one in found)
    return {
        "name": kind,
        "trials": len(found),
        **counts,
        "misnamed_at_most": most_likely(misnamed, len(found)),
        "median_s": median(seconds) if seconds else None,
        "worst_s": max(seconds, default=None),
    }


def most_likely(count: int, trials: int) -> float:
    """The upper end of Wilson's interval of 95 % of a share that was ``count`` of ``trials``.

    >>> round(most_likely(0, 500), 4), round(most_likely(1, 10), 3)
    (0.0076, 0.404)
    """
    share, square = count / trials, _Z * _Z
    spread = math.sqrt(share * (1 - share) / trials + square / (4 * trials * trials))
    return min(1.0, (share + square / (2 * trials) + _Z * spread) / (1 + square / trials))


def judge(accident: Accident, seen: Aftermath) -> Flaws:
    """The flaws of a trial, from what became of its ranks."""
    wrong: dict[str, str] = {}
    if not seen.struck_s:
        ends = [ending and f"{ending.error} {ending.text}" for ending in seen.endings]
        return Flaws({"not_struck": f"{_COLUMNS['not_struck']}; ranks ended by {ends}"}, None)
    # One of two victims may meet the end of the other before the fault strikes it.
    accident = accident._replace(victims=tuple(sorted(seen.struck_s)))
    dead = set(accident.victims) - set(accident.victims if accident.kind in WHOLE else ())
    if accident.kind == "size":  # gloo ends the process that receives more than it asked for
        dead = {rank for rank, code in enumerate(seen.exit_codes) if code == -signal.SIGABRT}
    alive = [rank for rank in range(WORLD) if rank not in dead]
    found = {rank: ending for rank in alive if (ending := seen.endings[rank]) is not None}
    for rank in set(alive) - set(found):
        column = "hangs" if seen.exit_codes[rank] is None else "raw"
        wrong[column] = f"rank {rank} never said how it ended\n{seen.last_lines[rank]}"
    for rank in accident.victims if accident.kind in ("raise", "pause long") else ():
        if seen.endings[rank] is None and seen.exit_codes[rank] is None:  # these end by themselves
            wrong["hangs"] = f"rank {rank}, which was struck, never ended\n{seen.last_lines[rank]}"
    errors = {rank: one for rank, one in found.items() if one.error}
    for rank, one in errors.items():
        if not one.is_ours:
            wrong["raw"] = f"rank {rank} raised {one.error}: {one.text}"
    wrong.update(_of_naming(accident, found, errors, dead))
    if len({one.digest for one in found.values()}) > 1 and not errors:
        wrong["diverged"] = _COLUMNS["diverged"]
    steps = [one.step for one in errors.values() if one.step >= 0]
    if steps and max(steps) - min(steps) > 1:
        wrong["apart"] = f"ranks failed in steps {steps}"
    stays = accident.victims if accident.kind == "return" else ()
    for rank in found:
        if seen.exit_codes[rank] is None and rank not in stays:
            wrong["left"] = f"rank {rank} stayed though its training had ended"
    detect_s = None
    if errors:
        detect_s = max(one.end_s for one in errors.values()) - max(seen.struck_s.values())
        if detect_s > accident.timeout_s + GRACE_S:
            wrong["late"] = f"the last rank ended after {detect_s:.1f} s"
    return Flaws(wrong, detect_s)


def _of_naming(
    accident: Accident, found: dict[int, Ending], errors: dict[int, Ending], dead: set[int]
) -> dict[str, str]:
    """Flaws of the errors that there are, and of those that there are not."""
    if accident.kind in BENIGN:
        raised = (f"rank {rank} raised {one.error}: {one.text}" for rank, one in errors.items())
        return {"misnamed": "; ".join(raised)} if errors else {}
    if accident.kind in PAYLOADS:
        for rank, one in errors.items():
            may = {*accident.victims, *dead} if accident.kind != "flip sent" else range(WORLD)
            if not set(one.ranks) <= set(may):
                return {"misnamed": f"rank {rank} names {one.ranks}: {one.text}"}
        silent = [rank for rank, one in found.items() if not one.error]
        if errors and silent:
            return {"misnamed": f"ranks {silent} raised nothing where others did"}
        return {}
    named = {accident.victims}
    if accident.victims[0] == 0:
        named.add((0,))  # whose process holds the store, without which nobody can tell of others
    for rank, one in found.items():
        if one.ranks not in named and (one.error or accident.point != "detach"):
            what = f"names {one.ranks}: {one.text}" if one.error else "raised nothing"
            return {"misnamed": f"rank {rank} {what}"}
    return {}


def observe(accident: Accident) -> Aftermath:
    """Carries a trial out."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with TemporaryDirectory(prefix="gradwire-faults-") as folder:
        watched = _Watched(context, accident, folder)
        try:
            watched.watch()
        finally:
            seen = watched.end()
    return seen


class _Watched:
    """The processes of one trial, and what they tell."""

    def __init__(self, context: Any, accident: Accident, folder: str) -> None:
        self.accident, self._folder = accident, Path(folder)
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        self._endings: list[Ending | None] = [None] * WORLD
        self._struck_s: dict[int, float] = {}
        self._wakes: list[tuple[float, int]] = []
        for rank in range(WORLD):
            here, there = context.Pipe()
            process = context.Process(target=live, args=(accident, rank, there, folder))
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def watch(self) -> None:
        """Listens to all ranks until their training has ended, or should have."""
        accident = self.accident
        left = {end: rank for rank, end in enumerate(self._ends)}
        stays = accident.victims if accident.kind in ("stop", "return") else ()
        deadline_s = time.monotonic() + _START_S
        while not set(left.values()) <= set(stays) or len(self._struck_s) < len(stays):
            now_s = time.monotonic()
            for one in [one for one in self._wakes if one[0] <= now_s]:
                self._wakes.remove(one)
                os.kill(self._processes[one[1]].pid, signal.SIGCONT)
            if now_s > deadline_s:
                return
            until_s = min([deadline_s, *(at_s for at_s, _ in self._wakes)])
            for end in wait(list(left), until_s - now_s):
                assert isinstance(end, Connection)
                if not self._hear(end, left[end]):
                    del left[end]
                if self._struck_s:
                    deadline_s = max(self._struck_s.values()) + 3 * accident.timeout_s + 2 * GRACE_S

    def _hear(self, end: Connection, rank: int) -> bool:
        """Takes what a rank tells; returns whether it may tell more."""
        try:
            what, value = end.recv()
        except (EOFError, ConnectionError):
            return False
        if what == "port":
            for other in self._ends[1:]:
                other.send(value)
        elif what == "struck":
            self._struck_s[rank] = value
            if (factor := PAUSES.get(self.accident.kind)) is not None:
                self._wakes.append((value + factor * self.accident.timeout_s, rank))
        else:
            self._endings[rank] = value
        return bool(what != "over")

    def end(self) -> Aftermath:
        """Ends all processes: those whose training has ended have a few seconds to do so alone."""
        codes: list[int | None] = []
        deadline_s = time.monotonic() + _LEFT_S
        for process, ending in zip(self._processes, self._endings, strict=True):
            if ending is not None and ending.error != "Left":
                process.join(max(0.0, deadline_s - time.monotonic()))
            codes.append(process.exitcode)
        for end in self._ends:
            end.close()
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        lines = tuple(self._last_lines(rank) for rank in range(WORLD))
        return Aftermath(dict(self._struck_s), tuple(self._endings), tuple(codes), lines)

    def _last_lines(self, rank: int) -> str:
        path = self._folder / f"{rank}"
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return "\n".join(text.splitlines()[-6:])
