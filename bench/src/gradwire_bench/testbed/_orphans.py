"""Orphans: processes of testbeds whose owner is dead, which the next testbed ends.

A holder ends all that runs on its hosts when its owner does. If the holder is killed or
stopped too, ranks would run on for ever. So whatever runs for a testbed has its owner
in its environment, which children inherit; where that process is no more, nobody waits
for them.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

_OWNER = "GRADWIRE_TESTBED_OWNER"
_START_TIME = 19
"""The place of a process' start time behind its name in ``/proc/PID/stat``; see
proc(5).
"""


def mark() -> dict[str, str]:
    """The variable that names this process as the owner of what it starts.

    A number is used again once its process has ended, so the start time stands beside
    it, and the namespace that numbers are of, as other containers count from 1 too.
    """
    return {_OWNER: f"{_numbers()} {os.getpid()} {_start_time(os.getpid())}"}


def end_orphans() -> list[int]:
    """Kills every process of a testbed whose owner has ended; returns their numbers."""
    found = []
    for entry in Path("/proc").glob("[0-9]*") if Path("/proc/self").exists() else ():
        # it has ended, or is another user's
        with contextlib.suppress(OSError, ValueError):
            owner = _owner_of(entry)
            if (
                owner
                and owner[0] == _numbers()
                and _start_time(int(owner[1])) != owner[2]
            ):
                os.kill(int(entry.name), signal.SIGKILL)
                found.append(int(entry.name))
    return found


def _owner_of(process: Path) -> list[str]:
    """The namespace, number and start time in a process' mark; empty without one."""
    begin = f"{_OWNER}=".encode()
    for variable in (process / "environ").read_bytes().split(b"\0"):
        if variable.startswith(begin):
            return variable[len(begin) :].decode().split()
    return []


def _numbers() -> str:
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:  # no Linux
        return "0"


def _start_time(pid: int) -> str:
    """When a process began, in clock ticks; empty where there is none of this
    number.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    state, *rest = text.rpartition(")")[2].split()
    return "" if state == "Z" else rest[_START_TIME - 1]
