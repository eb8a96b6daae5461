"""Alarms: whatever an error says, and whoever ends first, all ranks learn where it began."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.contract.verbs import Among
from gradwire.errors import ExitCode, RankFailed
from gradwire.runtime.failure import pulse
from gradwire.runtime.failure.membership import Membership
from gradwire.runtime.failure.pulse import MOST_CHARACTERS, Alarm, said
from gradwire.runtime.handle import Handle
from gradwire.runtime.step import wire
from gradwire.runtime.step.task_graph import Task
from tests.runtime.given import SMALL
from tests.runtime.ranks import Ranks
from tests.runtime.training import Net, momentum, train

anything = st.text(st.characters(exclude_categories=()))
"""Lone surrogates too, which no encoding takes."""
Met = tuple[str, tuple[int, ...] | None, str]
"""The error that a rank raised: its type, the ranks it names, its text."""


@given(ranks=st.lists(st.integers()), step=st.integers(), text=anything)
@example([], -1, "\udc80")
@example([0], 3, "a\0b\nc;d,\u2665")
@example([0], 3, "long" * MOST_CHARACTERS)
def test_an_alarm_says_on_all_ranks_what_was_put_in(ranks: list[int], step: int, text: str) -> None:
    line = Alarm(tuple(ranks), step, text).encoded()
    assert line.isascii()
    assert "\0" not in line
    found = Alarm.decoded(line.encode(), -7)
    assert found[:2] == (tuple(ranks), step)
    plain = text.encode("utf-8", "backslashreplace").decode()
    if len(plain) > MOST_CHARACTERS:
        plain = plain[: MOST_CHARACTERS - 3] + "..."
    assert found.text == plain


as_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=8
).map(lambda value: repr(value).replace("'", '"').encode("utf-8", "replace"))


@given(st.binary() | as_json)
@example(b"")
@example(b"\xff\xfe\x00")
@example(b"[" * 100_000)
@example(b"1;2;three")
@example(b'[[true], 2, "text"]')
@example(b'[[1], 2.5, "text"]')
@example(b'[[1], 2, "\\ud800"]')
@example(b"[[" + b"1" * 5000 + b'], 2, "text"]')
def test_bytes_that_are_no_alarm_are_an_alarm_that_names_nobody(line: bytes) -> None:
    found = Alarm.decoded(line, 7)
    found.text.encode()
    assert all(type(number) is int for number in (found.step, *found.ranks))
    if "cannot be read" in found.text:
        assert found[:2] == ((), 7)
        assert len(found.text) <= MOST_CHARACTERS + 100
    else:
        assert Alarm.decoded(found.encoded().encode(), 8) == found


class Mute(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def test_every_error_can_be_told() -> None:
    assert said(Mute()) == "Mute: its text cannot be had"
    assert said(KeyError()) == "KeyError: "


def attached(rank: int) -> tuple[Handle, Any]:
    """A handle after two steps, and what trains it further."""
    model = Net()
    handle = gw.attach(model, "topk", options=SMALL)
    optimizer = momentum(model.parameters())
    train(model, optimizer, rank, range(2))
    return handle, lambda: train(model, optimizer, rank, range(2, 5))


def met(act: Any) -> Met:
    """What ``act`` raised."""
    try:
        act()
    except Exception as error:
        return type(error).__name__, getattr(error, "ranks", None), said(error)
    return "nothing", None, ""


def wait_for_ever(handle: Handle) -> None:
    """Returns by the engine's failure only."""
    handle._engine.wait([Task("never", lambda: None)])


def fail_in_lane(handle: Handle, error: Exception) -> None:
    """Makes a computation of the next step raise."""

    def gather(grads: object, copying: object) -> None:
        raise error

    handle.synchroniser.messages[1]._gather = gather  # type: ignore[union-attr,method-assign]


def raise_strangely(rank: int, world: int) -> Met:
    """A tensor's worth of text, with surrogates and zeros."""
    handle, go_on = attached(rank)
    if rank == 1:
        fail_in_lane(handle, ValueError("file \udc80\0\ud800 is gone, " * 100_000))
    return met(go_on)


def end_at_once(rank: int, world: int, culprit: int) -> Met:
    """Rank 0 hosts the store, and its process ends as soon as it hears; rank 1 takes its time."""
    handle, go_on = attached(rank)
    if rank == culprit:
        fail_in_lane(handle, ValueError("its own mistake"))
    if rank == 1:
        pulse.LINGER_S = 3.0
    found = met(go_on)
    if rank == 0:
        os._exit(1)
    return found


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(240)
@pytest.mark.parametrize("culprit", [0, 2])
def test_the_culprit_is_named_though_the_store_goes_with_rank_0(
    doomed: Ranks, culprit: int
) -> None:
    doomed.send(end_at_once, culprit)
    outcomes = doomed.collect(60.0, without=[0])
    for rank in {1, 2, 3} - {culprit}:
        kind, ranks, text = outcomes[rank].value
        assert (kind, ranks) == ("RankFailed", (culprit,))
        assert f"rank {culprit} of 4 raised ValueError: its own mistake" in text


def spoil_the_alarm(rank: int, world: int) -> Met:
    handle, _ = attached(rank)
    if rank == 1:
        handle._engine._pulse._store.set("alarm", b"\xff;\xfe")  # type: ignore[union-attr]
    return met(lambda: wait_for_ever(handle))


class Stuck:
    """A channel that cannot be taken down."""

    def abort(self) -> None:
        raise OSError


def leave(rank: int, world: int) -> Met:
    handle, _ = attached(rank)
    if rank == 2:  # who waits is told all the same
        handle._engine.routes.circles[Among.RANKS].channels.insert(0, Stuck())
    if rank == 1:
        handle._engine.give_up("somebody left")
    return met(lambda: wait_for_ever(handle))


def break_the_pulse(rank: int, world: int) -> Met:
    handle, _ = attached(rank)
    if rank == 1:
        handle._engine._pulse._beat = "no number"  # type: ignore[union-attr,assignment]
    return met(lambda: wait_for_ever(handle))


REACHES_ALL: list[tuple[Any, tuple[str, Any], tuple[str, Any], str]] = [
    (raise_strangely, ("ValueError", None), ("RankFailed", (1,)), "rank 1 of 3 raised ValueError"),
    (spoil_the_alarm, ("RankFailed", ()), ("RankFailed", ()), "cannot be read"),
    (leave, ("LoopMistake", (1,)), ("LoopMistake", (1,)), "somebody left"),
    (break_the_pulse, ("TypeError", None), ("RankFailed", (1,)), "rank 1 of 3 ended by TypeError"),
]
"""What rank 1 does, the error that it raises itself, the error of the others, and its text."""


@pytest.fixture
def runs() -> Iterator[list[Ranks]]:
    """The cases, all at once, as they wait for more than they compute."""
    groups = [Ranks(3) for _ in REACHES_ALL]
    try:
        for ranks, (life, *_) in zip(groups, REACHES_ALL, strict=True):
            ranks.send(life)
        yield groups
    finally:
        for ranks in groups:
            ranks.close()


@pytest.mark.slow
@pytest.mark.multi
def test_whatever_ends_inside_one_rank_reaches_all(
    runs: list[Ranks], subtests: pytest.Subtests
) -> None:
    for ranks, (life, own, of_others, part) in zip(runs, REACHES_ALL, strict=True):
        with subtests.test(life.__name__):
            for rank, one in enumerate(ranks.collect(100.0)):
                assert one.error is None, one.error
                kind, named, text = one.value
                assert (kind, named) == (own if rank == 1 else of_others)
                assert rank == 1 or part in text
                assert rank == 1 or len(text) < 2 * MOST_CHARACTERS


def test_the_first_who_gives_up_waiting_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no reason to wait on, and its process may hold the store, and end."""
    store, found = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), False), {}
    monkeypatch.setattr(wire, "_given", [store])

    def share(rank: int, timeout: timedelta) -> None:
        try:
            Membership(f"{wire.REJOINED} three", rank, 3).agree("", len, timeout)
        except RankFailed as error:
            found[rank] = error.ranks

    limits = timedelta(seconds=0.1), timedelta(hours=1)
    threads = [threading.Thread(target=share, args=one, daemon=True) for one in enumerate(limits)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {0: (2,), 1: (2,)}


def test_ranks_that_wait_for_others_of_each_other_take_one_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 holds rank 2 for lost, which the others have heard."""
    store, found = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), False), {}
    monkeypatch.setattr(wire, "_given", [store])

    def share(rank: int, due: set[int]) -> None:
        who = Membership(f"{wire.REJOINED} differing", rank, 3)
        found[rank] = who.agree(rank, dict, timedelta(seconds=20), due=due, is_partial=True)

    Membership(f"{wire.REJOINED} differing", 1, 3).post(1)
    given = (0, {0, 1, 2}), (2, {0, 1, 2}), (1, {0, 1})
    threads = [threading.Thread(target=share, args=one, daemon=True) for one in given[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    share(*given[2])
    assert found == {rank: {0: 0, 1: 1, 2: 2} for rank in range(3)}


SCRIPT = """
import sys
import torch.distributed as dist
import gradwire as gw
from tests.runtime.training import Net, momentum, train

rank, address = int(sys.argv[1]), f"tcp://127.0.0.1:{sys.argv[2]}"
dist.init_process_group("gloo", rank=rank, world_size=2, init_method=address)
model = Net()
handle = gw.attach(model, "onebit")
train(model, momentum(model.parameters()), rank, range(1))
if rank == 1:
    raise ZeroDivisionError("the user's own mistake")
train(model, momentum(model.parameters()), rank, range(1, 3))
"""


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(240)
def test_a_job_ends_when_one_rank_raises() -> None:
    """Whole interpreters: they close their exchanges as they end, which forked ranks do not."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    given: Any = {"stderr": subprocess.PIPE, "text": True, "cwd": Path(__file__).parents[2]}
    command = [sys.executable, "-c", SCRIPT]
    jobs = [subprocess.Popen([*command, str(rank), port], **given) for rank in range(2)]
    try:
        texts = [job.communicate(timeout=100)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert [job.returncode for job in jobs] == [ExitCode.RANK_LOST, 1], texts
    assert "ZeroDivisionError: the user's own mistake" in texts[1]
    assert "RankFailed: step 1 cannot be finished: rank 1 of 2 stopped answering" in texts[0]
