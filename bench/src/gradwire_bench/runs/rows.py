r"""Small gathers in one hop and in two: straight to each rank, and along rows.

gradwire testbed run --hosts 8 --rate 1gbit -- python -m gradwire_bench.runs.rows

Rank 0 prints the seconds of a gather of ``--bytes`` from each rank.
"""

import time
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import typer

from gradwire.cli.report.table import Row
from gradwire.contract.verbs import AllGather
from gradwire.errors import invalid
from gradwire.runtime.transport.direct import HostChannel, begin_straight, row_width
from gradwire.runtime.transport.wire import default_store

from .turns import print_rows, seconds_in_turn

_REPEATS = 20


@dataclass
class Gathers:
    """Gathers by rows of ``width`` ranks."""

    channel: HostChannel
    width: int
    num_bytes: int

    def turn(self) -> float:
        """The seconds of one gather, on average."""
        self.channel.row_width = self.width
        own = torch.zeros(self.num_bytes, dtype=torch.uint8)
        whole = own.repeat(self.channel.size())
        begin_s = time.perf_counter()
        for _ in range(_REPEATS):
            begin_straight(AllGather(whole, own), self.channel).wait()
        return (time.perf_counter() - begin_s) / _REPEATS


def measure(num_bytes: int, turns: int) -> list[Row]:
    """A row for gathers in one hop, and one for gathers in two."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    width = row_width(world)
    if width == world:
        accepted = "a number with rows, as 6, 8, 9 or 12"
        raise invalid("ranks", world, accepted, "start another number")
    timeout = dist.distributed_c10d.default_pg_timeout
    channel = HostChannel(default_store(), rank, world, timeout)
    sides = {
        "straight": Gathers(channel, world, num_bytes),
        f"rows of {width}": Gathers(channel, width, num_bytes),
    }
    # the first turn warms up
    seconds = seconds_in_turn([*sides.values()], turns + 1)[:, 1:].tolist()
    return [
        {"name": name, "gather_s": median(s), "lowest_s": min(s), "highest_s": max(s)}
        for name, s in zip(sides, seconds, strict=True)
    ]


def main(bytes: int = 64, turns: int = 9) -> None:
    """Measures gathers of so many bytes; rank 0 prints."""
    print_rows(partial(measure, bytes, turns))


if __name__ == "__main__":
    typer.run(main)
