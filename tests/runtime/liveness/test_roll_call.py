"""The roll call: who can be reached without the store, and what an error makes of
it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from gradwire.errors import ExitCode
from gradwire.runtime.liveness import roll_call
from gradwire.runtime.liveness.blame import alarm_of
from gradwire.runtime.liveness.roll_call import Reach, RollCall, _Way, _way_to
from tests.each import each

WORLD = 4
HANG_S = 60.0
"""Seconds after which a wait of these tests counts as one that never ends."""
HERE, CUT, ENDED, MUTE = Reach.ANSWERS, Reach.CUT, Reach.ENDED, Reach.MUTE


@pytest.fixture
def store() -> PrefixStore:
    patience = timedelta(seconds=HANG_S)
    return PrefixStore("job", TCPStore("127.0.0.1", 0, None, True, patience))


@pytest.fixture
def ranks(
    store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[RollCall]]:
    """Four ranks that have met; rank 1 knows of an alarm, and all note what they hear.

    A rank has as long to answer as a busy machine may need.
    """
    monkeypatch.setattr(roll_call, "ASK_S", HANG_S)
    monkeypatch.setattr(roll_call, "_SERVE_S", HANG_S)
    found: list[RollCall] = []
    with ExitStack() as stack:
        for rank in range(WORLD):
            heard: list[bytes] = []
            found.append(
                RollCall(rank, WORLD, heard.append, lambda rank=rank: "x" * (rank == 1))
            )
            found[-1].notes = heard  # type: ignore[attr-defined]
            stack.callback(found[-1].close)
        while not all(one.is_complete for one in found):
            for one in found:
                one.meet(store)
        yield found


def test_all_that_live_answer_and_tell_what_they_know(ranks: list[RollCall]) -> None:
    assert ranks[0].ask() == ({1: HERE, 2: HERE, 3: HERE}, b"x")
    assert ranks[1].ask() == ({0: HERE, 2: HERE, 3: HERE}, b"")


def test_a_process_that_has_ended_is_told_from_one_that_is_stopped(
    ranks: list[RollCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks[2].close()
    host, _, token = ranks[0]._probes.pop(3)
    assert ranks[0].ask()[0] == {1: HERE, 2: ENDED, 3: Reach.UNKNOWN}
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as stopped:  # takes connections and says nothing
        ranks[0]._probes = {3: (host, stopped.getsockname()[1], token)}
        monkeypatch.setattr(roll_call, "ASK_S", 2.0)
        assert ranks[0].ask()[0] == {1: Reach.UNKNOWN, 2: Reach.UNKNOWN, 3: MUTE}


def test_an_alarm_is_heard_at_every_probe_port(ranks: list[RollCall]) -> None:
    ranks[2].announce("fire")
    deadline_s = time.monotonic() + HANG_S
    while [one.notes for one in ranks] != [[b"fire"], [b"fire"], [], [b"fire"]]:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_who_does_not_know_the_token_is_not_heard(ranks: list[RollCall]) -> None:
    _, port, token = ranks[0]._probes[1]
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(f"{token[::-1]}\nfire\n".encode())
        assert stranger.recv(100) == b""
    for said in (b"\nfire\n", f"{token[:4]}\nfire\n".encode()):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(said)
            with suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
    assert ranks[1].notes == []  # type: ignore[attr-defined]


def test_a_silent_visitor_keeps_nobody_from_the_probe_port(
    ranks: list[RollCall],
) -> None:
    host, port, _ = ranks[0]._probes[1]
    with ExitStack() as stack:
        for _ in range(9):
            stack.enter_context(socket.create_connection((host, port)))
        assert ranks[0].ask()[0][1] is HERE


def test_visitors_who_say_nothing_are_sent_away(
    ranks: list[RollCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roll_call, "_SERVE_S", 0.1)
    host, port, _ = ranks[0]._probes[1]
    with socket.create_connection((host, port), HANG_S) as visitor:
        assert visitor.recv(1) == b""


class Clock:
    """Stands still until it is set; put in the place of the module ``time``."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.looked = threading.Semaphore(0)

    def monotonic(self) -> float:
        self.looked.release()
        return self.now_s


def test_visitors_who_say_a_byte_at_a_time_are_sent_away(
    ranks: list[RollCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their time does not begin anew with each byte."""
    host, port, token = ranks[0]._probes[1]
    clock = Clock()
    monkeypatch.setattr(roll_call, "time", clock)
    with socket.create_connection((host, port), HANG_S / 2) as visitor:
        for _ in range(2):  # when the visit begins, and before the first byte is read
            assert clock.looked.acquire(timeout=HANG_S)
        clock.now_s = HANG_S + 1
        visitor.sendall(token[:1].encode())
        assert visitor.recv(1) == b""


def test_a_probe_port_that_is_closed_as_it_opens_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank may leave at any time, and the error would end the run of all others."""
    one = RollCall(0, WORLD, lambda line: None, str)
    monkeypatch.setattr(threading.Thread, "start", lambda self: one.close())
    assert one._open(_Way(own="127.0.0.1"), set())[1] > 0


def test_a_probe_port_is_at_one_address(ranks: list[RollCall]) -> None:
    """A rank that reaches the store within its host opens a probe port for its host
    alone.
    """
    own = [
        one._listening.getsockname()[0] for one in ranks if one._listening is not None
    ]
    assert own == ["127.0.0.1"] * WORLD


@each(
    "shown, at",
    [
        ({"127.0.0.2"}, "127.0.0.2"),
        ({"127.0.0.2", "127.0.0.3"}, "0.0.0.0"),
        (set(), "127.0.0.1"),
    ],
)
def test_a_rank_beside_the_store_is_where_others_see_the_store(
    shown: set[str], at: str
) -> None:
    one = RollCall(0, 2, lambda line: None, lambda: "")
    host, port, _ = one._open(_way_to("127.0.0.1"), shown)
    assert one._listening is not None
    assert one._listening.getsockname() == (at, port)
    assert host == ("" if len(shown) > 1 else at)
    one.close()


@each(
    "rank, silent, reach, store_lost, named, text, code",
    [
        (0, (2,), {1: HERE, 2: ENDED, 3: HERE}, False, (2,), "process has ended", 75),
        (0, (2,), {1: HERE, 2: MUTE, 3: HERE}, False, (2,), "is stopped", 75),
        (0, (2,), {}, False, (2,), "rank 2 of 4 stopped answering", 75),
        (
            0,
            (2, 3),
            {1: HERE, 2: ENDED, 3: CUT},
            False,
            (2, 3),
            "reaches rank 3 of 4",
            68,
        ),
        (
            *(0, (2, 3), {1: HERE, 2: CUT, 3: CUT}, False, (2, 3)),
            *(
                "parted: ranks 0, 1 of 4 reach each other, and no connection "
                "reaches ranks 2, 3",
                68,
            ),
        ),
        (
            *(2, (0,), {0: CUT, 1: CUT, 3: HERE}, True, (0, 1)),
            *(
                "parted: ranks 2, 3 of 4 reach each other, and no connection "
                "reaches ranks 0, 1",
                68,
            ),
        ),
        (3, (0,), {0: CUT, 1: CUT, 2: CUT}, True, (3,), "rank 3 of 4 is cut off", 68),
        (1, (0,), {0: HERE, 2: HERE, 3: HERE}, True, (), "store stopped answering", 69),
        (0, (0,), {1: HERE, 2: HERE, 3: HERE}, True, (), "though rank 0 of 4 does", 69),
        (
            1,
            (0,),
            {0: ENDED, 2: HERE, 3: HERE},
            True,
            (0,),
            "the job's store with it",
            75,
        ),
        (1, (), {0: HERE, 2: HERE, 3: HERE}, False, None, "", 0),
        (1, (), {0: HERE, 2: CUT, 3: HERE}, False, None, "", 0),
    ],
)
def test_an_alarm_names_the_ranks_that_did_not_answer(
    rank: int,
    silent: tuple[int, ...],
    reach: dict[int, Reach],
    store_lost: bool,
    named: tuple[int, ...] | None,
    text: str,
    code: int,
) -> None:
    alarm = alarm_of(rank, WORLD, 7, silent, reach, store_lost=store_lost)
    if named is None:
        assert alarm is None
    else:
        assert alarm is not None
        assert (alarm.ranks, alarm.step, alarm.code) == (named, 7, ExitCode(code))
        assert text in alarm.text
