r"""One payload over several connections of a far link, after a pause and warm.

gradwire testbed run --hosts 2 --rate 50mbit --delay 40 -- \
    python -m gradwire_bench.runs.connections --control reno

Rank 0 sends to rank 1, whose receives are posted before. A process group of gloo has
one connection for each pair of ranks, so a payload is cut into equal parts, one for
each group. Seconds are from the first send to the last receive; both ranks read one
clock, as they are on one machine. ``--control`` and slow start after idle are set in
the network namespaces of the testbed's hosts only.
"""

import time
from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import typer

from gradwire.cli.report.table import Row, plain

from ..testbed.netns import set_own

CONNECTIONS = (1, 4, 16)
SIZES_BYTES = (500_000, 2_000_000, 8_000_000)
WARM_UP = 3
"""Payloads before those that are measured."""
WARM_S = 0.15
"""Seconds between warm payloads: longer than a latency, shorter than a time-out."""
PAUSE_S = 1.0
"""Seconds after which TCP takes a connection for idle."""


def seconds(
    parts: Sequence[torch.Tensor], groups: Sequence[Any], wait_s: float
) -> float:
    """The seconds that parts take together, each through its own group.

    Args:
        parts: what rank 0 sends and rank 1 receives.
        groups: a process group for each part.
        wait_s: the pause before it, in seconds.
    """
    is_sender = dist.get_rank() == 0
    pairs = list(zip(parts, groups, strict=True))
    works: list[Any] = []
    if not is_sender:
        works = [dist.irecv(part, 0, group) for part, group in pairs]
    dist.barrier()
    time.sleep(wait_s)
    stamps = torch.zeros(2, dtype=torch.float64)
    if is_sender:
        stamps[0] = time.perf_counter()
        works = [dist.isend(part, 1, group) for part, group in pairs]
    for work in works:
        work.wait()
    if not is_sender:
        stamps[1] = time.perf_counter()
    dist.all_reduce(stamps)
    return float(stamps[1] - stamps[0])


def measure(
    connections: Sequence[int],
    sizes_bytes: Sequence[int],
    repeats: int,
    pause_s: float,
) -> list[Row]:
    """A row for each number of connections and size, with medians of ``repeats``."""
    groups = [dist.new_group() for _ in range(max(connections))]
    rows: list[Row] = []
    for size_bytes, count in product(sizes_bytes, connections):
        payload = torch.zeros(size_bytes, dtype=torch.uint8)
        given = payload.tensor_split(count), groups[:count]
        warm = [seconds(*given, WARM_S) for _ in range(WARM_UP + repeats)][WARM_UP:]
        rested = [seconds(*given, pause_s) for _ in range(repeats)]
        rows.append(
            {
                "name": f"{count} connections",
                "size_bytes": size_bytes,
                "after_pause_s": median(rested),
                "warm_s": median(warm),
            }
        )
    return rows


def main(control: str = "reno", repeats: int = 5, pause: float = PAUSE_S) -> None:
    """Measures, with a pause in seconds, and prints two tables on rank 0."""
    torch.set_num_threads(1)
    set_own("tcp_congestion_control", control)
    dist.init_process_group("gloo")
    for again in (1, 0):
        set_own("tcp_slow_start_after_idle", str(again))
        rows = measure(CONNECTIONS, SIZES_BYTES, repeats, pause)
        if dist.get_rank() == 0:
            title = f"{control}, tcp_slow_start_after_idle={again}"
            print(plain(rows, title=title), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
