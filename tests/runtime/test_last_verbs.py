"""A run that fails leaves a record of each rank's last verbs, and its error says where."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.contract.verbs import Recv, Send
from gradwire.errors import RankFailed
from gradwire.planning import catalogue
from gradwire.runtime.step.wire import FOLDER, NUM_VERBS, LastVerbs, carry_out
from tests.runtime.given import SMALL
from tests.runtime.ranks import Ranks
from tests.runtime.training import Net, momentum, train

STEP = 3


def test_a_record_holds_the_last_verbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "new"))
    verbs = LastVerbs()
    for number in range(NUM_VERBS + 5):
        verbs.launch(number, 0, "AllReduce", 8).started_s = 1.0
    path = verbs.write(1, 4, ValueError(), "no such layer")
    assert path is not None
    told = json.loads(path.read_text())
    assert (told["rank"], told["world"], told["error"]) == (1, 4, "no such layer")
    assert [verb["sequence"] for verb in told["verbs"]] == [*range(5, NUM_VERBS + 5)]
    assert {(verb["started_s"], verb["done_s"]) for verb in told["verbs"]} == {(1.0, None)}


class Noting:
    """A channel that notes the peer of each transfer, in the order in which transfers start."""

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
    """A note that a receive has started must not queue behind this rank's own payload."""
    channel, buf = Noting(), torch.zeros(1)
    carry_out([Send(1, buf), Recv(2, buf), Send(3, buf), Recv(4, buf)], [channel] * 4)
    assert channel.started == [("recv", 2), ("recv", 4), ("send", 1), ("send", 3)]


def test_no_file_is_written_through_a_link_that_was_laid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of records, and of the drafts of other files, could be guessed by another user."""
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
    engine = handle.synchroniser.engine
    if rank == 1:
        error = engine.give_up("somebody left")
    else:
        with pytest.raises(RankFailed) as raised:
            train(model, optimizer, rank, range(STEP, STEP + 1))
        error = raised.value
    (note,) = error.__notes__
    found: list[dict[str, Any]] = json.loads(Path(note.rpartition(" ")[2]).read_text())["verbs"]
    return found


@pytest.mark.multi
@pytest.mark.slow
def test_records_show_which_verb_a_rank_did_not_come_to(doomed: Ranks) -> None:
    found = doomed.run(fail)
    assert {verb["step"] for verb in found[1]} == set(range(STEP))
    assert all(verb["launched_s"] <= verb["started_s"] <= verb["done_s"] for verb in found[1])
    for rank in (0, 2, 3):
        late = [verb for verb in found[rank] if verb["step"] == STEP]
        assert late[0]["started_s"] is not None
        assert {verb["done_s"] for verb in late} == {None}
        assert [verb["name"] for verb in found[rank]][: len(found[1])] == [
            verb["name"] for verb in found[1]
        ]
