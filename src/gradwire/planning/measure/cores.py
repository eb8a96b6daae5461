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

    ``of_all`` gives every rank's figures, so that all ranks come to the same answer. Ranks share
    cores that may run on the same ones of a machine, which is one whose kernel tells the same boot,
    whatever host name they see. Sets of cores that overlap in part count as apart.
    """
    own = os.sched_getaffinity(0)
    rows = of_all([_place(sorted(own)), len(own), torch.get_num_threads()])
    num_ranks = Counter(place for place, _, _ in rows)
    each = [(cores / num_ranks[place], threads) for place, cores, threads in rows]
    short = [cores for cores, threads in each if cores <= threads]
    return min(short, default=None)


def _place(cores: list[int]) -> float:
    """A number for these cores of this machine, the same in all its processes."""
    told = _BOOT.read_text(encoding="ascii") if _BOOT.exists() else platform.node()
    return float(int.from_bytes(hashlib.sha256(f"{told} {cores}".encode()).digest()[:6], "big"))
