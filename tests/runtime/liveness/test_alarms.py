"""Alarms: whatever an error says, and whoever ends first, all ranks learn where it
began.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.contract.verbs import Among, Recv, Send
from gradwire.errors import RankFailed
from gradwire.planning import catalogue
from gradwire.runtime.handle import Handle
from gradwire.runtime.liveness import membership, pulse
from gradwire.runtime.liveness.alarm import MOST_CHARACTERS, Alarm, said
from gradwire.runtime.liveness.membership import Membership
from gradwire.runtime.transport import wire
from gradwire.runtime.transport.task_graph import Task
from gradwire.runtime.transport.wire import (
    FOLDER,
    NUM_VERBS,
    LastVerbs,
    carry_out,
    own_store,
)
from tests.runtime.given import SMALL
from tests.runtime.ranks import Ranks
from tests.runtime.training import TOPK, Net, adamw, digest, momentum, train

anything = st.text(st.characters(exclude_categories=()))
"""Lone surrogates too, which no encoding takes."""
Met = tuple[str, tuple[int, ...] | None, str]
"""The error that a rank raised: its type, the ranks it names, its text."""


@given(ranks=st.lists(st.integers()), step=st.integers(), text=anything)
@example([], -1, "\udc80")
@example([0], 3, "a\0b\nc;d,\u2665")
@example([0], 3, "long" * MOST_CHARACTERS)
def test_an_alarm_says_on_all_ranks_what_was_put_in(
    ranks: list[int], step: int, text: str
) -> None:
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
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    st.lists,
    max_leaves=8,
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

    handle._synchroniser.messages[1]._gather = gather  # type: ignore[union-attr,method-assign]


def raise_strangely(rank: int, world: int) -> Met:
    """A tensor's worth of text, with surrogates and zeros."""
    handle, go_on = attached(rank)
    if rank == 1:
        fail_in_lane(handle, ValueError("file \udc80\0\ud800 is gone, " * 100_000))
    return met(go_on)


def end_at_once(rank: int, world: int, culprit: int) -> Met:
    """Rank 0 hosts the store, and its process ends as soon as it hears; rank 1 takes
    its time.
    """
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
    met_by = dict(zip((1, 2, 3), doomed.survivors({0}), strict=True))
    for rank in {1, 2, 3} - {culprit}:
        kind, ranks, text = met_by[rank]
        assert (kind, ranks) == ("RankFailed", (culprit,))
        assert f"rank {culprit} of 4 raised ValueError: its own mistake" in text


def spoil_the_alarm(rank: int, world: int) -> Met:
    handle, _ = attached(rank)
    if rank == 1:
        handle._engine._pulse._store.set(pulse.ALARM, b"\xff;\xfe")  # type: ignore[union-attr]
    return met(lambda: wait_for_ever(handle))


class Stuck:
    """A channel that cannot be taken down."""

    def abort(self) -> None:
        raise OSError


def leave(rank: int, world: int) -> Met:
    handle, _ = attached(rank)
    if rank == 2:  # who waits is told all the same
        handle._engine.routes.groups[Among.RANKS].channels.insert(0, Stuck())
    if rank == 1:
        handle._engine.give_up("somebody left")
    return met(lambda: wait_for_ever(handle))


def break_the_pulse(rank: int, world: int) -> Met:
    handle, _ = attached(rank)
    if rank == 1:
        handle._engine._pulse._beat = "no number"  # type: ignore[union-attr,assignment]
    return met(lambda: wait_for_ever(handle))


REACHES_ALL: list[tuple[Any, tuple[str, Any], tuple[str, Any], str]] = [
    (
        raise_strangely,
        ("ValueError", None),
        ("RankFailed", (1,)),
        "rank 1 of 3 raised ValueError",
    ),
    (spoil_the_alarm, ("RankFailed", ()), ("RankFailed", ()), "cannot be read"),
    (leave, ("LoopMistake", (1,)), ("LoopMistake", (1,)), "somebody left"),
    (
        break_the_pulse,
        ("TypeError", None),
        ("RankFailed", (1,)),
        "rank 1 of 3 ended by TypeError",
    ),
]
"""What rank 1 does, the error that it raises itself, the error of the others, and its
text.
"""


@pytest.mark.slow
@pytest.mark.multi
def test_whatever_ends_inside_one_rank_reaches_all(
    ranks_of: Callable[[int], Ranks], subtests: pytest.Subtests
) -> None:
    """The cases go all at once, as they wait for more than they compute."""
    groups = [ranks_of(3) for _ in REACHES_ALL]
    for ranks, (life, *_) in zip(groups, REACHES_ALL, strict=True):
        ranks.send(life)
    for ranks, (life, own, of_others, part) in zip(groups, REACHES_ALL, strict=True):
        with subtests.test(life.__name__):
            for rank, (kind, named, text) in enumerate(ranks.survivors(())):
                assert (kind, named) == (own if rank == 1 else of_others)
                assert rank == 1 or part in text
                assert rank == 1 or len(text) < 2 * MOST_CHARACTERS


def test_the_first_who_gives_up_waiting_tells_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They have no reason to wait on, and its process may hold the store, and end."""
    store, found = (
        dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), False),
        {},
    )
    monkeypatch.setattr(wire, "_given", [store])

    def share(rank: int, timeout: timedelta) -> None:
        try:
            Membership(f"{wire.REJOINED} three", rank, 3).agree("", len, timeout)
        except RankFailed as error:
            found[rank] = error.ranks

    limits = timedelta(seconds=0.1), timedelta(hours=1)
    threads = [
        threading.Thread(target=share, args=one, daemon=True)
        for one in enumerate(limits)
    ]
    threads[1].start()
    own_store(f"{wire.REJOINED} three").wait([f"{membership.MEETING}/note/1"])
    threads[0].start()
    for thread in threads:
        thread.join(60)
    assert found == {0: (2,), 1: (2,)}


def test_ranks_that_wait_for_others_of_each_other_take_one_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 holds rank 2 for lost, which the others have heard."""
    store, found = (
        dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), False),
        {},
    )
    monkeypatch.setattr(wire, "_given", [store])

    def share(rank: int, due: set[int]) -> None:
        who = Membership(f"{wire.REJOINED} differing", rank, 3)
        found[rank] = who.agree(
            rank, dict, timedelta(seconds=60), due=due, is_partial=True
        )

    Membership(f"{wire.REJOINED} differing", 1, 3).post(1)
    given = (0, {0, 1, 2}), (2, {0, 1, 2}), (1, {0, 1})
    threads = [
        threading.Thread(target=share, args=one, daemon=True) for one in given[:2]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    share(*given[2])
    assert found == {rank: {0: 0, 1: 1, 2: 2} for rank in range(3)}


# ---- A run that fails leaves a record of each rank's last verbs, and its error says wh


STEP = 3


def test_a_record_holds_the_last_verbs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "new"))
    verbs = LastVerbs()
    for number in range(NUM_VERBS + 5):
        verbs.launch(number, 0, "AllReduce", 8).started_s = 1.0
    path = verbs.write(1, 4, ValueError(), "no such layer")
    assert path is not None
    reported = json.loads(path.read_text())
    assert (reported["rank"], reported["world"], reported["error"]) == (
        1,
        4,
        "no such layer",
    )
    assert [verb["sequence"] for verb in reported["verbs"]] == [
        *range(5, NUM_VERBS + 5)
    ]
    assert {(verb["started_s"], verb["done_s"]) for verb in reported["verbs"]} == {
        (1.0, None)
    }


class Noting:
    """A channel that notes the peer of each transfer, in the order in which transfers
    start.
    """

    def __init__(self) -> None:
        self.started: list[tuple[str, int]] = []

    def send(self, bufs: list[torch.Tensor], peer: int, tag: int) -> Noting:
        self.started.append(("send", peer))
        return self

    def recv(self, bufs: list[torch.Tensor], peer: int, tag: int) -> Noting:
        self.started.append(("recv", peer))
        return self

    def wait(self) -> None:
        pass


def test_receives_start_before_sends() -> None:
    """A note that a receive has started must not queue behind this rank's own
    payload.
    """
    channel, buf = Noting(), torch.zeros(1)
    carry_out([Send(1, buf), Recv(2, buf), Send(3, buf), Recv(4, buf)], [channel] * 4)
    assert channel.started == [("recv", 2), ("recv", 4), ("send", 1), ("send", 3)]


def test_no_file_is_written_through_a_link_that_was_laid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of records, and of other files' temporary ones, could be guessed by another
    user.
    """
    monkeypatch.setenv(FOLDER, str(tmp_path))
    victim, verbs = tmp_path / "victim", LastVerbs()
    victim.write_text("kept")
    verbs.launch(0, 0, "Send", 8)
    record = tmp_path / f"gradwire-record-{os.getpid()}-{id(verbs):x}-rank-0.json"
    plan = tmp_path / "plan.json"
    for name in (record, plan.with_name(f"{plan.name}.{os.getpid()}.new")):
        name.symlink_to(victim)
    assert verbs.write(0, 2, ValueError(), "it failed") == record
    catalogue.load("vgg16").save(plan)
    assert victim.read_text() == "kept"
    assert json.loads(record.read_text())["error"] == "it failed"
    assert plan.stat().st_mode == victim.stat().st_mode  # what the umask leaves


def test_where_nothing_can_be_written_it_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER, str(tmp_path / "file"))
    verbs = LastVerbs()
    assert verbs.write(0, 2, ValueError(), "it failed") is None
    assert caplog.messages == []  # there was no verb
    verbs.launch(0, 0, "Send", 8)
    assert verbs.write(0, 2, ValueError(), "it failed") is None
    assert "cannot be written" in caplog.text


def fail(rank: int, world: int) -> list[dict[str, Any]]:
    model = Net()
    handle = gw.attach(model, "none", options=SMALL)
    optimizer = momentum(model.parameters())
    train(model, optimizer, rank, range(STEP))
    engine = handle._synchroniser.engine
    if rank == 1:
        error = engine.give_up("somebody left")
    else:
        with pytest.raises(RankFailed) as raised:
            train(model, optimizer, rank, range(STEP, STEP + 1))
        error = raised.value
    (note,) = error.__notes__
    found: list[dict[str, Any]] = json.loads(Path(note.rpartition(" ")[2]).read_text())[
        "verbs"
    ]
    return found


@pytest.mark.multi
@pytest.mark.slow
def test_records_show_which_verb_a_rank_did_not_come_to(doomed: Ranks) -> None:
    found = doomed.run(fail)
    assert {verb["step"] for verb in found[1]} == set(range(STEP))
    assert all(
        verb["launched_s"] <= verb["started_s"] <= verb["done_s"] for verb in found[1]
    )
    for rank in (0, 2, 3):
        late = [verb for verb in found[rank] if verb["step"] == STEP]
        assert late[0]["started_s"] is not None
        assert {verb["done_s"] for verb in late} == {None}
        assert [verb["name"] for verb in found[rank]][: len(found[1])] == [
            verb["name"] for verb in found[1]
        ]


# ---- A job that torchrun starts again finds the store as the dead ranks have left it -


def until_reported(handle: gw.Handle) -> None:
    while True:
        handle._engine.check()


def started_again(rank: int, world: int) -> str:
    """The second start of these ranks, as its first attach has the names of the first
    start's.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        patch.setattr(membership, "_JOINED", type(membership._JOINED)())
        patch.setattr(membership, "_ROLLS", {})
        handle = gw.attach(Net(), TOPK, options=SMALL)
        if rank == 1:
            handle._engine.give_up("a test gave up")
        with pytest.raises(RankFailed, match="a test gave up"):
            until_reported(handle)
        handle.detach()
        membership._JOINED.clear()
        membership._ROLLS.clear()
        # Agents of several hosts do not count alike.
        patch.setenv("TORCHELASTIC_RESTART_COUNT", str(rank))
        net = Net(rank)
        handle = gw.attach(net, TOPK, options=SMALL)
        train(net, adamw(net.parameters()), rank, range(3))
        handle.detach()
        return digest(net)


@pytest.mark.multi
def test_notes_and_alarms_of_ranks_that_are_gone_are_not_read(two: Ranks) -> None:
    one, other = two.run(started_again)
    assert one == other
