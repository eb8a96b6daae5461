"""`bench storm`: its schedule, what its lines mean, and a storm of three hosts."""

from __future__ import annotations

import json
from itertools import count
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradwire_bench.storm import storm, storm_rank
from gradwire_bench.storm.reading import Line, course_of, read_lines, row_of
from gradwire_bench.storm.schedule import (
    COUNTS,
    DDP,
    GRADWIRE,
    StormBench,
    faults_of,
)
from gradwire_bench.storm.storm_rank import Learner, Life


@pytest.mark.smoke
def test_all_faults_are_drawn_from_the_seed() -> None:
    faults = faults_of(7, 32, 1800.0)
    assert faults == faults_of(7, 32, 1800.0)
    assert faults != faults_of(8, 32, 1800.0)
    kinds = [fault.kind for fault in faults]
    assert {kind: kinds.count(kind) for kind in COUNTS} == COUNTS
    assert {fault.kind for fault in faults_of(7, 2, 10.0)} == {*COUNTS}


@pytest.mark.smoke
def test_kills_come_at_even_distances() -> None:
    settings = StormBench(seconds=100, kill_every_s=20.0)
    assert [fault.begin_s for fault in settings.faults] == [20.0, 40.0, 60.0]
    assert {fault.kind for fault in settings.faults} == {"kill"}
    dead_s = sum(fault.end_s - fault.begin_s for fault in settings.faults)
    assert settings.fraction_alive == pytest.approx(1 - dead_s / 800)


# a life of two steps that count, and one that a kill takes; then one that counts
KILLED: list[Line] = [
    [0.0, "life"],
    [2.0, "step", 1.0, 0],
    [3.0, "step", 2.0, 1],
    [3.5, "in", "a", [0, 1], True],
    [4.5, "step", 3.5, 2],
    [5.0, "end"],
    [7.0, "life"],
    [8.0, "out"],
    [8.0, "in", "empty", [], False],
    [9.0, "step", 8.0, 100],
    [9.5, "in", "b", [100], True],
    [9.6, "loss", 100, 5.0],
]
# after a restart from the begin of round 1 the rank makes it again
RESTARTED: list[Line] = [
    [0.0, "life"],
    [0.0, "back", 0],
    [2.0, "step", 1.0, 0],
    [2.0, "in", 0, [0], True],
    [3.0, "step", 2.0, 1],
    [3.0, "in", 1, [1], True],
    [4.0, "end"],
    [5.0, "life"],
    [5.0, "back", 1],
    [7.0, "step", 6.0, 100],
    [7.0, "in", 1, [100], True],
]


@pytest.mark.smoke
def test_steps_count_that_reached_the_model() -> None:
    course = course_of(KILLED, 10.0)
    assert course.counted == [(1.0, 2.0), (2.0, 3.0), (8.0, 9.0)]
    assert course.lost == [(3.5, 4.5)]
    assert course.dead == [(5.0, 7.0)]
    assert course.rounds == ["a", "empty", "b"]
    assert course.counted_at_s == [3.5, 9.5]
    assert course.num_failed == 1
    assert course.losses == [(9.6, 100, 5.0)]


def test_steps_since_a_checkpoint_are_lost_with_it() -> None:
    course = course_of(RESTARTED, 10.0)
    assert course.counted == [(1.0, 2.0), (6.0, 7.0)]
    assert course.lost == [(2.0, 3.0)]
    assert course.num_failed == 1


def test_the_clock_begins_when_all_ranks_train(tmp_path: Path) -> None:
    file = tmp_path / "0"
    file.write_text("\n".join(map(json.dumps, KILLED)), encoding="utf-8")
    course = course_of(read_lines(file, 1.5, 4.0), 4.0)
    assert course.counted == [(0.0, 0.5), (0.5, 1.5)]
    assert course.lost == [(2.0, 3.0)]
    assert course.dead == [(3.5, 4.0)]


def test_a_rank_that_does_not_come_back_is_dead_to_the_end() -> None:
    assert course_of(KILLED[:6], 10.0).dead == [(5.0, 10.0)]


def test_a_process_that_ends_before_its_first_word_has_never_lived() -> None:
    lines: list[Line] = [[0.0, "life"], [2.0, "end"], [3.5, "end"], [6.0, "life"]]
    assert course_of([*lines, [8.0, "end"]], 10.0).dead == [(2.0, 6.0), (8.0, 10.0)]


def test_a_row_has_shares_of_all_ranks_seconds() -> None:
    courses = [course_of(KILLED, 10.0), course_of(RESTARTED, 10.0)]
    row = row_of("two ranks", courses, 10.0)
    assert row["fraction_counted"] == 5 / 20
    assert row["fraction_lost"] == 2 / 20
    assert row["fraction_dead"] == 3 / 20
    assert row["fraction_closed"] == 5 / 7
    assert row["fraction_in"] == 1 / 2
    assert row["back_s"] == (4.5 + 3.0) / 2
    assert row["trains_s"] == 1.0
    assert row["counts_s"] == (2.5 + 2.0) / 2


def test_a_rank_that_never_trains_again_is_back_never() -> None:
    row = row_of("one rank", [course_of([*KILLED[:6], [7.0, "life"]], 10.0)], 10.0)
    assert row["back_s"] == row["trains_s"] == inf


def test_steps_of_the_storm_count_that_reach_the_model_after_it() -> None:
    lines: list[Line] = [
        [-1.0, "life"],
        [1.0, "step", -1.0, 0],
        [5.5, "step", 4.5, 1],
        [6.5, "step", 5.5, 2],
        [8.0, "in", "a", [0, 1, 2], True],
    ]
    course = course_of(lines, 5.0)
    assert course.counted == [(0.0, 1.0), (4.5, 5.0)]
    assert course.lost == []


def test_a_step_that_a_busy_machine_makes_longer_counts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # each reading of the clock takes longer than a step
    clock_s = count(step=3)
    clock = SimpleNamespace(monotonic=lambda: next(clock_s), sleep=lambda wait_s: None)
    monkeypatch.setattr(storm_rank, "time", clock)
    no_hosts: Any = None
    life = Life(StormBench(hosts=2), GRADWIRE, str(tmp_path), no_hosts, 0.0, 1, 0)
    learner = Learner(life)
    learner.step(learner.model, 0, learner.model.state_dict())
    learner._file.close()
    end_s, what, begin_s, _ = json.loads((tmp_path / "1").read_text().splitlines()[-1])
    assert what == "step"
    # the last rank's step, and a reading
    assert end_s - begin_s == 4 * 0.5 + 3


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.multi
@pytest.mark.netns
@pytest.mark.timeout(300)
def test_a_killed_rank_is_missed_and_the_others_train_on(tmp_path: Path) -> None:
    settings = StormBench(
        hosts=3,
        seconds=40,
        seed=3,
        delay_s=0.005,
        step_s=0.1,
        every=6,
        timeout_s=6.0,
        ways=(DDP, GRADWIRE),
    )
    record = storm.run(settings, lambda fraction, what: None)
    ddp, gradwire = record["rows"]
    for row in record["rows"]:
        assert row["fraction_dead"] > 0
        assert row["sent_bytes"] > 0
        assert row["loss"] < 5.6  # that of guesses is log 256
    assert gradwire["fraction_counted"] > ddp["fraction_counted"]
    killed = next(fault for fault in settings.faults if fault.kind == "kill")
    others = {*range(3)} - {killed.rank}
    for rank in others:
        course = record["ways"][GRADWIRE][rank]
        steps = [*course["counted"], *course["lost"]]
        assert any(begin_s > killed.begin_s for begin_s, _ in steps)
    storm.write(record, tmp_path)
    written = json.loads((tmp_path / "storm.json").read_text(encoding="utf-8"))
    assert written["rows"] == record["rows"]
    page = (tmp_path / "storm.html").read_text(encoding="utf-8")
    assert "/*page*/ null" not in page
