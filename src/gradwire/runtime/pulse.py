"""Pulse: which rank died, told by the ranks that live.

When a rank dies, its peers see a closed connection or a timeout, then those that wait for them see
the same, and no error says where it began. Every rank therefore counts up a number in the job's
rendezvous store, once in ``PERIOD_S``; a rank whose number stands still is gone. The first rank to
find out leaves an alarm in the store, and the others, who may be waiting on a healthy connection,
hear it within a period.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

PERIOD_S = 0.5
PATIENCE_S = 3.0
"""How long a number must stand still. Six periods: a busy machine may skip some."""


class Pulse:
    """Counts for this rank, watches the alarm, and can tell who is silent.

    ``on_alarm(text, ranks)`` is called once, from the pulse's thread, when another rank raised one.
    """

    def __init__(
        self, name: str, rank: int, world: int, on_alarm: Callable[[str, tuple[int, ...]], None]
    ) -> None:
        # torch has no public way to the job's store; a clone has a connection of its own, so that
        # a blocked call of the main thread does not stop the pulse.
        default: Any = dist.distributed_c10d._get_default_store()
        self._store: Any = PrefixStore(f"gradwire/{name}", default.clone())
        self._store.set_timeout(timedelta(seconds=PATIENCE_S))
        self._rank, self._world, self._on_alarm = rank, world, on_alarm
        self._stop = threading.Event()
        self._beat = 0
        self.step = 0
        self._thread = threading.Thread(target=self._run, name="gradwire pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)

    def raise_alarm(self, text: str, ranks: tuple[int, ...]) -> None:
        """Tells all other ranks; does nothing if the store itself is gone."""
        try:
            self._store.set("alarm", f"{','.join(map(str, ranks))};{text}")
        except RuntimeError:
            return

    def silent_ranks(self) -> tuple[int, ...]:
        """Ranks whose number stood still for ``PATIENCE_S``; rank 0 if the store is gone."""
        before = self._read()
        if before is None:
            return (0,)
        deadline = time.monotonic() + PATIENCE_S
        silent = set(range(self._world)) - {self._rank}
        while silent and time.monotonic() < deadline:
            time.sleep(PERIOD_S / 2)
            now = self._read()
            if now is None:
                return (0,)
            silent = {r for r in silent if now[r][0] == before[r][0]}
        return tuple(sorted(silent))

    def behind(self) -> tuple[int, ...]:
        """Ranks that have not reached the step this rank is in."""
        now = self._read()
        return () if now is None else tuple(r for r, (_, s) in enumerate(now) if s < self.step)

    def _read(self) -> list[tuple[int, int]] | None:
        """(number, step) of every rank, or None if the store cannot be reached."""
        try:
            keys = [f"pulse/{r}" for r in range(self._world)]
            texts = [self._store.get(k) if self._store.check([k]) else b"0;0" for k in keys]
        except RuntimeError:
            return None
        pairs = [text.decode().split(";") for text in texts]
        return [(int(beat), int(step)) for beat, step in pairs]

    def _run(self) -> None:
        while not self._stop.is_set():
            self._beat += 1
            try:
                self._store.set(f"pulse/{self._rank}", f"{self._beat};{self.step}")
                alarm = self._store.get("alarm").decode() if self._store.check(["alarm"]) else ""
            except RuntimeError:
                return  # The store is gone; whoever needs it will say so.
            if alarm:
                ranks, _, text = alarm.partition(";")
                self._on_alarm(text, tuple(int(r) for r in ranks.split(",") if r))
                return
            self._stop.wait(PERIOD_S)
