"""Ranks for tests: processes joined by one gloo group, that run the functions they are
handed.

Starting a process that imports torch takes seconds; here a fork server imports it once
and every rank is forked from there in milliseconds. A pool of ranks lives as long as
its tests go well: after a failure or a timeout its processes are ended and the next
test gets new ones. Every wait is bounded, and what a rank raised comes back with its
traceback.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.runtime.server import PRELOADED

Body = Callable[..., Any]
"""Runs on every rank as ``body(rank, world, *args)``; importable, and so is what it
returns.
"""

GRACE_S = 20.0
"""How long the other ranks may go on after one has failed, to say what they know."""


START_S = 100.0
"""How long the first rank may take to start, while the fork server imports torch on a
busy machine.
"""
TIMEOUT_S = 100.0
"""How long ranks may take to answer; pytest ends a test that takes 120 s."""


HURRIED = {
    "PERIOD_S": 0.25,
    "PATIENCE_S": 1.5,
    "ENDED_S": 0.5,
    "LINGER_S": 0.5,
    "_LOOK_S": 0.1,
    "_LINGER_S": 0.2,
    "_JOIN_S": 1.0,
}
"""Seconds that ranks of tests take for what takes them several times as long in a job:
to find each other, to notice who is lost, and to give up what nobody can end.
"""


class RanksFailed(AssertionError):
    """What went wrong on which rank."""


class Outcome(NamedTuple):
    """How a rank that was run on its own ended: its value or traceback, or its exit
    code.
    """

    value: Any
    error: str | None
    exit_code: int | None


class Ranks:
    """``world`` processes in one gloo group."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._ends: list[Connection] = []
        self._folder: TemporaryDirectory[str] | None = None

    def run(self, body: Body, *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Runs ``body`` on every rank; returns their values in rank order, or
        raises.
        """
        if not self._processes:
            self.start()
        outcomes = self.outcomes(body, *args, timeout_s=timeout_s)
        failures: dict[str, list[int]] = {}
        for rank, (_, error, _) in enumerate(outcomes):
            if error is not None:
                failures.setdefault(error, []).append(rank)
        if failures:
            self.close()
            raise RanksFailed(
                "\n".join(
                    f"\n--- ranks {who} of {self.world}\n{e}"
                    for e, who in failures.items()
                )
            )
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, body: Body, *args: Any, timeout_s: float = TIMEOUT_S
    ) -> list[Outcome]:
        """As ``run``, but says of each rank how it ended, and leaves the processes
        alone.
        """
        self.send(body, *args)
        return self.collect(timeout_s)

    def send(self, body: Body, *args: Any) -> None:
        """Starts ``body`` on every rank."""
        if not self._processes:
            self.start()
        task = pickle.dumps((body, args))
        for end in self._ends:
            end.send_bytes(task)

    def collect(
        self, timeout_s: float, *, without: Sequence[int] = ()
    ) -> list[Outcome]:
        """What the ranks answer; after a first failure the others have a few seconds
        more.
        """
        deadline = time.monotonic() + timeout_s
        found: dict[int, Outcome] = {}
        waiting = {end: r for r, end in enumerate(self._ends) if r not in without}
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for end in wait(list(waiting), left_s):
                assert isinstance(end, Connection)
                rank = waiting.pop(end)
                found[rank] = self._answer(rank, end)
                if found[rank].error is not None and not without:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in waiting.values():
            found[rank] = Outcome(None, self._stack_of(rank), None)
        return [
            found.get(rank, Outcome(None, None, None)) for rank in range(self.world)
        ]

    def survivors(self, dead: Collection[int]) -> list[Any]:
        """What those answer that are not dead, in rank order; raises what one of them
        raised.
        """
        found = self.collect(TIMEOUT_S, without=sorted(dead))
        living = [one for rank, one in enumerate(found) if rank not in dead]
        for one in living:
            assert one.error is None, one.error
        return [one.value for one in living]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends one rank's process a signal."""
        os.kill(self._processes[rank].pid, number)

    def start(self) -> None:
        """Starts the processes and joins them."""
        self._folder = TemporaryDirectory(prefix="ranks-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(self.world):
            here, there = context.Pipe()
            self._ends.append(here)
            args = (rank, self.world, there, self._folder.name)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
        if not self._ends[0].poll(START_S):
            self.close()
            raise RanksFailed("rank 0 did not open its store")
        port = self._ends[0].recv_bytes()
        for end in self._ends[1:]:
            end.send_bytes(port)

    def close(self) -> None:
        """Ends the processes."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join(5.0)
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._ends, self._folder = [], [], None

    def _answer(self, rank: int, end: Connection) -> Outcome:
        try:
            value, error = pickle.loads(end.recv_bytes())
        except (EOFError, ConnectionError):
            self._processes[rank].join(GRACE_S)
            code = self._processes[rank].exitcode
            return Outcome(None, f"ended with exit code {code}", code)
        return Outcome(value, error, None)

    def _stack_of(self, rank: int) -> str:
        """Where a silent rank is: the stacks of its threads."""
        assert self._folder is not None
        if not self._processes[rank].is_alive():
            return "did not answer and is gone"
        self.kill(rank, signal.SIGUSR1)
        self._processes[rank].join(0.5)
        return (
            "did not answer; it is at\n"
            + (Path(self._folder.name) / f"{rank}").read_text()
        )


def run_alone(code: str) -> None:
    """Runs lines of Python in a process of its own, in which torch is imported
    already.
    """
    ranks = Ranks(1)
    try:
        ranks.run(_execute, code)
    finally:
        ranks.close()


def _execute(rank: int, world: int, code: str) -> None:
    exec(code, {"__name__": "__main__"})


def _serve(rank: int, world: int, end: Connection, folder: str) -> None:
    """The life of a rank: join, then run what comes until the other end closes."""
    torch.set_num_threads(1)
    _hurry()
    with (Path(folder) / f"{rank}").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        _join(rank, world, end)
        gc.freeze()  # what is there already is not walked through again and again
        while True:
            try:
                body, args = pickle.loads(end.recv_bytes())
            except (EOFError, ConnectionError):
                # Nothing here is worth a goodbye to peers that may be gone.
                os._exit(0)
            torch.manual_seed(1234)
            try:
                answer = (body(rank, world, *args), None)
            except BaseException:
                answer = (None, traceback.format_exc())
            with suppress(BrokenPipeError):  # Nobody waits for it any more.
                end.send_bytes(_pickled(answer))
            # A model that is dropped while it is attached is in a cycle with its
            # threads, which would go on beside the next test.
            gc.collect()


def _hurry() -> None:
    for module in [
        one for name, one in sys.modules.items() if name.startswith("gradwire.runtime")
    ]:
        for name in HURRIED.keys() & vars(module).keys():
            setattr(module, name, HURRIED[name])


def _join(rank: int, world: int, end: Connection) -> None:
    """Joins the group; rank 0 opens a store on a port that the system picks."""
    port = 0 if rank == 0 else int(end.recv_bytes())
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=60))
    if rank == 0:
        end.send_bytes(str(store.port).encode())
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    # a rank that ends or leaves while another still connects would end that one
    dist.barrier()


def _pickled(answer: Any) -> bytes:
    """Plain pickle: the pickler of torch's processes would send file descriptors of
    tensors.
    """
    buffer = io.BytesIO()
    pickle.Pickler(buffer).dump(answer)
    return buffer.getvalue()
