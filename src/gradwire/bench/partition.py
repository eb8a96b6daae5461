"""Times what ZEN computes on one rank against the transfer that it saves, all in one run, in turn.

A round is: a copy of the vector (what the memory does just then), the partition of this rank's
entries into coo payloads, the merge of all ranks' entries of one part, its hash bitmap, and the
dense vector made of the hash bitmaps of all parts. ``zen`` is the sum of the last four, beside the
seconds that its messages save on a link: the bytes of a dense all-reduce (2 (W - 1) / W of the
vector) less those pushed and pulled. On a GPU the partition is timed both ways: in two passes, and
by algorithm 1 with its hash table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles

import torch
from torch import Tensor

from ..errors import invalid
from ..sparse.entries import Entries
from ..sparse.formats.coo import coo
from ..sparse.formats.hash_bitmap import hash_bitmap
from ..sparse.gpu import partition as gpu
from ..sparse.merge import Accumulator
from ..sparse.partition import coo_slots_bytes, partition_into_coo
from ..sparse.parts import parts_of
from ..sparse.permutation import Permutation
from ._draws import Draws
from .kernel import COPY_BYTES, Row, seconds

CPU_STEPS = ("partition", "merge", "encode", "decode")
_log = logging.getLogger("gradwire")
Steps = dict[str, Callable[[], object]]


def measure(
    draws: Draws, rate_bytes_per_s: float, threads: int, rounds: int = 15, *, device: str = "cpu"
) -> list[Row]:
    """A row a step; on a GPU a row for each form of the partition."""
    if rounds < 4:
        raise invalid("rounds", rounds, "at least 4", "leave it out")
    if device != "cpu":
        return _on_gpu(draws, rounds, torch.device(device))
    _log.warning("the Triton forms are not measured here: ask for --device cuda where there is one")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rank = _Rank(draws)
        times = _in_turn({"copy": rank.copy, **rank.steps()}, rounds, torch.device("cpu"))
    finally:
        torch.set_num_threads(before)
    sums = [sum(parts) for parts in zip(*(times[name] for name in CPU_STEPS), strict=True)]
    rows = [_row(name, taken) for name, taken in times.items()]
    rows[0]["bandwidth_bytes_per_s"] = COPY_BYTES * draws.numel / median(times["copy"])
    saved_s = rank.saved_bytes / rate_bytes_per_s
    whole = _row("zen", sums)
    whole |= {"saved_s": saved_s, "saved_over_spent": saved_s / median(sums)}
    return [{**row, "threads": threads} for row in (*rows, whole)]


class _Rank:
    """One rank of ``draws.world`` with all that it reuses from step to step."""

    def __init__(self, draws: Draws) -> None:
        world, numel = draws.world, draws.numel
        self.shuffle, pool = Permutation(numel, seed=1), draws.pool()
        self.parts = parts_of(numel, world, self.shuffle)
        ranks = [_entries(draws.taken(rank, pool), rank) for rank in range(world)]
        self.own = ranks[0]
        self.sent = torch.zeros(coo_slots_bytes(self.own, world), dtype=torch.uint8)
        pushed = [partition_into_coo(one, numel, world, self.shuffle) for one in ranks]
        lists = [
            [coo().decode(payloads[part.rank], part.length) for payloads in pushed]
            for part in self.parts
        ]
        totals = [Accumulator(part.length) for part in self.parts]
        self.pulled = []
        for total, given in zip(totals, lists, strict=True):
            _add_all(total, given)
            self.pulled.append(total.encode(hash_bitmap()))
        self.total, self.given = totals[0], lists[0]
        self.bits = torch.zeros(self.pulled[0].size_bytes, dtype=torch.uint8)
        self.vector_N, self.out_N = torch.zeros(numel), torch.zeros(numel)
        push_bytes = sum(payload.size_bytes for payload in pushed[0][1:])
        pull_bytes = sum(payload.size_bytes for payload in self.pulled[1:])
        self.saved_bytes = 2 * (world - 1) / world * 4 * numel - push_bytes - pull_bytes

    def copy(self) -> Tensor:
        return self.out_N.copy_(self.vector_N)

    def steps(self) -> Steps:
        numel, world = self.out_N.numel(), len(self.parts)
        return {
            "partition": lambda: partition_into_coo(
                self.own, numel, world, self.shuffle, buffer=self.sent
            ),
            "merge": lambda: _add_all(self.total, self.given),
            "encode": lambda: self.total.encode(hash_bitmap(), self.bits),
            "decode": lambda: hash_bitmap().fill(
                self.pulled, self.parts, self.out_N, scale=1 / world
            ),
        }


def _entries(indices_K: Tensor, seed: int) -> Entries:
    draw = torch.Generator().manual_seed(seed)
    return Entries(indices_K, torch.randn(indices_K.numel(), generator=draw))


def _add_all(total: Accumulator, given: list[Entries]) -> None:
    total.clear()
    for entries in given:
        total.add(entries)


def _on_gpu(draws: Draws, rounds: int, device: torch.device) -> list[Row]:
    """The paper's figure 16: one tensor's partition, without its transfer."""
    entries = _entries(draws.taken(0, draws.pool()), 0)
    held = Entries(entries.indices_K.to(device), entries.values.to(device))
    where = (held, draws.numel, draws.world, Permutation(draws.numel, seed=1))
    times = _in_turn(
        {
            "two passes": partial(gpu.two_passes, *where),
            "algorithm 1": partial(gpu.algorithm_1, *where),
        },
        rounds,
        device,
    )
    _, spill = gpu.algorithm_1(*where)
    rows = [_row(name, taken) for name, taken in times.items()]
    rows[1] |= {"serial": spill.serial, "fallback": spill.fallback}
    return rows


def _in_turn(steps: Steps, rounds: int, device: torch.device) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-1, rounds):
        for name, step in steps.items():
            taken = seconds(step, device)
            if number >= 0:  # the first round compiles, allocates and touches pages
                times[name].append(taken)
    return times


def _row(name: str, taken: list[float]) -> Row:
    low, middle, high = quantiles(taken, n=4)
    return {"name": name, "kernel_s": middle, "kernel_s_q1": low, "kernel_s_q3": high}
