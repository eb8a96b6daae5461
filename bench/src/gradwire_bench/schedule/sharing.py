"""Isolation of hosts that share one machine: their cores and their queues.

Eight ranks hand messages around a ring on two cores. Left alone, a thread that is woken
interrupts the one that runs, often on the other core, and most of the time goes into
switching. And a long message fills the queue of its link (20 ms of it), in which each
hop of a short one then waits: so many lanes delay each other in a way that hosts with
fair queues do not.
"""

import contextlib
import os
from pathlib import Path

from ..errors import TestbedUnavailable
from ..testbed.netns import has_own_network, set_own

WINDOW_S = 0.005
_LEAST_WINDOW_BYTES = 65_536


def share_cores(rank: int, num_ranks: int) -> None:
    """Keeps this process on one core, beside ranks of neighbouring numbers, without
    preemption.

    For all threads there are; those made later inherit it. Does nothing where there is
    a core for each rank, or outside Linux. Of a 1 KiB all-reduce by gloo among 8 shaped
    hosts, processor time a rank and involuntary switches: 2.5 ms and 35 as it comes,
    1.5 ms and 10 under SCHED_BATCH (a woken thread waits its turn), 2.1 ms and 35 with
    each rank kept on one core, 1.0 ms and 0 with both (two cores, load average 10).
    """
    if not hasattr(os, "sched_setscheduler"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= num_ranks:
        return
    core = cores[rank * len(cores) // num_ranks]
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), {core})
            os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


def keep_queues_short(rate_bytes_per_s: float) -> None:
    """Limits what a connection of this host, a network namespace, may have under way.

    To 5 ms of the link's rate or 64 KiB; it holds for connections made afterwards. On 8
    hosts at 104 Mbit/s a 1 KiB all-reduce beside one of 6 MiB took 93 ms with it and
    236 ms without; the long one alone took 1.06 of its ideal time. On plain loopback,
    which has no link to fill, the machine's own setting stays.

    Raises ``TestbedUnavailable`` where the kernel's settings cannot be written.
    """
    if not has_own_network():
        return
    most = max(_LEAST_WINDOW_BYTES, round(WINDOW_S * rate_bytes_per_s))
    try:
        set_own("tcp_rmem", f"4096 {most // 2} {most}")
    except OSError as problem:
        raise TestbedUnavailable(
            f"tcp_rmem cannot be written, and long messages would delay short ones: "
            f"{problem.strerror}; in a container, have /proc/sys writable "
            "(docker run --privileged)"
        ) from None
