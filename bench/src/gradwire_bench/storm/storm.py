"""``bench storm``: the same faults strike the same ranks under each way to train.

Hosts are far from each other, and their ranks have speeds of 1 to 4. A host more holds
the store and torchft's Lighthouse, which nothing strikes. A killed process starts again
some seconds later. A process that ends by itself starts again at once. Under DDP all
ranks start again once all can, from the last checkpoint, as under torchrun.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gradwire.cli.report.table import Row
from gradwire.contract.files import write_text

from ..report.live import filled
from ..testbed.hosts import Hosts, shaped_hosts
from ..testbed.netns import set_link
from ..testbed.ranks import part_of
from ..training.peers import is_there
from .reading import Course, course_of, loss_at, losses_of, read_lines, row_of
from .schedule import CALM, DDP, TORCHFT, WAYS, Fault, StormBench
from .storm_rank import READY, Life, live, serve

NOT_INSTALLED = f"{TORCHFT}: not installed; pip install torchft==0.2.0"
TEMPLATE = Path(__file__).parents[1] / "report" / "storm.html"
_PRELOADED = ["torch", "torch._dynamo", "gradwire_bench.storm.storm_rank", "torchft"]
_POLL_S = 0.1
_START_S = 300.0
"""Seconds in which all ranks must have begun to train."""
_PAUSE_S = 1.0
"""Seconds until a process that has ended starts again."""


def run(settings: StormBench, report: Callable[[float, str], None]) -> dict[str, Any]:
    """Trains in each way under the same faults.

    Returns:
        The record: settings, rows of figures, notes, and the ranks' courses by way.
    """
    names = list(settings.ways or WAYS[:-1])
    most = settings.fraction_alive
    notes = [f"no way can count more than {most:.1%}: ranks are dead or stopped"]
    if TORCHFT in names and not is_there("peer-torchft-diloco", ()):
        names.remove(TORCHFT)
        notes.append(NOT_INSTALLED)
    rows: list[Row] = []
    ways: dict[str, list[Course]] = {}
    with shaped_hosts(settings.testbed) as hosts:
        for place, name in enumerate(names):
            with TemporaryDirectory(prefix="gradwire-storm-") as folder:
                struck = _Struck(settings, name, hosts, Path(folder))
                struck.run(part_of(report, place, len(names), f"{name} "))
                ways[name] = struck.courses()
            row = row_of(name, ways[name], settings.seconds)
            rows.append({**row, "sent_bytes": struck.sent_bytes})
    points = [losses_of(courses) for courses in ways.values()]
    last = points[-1]
    for row, many in zip(rows, points, strict=True):
        _, row["tokens"], row["loss"] = many[-1]
        equal = min(many[-1][1], last[-1][1])
        row["loss_over_last"] = loss_at(equal, many) / loss_at(equal, last)
    return {
        "settings": {**asdict(settings), "faults": settings.faults},
        "rows": rows,
        "notes": notes,
        "ways": {name: [one._asdict() for one in ways[name]] for name in ways},
    }


def write(record: dict[str, Any], folder: Path) -> None:
    """Writes the record, and a page that shows it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "storm.json", json.dumps(record))
    write_text(folder / "storm.html", filled(TEMPLATE, record))


class _Struck:
    """The processes of one way, and the faults that strike them."""

    def __init__(
        self, settings: StormBench, way: str, hosts: Hosts, folder: Path
    ) -> None:
        self._settings = settings
        self._way = way
        self._hosts = hosts
        assert hosts.namespaces is not None
        self._spaces = hosts.namespaces
        self._folder = folder
        self._files = [folder / f"{rank}" for rank in range(settings.hosts)]
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._lives: list[Any] = [None] * settings.hosts
        self._numbers = [0] * (settings.hosts + 1)
        self._starts_s = [0.0] * settings.hosts
        """When each rank may start again."""
        self._begin_s = time.monotonic()
        self._storm_s = 0.0
        """When the storm begins: all ranks train by then."""
        self.sent_bytes = 0.0
        """The bytes that the interface of a rank has sent, on average."""

    def run(self, report: Callable[[float, str], None]) -> None:
        """Lets the storm pass."""
        settings = self._settings
        server = self._context.Process(target=serve, args=(self._life(settings.hosts),))
        server.start()
        faults = [] if self._way == CALM else settings.faults
        events = [(fault.begin_s, self._strike, fault) for fault in faults]
        events += [(fault.end_s, self._mend, fault) for fault in faults]
        events.sort(key=lambda event: event[0])
        # torch is imported by then, which ranks are forked with
        while not (self._folder / READY).exists() and server.is_alive():
            time.sleep(_POLL_S)
        try:
            while not self._all_train() and self._now_s() < _START_S:
                self._end_and_start()
                time.sleep(_POLL_S)
            self._storm_s = self._now_s()
            self._starts_s = [0.0] * settings.hosts
            before = self._sent()
            until_s = settings.seconds + settings.tail_s
            while (now_s := self._now_s() - self._storm_s) < until_s:
                while events and events[0][0] <= now_s:
                    _, act, fault = events.pop(0)
                    act(fault)
                self._end_and_start()
                report(now_s / until_s, f"{now_s:.0f} s")
                time.sleep(_POLL_S)
            self.sent_bytes = (self._sent() - before) / settings.hosts
        finally:
            for process in filter(None, (*self._lives, server)):
                process.kill()
                process.join()
            for _, _, fault in events:
                self._mend(fault)

    def courses(self) -> list[Course]:
        """The courses of all ranks."""
        seconds = self._settings.seconds
        lines = [read_lines(file, self._storm_s, seconds) for file in self._files]
        return [course_of(of_rank, seconds) for of_rank in lines]

    def _all_train(self) -> bool:
        """Whether each rank has made a step."""
        return all(
            file.exists() and '"step"' in file.read_text(encoding="utf-8")
            for file in self._files
        )

    def _now_s(self) -> float:
        return time.monotonic() - self._begin_s

    def _sent(self) -> int:
        counters = self._hosts.read_counters()[: self._settings.hosts]
        return sum(counted.tx_bytes for counted in counters)

    def _strike(self, fault: Fault) -> None:
        process = self._lives[fault.rank]
        if fault.kind == "partition":
            set_link(self._spaces, fault.rank, up=False)
        elif process is not None:
            is_kill = fault.kind == "kill"
            os.kill(process.pid, signal.SIGKILL if is_kill else signal.SIGSTOP)
        if fault.kind != "stop":
            # a process that ends meanwhile cannot start
            self._starts_s[fault.rank] = self._storm_s + fault.end_s

    def _mend(self, fault: Fault) -> None:
        process = self._lives[fault.rank]
        if fault.kind == "partition":
            set_link(self._spaces, fault.rank, up=True)
        elif process is not None and process.is_alive():
            os.kill(process.pid, signal.SIGCONT)

    def _end_and_start(self) -> None:
        """Notes which processes have ended, and starts those that may start."""
        lives = self._lives
        now_s = self._now_s()
        ended = [rank for rank, one in enumerate(lives) if one and not one.is_alive()]
        is_together = self._way == DDP
        if ended and is_together:
            ended = [rank for rank, one in enumerate(lives) if one]
        for rank in ended:
            lives[rank].kill()
            lives[rank].join()
            lives[rank] = None
            with self._files[rank].open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps([now_s, 'end'])}\n")
            self._starts_s[rank] = max(self._starts_s[rank], now_s + _PAUSE_S)
        may = [
            rank
            for rank, start_s in enumerate(self._starts_s)
            if lives[rank] is None and start_s <= now_s
        ]
        if is_together and len(may) < len(lives):
            return
        for rank in may:
            lives[rank] = self._context.Process(target=live, args=(self._life(rank),))
            lives[rank].start()
            self._numbers[rank] += 1

    def _life(self, host: int) -> Life:
        """The next life on a host."""
        return Life(
            storm=self._settings,
            way=self._way,
            folder=str(self._folder),
            # processes are sent all but the forwarder, which is of this one
            spaces=replace(self._spaces, forwarder=None),
            begin_s=self._begin_s,
            rank=host,
            number=self._numbers[host],
        )
