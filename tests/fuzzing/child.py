"""A fuzzing process: tries one input after another and notes its number before each.

python -m tests.fuzzing.child TARGET SEED FIRST LAST SECONDS PLACE
python -m tests.fuzzing.child build WORKER WORKERS

It is started by ``tests.fuzzing.campaign`` under the sanitizers. PLACE is a file of 8
bytes, in which the number of the input is found if the process does not come back from
it.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import random
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gradwire.errors import GradwireError
from tests.fuzzing import parsers, payloads, planted, sanitizer

TARGETS: dict[str, Callable[[random.Random], None]] = {
    **payloads.TARGETS,
    **parsers.TARGETS,
    **planted.TARGETS,
}
BUILD = "build"
_EACH = 100  # inputs for which one alarm is set
_MOST_FINDINGS = 10


def draw(target: str, seed: int, number: int) -> random.Random:
    """The random numbers of an input: a function of these three."""
    return random.Random(f"{target} {seed} {number}")


def attack(
    target: str, seed: int, first: int, last: int, seconds: float, place: Path
) -> None:
    """Tries inputs ``first`` to ``last``, at most; prints a line for each finding, and
    a sum.
    """
    try_one, until_s = TARGETS[target], time.monotonic() + seconds
    seen: set[str] = set()
    number, refused = first, 0
    with place.open("r+b") as file, mmap.mmap(file.fileno(), 8) as reported:
        while number < last and (number == first or time.monotonic() < until_s):
            if (number - first) % _EACH == 0:
                sanitizer.watch()
            reported[:] = struct.pack("<q", number)
            try:
                try_one(draw(target, seed, number))
            except GradwireError:
                refused += 1
            except Exception as error:
                where = _innermost(error)
                if where not in seen and len(seen) < _MOST_FINDINGS:
                    seen.add(where)
                    _say(
                        number=number,
                        what=f"{type(error).__name__} at {where}: {error}",
                    )
            number += 1
            if number == first + 1:  # what it took to build kernels does not count
                until_s = time.monotonic() + seconds
    faulthandler.cancel_dump_traceback_later()
    _say(tried=number - first, refused=refused)


def _innermost(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "gradwire" in frame.filename] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}"


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    sanitizer.sanitize()
    torch.set_num_threads(1)
    if sys.argv[1] == BUILD:
        payloads.kernels(int(sys.argv[2]), int(sys.argv[3]))
        return
    target, seed, first, last, seconds, place = sys.argv[1:]
    attack(target, int(seed), int(first), int(last), float(seconds), Path(place))


if __name__ == "__main__":
    main()
