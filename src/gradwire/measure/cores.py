"""shared_cores: the part of its machine's cores that a rank has, where that is too little."""

from __future__ import annotations

import hashlib
import os
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def shared_cores(of_all: Callable[[Sequence[float]], list[list[float]]]) -> float | None:
    """The cores of the rank that has fewest; None where each has more than threads that compute.

    ``of_all`` gives every rank's figures, so that all ranks come to the same answer. Ranks are on
    one machine whose kernel tells the same boot, whatever host name they see.
    """
    rows = of_all([_machine(), len(os.sched_getaffinity(0)), torch.get_num_threads()])
    num_ranks = Counter(machine for machine, _, _ in rows)
    each = [(cores / num_ranks[machine], threads) for machine, cores, threads in rows]
    short = [cores for cores, threads in each if cores <= threads]
    return min(short, default=None)


def _machine() -> float:
    """A number for this machine, the same in all its processes."""
    told = _BOOT.read_text(encoding="ascii") if _BOOT.exists() else platform.node()
    return float(int.from_bytes(hashlib.sha256(told.encode()).digest()[:6], "big"))
