"""Runs ranks on every host and watches over them: output, failures, time limits, the
end.

Ranks get the variables that torchrun sets. A rank is a process group of its own, so
that ending it also ends what it started, and Ctrl-C reaches the launcher first, which
then ends all ranks.
"""

import contextlib
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Literal

from gradwire.contract.units import format_seconds
from gradwire.errors import ExitCode, RankFailed, invalid

from ._orphans import mark
from .hosts import Hosts
from .relay import RELAY

Output = Literal["first", "all", "none"]
EndedBy = Literal["itself", "another's failure", "time limit"]

_KILL_AFTER_S = 2.0  # from SIGTERM to SIGKILL
_NUM_LAST_LINES = 20
_DRAIN_S = 5.0  # for the last output of a rank that has ended


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """The end of a rank.

    ``returncode`` is negative for a signal. ``ended_by`` tells whether it ended by
    itself, was ended because another one had failed, or because the time was up.
    ``last_lines`` is the end of its output (of its stderr alone where its stdout was
    passed through).
    """

    rank: int
    returncode: int
    seconds: float
    ended_by: EndedBy
    last_lines: tuple[str, ...]


@dataclass(eq=False)
class _Running:
    rank: int
    process: subprocess.Popen[bytes]
    last_lines: deque[str]
    started_s: float
    readers: list[threading.Thread] = field(default_factory=list)
    has_ended: threading.Event = field(default_factory=threading.Event)
    waiting: threading.Lock = field(default_factory=threading.Lock)
    seconds: float = 0.0
    ended_by: EndedBy = "itself"


def launch(
    hosts: Hosts,
    command: Sequence[str],
    *,
    timeout_s: float | None = None,
    grace_s: float = 5.0,
    output: Output = "first",
    stdout: IO[str] | None = None,
    check: bool = False,
) -> list[RankExit]:
    """Runs ``command`` on all hosts at once, as many ranks as these have, and waits for
    all.

    Once a rank has failed the others have ``grace_s`` to notice it themselves;
    ``timeout_s`` limits the whole.
    ``output``: "first" passes rank 0's output through and keeps the others' last lines,
    "all" also shows every other line on stderr behind its rank, "none" only keeps.
    ``stdout`` is where rank 0's stdout goes (a real file; this process' stdout when
    left out). With ``check`` a failure raises RankFailed, whose text is that of
    `failure_text`. A command that is not there is an InvalidSetting.
    """
    _check(command, timeout_s)
    ended: queue.Queue[_Running] = queue.Queue()
    running: list[_Running] = []
    try:
        for rank in range(hosts.num_ranks):
            process = subprocess.Popen(
                hosts.command_on(rank // hosts.ranks_per_host, list(command)),
                env=rank_variables(hosts, rank),
                stdin=subprocess.DEVNULL,
                stdout=stdout if rank == 0 and output != "none" else subprocess.PIPE,
                stderr=subprocess.PIPE if rank == 0 else subprocess.STDOUT,
                start_new_session=True,
            )
            lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
            running.append(_Running(rank, process, lines, time.monotonic()))
            _follow(running[-1], output, ended)
        _supervise(running, ended, timeout_s, grace_s)
    finally:
        left = [one for one in running if not one.has_ended.is_set()]
        # an interrupt may have come before the thread that waits for its end
        for one in left:
            threading.Thread(target=_wait, args=(one, ended), daemon=True).start()
        _end(left)
    exits = [_exit(one) for one in running]
    failed = first_failure(exits)
    if check and failed is not None:
        raise RankFailed(failure_text(exits), ranks=(failed.rank,))
    return exits


def _check(command: Sequence[str], timeout_s: float | None) -> None:
    if not command or shutil.which(command[0]) is None:
        raise invalid(
            "command",
            command[0] if command else "",
            "a program in PATH or a path to one",
            "for a Python script write: python script.py",
        )
    if timeout_s is not None and timeout_s <= 0:
        raise invalid(
            "timeout_s", timeout_s, "a positive number of seconds", "or leave it out"
        )


def rank_variables(hosts: Hosts, rank: int) -> dict[str, str]:
    """This process' variables and those that torchrun would add for this rank.

    ``OMP_NUM_THREADS``, ``PYTHONUNBUFFERED`` and ``TORCH_CPP_LOG_LEVEL`` are set only
    where unset: ranks share this machine's cores, the last lines of a rank that dies
    must have been written, and torch warns at every connection that a host without DNS
    has no name.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // hosts.num_ranks)
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return {
        **defaults,
        **os.environ,
        **mark(),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % hosts.ranks_per_host),
        "WORLD_SIZE": str(hosts.num_ranks),
        "LOCAL_WORLD_SIZE": str(hosts.ranks_per_host),
        "MASTER_ADDR": hosts.addresses[0],
        "MASTER_PORT": str(hosts.master_port),
        "GLOO_SOCKET_IFNAME": hosts.interface,
        "NCCL_SOCKET_IFNAME": hosts.interface,
        **({} if hosts.relay_port is None else {RELAY: str(hosts.relay_port)}),
    }


def _follow(one: _Running, output: Output, ended: queue.Queue[_Running]) -> None:
    """Starts the threads that read a rank's output and wait for its end."""
    shown = output == "all" or (output == "first" and one.rank == 0)
    prefix = f"[rank {one.rank}] " if one.rank > 0 else ""
    for stream in (one.process.stdout, one.process.stderr):
        if stream is not None:
            read = (stream, one.last_lines, prefix if shown else None)
            one.readers.append(threading.Thread(target=_read, args=read, daemon=True))
            one.readers[-1].start()
    threading.Thread(target=_wait, args=(one, ended), daemon=True).start()


def _read(stream: IO[bytes], last_lines: deque[str], shown_behind: str | None) -> None:
    with stream:
        for raw in stream:
            line = raw.decode(errors="replace").rstrip("\n")
            last_lines.append(line)
            if shown_behind is not None:
                # One write per line: print's two would mix with other ranks' lines.
                sys.stderr.write(f"{shown_behind}{line}\n")
                sys.stderr.flush()


def _wait(one: _Running, ended: queue.Queue[_Running]) -> None:
    with one.waiting:
        if one.has_ended.is_set():
            return
        # Without reaping it yet: until then its group's number cannot pass to other
        #     processes.
        os.waitid(os.P_PID, one.process.pid, os.WEXITED | os.WNOWAIT)
        one.seconds = time.monotonic() - one.started_s
        _signal(one, signal.SIGKILL)
        one.process.wait()
        one.has_ended.set()
        ended.put(one)


def _signal(one: _Running, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(one.process.pid, number)


def _supervise(
    running: Sequence[_Running],
    ended: queue.Queue[_Running],
    timeout_s: float | None,
    grace_s: float,
) -> None:
    """Returns when all ranks have ended, by themselves or for a reason noted in
    them.
    """
    left = set(running)
    deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    reason: EndedBy = "time limit"
    while left:
        wait_s = (
            None if deadline_s == math.inf else max(0.0, deadline_s - time.monotonic())
        )
        try:
            one = ended.get(timeout=wait_s)
        except queue.Empty:
            _end(left, reason)
            deadline_s = math.inf
            continue
        left.discard(one)
        end_of_grace_s = time.monotonic() + grace_s
        failed_itself = one.process.returncode != 0 and one.ended_by == "itself"
        if failed_itself and reason == "time limit" and end_of_grace_s < deadline_s:
            deadline_s = end_of_grace_s
            reason = "another's failure"


def _end(
    running: Sequence[_Running] | set[_Running], reason: EndedBy = "another's failure"
) -> None:
    for one in running:
        if not one.has_ended.is_set():
            one.ended_by = reason
            _signal(one, signal.SIGTERM)
    deadline_s = time.monotonic() + _KILL_AFTER_S
    for one in running:
        if not one.has_ended.wait(max(0.0, deadline_s - time.monotonic())):
            _signal(one, signal.SIGKILL)
    for one in running:
        one.has_ended.wait()


def _exit(one: _Running) -> RankExit:
    for reader in one.readers:
        reader.join(_DRAIN_S)
    return RankExit(
        rank=one.rank,
        returncode=one.process.returncode,
        seconds=one.seconds,
        ended_by=one.ended_by,
        last_lines=tuple(one.last_lines),
    )


def first_failure(exits: Sequence[RankExit]) -> RankExit | None:
    """The rank that failed first by itself, else the first that was ended; None if all
    is well.
    """
    failed = [one for one in exits if one.returncode != 0]
    by_itself = [one for one in failed if one.ended_by == "itself"]
    return min(by_itself or failed, key=lambda one: one.seconds, default=None)


def exit_code(exits: Sequence[RankExit]) -> int:
    """One code for the whole run: `ExitCode.TIME_LIMIT` when the time was up, else that
    of the rank that failed first, 128 and the number for a signal, as a shell gives
    it.
    """
    failed = first_failure(exits)
    if failed is None:
        return ExitCode.DONE
    if failed.ended_by == "time limit":
        return ExitCode.TIME_LIMIT
    return failed.returncode if failed.returncode > 0 else 128 - failed.returncode


def failure_text(exits: Sequence[RankExit]) -> str:
    """A text that names the rank that failed first, how, and its last lines; "" if none
    failed.
    """
    failed = first_failure(exits)
    if failed is None:
        return ""
    if failed.ended_by == "time limit":
        late = ", ".join(str(one.rank) for one in exits if one.ended_by == "time limit")
        how = (
            f"the time limit ended ranks {late} after {format_seconds(failed.seconds)}"
        )
    else:
        how = f"rank {failed.rank} failed first, {_how(failed.returncode)} after " + (
            format_seconds(failed.seconds)
        )
    if not failed.last_lines:
        return f"{how}; rank {failed.rank} left no output"
    shown = "\n".join(f"  [rank {failed.rank}] {line}" for line in failed.last_lines)
    return f"{how}; last lines of rank {failed.rank}:\n{shown}"


def _how(returncode: int) -> str:
    if returncode > 0:
        return f"with exit code {returncode}"
    try:
        return f"ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"ended by signal {-returncode}"
