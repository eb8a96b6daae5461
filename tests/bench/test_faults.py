"""`bench faults`: what a trial is judged by, and six fixed trials on real ranks."""

from __future__ import annotations

import pytest

from gradwire.bench.faults import (
    KINDS,
    Aftermath,
    FaultsBench,
    accident_of,
    judge,
    run,
)
from gradwire.bench.faults_rank import WAYS, WORLD, Ending
from gradwire.bench.striking import Accident
from gradwire.errors import InvalidSetting

WELL = Ending("", False, (), -1, "", 3.0, 7)
VICTIM = 2


def accident(kind: str, point: str = "verb") -> Accident:
    return Accident(0, "plain", kind, (VICTIM,), point, "before", 2, 0.0, 0.0, 0.0, 5.0, 1)


def lost(ranks: tuple[int, ...] = (VICTIM,), step: int = 2, end_s: float = 3.0) -> Ending:
    return Ending("RankFailed", True, ranks, step, "", end_s, 0)


def aftermath(*endings: Ending | None, **changed: object) -> Aftermath:
    """A trial that was struck at 0 s, whose processes have ended but for those that never said."""
    codes = tuple(None if ending is None else 0 for ending in endings)
    return Aftermath({VICTIM: 0.0}, endings, codes, ("",) * WORLD)._replace(**changed)  # type: ignore[arg-type]


KILLED = aftermath(lost(), lost(), None, lost(step=3))


@pytest.mark.parametrize(
    ("kind", "found", "flaws"),
    [
        ("kill", KILLED, set()),
        ("kill", aftermath(lost(), None, None, lost()), {"hangs"}),
        (
            "kill",
            aftermath(lost(), None, None, lost(), exit_codes=(0, -6, -9, 0)),
            {"raw"},
        ),
        ("kill", aftermath(lost(), lost((1,)), None, lost()), {"misnamed"}),
        ("kill", aftermath(lost(), lost((1, 2)), None, lost()), {"misnamed"}),
        ("kill", aftermath(lost(), WELL, None, lost()), {"misnamed"}),
        ("kill", aftermath(lost(), lost(step=4), None, lost()), {"apart"}),
        ("kill", aftermath(lost(), lost(end_s=10.1), None, lost()), {"late"}),
        ("kill", KILLED._replace(exit_codes=(0, None, None, 0)), {"left"}),
        ("kill", KILLED._replace(struck_s={}), {"not_struck"}),
        (
            "kill",
            aftermath(lost(), Ending("ValueError", False, (), -1, "", 3.0, 0), None, lost()),
            {"raw", "misnamed"},
        ),
        ("straggle", aftermath(WELL, WELL, WELL, WELL), set()),
        ("straggle", aftermath(WELL, lost(), WELL, WELL), {"misnamed"}),
        ("flip received", aftermath(WELL, WELL, WELL, WELL), set()),
        (
            "flip received",
            aftermath(WELL, WELL, WELL._replace(digest=8), WELL),
            {"diverged"},
        ),
        ("flip received", aftermath(lost(), lost(), lost(), lost()), set()),
        ("flip received", aftermath(lost(), lost((1,)), lost(), lost()), {"misnamed"}),
    ],
)
def test_a_trial_is_judged_by_its_ends(kind: str, found: Aftermath, flaws: set[str]) -> None:
    assert set(judge(accident(kind), found).wrong) == flaws


def test_all_is_drawn_from_the_seed_and_the_number() -> None:
    one, other = FaultsBench(trials=200, seed=1), FaultsBench(trials=11, seed=1)
    assert accident_of(one, 7) == accident_of(other, 7)
    drawn = [accident_of(one, number) for number in range(200)]
    assert {each.kind for each in drawn} == set(KINDS)
    assert {each.way for each in drawn} == set(WAYS)
    assert all(each.point != "broadcast" or each.way != "ddp" for each in drawn)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="only must be one of kill, stop"):
        FaultsBench(trials=1, seed=0, only=("explode",))


@pytest.mark.slow
@pytest.mark.multi
def test_survivors_of_fixed_trials_say_who_was_lost() -> None:
    kinds = ("kill", "stop", "raise", "return", "kill two", "pause")
    settings = FaultsBench(trials=6, seed=2, at_once=6, only=kinds, timeout_s=4.0)
    rows, notes = run(settings, lambda fraction, what: None)
    assert notes == []
    assert [row["name"] for row in rows] == list(kinds)
