"""Runs a rank program on all ranks of all hosts and collects the results.

A rank program is a module with ``measure(settings, report) -> result``, which lies
beside what it measures; settings and results are plain JSON. Ranks meet by
torch.distributed over the hosts' links; files carry the results.
"""

import importlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gradwire.measure.group import launched_group

from .counters import InterfaceCounters
from .hosts import Hosts
from .launch import launch
from .relay import RELAY, own_counters, relayed_group

_POLL_S = 0.2
Json = dict[str, Any]
"""Plain values by name: settings of a program, and its results."""
Report = Callable[[float, str], None]
"""Tells how far a measurement is: (fraction done in [0, 1], what is going on)."""


def run_ranks(
    hosts: Hosts,
    program: str,
    settings: Json,
    *,
    report: Report,
    timeout_s: float = 3600.0,
) -> list[Json]:
    """Runs the module ``program``, such as ``gradwire_bench.demo.demo_rank``, on all
    hosts.

    ``settings["timeout_s"]``, if given, limits each wait of torch's default group.
    ``timeout_s`` limits the whole run, an hour by default. Returns every rank's result;
    raises ``RankFailed`` with the last lines of a rank that fails.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        place = Path(folder)
        (place / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        over = threading.Event()
        watcher = threading.Thread(
            target=_watch, args=(place / "progress", report, over)
        )
        watcher.start()
        try:
            command = [
                sys.executable,
                "-P",
                "-m",
                __name__,
                program,
                folder,
                _home(program),
            ]
            launch(hosts, command, timeout_s=timeout_s, output="none", check=True)
        finally:
            over.set()
            watcher.join()
        return [
            json.loads(_result(place, rank).read_text(encoding="utf-8"))
            for rank in range(hosts.num_ranks)
        ]


def _home(program: str) -> str:
    """The folder that the outermost package of a module lies in."""
    package = importlib.import_module(program.partition(".")[0])
    assert package.__file__ is not None, f"{package.__name__} has no __init__.py"
    return str(Path(package.__file__).resolve().parents[1])


def _result(place: Path, rank: int) -> Path:
    return place / f"result-{rank}.json"


def _watch(progress: Path, report: Report, over: threading.Event) -> None:
    """Passes on rank 0's last report until all is over."""
    seen = ""
    while not over.wait(_POLL_S):
        text = ""
        if progress.exists():
            text = progress.read_text(encoding="utf-8")
        if text and text != seen:
            seen = text
            fraction, _, what = text.partition(" ")
            report(float(fraction), what)


def part_of(report: Report, place: int, total: int, name: str = "") -> Report:
    """A report for one of several parts that take turns, told with its name."""

    def part(fraction: float, what: str) -> None:
        report((place + fraction) / total, f"{name}{what}")

    return part


def counted(call: Callable[[], object]) -> tuple[float, InterfaceCounters]:
    """Seconds of a call that all ranks make, and the bytes on this rank's link."""
    before = own_counters()  # before any rank sends
    dist.barrier()
    start_s = time.perf_counter()
    call()
    seconds = time.perf_counter() - start_s
    dist.barrier()
    return seconds, own_counters().since(before)


def in_turn(
    sides: Mapping[str, Callable[[], object]],
    repeats: int,
    report: Report,
    prepare: Callable[[str], object],
) -> dict[str, Json]:
    """Seconds and sent bytes of each repeat by side, after a turn that warms up.

    ``prepare`` is called with a side's name before each of its calls.
    """
    figures: dict[str, Json] = {
        name: {"seconds": [], "sent_bytes": []} for name in sides
    }
    for turn in range(repeats + 1):
        for place, (name, side) in enumerate(sides.items()):
            report((turn + place / len(sides)) / (repeats + 1), name)
            prepare(name)
            seconds, moved = counted(side)
            if turn:
                figures[name]["seconds"].append(seconds)
                figures[name]["sent_bytes"].append(moved.tx_bytes)
    return figures


def main() -> None:
    """One rank's program: joins the group, measures, writes the result."""
    program = sys.argv[1]
    folder = Path(sys.argv[2])
    home = sys.argv[3]
    if home not in sys.path:
        sys.path.insert(0, home)  # what lies beside src/ is not installed
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))

    def report(fraction: float, what: str) -> None:
        if dist.get_rank() == 0:
            temporary = folder / "progress.new"
            temporary.write_text(f"{fraction} {what}", encoding="utf-8")
            temporary.replace(folder / "progress")

    timeout = (
        timedelta(seconds=settings["timeout_s"]) if "timeout_s" in settings else None
    )
    join = relayed_group if RELAY in os.environ else launched_group
    with join(timeout=timeout):
        result = importlib.import_module(program).measure(settings, report)
        _result(folder, dist.get_rank()).write_text(
            json.dumps(result), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
