"""Figures 7 and 9 of DEFT: where a step's time goes, and selection over the number of
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import log, log2
from pathlib import Path

import torch
from torch import Tensor

from gradwire.collective.steps.shares import pack
from gradwire.compress.topk import topk
from gradwire_bench.report import bars, curves
from gradwire_lab.compress.deft import (
    ALLOCATIONS,
    layer_k,
    loads,
    partition_of,
    printed_work,
    two_stage,
    work,
)

from ..frame import Ask, Claim, Findings, Report, Row
from ..rows import number
from ..workloads.kept import layer_sizes
from .breakdown import Breakdown, run
from .breakdown_rank import PARTS
from .runs import one_thread
from .selection import Parts, Selected, deft_parts, encode_s
from .setting import LSTM, Application, accumulated

METHODS = ("topk", "cltk", "deft")
HOSTS = {False: 8, True: 4}
"""Real ranks of figure 7, by ``quick``; 16 in the paper."""
STEPS = {False: 30, True: 8}
RATE = 125_000_000.0
SIZES = {
    False: {"vocabulary": 20_000, "embedding": 128, "hidden": 256, "batch": 4},
    True: {"vocabulary": 5_000, "embedding": 128, "hidden": 256, "batch": 2},
}
"""Sizes of figure 7's language model, by ``quick``. It is larger than in the trainings:
selecting from a million parameters takes less time than Python's calls.
"""
SELECTED = {
    False: {"vocabulary": 30_000, "embedding": 256, "hidden": 512, "batch": 4},
    True: {"vocabulary": 10_000, "embedding": 256, "hidden": 512, "batch": 2},
}
COUNTS = (2, 4, 8, 16)
REPEATS = {False: 9, True: 5}
NEGLIGIBLE = 0.02
"""The share of a step below which a time is negligible."""
SIGNIFICANT = 0.5
"""The share of another time up to which a time is significantly less."""


Bench = Callable[[Breakdown, Report], list[Row]]


def figure7(ask: Ask, measure: Bench = run) -> Findings:
    """A step of the language model by real ranks, by parts, for each sparsifier."""
    bench = Breakdown(
        task=LSTM.make.__name__,
        sizes=SIZES[ask.quick],
        methods={"dense": ("none", {})}
        | {name: (name, {"density": LSTM.density}) for name in METHODS},
        hosts=HOSTS[ask.quick],
        rate_bytes_per_s=RATE,
        num_steps=STEPS[ask.quick],
    )
    rows = measure(bench, ask.report)
    by_name = {str(row["name"]): row for row in rows}
    where = "shaped links" if rows[0]["link_bytes_per_s"] else "plain loopback"
    notes = (
        f"{bench.hosts} processes of one machine on {where}: they share its "
        "cores, so all that is "
        "computed takes longer than alone, the more the more ranks compute at once",
    )
    return Findings(tuple(rows), _breakdown_claims(by_name), notes)


def _breakdown_claims(rows: dict[str, Row]) -> tuple[Claim, ...]:
    place = "section 5.3, figure 7"
    alone_s, norms_s, communication_s = (
        {name: number(rows[name], key) for name in METHODS}
        for key in ("selection_s", "norms_s", "communication_s")
    )
    selection_s = {name: alone_s[name] + norms_s[name] for name in METHODS}
    others_s = min(selection_s["topk"], selection_s["cltk"])
    faster = selection_s["deft"] <= SIGNIFICANT * others_s
    less = communication_s["deft"] < min(
        communication_s["topk"], communication_s["cltk"]
    )
    share, of_norms = (
        number(rows["deft"], key) / number(rows["deft"], "step_s")
        for key in ("partition_s", "norms_s")
    )

    def shown(values: dict[str, float]) -> str:
        return ", ".join(
            f"{name} {1e3 * seconds:.2f} ms" for name, seconds in values.items()
        )

    return (
        Claim(
            "DEFT needs significantly less time for selection than CLT-k and Top-k",
            place,
            f"{shown(selection_s)}, of which DEFT's norms {1e3 * norms_s['deft']:.2f} "
            f"ms; significantly: at most {SIGNIFICANT:g} times as much",
            faster,
            "" if faster else _why_long(alone_s["deft"], norms_s["deft"], others_s),
        ),
        Claim(
            "DEFT's communication takes less time than CLT-k's and Top-k's",
            place,
            shown(communication_s),
            less,
            ""
            if less
            else "DEFT makes three small collectives before that of the values, "
            "Top-k none; here volumes are small and communication is mostly latency "
            "and waiting for slower ranks",
        ),
        Claim(
            "the overhead of DEFT's partitioning is negligible",
            place,
            f"{100 * share:.2f} % of a step, and {100 * of_norms:.2f} % for norms, "
            f"which count as selection; negligible: at most {100 * NEGLIGIBLE:g} %",
            share <= NEGLIGIBLE,
            "" if share <= NEGLIGIBLE else "a step of so small a model is short itself",
        ),
    )


def _why_long(alone_s: float, norms_s: float, others_s: float) -> str:
    """The reason why DEFT's selection is not significantly faster: its norms, or
    Python.
    """
    if alone_s <= SIGNIFICANT * others_s:
        return (
            f"its norms take {norms_s / (alone_s + norms_s):.0%} of it, a pass over "
            "all elements that the paper counts nowhere: without them it would be"
        )
    return "at this size a selection takes about as long as Python's calls"


def draw7(rows: Sequence[Row], path: Path) -> Path:
    """Draws a bar for each method and part."""
    keys = [f"{part}_s" for part in PARTS]
    return bars.draw(
        rows, path, keys=keys, title="A step of the language model, by parts"
    )


def figure9(
    ask: Ask,
    counts: Sequence[int] = COUNTS,
    app: Application = LSTM,
    repeats: int | None = None,
) -> Findings:
    """Seconds of DEFT's layer-wise selection on the rank with most to do, against Top-k
    of all.

    The norms of all layers, which every rank takes before it selects in its own, are a
    pass of their own in these seconds; the paper's equations leave them out. Ranks run
    one after another in one process and one thread, each on the same gradient, so that
    they do not get in each other's way.
    """
    task = app.make(**SELECTED[ask.quick])
    repeats = repeats or REPEATS[ask.quick]
    given = Selected(accumulated(task), layer_sizes(task), app.density)
    with one_thread():
        ask.report(0.1, "Top-k of the whole")
        whole_s = encode_s(topk(density=given.density), given, repeats)
        rows = [
            _selection_row(
                "1 rank", 1, whole_s, Parts(0.0, 0.0, whole_s, whole_s, 0.0), given
            )
        ]
        for done, world in ask.each(counts):
            ask.report(0.1 + 0.9 * done, f"DEFT on {world} ranks")
            parts_s = deft_parts(given, world, repeats)
            printed_s = deft_parts(given, world, repeats, "paper")
            rows.append(
                _selection_row(f"{world} ranks", world, whole_s, parts_s, given)
                | _as_printed(given, world, whole_s, printed_s)
            )
    return Findings(tuple(rows), _speedup_claims(rows), (task.description,))


def _selection_row(
    name: str, world: int, whole_s: float, parts_s: Parts, given: Selected
) -> Row:
    return {
        "name": name,
        "num_ranks": world,
        "numel": given.grad_N.numel(),
        "norms_s": parts_s.norms_s,
        "take_s": parts_s.take_s,
        "layers_s": parts_s.layers_s,
        "selection_s": parts_s.all_s,
        "fraction_norms": parts_s.norms_s / parts_s.all_s,
        "speedup": whole_s / parts_s.all_s,
        "speedup_without_norms": whole_s / (parts_s.take_s + parts_s.layers_s),
        **_expected(given, world),
        "speedup_linear": float(world),
    }


def _as_printed(
    given: Selected, world: int, whole_s: float, parts_s: Parts
) -> dict[str, float | None]:
    """The figures of algorithms 3 and 4 as printed beside ours: seconds, k, and the
    busiest rank's elements.
    """
    k = max(1, round(given.density * given.grad_N.numel()))
    partition = partition_of(tuple(given.layers), world)
    sizes_L = partition.sizes_L
    found: dict[str, float | None] = {}
    for name, rules in ALLOCATIONS.items():
        k_L = rules.layer_k(_norms_of(given.grad_N, sizes_L), sizes_L, k)
        owners_L = rules.owners(partition, k_L, world, 0)
        read = [0.0, *loads(work(sizes_L, k_L), owners_L.tolist(), world + 1)]
        found |= {
            f"k_over_budget_{name}": int(k_L.sum()) / k,
            f"busiest_of_mean_{name}": max(read) * world / sum(read),
        }
    comparisons = printed_work(sizes_L, k_L)
    return {
        **found,
        "selection_printed_s": parts_s.all_s,
        "speedup_printed": whole_s / parts_s.all_s,
        "speedup_printed_by_equation_6": _ratio(
            given.grad_N.numel() * log(k), heaviest(comparisons, world)
        ),
    }


def _expected(given: Selected, world: int) -> dict[str, float | None]:
    """The speedups of equations 6 and 8 for algorithm 2's layers, and the one that
    counts the elements our implementation reads: all of them once for the norms.

    A speedup is None where ranks have so few elements to choose that the paper's
    logarithms are 0 or less.
    """
    grad_N = given.grad_N
    numel = given.grad_N.numel()
    k = max(1, round(given.density * numel))
    sizes_L = torch.tensor(two_stage(given.layers, world))
    k_L = _k_of(grad_N, sizes_L, k)
    comparisons = sizes_L * k_L.double().log2()
    [whole] = work(torch.tensor([numel]), torch.tensor([k]))
    parts = work(sizes_L, k_L)
    return {
        "speedup_by_equation_6": _ratio(
            numel * log2(k), heaviest(comparisons.tolist(), world)
        ),
        "speedup_by_equation_8": _ratio(
            numel * log2(k), numel / world * log2(k / world)
        ),
        "speedup_by_work": _ratio(whole, _norms(numel, world) + heaviest(parts, world)),
    }


def _norms(numel: int, world: int) -> int:
    """The number of elements read for norms; a rank that is alone needs none."""
    return numel if world > 1 else 0


def _ratio(whole: float, part: float) -> float | None:
    return whole / part if part > 0 else None


def heaviest(costs: Sequence[float], num_bins: int) -> float:
    """Equation 5, C(n): the largest load as algorithm 4 fills the bins."""
    return max(loads(costs, pack(costs, num_bins), num_bins))


def _k_of(grad_N: Tensor, sizes_L: Tensor, k: int) -> Tensor:
    """Algorithm 3 for layers of this gradient (int64)."""
    return layer_k(_norms_of(grad_N, sizes_L), sizes_L, k)


def _norms_of(grad_N: Tensor, sizes_L: Tensor) -> Tensor:
    parts = torch.split(grad_N, sizes_L.tolist())
    return torch.stack([part.norm().double() for part in parts])


def _speedup_claims(rows: Sequence[Row]) -> tuple[Claim, ...]:
    place = "section 5.4, figure 9"
    several = [row for row in rows if number(row, "num_ranks") > 1]

    def shown(key: str) -> str:
        known = (row for row in several if row[key] is not None)
        return ", ".join(f"{row['num_ranks']}: {number(row, key):.2f}" for row in known)

    measured = all(
        number(row, "speedup") >= number(row, "num_ranks") for row in several
    )
    keys = ("speedup_by_equation_6", "speedup_by_equation_8", "num_ranks")
    bounded = all(
        number(row, above) >= number(row, below)
        for row in several
        for above, below in pairwise(keys)
        if row[above] is not None and row[below] is not None
    )
    return (
        Claim(
            "the speedup of DEFT's selection over Top-k is higher than linear",
            place,
            f"by ranks {shown('speedup')}, without the norms "
            f"{shown('speedup_without_norms')}; by "
            f"what is read {shown('speedup_by_work')}; with algorithms 3 and 4 as "
            f"printed {shown('speedup_printed')}, whose busiest rank reads "
            f"{shown('busiest_of_mean_paper')} times the mean (ours "
            f"{shown('busiest_of_mean_level')})",
            measured,
            ""
            if measured
            else "every rank takes the norms of all layers, a pass that gets no "
            f"shorter with more ranks ({shown('fraction_norms')} of these seconds) and "
            "that equations 6 to 9 leave out. And our Top-k costs one pass and hardly "
            "more, whatever k is: where the paper's costs n log k, a smaller k saves "
            "nothing here, a pass over a part is 1/n of it at best, and what a call "
            "costs whatever its size shrinks with no number of ranks",
        ),
        Claim(
            "f(n) >= f_trivial(n) >= n: the allocation costs no more than one "
            "layer a rank would",
            "section 4.4, equation 9",
            f"f(n) {shown('speedup_by_equation_6')}; f_trivial "
            f"{shown('speedup_by_equation_8')}",
            bounded,
            ""
            if bounded
            else "not so in general: layers are whole, and the k of layers add up "
            "otherwise than k / n each",
        ),
    )


def draw9(rows: Sequence[Row], path: Path) -> Path:
    """Speedup over ranks: measured, by the equations, linear."""
    titles = {
        "speedup": "measured, norms included",
        "speedup_without_norms": "measured, without the norms",
        "speedup_by_equation_6": "f(n), equation 6",
        "speedup_by_equation_8": "f_trivial(n), equation 8",
        "speedup_by_work": "by what our selection reads",
        "speedup_linear": "linear",
    }
    series = {
        title: [
            (number(row, "num_ranks"), number(row, key))
            for row in rows
            if row[key] is not None
        ]
        for key, title in titles.items()
    }
    return curves.draw_panels(
        {"": series},
        path,
        title="DEFT's selection over Top-k",
        x_label="ranks",
        y_label="speedup",
        doubling=True,
    )
