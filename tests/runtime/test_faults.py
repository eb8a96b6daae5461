"""A rank dies, hangs or raises: the others say which one and in which step, and none hangs.

Finding out takes seconds of waiting and hardly any computing, so all accidents happen at once, each
to a group of its own, and the tests look at what became of them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch import Tensor

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.errors import ExitCode
from gradwire.exchange.by_name import exchange_for
from gradwire.runtime.step import engine
from tests.runtime.given import keywords
from tests.runtime.ranks import Outcome, at_once
from tests.runtime.training import DENSE, SMALL_MB, Net, ddp, momentum, train

pytestmark = [pytest.mark.multi, pytest.mark.timeout(240), pytest.mark.slow]
WORLD = 4
STEP = 3
"""The step that cannot be finished."""
PATIENCE_S = 20.0
"""How long a rank that says nothing is waited for, where only a time-out can tell. It is more than
a busy machine may keep one of all these processes from computing: its neighbours are 31."""
LIMIT_S = 120.0
"""More than any rank may need, on a busy machine too; a rank that hangs never answers."""


class Accident(NamedTuple):
    """What happens to which rank in step ``STEP``."""

    victim: int
    how: str
    timeout_s: float = 300.0
    codec: str = "none"


ACCIDENTS = {
    "killed in mid-step": Accident(2, "killed"),
    "killed in mid-step, ring": Accident(2, "killed", codec="ring"),
    "killed in mid-step, onebit": Accident(3, "killed", codec="onebit"),
    "killed between steps": Accident(1, "killed between steps"),
    "rank 0 killed, with the store": Accident(0, "killed"),
    "stopped": Accident(2, "stopped", timeout_s=PATIENCE_S),
    "rank 0 stopped, with the store": Accident(0, "stopped", timeout_s=PATIENCE_S),
    "raised and stayed": Accident(1, "raised", timeout_s=PATIENCE_S),
}


class Report(NamedTuple):
    """What a survivor's training loop met."""

    kind: str
    ranks: tuple[int, ...] | None
    step: int | None
    text: str


def exchange_of(codec: str) -> Exchange:
    if codec == "ring":
        return gw.pair(gw.compress.none(), gw.collective.ring())
    return exchange_for(gw.compress.onebit() if codec == "onebit" else gw.compress.none())


def strike(how: str, grad: Tensor) -> None:
    """Runs in the middle of the victim's backward: some messages are on their way, some are not."""
    if how == "raised":
        raise ZeroDivisionError("the user's own mistake")
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)


def suffer(rank: int, world: int, wrapped: bool, accident: Accident) -> Report | None:
    net = Net()
    # DDP would broadcast buffers itself in the forward pass, and meet the dead rank there.
    model = ddp(net, broadcast_buffers=False) if wrapped else net
    limit = timedelta(seconds=accident.timeout_s)
    dist.barrier()
    gw.attach(model, exchange_of(accident.codec), **keywords(bucket_cap_mb=SMALL_MB, timeout=limit))
    optimizer = momentum(model.parameters())
    train(model, optimizer, rank, range(STEP))
    if rank == accident.victim and accident.how != "killed between steps":
        net.middle.weight.register_hook(partial(strike, accident.how))
    dist.barrier()
    if rank == accident.victim and accident.how == "killed between steps":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        train(model, optimizer, rank, range(STEP, STEP + 3))
    except Exception as error:
        return Report(
            type(error).__name__,
            getattr(error, "ranks", None),
            getattr(error, "step", None),
            str(error),
        )
    return None


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, list[Outcome]]]:
    runs = {  # a module and DDP by turns
        name: (suffer, place % 2 == 1, one) for place, (name, one) in enumerate(ACCIDENTS.items())
    }
    yield from at_once(ACCIDENTS, runs, WORLD, LIMIT_S)


@pytest.mark.parametrize("name", ACCIDENTS)
def test_survivors_name_the_rank_and_the_step(
    name: str, outcomes: dict[str, list[Outcome]]
) -> None:
    victim = ACCIDENTS[name].victim
    for rank, (report, error, _) in enumerate(outcomes[name]):
        if rank == victim:
            continue
        assert error is None, f"rank {rank}: {error}"
        assert report is not None, f"rank {rank} finished a step without rank {victim}"
        assert f"rank {victim} " in report.text
        assert f"step {STEP} " in report.text
        assert (report.kind, report.ranks, report.step) == ("RankFailed", (victim,), STEP)


SCRIPT = """
import sys
import torch.distributed as dist
import gradwire as gw
from tests.runtime.given import SMALL
from tests.runtime.training import Net, momentum, train

rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
model = Net()
gw.attach(model, "onebit", options=SMALL)
optimizer = momentum(model.parameters())
train(model, optimizer, rank, range(2))
if rank == 1:
    raise ZeroDivisionError("the user's own mistake")
train(model, optimizer, rank, range(2, 5))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_job_ends_when_one_rank_raises() -> None:
    """Whole interpreters, as a user starts them: they end by themselves, with the reason."""
    port = free_port()
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(port)],
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        texts = [job.communicate(timeout=60)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert [job.returncode for job in jobs] == [ExitCode.RANK_LOST, 1], texts
    assert "ZeroDivisionError: the user's own mistake" in texts[1]
    assert "RankFailed: step 2 cannot be finished: rank 1 of 2 stopped answering" in texts[0]


THREE = 3
TIMEOUT = timedelta(seconds=12)
"""Longer than a rank that lives needs on a busy machine, on which 27 of them start at once."""
ATTACH_LIMIT_S = 150.0
"""More than any rank may need, on a busy machine too; a rank that hangs never answers."""


class AttachAccident(NamedTuple):
    """What happens to which rank at which part of attach."""

    victim: int
    how: str
    part: str


OF_ATTACH = {
    f"rank {victim} {how}, {part}": AttachAccident(victim, how, part)
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


def struck_by(how: str) -> Callable[..., Any]:
    def struck(*args: Any) -> Any:
        if how == "raised":
            raise RuntimeError("Too many open files")
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)

    return struck


def attach_all(rank: int, world: int, accident: AttachAccident) -> tuple[str, Any, str] | None:
    dist.barrier()
    if rank == accident.victim:
        if accident.part == "before":
            struck_by(accident.how)()
        else:
            setattr(engine, accident.part, struck_by(accident.how))
    try:
        gw.attach(Net(), DENSE, failure=gw.FailurePolicy(timeout=TIMEOUT))
    except Exception as error:
        return type(error).__name__, getattr(error, "ranks", None), str(error)
    return None


@pytest.fixture(scope="module")
def outcomes_of_attach() -> Iterator[dict[str, list[Outcome]]]:
    runs = {name: (attach_all, one) for name, one in OF_ATTACH.items()}
    yield from at_once(OF_ATTACH, runs, THREE, ATTACH_LIMIT_S)


@pytest.mark.parametrize("name", OF_ATTACH)
def test_the_others_name_the_rank(name: str, outcomes_of_attach: dict[str, list[Outcome]]) -> None:
    victim = OF_ATTACH[name].victim
    for rank, (report, error, _) in enumerate(outcomes_of_attach[name]):
        if rank == victim:
            continue
        assert error is None, f"rank {rank}: {error}"
        assert report is not None, f"rank {rank} attached without rank {victim}"
        kind, ranks, text = report
        assert (kind, ranks) == ("RankFailed", (victim,)), text
        assert text.startswith("attach cannot be finished: ")
        assert f"rank {victim} " in text
