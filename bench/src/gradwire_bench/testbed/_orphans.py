"""Orphans: processes of testbeds whose owner is dead, which the next testbed ends.

A holder ends all that runs on its hosts when its owner does. If the holder is killed or
stopped too, ranks would run on for ever. So whatever runs for a testbed has its owner
in its environment, which children inherit; where that process is no more, nobody waits
for them.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_OWNER = "GRADWIRE_TESTBED_OWNER"
_STOP_S = 30.0
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


@contextlib.contextmanager
def open_helper(
    enter: Sequence[str], script: str, *words: str
) -> Iterator[subprocess.Popen[str]]:
    """A script of this folder for a ``with`` block; it ends when its input does.

    Args:
        enter: Words to put before the command.
        script: The name of its file.
        words: Its arguments.
    """
    path = str(Path(__file__).with_name(script))
    process = subprocess.Popen(
        [*enter, sys.executable, "-I", "-S", path, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **mark()},
        # Ctrl-C is for the owner, who closes it in good order
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        # what it was not told any more, if it has ended
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(timeout=_STOP_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


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
