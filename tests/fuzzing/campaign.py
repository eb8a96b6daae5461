"""The campaign: fuzzing processes under the sanitizers, and what came of them.

An input that ends its process, by a sanitizer or a signal, is known by its number, and
the process is started again behind it.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzzing import sanitizer

ROOT = Path(__file__).parents[2]
SHARES = {"codecs": 0.4, "formats": 0.3, "exchanges": 0.2, "programs": 0.1}
"""Each target's share of the time."""
MOST_DEATHS = 5
_START_S, _BUILD_S = 300.0, 1800.0  # kernels may have to be built first
_SHOWN = 3000
_LINES = 12


@dataclass(frozen=True)
class Finding:
    """An input that something went wrong with: which, and what."""

    target: str
    seed: int
    number: int
    what: str

    @property
    def command(self) -> str:
        """The command that makes the input again."""
        return (
            f"python -m tests.fuzzing {self.target} --seed {self.seed} --input "
            f"{self.number}"
        )

    def __str__(self) -> str:
        return f"{self.command}\n    {self.what}"


@dataclass
class Tried:
    """What came of one target's inputs."""

    target: str
    seed: int
    num_inputs: int = 0
    num_refused: int = 0
    wall_s: float = 0.0
    findings: list[Finding] = field(default_factory=list)


def fuzz(
    target: str, seed: int, *, first: int = 0, last: int = 2**62, seconds: float
) -> Tried:
    """Tries inputs ``first`` to ``last`` of a target, for so many seconds at most."""
    found, began_s = Tried(target, seed), time.monotonic()
    number, deaths = first, 0
    while number < last and deaths < MOST_DEATHS:
        left_s = seconds - (time.monotonic() - began_s)
        if number > first and left_s <= 0:
            break
        number, died = _process(found, number, last, max(left_s, 0.0))
        deaths += died
    found.wall_s = time.monotonic() - began_s
    return found


def _process(found: Tried, first: int, last: int, seconds: float) -> tuple[int, bool]:
    """One process from input ``first`` on; returns the next input, and whether it
    died.
    """
    with tempfile.NamedTemporaryFile() as place:
        place.write(struct.pack("<q", first))
        place.flush()
        reported = [found.target, found.seed, first, last, seconds, place.name]
        ended = _child(*reported, timeout_s=seconds + _START_S)
        (at,) = struct.unpack("<q", Path(place.name).read_bytes())
    for line in map(json.loads, filter(_is_report, ended.stdout.splitlines())):
        if "what" in line:
            found.findings.append(_finding(found, line["number"], line["what"]))
        else:
            found.num_inputs += line["tried"]
            found.num_refused += line["refused"]
    if ended.returncode == 0:
        return first + 2**62, False
    found.findings.append(_finding(found, at, _said(ended.stderr, ended.returncode)))
    found.num_inputs += at + 1 - first
    return at + 1, True


def _child(*arguments: object, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzzing.child", *map(str, arguments)],
        env=sanitizer.environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )


def _is_report(line: str) -> bool:
    return line.startswith("{")


def _finding(found: Tried, number: int, what: str) -> Finding:
    return Finding(found.target, found.seed, number, what)


def _said(stderr: str, code: int) -> str:
    """What a sanitizer said, from its first line on, or the end of what the process
    did.
    """
    for mark in ("ERROR: AddressSanitizer", "runtime error:", "Timeout ("):
        start = stderr.find(mark)
        if start >= 0:
            lines = stderr[stderr.rfind("\n", 0, start) + 1 :].splitlines()
            return "\n    ".join(lines[:_LINES])
    return f"ended with {code}: {stderr[-_SHOWN:]}"


def _build(worker: int, workers: int) -> None:
    """Builds a part of the kernels; raises ``RuntimeError`` with what the process
    said.
    """
    ended = _child("build", worker, workers, timeout_s=_BUILD_S)
    if ended.returncode:
        raise RuntimeError(ended.stderr[-_SHOWN:])


def campaign(
    seconds: float, seed: int, workers: int, announce: Callable[[Tried], None]
) -> Iterator[Tried]:
    """Every target for its share of ``seconds``, on so many processors; each worker has
    a seed.
    """
    jobs = [
        (target, seed + worker, share * seconds)
        for target, share in SHARES.items()
        for worker in range(workers)
    ]
    with ThreadPoolExecutor(workers) as pool:
        builds = [pool.submit(_build, worker, workers) for worker in range(workers)]
        for build in builds:
            build.result()
        for tried in pool.map(lambda job: fuzz(job[0], job[1], seconds=job[2]), jobs):
            announce(tried)
            yield tried
