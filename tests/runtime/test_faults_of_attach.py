"""A rank that is stopped, killed or raises while all attach is named by the others, in time.

As in `test_faults`, all accidents happen at once, each to a group of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

import gradwire as gw
from gradwire.runtime.step import engine
from tests.runtime.ranks import Outcome, at_once
from tests.runtime.training import DENSE, Net

pytestmark = [pytest.mark.multi, pytest.mark.timeout(240), pytest.mark.slow]
WORLD = 3
TIMEOUT = timedelta(seconds=12)
"""Longer than a rank that lives needs on a busy machine, on which 27 of them start at once."""
LIMIT_S = 150.0
"""More than any rank may need, on a busy machine too; a rank that hangs never answers."""


class Accident(NamedTuple):
    """What happens to which rank at which part of attach."""

    victim: int
    how: str
    part: str


ACCIDENTS = {
    f"rank {victim} {how}, {part}": Accident(victim, how, part)
    for victim, how, part in [
        (0, "stopped", "before"),
        (1, "stopped", "before"),
        (0, "stopped", "open_channels"),
        (1, "stopped", "open_channels"),
        (0, "killed", "open_channels"),
        (2, "killed", "open_channels"),
        (2, "raised", "open_channels"),
        (1, "stopped", "broadcast_all"),
        (2, "killed", "broadcast_all"),
    ]
}


def strike(how: str) -> Callable[..., Any]:
    def struck(*args: Any) -> Any:
        if how == "raised":
            raise RuntimeError("Too many open files")
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)

    return struck


def suffer(rank: int, world: int, accident: Accident) -> tuple[str, Any, str] | None:
    dist.barrier()
    if rank == accident.victim:
        if accident.part == "before":
            strike(accident.how)()
        else:
            setattr(engine, accident.part, strike(accident.how))
    try:
        gw.attach(Net(), DENSE, timeout=TIMEOUT)
    except Exception as error:
        return type(error).__name__, getattr(error, "ranks", None), str(error)
    return None


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, list[Outcome]]]:
    runs = {name: (suffer, one) for name, one in ACCIDENTS.items()}
    yield from at_once(ACCIDENTS, runs, WORLD, LIMIT_S)


@pytest.mark.parametrize("name", ACCIDENTS)
def test_the_others_name_the_rank(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    victim = ACCIDENTS[name].victim
    for rank, (report, error, _) in enumerate(outcomes[name]):
        if rank == victim:
            continue
        assert error is None, f"rank {rank}: {error}"
        assert report is not None, f"rank {rank} attached without rank {victim}"
        kind, ranks, text = report
        assert (kind, ranks) == ("RankFailed", (victim,)), text
        assert text.startswith("attach cannot be finished: ")
        assert f"rank {victim} " in text
