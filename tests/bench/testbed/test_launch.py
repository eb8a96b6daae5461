"""Ranks get their variables, failures are named, and time limits hold; on loopback, so
anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from gradwire.errors import RankFailed
from gradwire_bench.testbed.hosts import Hosts, Testbed, loopback_hosts
from gradwire_bench.testbed.launch import exit_code, failure_text, first_failure, launch


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with loopback_hosts(Testbed(hosts=3)) as opened:
        yield opened


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def test_ranks_get_torchruns_variables(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN", "7")
    show = (
        "echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT "
        "$GLOO_SOCKET_IFNAME $OWN"
    )
    exits = launch(hosts, shell(show), output="none", check=True)
    expected = f"0 3 127.0.0.1 {hosts.master_port} {hosts.interface} 7"
    assert [one.last_lines for one in exits] == [
        (f"{rank} {expected}",) for rank in range(3)
    ]


@pytest.mark.smoke
def test_a_crashing_rank_is_named_and_the_others_are_ended(hosts: Hosts) -> None:
    script = "echo from $RANK; [ $RANK != 1 ] || exit 9; exec sleep 600"
    exits = launch(hosts, shell(script), output="none", grace_s=0.1)
    failed = first_failure(exits)
    assert (failed.rank, failed.returncode, failed.last_lines) == (1, 9, ("from 1",))
    assert [one.ended_by for one in exits] == [
        "another's failure",
        "itself",
        "another's failure",
    ]
    assert exit_code(exits) == 9
    assert failure_text(exits).startswith(
        "rank 1 failed first, with exit code 9 after "
    )
    assert "from 1" in failure_text(exits)


def test_check_raises_with_the_signal_that_killed_it(hosts: Hosts) -> None:
    script = "[ $RANK != 2 ] || kill -SEGV $$; exec sleep 600"
    with pytest.raises(
        RankFailed, match="rank 2 failed first, ended by SIGSEGV"
    ) as raised:
        launch(hosts, shell(script), output="none", grace_s=0.1, check=True)
    assert raised.value.ranks == (2,)


def test_the_time_limit_ends_ranks_that_ignore_it(hosts: Hosts) -> None:
    script = "trap '' TERM; [ $RANK != 0 ] || exit 0; while :; do sleep 600; done"
    exits = launch(hosts, shell(script), output="none", timeout_s=0.3)
    assert [one.ended_by for one in exits] == ["itself", "time limit", "time limit"]
    assert exit_code(exits) == 124
    assert failure_text(exits).startswith("the time limit ended ranks 1, 2 ")


def test_what_a_rank_leaves_behind_ends_with_it(hosts: Hosts) -> None:
    exits = launch(hosts, shell("sleep 600 & echo $!"), output="none", check=True)
    assert all(one.last_lines for one in exits)


def test_an_interrupt_before_a_rank_is_watched_ends_it(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came before the thread that waits for the rank's end, for which all then
    waited for ever.

    The rank that had been started is gone: nobody else would end it.
    """
    pids = []

    def interrupted(one: Any, *rest: Any) -> None:
        pids.append(one.process.pid)
        for stream in (one.process.stdout, one.process.stderr):
            if stream is not None:
                stream.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(
        import_module("gradwire_bench.testbed.launch"), "_follow", interrupted
    )
    with pytest.raises(KeyboardInterrupt):
        launch(hosts, ["sleep", "600"], output="none")
    assert len(pids) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_rank_0_passes_through_and_others_are_prefixed(
    hosts: Hosts, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "echo out $RANK; echo err $RANK >&2"
    launch(hosts, shell(script), output="all", check=True)
    shown = capfd.readouterr()
    assert shown.out == "out 0\n"
    assert sorted(shown.err.splitlines()) == [
        "[rank 1] err 1",
        "[rank 1] out 1",
        "[rank 2] err 2",
        "[rank 2] out 2",
        "err 0",
    ]
    launch(hosts, shell(script), output="first", check=True)
    assert capfd.readouterr() == ("out 0\n", "err 0\n")
    launch(hosts, shell(script), output="none", check=True)
    assert capfd.readouterr() == ("", "")
