"""Trials of ``bench faults``: their processes, and the faults that others must do to
these.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from pkgutil import walk_packages
from tempfile import TemporaryDirectory
from typing import Any

from gradwire import runtime

from ..testbed.hosts import HostLinks, Hosts, Testbed, shaped_hosts
from ..testbed.wide_area import NEAR
from .accidents import (
    HEALED,
    LINKS,
    NEWCOMER,
    PARTITIONS,
    PAUSES,
    REJOIN,
    Accident,
)
from .faults_judge import Aftermath, Ending
from .faults_rank import OVER, Surroundings, keep_store, live

_START_S = 60.0
_BACK_S = 20.0
"""Seconds of training in which ranks come back, once links are whole."""
_LONGEST_S = 80.0
"""Seconds that ranks may take beside time-outs, also if others come in or come back."""
_LEFT_S = 10.0
"""Seconds that a process may take to end once its training has ended."""
_PRELOADED = [
    *("torch", "torch._dynamo", "gradwire_bench.faults.faults_rank"),
    *(found.name for found in walk_packages(runtime.__path__, "gradwire.runtime.")),
]
"""Modules that are imported before ranks are forked.

An import in a rank would delay its attach.
"""
_SLOW_BYTES_PER_S = 125_000.0


class Trials:
    """Carries trials out, several at once, each in processes of its own.

    Ranks are forked from one process that has imported torch. Shaped hosts are made
    when a trial needs links that fail or links unlike those of one switch, and kept for
    the next one. To be used in a ``with`` block.
    """

    def __init__(self, testbed: Testbed) -> None:
        self._testbed = testbed
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._free: list[tuple[Hosts, HostLinks]] = []

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def observe(self, accident: Accident) -> Aftermath:
        """The outcome of a trial for its ranks."""
        with TemporaryDirectory(prefix="gradwire-faults-") as folder:
            if accident.kind == "resume":
                return self._resumed(accident, folder)
            return self._lived(accident, folder)

    def _resumed(self, accident: Accident, folder: str) -> Aftermath:
        """All ranks are killed and start again from files; they must end as if never
        killed.
        """
        calm = accident._replace(kind="calm", victims=())
        died = self._lived(accident, folder)
        if not died.struck_s:
            return died
        again = self._lived(calm, folder, resume=True)
        with TemporaryDirectory(prefix="gradwire-faults-") as other:
            ending = self._lived(calm, other).endings[0]
        if ending is None or ending.error:
            # a busy machine let the run without an accident fail
            return again._replace(struck_s={})
        return again._replace(struck_s=died.struck_s, digest=ending.digest)

    def _lived(
        self, accident: Accident, folder: str, *, resume: bool = False
    ) -> Aftermath:
        with ExitStack() as stack:
            spaces = None
            links = None
            if accident.kind in LINKS or self._testbed.wide_area != NEAR:
                hosts, links = stack.enter_context(self._bed())
                assert hosts.namespaces is not None
                # ranks are sent all but the forwarder, which is of this process
                spaces = replace(hosts.namespaces, forwarder=None)
            start = Surroundings(folder, spaces, resume)
            watched = _Watched(self._context, accident, start, links)
            try:
                watched.watch()
            finally:
                seen = watched.end()
        return seen

    @contextmanager
    def _bed(self) -> Iterator[tuple[Hosts, HostLinks]]:
        """Shaped hosts for a trial, whose links are whole before and after it."""
        with self._lock:
            if not self._free:
                hosts = self._stack.enter_context(shaped_hosts(self._testbed))
                self._free.append((hosts, HostLinks(hosts, self._testbed)))
            bed = self._free.pop()
        try:
            yield bed
        finally:
            bed[1].mend()
            with self._lock:
                self._free.append(bed)


class _Watched:
    """The processes of one trial, and what they tell."""

    def __init__(
        self,
        context: Any,
        accident: Accident,
        start: Surroundings,
        links: HostLinks | None,
    ) -> None:
        self.accident = accident
        self._folder = Path(start.folder)
        self._links = links
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        self._endings: list[Ending | None] = [None] * len(accident.processes)
        self._struck_s: dict[int, float] = {}
        self._wakes: list[tuple[float, Callable[[], object]]] = []
        self._over = self._folder / OVER
        if accident.kind not in (HEALED, REJOIN, NEWCOMER):
            self._over.touch()
        self._store: Any = None
        for rank in accident.processes:
            self._processes.append(self._begin(context, live, accident, rank, start))
        if accident.has_store:
            self._store = self._begin(context, keep_store, start.folder, start.spaces)
            self._store_end = self._ends.pop()
            self._send_port(self._store_end.recv(), self._ends)

    def _begin(self, context: Any, target: Any, *args: Any) -> Any:
        here, there = context.Pipe()
        process = context.Process(target=target, args=(there, *args))
        process.start()
        there.close()
        self._ends.append(here)
        return process

    def watch(self) -> None:
        """Listens to all ranks until their training has ended, or should have."""
        accident = self.accident
        left = {end: rank for rank, end in enumerate(self._ends)}
        stays = accident.victims if accident.kind in ("stop", "return") else ()
        deadline_s = time.monotonic() + _START_S
        longest_s = _LONGEST_S + 3 * accident.timeout_s
        while not set(left.values()) <= set(stays) or len(self._struck_s) < len(stays):
            now_s = time.monotonic()
            for wake in [wake for wake in self._wakes if wake[0] <= now_s]:
                self._wakes.remove(wake)
                wake[1]()
            if now_s > deadline_s:
                return
            until_s = min([deadline_s, *(at_s for at_s, _ in self._wakes)])
            for end in wait(list(left), until_s - now_s):
                assert isinstance(end, Connection)
                if not self._hear(end, left[end]):
                    del left[end]
                if self._struck_s:
                    deadline_s = max(self._struck_s.values()) + longest_s

    def _hear(self, end: Connection, rank: int) -> bool:
        """Takes what a rank tells; returns whether it may tell more.

        Others need not train on for a process that has come in, or has ended.
        """
        if rank >= self.accident.world:
            self._over.touch()
        try:
            what, value = end.recv()
        except (EOFError, ConnectionError):
            return False
        if what == "port":
            self._send_port(value, self._ends[1:])
        elif what == "struck":
            self._struck_s[rank] = value
            self._strike(rank, value)
        elif what == "over":
            self._endings[rank] = value
        return bool(what != "over")

    def _send_port(self, port: int, ends: list[Connection]) -> None:
        for other in ends:
            other.send(port)

    def _strike(self, rank: int, now_s: float) -> None:
        """Does what the fault is, where a rank cannot do it to itself."""
        kind = self.accident.kind
        timeout_s = self.accident.timeout_s
        if kind in PAUSES:
            go_on = partial(os.kill, self._processes[rank].pid, signal.SIGCONT)
            self._wakes.append((now_s + PAUSES[kind] * timeout_s, go_on))
        elif kind in ("resume", "kill two"):
            for victim in self.accident.victims:
                self._processes[victim].kill()
        elif kind == "kill store":
            self._store.kill()
            self._store.join()
        elif self._links is not None and kind in LINKS and len(self._struck_s) == 1:
            self._break(self._links, kind, rank)
            mends_s = now_s + self.accident.heals_s
            self._wakes.append((mends_s, self._links.mend))
            self._wakes.append((mends_s + _BACK_S, self._over.touch))
        elif kind == REJOIN:
            self._ends[-1].send("done")
        if kind in (*LINKS, "kill store"):
            self._ends[rank].send("done")

    def _break(self, links: HostLinks, kind: str, rank: int) -> None:
        if kind == "one way":
            links.mute(rank)
        elif kind == "1 Mbit":
            links.slow(rank, _SLOW_BYTES_PER_S)
        elif kind in PARTITIONS:
            links.part(self.accident.victims)
        else:
            links.cut(rank)

    def end(self) -> Aftermath:
        """Ends all processes: those whose training has ended have a few seconds to do
        so alone.
        """
        codes: list[int | None] = []
        deadline_s = time.monotonic() + _LEFT_S
        for process, ending in zip(self._processes, self._endings, strict=True):
            if ending is not None and ending.error != "LoopLeft":
                process.join(max(0.0, deadline_s - time.monotonic()))
            codes.append(process.exitcode)
        for end in self._ends:
            end.close()
        for process in filter(None, (*self._processes, self._store)):
            if process.is_alive():
                process.kill()
            process.join()
        lines = tuple(self._last_lines(rank) for rank in self.accident.processes)
        return Aftermath(
            dict(self._struck_s), tuple(self._endings), tuple(codes), lines
        )

    def _last_lines(self, rank: int) -> str:
        path = self._folder / f"{rank}.log"
        text = ""
        if path.exists():
            text = path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-6:])
