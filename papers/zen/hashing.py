"""Figure 16 of ZEN: the cost of algorithm 1 over its memory and its number of hash
functions, beside the sort that gradwire uses and the strawman of appendix A. As a
collective, ``strawman`` trains in figure 18.

``zen(partition="hash")`` runs the kernel that is measured here: on a GPU where there is
one, and on the CPU's threads. The causes of its cost are counted too: entries that all
hash functions fail to place are written one after another, and the memory is read
through at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from gradwire.collective.steps.push_pull import Cut
from gradwire.collective.zen import zen
from gradwire.kernels.libraries import has_triton
from gradwire.kernels.sparse.entries import Entries, Parts
from gradwire.kernels.sparse.partition import partition
from gradwire.kernels.sparse.permutation import Permutation
from gradwire_bench.report import curves
from gradwire_lab.kernels.hashing import Hashed, HashMemory, hash_partition

from ..frame import Ask, Claim, Findings, Row, effect
from .values import number

NUMEL = 20_000_000
QUICK_NUMEL = 2_000_000
GPU_NUMEL = 214_000_000
REPEATS = 5
"""The elements of DeepFM's embedding, where there is a GPU, and the repeats of each
measurement.
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


def figure16(
    ask: Ask,
    memories: Sequence[float] = MEMORIES,
    hashes: Sequence[int] = HASHES,
    numel: int | None = None,
) -> Findings:
    """Algorithm 1 over r_1 (a) and over k (b), the sort by place that does the same,
    and what appendix A's strawman loses.
    """
    has_gpu = torch.cuda.is_available() and has_triton()
    if numel is None:
        numel = QUICK_NUMEL if ask.quick else GPU_NUMEL if has_gpu else NUMEL
    jobs = [("16a", memory, BEST_HASHES) for memory in memories]
    jobs += [("16b", BEST_MEMORY, count) for count in hashes]
    entries = drawn(numel, DENSITY, "cuda" if has_gpu else "cpu")
    permutation = Permutation(numel)
    rows: list[Row] = []
    for done, (figure, memory, count) in ask.each(jobs):
        ask.report(done, f"r_1 = {memory:g} entries, k = {count}")
        rows.append(_row(figure, entries, permutation, HashMemory(count, memory)))
    rows.append(_sorted_row(entries, permutation))
    rows.append(_universal_row(entries, numel))
    rows += [_strawman_row(numel // 4, memory) for memory, _ in STRAWMAN]
    return Findings(tuple(rows), claims(rows), (_beside(rows),), complete=has_gpu)


def drawn(numel: int, density: float, device: str = "cpu") -> Entries:
    """Entries of elements drawn uniformly, by ascending index."""
    drawn_N = torch.rand(numel, generator=torch.Generator().manual_seed(0))
    indices_K = (drawn_N < density).nonzero()[:, 0].int().to(device)
    return Entries(indices_K, torch.ones(indices_K.numel(), device=device))


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """The median seconds of a partition, all launches included."""
    seconds = []
    for _ in range(REPEATS + 1):
        start_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start_s)
    return median(seconds[1:])  # the first compiles


def _row(
    figure: str, entries: Entries, permutation: Permutation, memory: HashMemory
) -> Row:
    def hashed() -> Hashed:
        return hash_partition(
            entries, permutation.numel, PARTS, permutation, memory=memory
        )

    seconds = seconds_of(hashed, entries.values.device)
    found = hashed()
    num = max(1, entries.num)
    cells = memory.parallel_cells(num, PARTS) + memory.serial_cells(num, PARTS)
    return {
        "name": f"{figure}: r_1 = {memory.parallel:g} |G| d, k = {memory.rehashes}",
        "figure": figure,
        "memory": memory.parallel,
        "num_hashes": memory.rehashes,
        "fraction_written_serially": (found.serial + found.fallback) / num,
        "fraction_beyond_serial": found.fallback / num,
        "words_read_an_entry": PARTS * cells / num,
        **_measured(entries, seconds, 4 * PARTS * cells, found.parts),
    }


def _measured(entries: Entries, seconds: float, memory: int, parts: Parts) -> Row:
    """The entries that rows of algorithm 1 and of the sort have in common."""
    device = entries.values.device
    is_gpu = device.type == "cuda"
    return {
        "kernel_s": seconds,
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
        "memory_bytes": memory,
        "push_imbalance": PARTS * max(parts.counts_W) / max(1, entries.num),
    }


def _sorted_row(entries: Entries, permutation: Permutation) -> Row:
    """The row of the library's partition: two lists of a place and a number each."""

    def grouped() -> Parts:
        return partition(entries, permutation.numel, PARTS, permutation)

    seconds = seconds_of(grouped, entries.values.device)
    memory = 2 * 8 * entries.num
    return {
        "name": "sort by place",
        "figure": "sort",
        **_measured(entries, seconds, memory, grouped()),
    }


def _universal_row(entries: Entries, numel: int) -> Row:
    """The row of the paper's h_0: MurmurHash needs the index set of each server."""
    part_K = murmur(entries.indices_K, 0) % PARTS
    largest = int(part_K.bincount(minlength=PARTS).max())
    return {
        "name": "MurmurHash as h_0",
        "figure": "h_0",
        "memory_bytes": 4 * numel,
        "push_imbalance": PARTS * largest / max(1, entries.num),
    }


def murmur(indices_K: Tensor, number: int) -> Tensor:
    """Hash function number ``number``: MurmurHash3's 32-bit finaliser of the index and
    a seed.
    """
    mask = 0xFFFFFFFF
    x_K = (indices_K.long() + number * 0x9E3779B9) & mask
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x_K = (x_K ^ (x_K >> shift)) * factor & mask
    return x_K ^ (x_K >> 16)


def algorithm_3(indices_K: Tensor, num_parts: int, room: int) -> list[Tensor]:
    """Appendix A's strawman: one hash function into ``room`` cells for each part.

    Returns the indices of each part that were not overwritten.
    """
    return extracted(hashed_once(indices_K, num_parts * room), num_parts)


def hashed_once(indices_K: Tensor, num_cells: int) -> Tensor:
    """Lines 2 to 7 of algorithm 3: indices in the cells of all parts.

    A cell holds index + 1, as the mark of an empty cell, 0, is an index.
    """
    table = torch.zeros(num_cells, dtype=torch.int32)
    table[murmur(indices_K, 1) * num_cells >> 32] = indices_K + 1
    return table


def extracted(table: Tensor, num_parts: int) -> list[Tensor]:
    """Lines 8 to 14 of algorithm 3: the indices of each part."""
    return [part[part.nonzero()[:, 0]] - 1 for part in table.chunk(num_parts)]


@dataclass(frozen=True, kw_only=True)
class strawman(zen):
    """The system with appendix A's strawman in place of algorithm 1.

    Of the elements that share a cell all but one are lost. Those that are left go to
    the ranks that ``zen`` names.

    Args:
        memory: The cells of all parts together over the gradient's units.
    """

    memory: float = 1.0

    def grouped(self, cut: Cut, units: Entries, room: Entries) -> Parts:
        world = len(cut.parts)
        cells = max(1, round(self.memory * cut.num_units / world))
        kept = torch.cat(algorithm_3(units.indices_K, world, cells))
        is_kept_K = torch.isin(units.indices_K, kept)
        values_Kw = units.values.view(-1, units.width)[is_kept_K]
        left = Entries(units.indices_K[is_kept_K], values_Kw.reshape(-1), units.width)
        return partition(left, cut.num_units, world, cut.permutation)


def _strawman_row(numel: int, memory: float) -> Row:
    """The row of algorithm 3, with a memory of ``memory`` times the tensor's size."""
    indices_K = drawn(numel, STRAWMAN_DENSITY).indices_K
    room = round(memory * numel / PARTS)

    def hashed() -> list[Tensor]:
        return algorithm_3(indices_K, PARTS, room)

    def extract() -> list[Tensor]:
        return extracted(table, PARTS)

    table = hashed_once(indices_K, PARTS * room)
    kept = sum(part.numel() for part in extract())
    return {
        "name": f"algorithm 3, memory of {memory:g} tensors",
        "figure": "strawman",
        "memory": memory / STRAWMAN_DENSITY,
        "num_hashes": 1,
        "fraction_lost": 1 - kept / indices_K.numel(),
        "words_read_an_entry": memory / STRAWMAN_DENSITY,
        "kernel_s": seconds_of(hashed, indices_K.device),
        "extract_s": seconds_of(extract, indices_K.device),
        "device": "cpu",
        "memory_bytes": 4 * PARTS * room,
    }


def _beside(rows: Sequence[Row]) -> str:
    """Algorithm 1 beside the sort, in words."""
    by_figure = {str(row["figure"]): row for row in rows}
    by_sort = by_figure["sort"]
    paper = [row for row in rows if row.get("memory") == BEST_MEMORY]
    fastest = min(number(row, "kernel_s") for row in paper)
    times = fastest / number(by_sort, "kernel_s")
    return (
        f"with r_1 = 2 |G| d algorithm 1 takes {times:.1f} times as long as the sort "
        f"by place on {by_sort['device']}; both have the same parts, and only the "
        "sort's ascend"
    )


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
        *([_strawman_claim(lost), _extraction_claim(lost)] if lost else []),
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
            f"% of the entries less for {read / 2:.1f} more words read an entry; in "
            f"{number(one, 'kernel_s'):.3g}, {number(two, 'kernel_s'):.3g} and "
            f"{number(four, 'kernel_s'):.3g} s; "
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
            f"{100 * _serial(four):.2f} %, in {number(one, 'kernel_s'):.3g}, "
            f"{number(three, 'kernel_s'):.3g} and {number(four, 'kernel_s'):.3g} s",
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
    agrees = all(
        abs(number(row, "fraction_lost") - paper) < 0.01 for row, (_, paper) in pairs
    )
    loads = (0.1, 0.4)
    expected = ", ".join(f"{100 * (1 - (1 - exp(-x)) / x):.1f} % at {x}" for x in loads)
    return Claim(
        "one hash into a memory as large as a tensor of 10 % density loses 17.5 %, "
        "into one four times as large 4.8 %",
        "section 3.2, appendix A",
        "; ".join(f"{100 * number(row, 'fraction_lost'):.1f} %" for row, _ in pairs),
        agrees,
        ""
        if agrees
        else "1 - (1 - exp(-x)) / x of the entries are lost at a load of x: "
        f"{expected}. The "
        "paper's two are those of memories of a quarter of the tensor and of the whole",
    )


def _extraction_claim(lost: Sequence[Row]) -> Claim:
    """The strawman's other claim: what saves gradients costs time."""
    one_s, four_s = (number(row, "extract_s") for row in lost)
    grows = four_s > 2 * one_s
    return Claim(
        "from a memory of four tensors indices are extracted in 41.8 ms, 40 % of an "
        "iteration: a memory that loses less takes longer to read",
        "section 3.2, appendix A",
        f"{1e3 * one_s:.1f} and {1e3 * four_s:.1f} ms from one tensor and from four",
        grows,
        "" if grows else "extraction takes no longer from more memory here",
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
    if row is None:
        return Claim(says, "section 5.3", "not measured", None)
    seconds = number(row, "kernel_s")
    device = str(row["device"])
    ours = f"{1e3 * seconds:.1f} ms on {device}"
    if PAPER_GPU not in device:
        return Claim(
            says,
            "section 5.3",
            ours,
            None,
            f"another device than the paper's {PAPER_GPU}",
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
