"""Last verbs: what a rank did last on the network, which it writes to a file when its run fails.

Where ranks of a job wait for each other, their records side by side say which verb one of them has
launched, started or done, and another has not.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections import deque
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from ...contract.files import write_anew
from .lanes import wall_clock

NUM_VERBS = 64
"""The verbs that a record holds."""
FOLDER = "GRADWIRE_RECORDS"
"""The environment variable with the folder for records; the system's temporary one without it."""
_log = logging.getLogger("gradwire")


@dataclass(slots=True)
class NotedVerb:
    """One verb for the network, or several that were started together.

    ``sequence`` numbers a rank's verbs from 0. Times are seconds since the epoch on a clock that
    all processes of a machine share; None is what has not happened yet.
    """

    sequence: int
    step: int
    message: int
    name: str
    size_bytes: int
    launched_s: float
    started_s: float | None = None
    done_s: float | None = None


class LastVerbs:
    """The last ``NUM_VERBS`` verbs of one rank."""

    def __init__(self) -> None:
        self._verbs: deque[NotedVerb] = deque(maxlen=NUM_VERBS)
        self._numbers = count()

    def launch(self, step: int, message: int, name: str, size_bytes: int) -> NotedVerb:
        """Notes a verb that waits for its channel from now on; returns it, to be filled in."""
        verb = NotedVerb(next(self._numbers), step, message, name, size_bytes, wall_clock())
        self._verbs.append(verb)
        return verb

    def write(self, rank: int, world: int, error: BaseException, text: str) -> Path | None:
        """Writes the record and notes its path on the error, which says ``text``.

        Returns the path, or None where there is nothing to write.
        A folder that cannot be written to is logged, as the error itself matters more.
        """
        verbs = [asdict(verb) for verb in tuple(self._verbs)]
        if not verbs:
            return None
        told = {"rank": rank, "world": world, "failed_s": wall_clock(), "error": text}
        folder = Path(os.environ.get(FOLDER) or tempfile.gettempdir())
        path = folder / f"gradwire-record-{os.getpid()}-{id(self):x}-rank-{rank}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_anew(path, json.dumps({**told, "verbs": verbs}, indent=1))
        except OSError as failed:
            _log.warning("the record of the last verbs cannot be written: %s", failed)
            return None
        error.add_note(f"the last verbs of rank {rank} stand in {path}")
        return path
