"""Whatever ends the owner of a testbed, nothing of it is left: no process, so no
namespace.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradwire_bench.testbed.hosts import Testbed, shaped_hosts

OWNER = Path(__file__).with_name("owner.py")
NOBODY = 65534
pytestmark = pytest.mark.netns


def start(
    *arguments: str, command: tuple[str, ...] = (sys.executable,)
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, str(OWNER), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )


def announced(owner: subprocess.Popen[str]) -> tuple[str, set[int]]:
    """Privilege, and the pids of the processes that keep the namespaces."""
    privilege, *pids = owner.stdout.readline().split()
    assert len(pids) == (4 if "far" in owner.args else 3)
    return privilege, {int(pid) for pid in pids}


def ranks_of(owner: subprocess.Popen[str]) -> set[int]:
    """The pids of both processes of each rank."""
    lines = owner.stdout.readline(), owner.stderr.readline().removeprefix("[rank 1] ")
    pids = {int(pid) for line in lines for pid in line.split()}
    assert len(pids) == 4
    return pids


def is_running(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] != "Z"  # there may be nobody to reap it


def still_running(pids: set[int]) -> set[int]:
    deadline_s = time.monotonic() + 60
    while left := {pid for pid in pids if is_running(pid)}:
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.01)
    return left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_ended_owner_leaves_nothing(number: signal.Signals) -> None:
    with start() as owner:
        _, keepers = announced(owner)
        ranks = ranks_of(owner)
        if number == signal.SIGINT:
            # which leaves one of a living owner alone
            with shaped_hosts(Testbed(hosts=1)):
                assert {pid for pid in ranks if is_running(pid)} == ranks
        owner.send_signal(number)
        owner.communicate(timeout=60)
    assert owner.returncode == -number
    assert still_running(keepers | ranks) == set()


def test_a_killed_owner_of_far_hosts_leaves_no_forwarder() -> None:
    with start("far") as owner:
        _, keepers = announced(owner)
        ranks = ranks_of(owner)
        owner.kill()
        owner.communicate(timeout=60)
    assert still_running(keepers | ranks) == set()


@pytest.mark.smoke
def test_an_exception_in_the_block_leaves_nothing() -> None:
    with start("raise") as owner:
        _, keepers = announced(owner)
        pids, said = owner.communicate(timeout=60)
    assert "ZeroDivisionError" in said
    assert still_running(keepers | {*map(int, pids.split())}) == set()


def test_nothing_is_left_as_soon_as_the_block_is() -> None:
    with shaped_hosts(Testbed(hosts=1)) as hosts:
        keepers = {hosts.namespaces.holder_pid, *hosts.namespaces.pids}
        subprocess.run(hosts.command_on(0, ["true"]), check=True)
    assert [pid for pid in keepers if is_running(pid)] == []


def test_a_killed_holder_is_survived() -> None:
    with shaped_hosts(Testbed(hosts=2)) as hosts:
        os.kill(hosts.namespaces.holder_pid, signal.SIGKILL)
    assert still_running(set(hosts.namespaces.pids)) == set()


def as_nobody() -> tuple[str, ...]:
    """The words that run a Python as an unprivileged user, or a skip that says what is
    missing.
    """
    if os.geteuid() != 0:
        return (sys.executable,)
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("setpriv is not installed, so the tests cannot give up root")
    user = (setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "env")
    said = []
    for python in (sys.executable, "/usr/bin/python3"):
        probe = [*user, python, str(OWNER.with_name("can_run.py"))]
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return (*user, python)
        said += done.stderr.strip().splitlines()[-1:]
    pytest.skip("; ".join(said))


def test_without_root_it_works_in_a_user_namespace() -> None:
    with start(command=as_nobody()) as owner:
        privilege, keepers = announced(owner)
        ranks = ranks_of(owner)
        owners = {Path(f"/proc/{pid}").stat().st_uid for pid in ranks}
        owner.kill()
        owner.communicate(timeout=60)
    assert privilege == "user-namespace"
    assert 0 not in owners
    assert still_running(keepers | ranks) == set()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_what_the_holder_cannot_end_the_next_testbed_does(
    number: signal.Signals,
) -> None:
    with start() as owner:
        _, keepers = announced(owner)
        ranks = ranks_of(owner)
        holder = min(keepers)  # which has forked the others
        os.kill(holder, number)
        owner.kill()
        owner.wait()
        assert all(map(is_running, ranks)), "nobody is there to end them"
        with shaped_hosts(Testbed(hosts=1)):
            assert still_running(keepers | ranks) == set()
