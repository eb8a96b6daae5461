"""Figure 16 of ZEN: the cost of algorithm 1 over its memory and its number of hash
functions.

The kernel's time can only be measured on a GPU (``gpu_s``). The causes of its changes
can be counted anywhere: entries that all hash functions fail to place are written one
after another, and the memory is read through at the end. ``place`` is algorithm 1 on a
CPU, wave by wave, with as many entries at once as a GPU has threads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from gradwire.kernels.libraries import has_triton
from gradwire.kernels.sparse.entries import Entries
from gradwire.kernels.sparse.permutation import Permutation
from gradwire_bench.report import curves
from gradwire_lab.hashing import algorithm_1

from ..frame import Ask, Claim, Findings, Row, effect
from .values import number

NUMEL = 20_000_000
QUICK_NUMEL = 2_000_000
GPU_NUMEL = 214_000_000
GPU_REPEATS = 5
"""The elements of DeepFM's embedding and the number of repeats, where there is a
GPU.
"""
PAPER_S = 6e-3
PAPER_GPU = "V100"
PARTS = 16
DENSITY = 0.052
"""The density of DeepFM's embedding after a machine's GPUs were added up: section
5.3.
"""
MEMORIES = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Values of r_1 over the number of entries: figure 16a."""
HASHES = (1, 2, 3, 4)
"""Values of k: figure 16b."""
BEST_MEMORY = 2.0
BEST_HASHES = 3
WAVES = 64
"""The number of waves in which all entries are placed: that of 11 million entries on a
V100's 164,000 threads, about.
"""
EMPTY = -1
"""The mark of an empty cell, which is no index; the paper's mark 0 is one."""
COLLISIONS = 0.01
STRAWMAN = ((1.0, 0.175), (4.0, 0.048))
"""Section 3.2: memory over the tensor's size, share of the entries lost, at 10 %
density.
"""
STRAWMAN_DENSITY = 0.1
LARGEST = {"LSTM": (406e6, 0.0113), "DeepFM": (214e6, 0.0280), "NMT": (112e6, 0.0247)}
"""The elements and the density of the embeddings: table 1."""
SERIAL_SHARE = 0.1
"""The value of r_2 over r_1."""
UNPRINTED = frozenset({"figure"})


@dataclass(frozen=True)
class Placed:
    """The result of algorithm 1 on the entries of one gradient."""

    num_entries: int
    num_words: int
    """The words in the parallel memory of all parts together."""
    placed: tuple[int, ...]
    """The number of entries that each hash function found room for."""

    @property
    def serial_share(self) -> float:
        """The share of the entries that are written one after another."""
        return 1 - sum(self.placed) / max(1, self.num_entries)

    @property
    def tries(self) -> float:
        """The mean number of hash functions that an entry tried; entries that fail try
        all.
        """
        tried = sum(turn * count for turn, count in enumerate(self.placed, start=1))
        left = self.num_entries - sum(self.placed)
        return (tried + len(self.placed) * left) / max(1, self.num_entries)


def place(
    indices_K: Tensor, num_parts: int, memory: float, hashes: int, *, waves: int = WAVES
) -> Placed:
    """Lines 4 to 17 of algorithm 1 with ``r_1 = memory * K`` over all parts.

    The entries of a wave try at once. Where several write to one place, one stays. The
    others see that when they read it back (technique 4), and try the next hash
    function.
    """
    room = max(1, round(memory * indices_K.numel() / num_parts))
    table = torch.full((num_parts * room,), EMPTY, dtype=torch.int64)
    placed = [0] * hashes
    part_K = _hash(indices_K, 0) % num_parts
    for wave_K, own_part_K in zip(
        indices_K.chunk(waves), part_K.chunk(waves), strict=True
    ):
        left_K = wave_K.long()
        left_part_K = own_part_K
        for turn in range(hashes):
            at_K = left_part_K * room + _hash(left_K, turn + 1) % room
            free_K = table[at_K] == EMPTY
            table[at_K[free_K]] = left_K[free_K]
            fails_K = table[at_K] != left_K
            placed[turn] += int((~fails_K).sum())
            left_K = left_K[fails_K]
            left_part_K = left_part_K[fails_K]
    return Placed(indices_K.numel(), num_parts * room, tuple(placed))


def _hash(indices_K: Tensor, number: int) -> Tensor:
    """Hash function number ``number``: MurmurHash3's 32-bit finaliser of the index and
    a seed.
    """
    mask = 0xFFFFFFFF
    x_K = (indices_K.long() + number * 0x9E3779B9) & mask
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x_K = (x_K ^ (x_K >> shift)) * factor & mask
    return x_K ^ (x_K >> 16)


def figure16(
    ask: Ask,
    memories: Sequence[float] = MEMORIES,
    hashes: Sequence[int] = HASHES,
    numel: int | None = None,
) -> Findings:
    """Algorithm 1 over r_1 (a) and over k (b), and the share that appendix A's strawman
    loses.
    """
    numel = numel or (QUICK_NUMEL if ask.quick else NUMEL)
    jobs = [("16a", memory, BEST_HASHES) for memory in memories]
    jobs += [("16b", BEST_MEMORY, count) for count in hashes]
    indices_K = _drawn(numel, DENSITY)
    rows: list[Row] = []
    has_gpu = torch.cuda.is_available() and has_triton()
    gpu = _entries(GPU_NUMEL, "cuda") if has_gpu else None
    for done, (figure, memory, count) in ask.each(jobs):
        ask.report(done, f"r_1 = {memory:g} entries, k = {count}")
        row = _row(figure, memory, count, place(indices_K, PARTS, memory, count))
        if gpu is not None:
            row["gpu_s"] = kernel_s(gpu, GPU_NUMEL, memory, count)
            row["gpu"] = torch.cuda.get_device_name(gpu.indices_K.device)
        rows.append(row)
    rows += [_strawman(numel, memory) for memory, _ in STRAWMAN]
    note = (
        "16a and 16b plot a kernel's time on a GPU; none is here: what it comes "
        "from is counted"
    )
    return Findings(
        tuple(rows), claims(rows), () if has_gpu else (note,), complete=has_gpu
    )


def _entries(numel: int, device: str) -> Entries:
    indices_K = _drawn(numel, DENSITY).to(device)
    return Entries(indices_K, torch.ones(indices_K.numel(), device=device))


def kernel_s(entries: Entries, numel: int, memory: float, hashes: int) -> float:
    """The median seconds of algorithm 1 on the device of ``entries``, all launches
    included.
    """
    permutation = Permutation(numel)
    seconds = []
    parallel = round(memory * entries.indices_K.numel())
    for _ in range(GPU_REPEATS + 1):
        start_s = time.perf_counter()
        algorithm_1.algorithm_1(
            entries, numel, PARTS, permutation, rehashes=hashes, parallel=parallel
        )
        if entries.indices_K.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start_s)
    return median(seconds[1:])  # the first compiles


def _drawn(numel: int, density: float) -> Tensor:
    """The ascending indices of elements drawn uniformly."""
    drawn_N = torch.rand(numel, generator=torch.Generator().manual_seed(0))
    return (drawn_N < density).nonzero()[:, 0].int()


def _row(figure: str, memory: float, hashes: int, found: Placed) -> Row:
    return {
        "name": f"{figure}: r_1 = {memory:g} |G| d, k = {hashes}",
        "figure": figure,
        "memory": memory,
        "num_hashes": hashes,
        "fraction_written_serially": found.serial_share,
        "tries_an_entry": found.tries,
        "words_read_an_entry": found.num_words
        * (1 + SERIAL_SHARE)
        / max(1, found.num_entries),
    }


def _strawman(numel: int, memory: float) -> Row:
    """The row of algorithm 3: one hash function into a memory of ``memory`` times the
    tensor's size, where entries that collide are lost.
    """
    indices_K = _drawn(numel // 4, STRAWMAN_DENSITY)
    found = place(indices_K, PARTS, memory / STRAWMAN_DENSITY, 1)
    return {
        "name": f"strawman, memory of {memory:g} tensors",
        "figure": "strawman",
        "memory": memory / STRAWMAN_DENSITY,
        "num_hashes": 1,
        "fraction_written_serially": found.serial_share,
        "tries_an_entry": found.tries,
        "words_read_an_entry": memory / STRAWMAN_DENSITY,
    }


def claims(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """The claims of sections 3.2 and 5.3 about algorithm 1, beside the rows."""
    by_memory = {number(row, "memory"): row for row in rows if row["figure"] == "16a"}
    by_hashes = {
        number(row, "num_hashes"): row for row in rows if row["figure"] == "16b"
    }
    lost = [row for row in rows if row["figure"] == "strawman"]
    return (
        *_memory_claims(by_memory),
        *_hash_claims(by_hashes),
        *([_strawman_claim(lost)] if lost else []),
        _bytes_claim(),
        _seconds_claim(by_hashes.get(BEST_HASHES)),
    )


def _serial(row: Row) -> float:
    return number(row, "fraction_written_serially")


def _memory_claims(by_memory: dict[float, Row]) -> list[Claim]:
    """The claims of figure 16a; empty unless the memories of the paper were tried."""
    if not {1.0, 2.0, 4.0} <= by_memory.keys():
        return []
    one, two, four = (by_memory[memory] for memory in (1.0, 2.0, 4.0))
    fewer = _serial(one) > 3 * _serial(two)
    gained = _serial(two) - _serial(four)
    read = number(four, "words_read_an_entry")
    return [
        Claim(
            "from r_1 = |G| d to 2 |G| d the cost falls notably, as less is written "
            "serially (from 2 to 4 it rises, as more memory has to be read)",
            "section 5.3, figure 16a",
            f"written serially: {100 * _serial(one):.1f} %, {100 * _serial(two):.2f} % "
            f"and {100 * _serial(four):.2f} %; from 2 to 4 that is {100 * gained:.1f} "
            f"% of the entries less for {read / 2:.1f} more words read an entry; "
            "notably: to less than a third",
            fewer,
            "" if fewer else "more memory saves few serial writes here",
        )
    ]


def _hash_claims(by_hashes: dict[float, Row]) -> list[Claim]:
    """The claims of figure 16b; empty unless all numbers of the paper were tried."""
    if not {1, 3, 4} <= by_hashes.keys():
        return []
    one, three, four = (by_hashes[count] for count in (1, 3, 4))
    falls = _serial(one) > _serial(three) > _serial(four)
    few = _serial(four) < COLLISIONS
    return [
        Claim(
            "more hash functions lower the cost, as less is written serially (from k = "
            "1 to 3; 3 and 4 cost much the same)",
            "section 5.3, figure 16b",
            f"written serially: {100 * _serial(one):.1f} %, "
            f"{100 * _serial(three):.2f} % and "
            f"{100 * _serial(four):.2f} %, after {number(one, 'tries_an_entry'):.2f}, "
            f"{number(three, 'tries_an_entry'):.2f} and "
            f"{number(four, 'tries_an_entry'):.2f} tries",
            falls,
            "" if falls else "more hash functions place no more entries here",
        ),
        Claim(
            "with four hash functions less than 1 % collide",
            "section 3.2",
            f"{100 * _serial(four):.2f} % with r_1 = 2 |G| d",
            few,
            ""
            if few
            else "the last entries find half of the memory full: placed one by one, "
            "1 / 80 of all "
            "fail four times (the integral of x^4 from 0 to 1/2, over 1/2)",
        ),
    ]


def _strawman_claim(lost: Sequence[Row]) -> Claim:
    """The strawman's claim: one hash function loses 1 - (1 - exp(-x)) / x of the
    entries at a load of x.
    """
    pairs = list(zip(lost, STRAWMAN, strict=True))
    agrees = all(abs(_serial(row) - paper) < 0.01 for row, (_, paper) in pairs)
    loads = (0.1, 0.4)
    expected = ", ".join(f"{100 * (1 - (1 - exp(-x)) / x):.1f} % at {x}" for x in loads)
    return Claim(
        "one hash into a memory as large as a tensor of 10 % density loses 17.5 %, "
        "into one four times as large 4.8 %",
        "section 3.2, appendix A",
        "; ".join(f"{100 * _serial(row):.1f} %" for row, _ in pairs),
        agrees,
        ""
        if agrees
        else "1 - (1 - exp(-x)) / x of the entries are lost at a load of x: "
        f"{expected}. The "
        "paper's two are those of memories of a quarter of the tensor and of the whole",
    )


def _bytes_claim() -> Claim:
    sizes = {
        name: (1 + SERIAL_SHARE) * BEST_MEMORY * numel * density * 4
        for name, (numel, density) in LARGEST.items()
    }
    shown = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in sizes.items())
    return Claim(
        "the memory of algorithm 1 is less than 150 MB for all models",
        "section 3.2",
        f"{shown} with r_1 = 2 |G| d in all; if each of 16 parts had that, 16 "
        "times as much",
        None,
        "arithmetic on figures that the paper prints",
    )


def _seconds_claim(row: Row | None) -> Claim:
    says = (
        "hashing DeepFM's embedding of 214 million elements at 5.2 % takes around 6 "
        "ms on a V100"
    )
    if row is None or "gpu_s" not in row:
        return Claim(says, "section 5.3", "not measured: no GPU", None)
    seconds = number(row, "gpu_s")
    device = str(row["gpu"])
    ours = f"{1e3 * seconds:.1f} ms on {device}"
    if PAPER_GPU not in device:
        return Claim(
            says, "section 5.3", ours, None, f"another GPU than the paper's {PAPER_GPU}"
        )
    why = "from the list of indices to parts of indices and values, all launches"
    return effect(says, "section 5.3", ours, seconds / PAPER_S, 1.0, why)


def draw16(rows: Sequence[Row], path: Path) -> Path:
    """Draws both panels: the shares written serially over r_1 and over k."""
    panels = {
        "k = 3": {
            "": [
                (number(r, "memory"), _serial(r)) for r in rows if r["figure"] == "16a"
            ]
        },
        "r_1 = 2 |G| d": {
            "": [
                (number(r, "num_hashes"), _serial(r))
                for r in rows
                if r["figure"] == "16b"
            ]
        },
    }
    return curves.draw_panels(
        panels,
        path,
        title="Entries that algorithm 1 writes serially",
        x_label="r_1 over entries, and number of hash functions",
        y_label="share of the entries",
    )
