"""The judgement of a trial of ``bench faults``: all that is wrong with what became of
its ranks.
"""

from __future__ import annotations

import signal
from typing import NamedTuple

from .accidents import (
    BENIGN,
    FSDP,
    HSDP_SHRINK,
    IN_PAIRS,
    LINKS,
    LOCAL,
    NEWCOMER,
    PARTITIONS,
    PAYLOADS,
    SERVER,
    SHRINKING,
    WHOLE,
    Accident,
)

GRACE_S = 5.0
"""Seconds after the time-out in which every survivor must have ended."""
ROUND_TRIPS = 10
"""Round trips that far survivors have besides: of waits, and of questions to the store.
"""
COLUMNS = {
    "hangs": "did not end",
    "late": f"ended more than {GRACE_S:g} s and {ROUND_TRIPS} round trips after the "
    "time-out",
    "raw": "an error that is none of gradwire's, or a process that died",
    "diverged": "parameters that differ without an error, or from those without an "
    "accident",
    "misnamed": "an error that does not name the victims, or names others",
    "owed": "local steps that are not in the model, or are in it twice",
    "apart": "steps that differ by more than 1",
    "left": "a process that did not end with its training",
    "not_struck": "the fault did not strike",
}
"""The things that may be wrong with a trial: a column of the table for each."""


class Ending(NamedTuple):
    """The end of a rank's training, and the CRC-32 of its parameters where no error
    ended it.

    ``error`` is the type of the error that ended it ("" for none), and ``is_ours``
    tells whether it is gradwire's; then ``ranks`` and ``step`` are what it names.
    """

    error: str
    is_ours: bool
    ranks: tuple[int, ...]
    step: int
    text: str
    end_s: float
    digest: int
    steps: int = 0
    of_all: int = 0
    """Under local steps: its own steps, and those of all ranks in the model."""
    next_s: float = 0.0
    """When it went on after a loss."""


class Aftermath(NamedTuple):
    """The outcome of a trial, before it is judged.

    ``struck_s`` are the times at which the fault struck, by rank, ``endings`` how each
    training ended (None for one that did not say), ``exit_codes`` those of its
    processes, None for one that had to be killed though its training had ended.
    ``last_lines`` are the ends of their output. ``digest`` is that of the parameters
    without an accident, where they are to be the same.
    """

    struck_s: dict[int, float]
    endings: tuple[Ending | None, ...]
    exit_codes: tuple[int | None, ...]
    last_lines: tuple[str, ...]
    digest: int | None = None


class Flaws(NamedTuple):
    """All that is wrong with a trial, in words, by column; the seconds to detect, and
    those from a rank's end to the next whole step of the others.
    """

    wrong: dict[str, str]
    detect_s: float | None
    next_s: float | None = None


def judge(accident: Accident, seen: Aftermath, round_trip_s: float = 0.0) -> Flaws:
    """The flaws of a trial, from what became of its ranks."""
    if not seen.struck_s:
        ends = f"ranks ended by {seen.endings}"
        return Flaws({"not_struck": f"{COLUMNS['not_struck']}; {ends}"}, None)
    alive = [rank for rank in accident.processes if rank not in _dead(accident, seen)]
    endings = {
        rank: ending for rank in alive if (ending := seen.endings[rank]) is not None
    }
    errors = {rank: ending for rank, ending in endings.items() if ending.error}
    of_names = _of_survival if accident.way in SHRINKING else _of_naming
    if accident.way == LOCAL:
        of_names = _of_local_steps
    wrong = {
        **_of_silence(accident, seen, set(alive) - set(endings)),
        **_of_raw_errors(accident, errors),
        **of_names(accident, seen, endings, errors),
        **_of_digests(accident, seen, endings, errors),
        **_of_steps({} if accident.way == LOCAL else errors),
        **_of_processes(accident, seen, endings),
    }
    struck_s = max(seen.struck_s.values())
    others = endings.keys() - {*accident.victims}
    next_s = [
        endings[rank].next_s - struck_s for rank in others if endings[rank].next_s
    ]
    if accident.way == LOCAL:  # where the end of a victim comes when it comes
        errors = {}
    seconds = {rank: ending.end_s - struck_s for rank, ending in errors.items()}
    limit_s = accident.timeout_s + GRACE_S + ROUND_TRIPS * round_trip_s
    detect_s = max(seconds.values(), default=None)
    if detect_s is not None and detect_s > limit_s:
        wrong["late"] = f"the last rank ended after {detect_s:.1f} s"
    return Flaws(wrong, detect_s, max(next_s, default=None))


def _of_silence(
    accident: Accident, seen: Aftermath, silent: set[int]
) -> dict[str, str]:
    """Flaws of ranks that never said how they ended."""
    wrong: dict[str, str] = {}
    for rank in silent:
        code = seen.exit_codes[rank]
        wrong["hangs" if code is None else "raw"] = (
            f"rank {rank} never said how it ended (exit code {code})\n"
            f"{seen.last_lines[rank]}"
        )
    if accident.kind not in ("raise", "pause long"):
        return wrong
    # Victims of these faults end by themselves.
    for rank in accident.victims:
        if seen.endings[rank] is None and seen.exit_codes[rank] is None:
            wrong["hangs"] = (
                f"rank {rank}, which was struck, never ended\n{seen.last_lines[rank]}"
            )
    return wrong


def _of_raw_errors(accident: Accident, errors: dict[int, Ending]) -> dict[str, str]:
    """Errors that are not gradwire's own."""
    for rank, ending in errors.items():
        if not (ending.is_ours or _is_of_fsdp(accident, rank, ending)):
            return {"raw": f"rank {rank} raised {ending.error}: {ending.text}"}
    return {}


def _is_of_fsdp(accident: Accident, rank: int, ending: Ending) -> bool:
    """Whether an error may be torch's, of a collective of FSDP's own.

    Ranks that hold other shards of a replica meet there.
    """
    is_mate = rank // 2 == accident.victims[0] // 2
    may = accident.way == FSDP or (accident.way == HSDP_SHRINK and is_mate)
    return may and not ending.is_ours


def _of_steps(errors: dict[int, Ending]) -> dict[str, str]:
    """Ranks that failed more than one step apart."""
    steps = [ending.step for ending in errors.values() if ending.step >= 0]
    if steps and max(steps) - min(steps) > 1:
        return {"apart": f"ranks failed in steps {steps}"}
    return {}


def _of_processes(
    accident: Accident, seen: Aftermath, endings: dict[int, Ending]
) -> dict[str, str]:
    """Processes that stayed though their training had ended."""
    stays = accident.victims if accident.kind == "return" else ()
    for rank in endings:
        if seen.exit_codes[rank] is None and rank not in stays:
            return {"left": f"rank {rank} stayed though its training had ended"}
    return {}


def _dead(accident: Accident, seen: Aftermath) -> set[int]:
    """The ranks that the fault ends, of which nothing is expected."""
    # gloo ends the process that receives more than it asked for
    if accident.kind == "size":
        return {
            rank for rank, code in enumerate(seen.exit_codes) if code == -signal.SIGABRT
        }
    return set(() if accident.kind in (*WHOLE, "resume") else accident.victims)


def _of_digests(
    accident: Accident,
    seen: Aftermath,
    endings: dict[int, Ending],
    errors: dict[int, Ending],
) -> dict[str, str]:
    """Flaws of parameters, which are compared where no rank has raised."""
    if errors and accident.way not in (LOCAL, *SHRINKING):
        return {}
    digests: dict[int, set[int]] = {}
    for rank in endings.keys() - errors.keys():
        ending = endings[rank]
        shard = rank % 2 if accident.way in (FSDP, HSDP_SHRINK) else 0
        if accident.way == SERVER:
            shard = rank // (accident.world - 1)  # the last rank holds no model
        digests.setdefault(shard, set()).add(ending.digest)
    if any(len(each) > 1 for each in digests.values()):
        return {"diverged": "parameters differ among ranks without an error"}
    if seen.digest is not None and digests.get(0) != {seen.digest}:
        return {"diverged": "parameters differ from those of a run without an accident"}
    return {}


def _of_survival(
    accident: Accident,
    seen: Aftermath,
    endings: dict[int, Ending],
    errors: dict[int, Ending],
) -> dict[str, str]:
    """Flaws of ranks that are to go on without the victims, or without their host or
    replica.
    """
    left = accident.victims
    if accident.way in IN_PAIRS:
        first = left[0] // 2 * 2
        left = (first, first + 1)
    for rank, ending in endings.items():
        if ending.error and _is_of_fsdp(accident, rank, ending):
            continue
        is_named = ending.ranks == (accident.victims if rank in left else left)
        if bool(ending.error) != (rank in left) or not is_named:
            return {"misnamed": f"rank {rank} names {ending.ranks}: {ending.text}"}
    return {}


def _of_local_steps(
    accident: Accident,
    seen: Aftermath,
    endings: dict[int, Ending],
    errors: dict[int, Ending],
) -> dict[str, str]:
    """Flaws of ranks that are to train on without the victims, if these are lost.

    A victim that is cut off, or stands still for long, may come back. If it ends, its
    error names victims, as others say of it, or other ranks than itself. A newcomer may
    end before it is in.
    """
    if accident.kind == "kill store" and errors:
        named = {rank: ending.ranks for rank, ending in errors.items() if ending.ranks}
        return {"misnamed": f"ranks are named: {named}"} if named else {}
    is_benign = accident.kind in (*BENIGN, "kill store")
    may_leave = set(() if is_benign else accident.victims)
    well = {rank: endings[rank] for rank in endings.keys() - errors.keys()}
    has_lost = not may_leave.issubset(well)
    must_name = has_lost and accident.kind != NEWCOMER
    for rank, ending in endings.items():
        names = set(ending.ranks)
        # a process that has come in knows of no loss before
        least = may_leave if must_name and rank < accident.world else set()
        is_right = not ending.error and least <= names <= may_leave
        if rank in may_leave:
            is_named = bool(names) and (rank not in names or names <= may_leave)
            may_end = accident.heals_s >= accident.timeout_s
            is_right = not ending.error or (is_named and may_end)
        if not is_right:
            return {"misnamed": f"rank {rank} names {ending.ranks}: {ending.text}"}
    for rank, ending in well.items():
        more = ending.of_all - sum(other.steps for other in well.values())
        if more < 0 or (more and not has_lost):
            return {"owed": f"rank {rank} counts {more} steps more than were made"}
    return {}


def _of_naming(
    accident: Accident,
    seen: Aftermath,
    endings: dict[int, Ending],
    errors: dict[int, Ending],
) -> dict[str, str]:
    """Flaws of the errors that there are, and of those that there are not."""
    if accident.kind in (*BENIGN, "resume"):
        raised = [f"rank {rank}: {ending.text}" for rank, ending in errors.items()]
        return {"misnamed": "; ".join(raised)} if raised else {}
    if accident.kind in (*PAYLOADS, "flap 5 s"):
        spoilt = {*accident.victims, *_dead(accident, seen)}
        for rank, ending in errors.items():
            may = range(accident.world) if accident.kind == "flip sent" else spoilt
            if not set(ending.ranks) <= set(may):
                return {"misnamed": f"rank {rank} names {ending.ranks}: {ending.text}"}
        silent = [rank for rank, ending in endings.items() if not ending.error]
        if errors and silent:
            return {"misnamed": f"ranks {silent} raised nothing where others did"}
        return {}
    if accident.way == FSDP or (accident.point == "detach" and not errors):
        return {}  # under FSDP ranks are numbered among those that hold the same shard
    for rank, ending in endings.items():
        # A training that ends soon after may not need the store any more.
        may_raise_nothing = accident.point == "detach" or accident.kind == "kill store"
        if not ending.error and not may_raise_nothing:
            return {"misnamed": f"rank {rank} raised nothing"}
        if ending.error and not _is_named(accident, rank, ending):
            return {"misnamed": f"rank {rank} names {ending.ranks}: {ending.text}"}
    return {}


def _is_named(accident: Accident, rank: int, ending: Ending) -> bool:
    """Whether a rank's error says what has happened."""
    victims = accident.victims
    if accident.kind == "kill store":
        return ending.ranks == ()
    if accident.kind == "other step":
        return ending.error == "RanksDiffer" and f"rank {victims[0]}" in ending.text
    if accident.kind in PARTITIONS:
        others = set(range(accident.world)) - set(victims)
        beyond = others if rank in victims else set(victims)
        return set(ending.ranks) == beyond and "is parted" in ending.text
    # Whose process holds the store, without which nobody can tell of others.
    may = (
        {victims, (0,)} if victims[0] == 0 and accident.kind not in LINKS else {victims}
    )
    return ending.ranks in may
