"""A store that answers late is not taken for ranks that are dead."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from gradwire.errors import ExitCode
from gradwire.runtime.failure import blame, pulse
from gradwire.runtime.failure.blame import silence
from gradwire.runtime.failure.pulse import Alarm, Place, Pulse, Sign, Stillness
from gradwire.runtime.failure.roll_call import Reach

HERE, ENDED, MUTE, CUT = Reach.ANSWERS, Reach.ENDED, Reach.MUTE, Reach.CUT


class Scripted(Pulse):
    """A pulse of rank 1 of 3 that reads these beats, each after a pause."""

    script: tuple[tuple[float, tuple[int, int, int]], ...] = ()

    def _run(self) -> None:
        for pause_s, beats in self.script:
            time.sleep(pause_s)
            self._note([Sign(beat, Place(0, 0, 0)) for beat in beats])


def read(monkeypatch: pytest.MonkeyPatch, *script: Any) -> tuple[tuple[int, ...], bool]:
    monkeypatch.setattr(pulse, "PATIENCE_S", 0.3)
    monkeypatch.setattr(pulse, "PERIOD_S", 0.05)
    monkeypatch.setattr(Scripted, "script", script)
    one = Scripted("test", 1, 3, lambda alarm: None, lambda: None, lambda error: None)
    return one.silent_ranks()


def test_what_a_store_does_not_tell_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    first, late = [(0.05, (7, 1, 7)), (0.02, (7, 2, 7))], (0.25, (7, 3, 7))
    assert read(monkeypatch, *first, late, (0.05, (8, 4, 8))) == ((), False)
    steady = [(0.04, (n, n, 7)) for n in range(12)]
    assert read(monkeypatch, *steady) == ((2,), False)
    for script in ([], first):  # no answer for as long as patience lasts
        assert read(monkeypatch, *script) == ((0,), True)


def test_a_number_stands_still_only_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 0.2, 30.0, 30.3, 30.4, 50.0])
    monkeypatch.setattr(pulse.time, "monotonic", lambda: next(now))
    one = Stillness()
    found = [one.read(number) for number in (4, 4, 4, 4, 5, 5)]
    assert found == pytest.approx([0, 0.2, 0.7, 1.0, 0, 0.5])


class Silent:
    """A pulse of rank 1 of 3 whose store answers at the given look, if at all."""

    rank, store_is_lost = 1, False

    def __init__(self, reach: list[dict[int, Reach]], answers: int, mute_s: float = 9.0) -> None:
        self.mute_s = mute_s
        self._reach, self._answers, self.looks = reach, answers, 0
        self.roll_call, self._lock = self, threading.Lock()

    def ask(self) -> tuple[dict[int, Reach], bytes]:
        with self._lock:
            return self._reach[min(self.looks, len(self._reach) - 1)], b""

    def silent_ranks(self) -> tuple[tuple[int, ...], bool]:
        time.sleep(0.05)  # for who asks at the doors
        with self._lock:
            self.looks += 1
            is_silent = self.looks < self._answers
        return ((0,) if is_silent else ()), is_silent


@pytest.mark.parametrize(
    ("reach", "answers", "looks", "found"),
    [
        ([{0: HERE, 2: HERE}], 3, 3, None),
        ([{0: HERE, 2: MUTE}], 3, 3, None),
        ([{0: HERE, 2: ENDED}], 99, 1, ((2,), ExitCode.RANK_LOST)),
        ([{0: HERE, 2: HERE}, {0: HERE, 2: ENDED}], 99, 2, ((2,), ExitCode.RANK_LOST)),
        ([{0: HERE, 2: CUT}], 99, 1, ((2,), ExitCode.NETWORK)),
        ([{0: ENDED, 2: HERE}], 99, 1, ((0,), ExitCode.RANK_LOST)),
        ([{0: MUTE, 2: HERE}], 99, 1, ((0,), ExitCode.RANK_LOST)),
        ([{0: HERE, 2: HERE}], 99, 3, ((), ExitCode.UNAVAILABLE)),
    ],
)
def test_who_is_known_to_be_dead_is_named_while_the_store_is_slow(
    reach: Any, answers: int, looks: int, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blame, "STORE_PATIENCE_S", 0.13 if looks == 3 and found else 60.0)
    one: Any = Silent(reach, answers)
    alarm = silence(one, 7, 3)
    told = None if alarm is None else (alarm.ranks, alarm.code)
    assert (told, one.looks) == (found, looks)
    assert alarm is None or isinstance(alarm, Alarm)


@pytest.mark.parametrize(("mute_s", "ranks"), [(9.0, (1,)), (0.5, (0,))])
def test_a_rank_that_was_cut_off_until_all_others_had_ended_names_itself(
    mute_s: float, ranks: tuple[int, ...]
) -> None:
    """Where the store answered until its host ended, it is the host that is lost."""
    one: Any = Silent([{0: ENDED, 2: ENDED}], 99, mute_s)
    alarm = silence(one, 7, 3)
    assert alarm is not None
    assert alarm.ranks == ranks
