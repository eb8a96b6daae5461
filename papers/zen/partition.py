r"""Times what ZEN computes on one rank against the transfer that it saves, all in one
run, in turn.

    python -m papers.zen.partition --hosts 8 --density 0.01 --rate 1gbit

A round is: a copy of the vector (what the memory does just then), the partition of this
rank's entries, the merge of all ranks' entries of one part, its hash bitmap, and the
dense vector made of the hash bitmaps of all parts. ``zen`` is the sum of the last four,
beside the seconds that its messages save on a link: the bytes of a dense all-reduce (2
(W - 1) / W of the vector) less those pushed and pulled. The partition is timed both
ways: by a sort, and by algorithm 1 with its hash table.
"""

from __future__ import annotations

from statistics import median

import torch
import typer
from torch import Tensor

from gradwire.cli.report.table import Row, plain
from gradwire.collective.steps.travel import bytes_sent
from gradwire.contract.units import parse_rate
from gradwire.errors import invalid
from gradwire.kernels.sparse.entries import Entries, parts_of
from gradwire.kernels.sparse.formats.coo import coo
from gradwire.kernels.sparse.formats.hash_bitmap import hash_bitmap
from gradwire.kernels.sparse.merge import merge
from gradwire.kernels.sparse.partition import partition
from gradwire.kernels.sparse.permutation import Permutation
from gradwire_bench.figures import quartiles, threads_of_torch
from gradwire_bench.micro.draws import IndexDraws
from gradwire_bench.micro.kernel import COPY_BYTES, TimedCall, seconds_in_turn
from gradwire_lab.kernels.hashing import hash_partition

CPU_STEPS = ("partition", "merge", "encode", "decode")


def measure(
    draws: IndexDraws,
    rate_bytes_per_s: float,
    threads: int,
    rounds: int = 15,
) -> list[Row]:
    """A row a step."""
    if rounds < 4:
        raise invalid("rounds", rounds, "at least 4", "leave it out")
    with threads_of_torch(threads):
        rank = _Rank(draws)
        times = seconds_in_turn(
            {"copy": rank.copy, **rank.steps()}, rounds, torch.device("cpu")
        )
    sums = [
        sum(parts) for parts in zip(*(times[name] for name in CPU_STEPS), strict=True)
    ]
    rows = [_row(name, taken) for name, taken in times.items()]
    rows[0]["bandwidth_bytes_per_s"] = COPY_BYTES * draws.numel / median(times["copy"])
    saved_s = rank.saved_bytes / rate_bytes_per_s
    whole = _row("zen", sums)
    whole |= {"saved_s": saved_s, "saved_over_spent": saved_s / median(sums)}
    return [{**row, "threads": threads} for row in (*rows, whole)]


class _Rank:
    """One rank of ``draws.world`` with all that it reuses from step to step."""

    def __init__(self, draws: IndexDraws) -> None:
        world = draws.world
        numel = draws.numel
        self.shuffle = Permutation(numel, seed=1)
        pool = draws.pool()
        self.parts = parts_of(numel, world, self.shuffle)
        ranks = [_entries(draws.taken(rank, pool), rank) for rank in range(world)]
        self.own = ranks[0]
        self.placed = _room(self.own.num)
        pushed = [partition(entries, numel, world, self.shuffle) for entries in ranks]
        self.given = [parts.of(0) for parts in pushed]
        self.summed = _room(sum(entries.num for entries in self.given))
        self.pulled = []
        for part in self.parts:
            sums = merge([parts.of(part.rank) for parts in pushed], part.length)
            self.pulled.append(hash_bitmap().encode(sums, part.length))
        self.sums = merge(self.given, self.parts[0].length)
        self.bits = torch.zeros(self.pulled[0].size_bytes, dtype=torch.uint8)
        self.vector_N = torch.zeros(numel)
        self.out_N = torch.zeros(numel)
        length = self.parts[0].length
        push_bytes = sum(
            coo().size_bytes(count, length) for count in pushed[0].counts_W[1:]
        )
        pull_bytes = sum(payload.size_bytes for payload in self.pulled[1:])
        self.saved_bytes = (
            bytes_sent("all_reduce", 4 * numel, world) - push_bytes - pull_bytes
        )

    def copy(self) -> Tensor:
        return self.out_N.copy_(self.vector_N)

    def steps(self) -> dict[str, TimedCall]:
        numel = self.out_N.numel()
        world = len(self.parts)
        length = self.parts[0].length
        room = Entries(*self.placed)
        return {
            "partition": lambda: partition(
                self.own, numel, world, self.shuffle, room=room
            ),
            "algorithm 1": lambda: hash_partition(
                self.own, numel, world, self.shuffle, room=room
            ),
            "merge": lambda: merge(self.given, length, room=self.summed),
            "encode": lambda: hash_bitmap().encode(self.sums, length, self.bits),
            "decode": self._decode,
        }

    def _decode(self) -> None:
        self.out_N.zero_()
        for part, payload in zip(self.parts, self.pulled, strict=True):
            hash_bitmap().scatter(payload, part, self.out_N, scale=1 / len(self.parts))


def _room(num: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(num, dtype=torch.int32), torch.zeros(num)


def _entries(indices_K: Tensor, seed: int) -> Entries:
    draw = torch.Generator().manual_seed(seed)
    return Entries(indices_K, torch.randn(indices_K.numel(), generator=draw))


def _row(name: str, taken: list[float]) -> Row:
    return {"name": name, **quartiles("kernel_s", taken)}


def main(
    numel: int = 25_000_000,
    hosts: int = 8,
    density: float = 0.01,
    overlap: float = 0.3,
    rate: str = "1gbit",
    threads: int = 2,
    rounds: int = 15,
) -> None:
    """Measures, and prints a row for each step."""
    draws = IndexDraws(numel=numel, world=hosts, density=density, overlap=overlap)
    print(plain(measure(draws, parse_rate(rate), threads, rounds)))


if __name__ == "__main__":
    typer.run(main)
