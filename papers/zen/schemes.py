"""Figure 8 of ZEN: each scheme's time over that of an all-reduce, for 4 to 128 ranks.

Bytes are counted from the captured index sets (``volumes``), as section 2.4 counts
them. Beside them are the predictions of the planner's formulas for the same sparsity,
on links without latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradwire.exchange.sparse_schemes import SchemeInputs, schemes, zen_cost
from gradwire.kernels.sparse.permutation import Permutation
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.sparsity import TensorSparsity
from gradwire_bench.report import curves

from ..frame import Ask, Claim, Findings, Row
from .captures import MODELS, Capture, captured, present
from .sparsity import findings, ranks_of, sparsity
from .values import number
from .volumes import busiest_bytes, dense_bytes, grown, rows_bytes

RANKS = (4, 8, 16, 32, 64, 128)
SHOWN = {
    "allreduce": "all-reduce",
    "agsparse": "AGsparse",
    "sparcml": "SparCML",
    "omnireduce": "OmniReduce",
    "sparse_ps": "sparse PS",
    "broadcast_in_turn": "sparse PS with broadcast, one after another",
    "sparse_ps_broadcast": "sparse PS with broadcast, all at once",
    "balanced": "Balanced Parallelism",
    "without_index": "Balanced Parallelism without index",
    "zen": "ZEN, smallest format",
    "rows": "ZEN, whole rows",
}
"""The names of schemes by the keys of their times. Beyond the paper's figure are the
sparse PS in all forms, of which appendix B.1 speaks, and the last two.
"""
RIVALS = ("sparse_ps", "broadcast_in_turn", "sparse_ps_broadcast")
"""The schemes that lemma 1 holds against Balanced Parallelism by name."""
EXISTING = ("agsparse", "sparcml", "omnireduce")
FORMULAS = {
    "allgather_sparse": "agsparse",
    "omnireduce": "omnireduce",
    "sparse_ps": "sparse_ps",
    "sparse_ps_broadcast": "sparse_ps_broadcast",
    "zen": "zen",
}
"""The planner's schemes that count the same bytes as the paper's. Its SparCML is left
out, as it turns dense where that pays.
"""
NEARLY = 0.01
MARGINAL = 0.2
"""The share of an all-reduce's time below which a gain is marginal."""
SMALL = "lstm, one sentence"
SMALL_RANKS = 8
PAPER_DENSITY = 0.0247
UNPRINTED = frozenset({"model", *(f"predicted_{key}" for key in FORMULAS.values())})


def figure8(
    ask: Ask, models: Sequence[str] = MODELS, ranks: Sequence[int] | None = None
) -> Findings:
    """Each scheme's time over the all-reduce's, by model and number of ranks."""
    wanted = ranks or tuple(n for n in RANKS if n <= ranks_of(ask))
    rows: list[Row] = []
    for done, model in ask.each(present(models)):
        ask.report(done, model)
        rows += model_rows(ask, model, wanted)
    ask.report(1.0, SMALL)
    rows += model_rows(ask, SMALL, (SMALL_RANKS,))
    return findings(rows, claims8(rows), models, (_formula_note(rows),))


def model_rows(ask: Ask, model: str, ranks: Sequence[int]) -> list[Row]:
    """A row for each number of ranks, which are always the first ranks of the
    capture.
    """
    most = max(ranks)
    found = captured(ask, model, most)
    tensor = sparsity(ask, model, most).tensors[0]
    sets = found.elements(most)
    sizes = grown(sets, found.numel)
    places = Permutation(found.numel).places
    rows = []
    for num_ranks in ranks:
        counted = busiest_bytes(sets[:num_ranks], found.numel, places, sizes)
        if found.width > 1:
            counted["rows"] = rows_bytes(found, num_ranks)
        counted["densification"] = tensor.units.gamma(num_ranks)
        rows.append(_row(model, num_ranks, found, counted, tensor))
    return rows


def _row(
    model: str,
    num_ranks: int,
    found: Capture,
    counted: dict[str, float],
    tensor: TensorSparsity,
) -> Row:
    dense = counted["allreduce"]
    return {
        "name": f"{model}, {num_ranks} ranks",
        "model": model,
        "num_ranks": num_ranks,
        "fraction_density": found.density,
        "densification": counted["densification"],
        **{
            key: counted[key] / dense
            for key in SHOWN
            if key in counted and key != "allreduce"
        },
        **_predicted(found.numel, num_ranks, tensor),
    }


def _predicted(numel: int, num_ranks: int, tensor: TensorSparsity) -> Row:
    """The planner's times for elements over the all-reduce's; ZEN takes the paper's
    formats.
    """
    rate = 1e9
    cluster = Cluster(num_ranks=num_ranks, rate_bytes_per_s=rate, hop_s=0.0)
    units = tensor.units.model_copy(update={"width": 1, "num_units": numel})
    at = SchemeInputs(numel=numel, units=units, blocks=tensor.blocks, cluster=cluster)
    dense_s = dense_bytes(numel, num_ranks) / rate
    others = [scheme for scheme in schemes().values() if scheme is not zen_cost]
    found = [zen_cost(at, "paper"), *(scheme(at) for scheme in others)]
    return {
        f"predicted_{FORMULAS[one.scheme]}": one.transfer_s / dense_s
        for one in found
        if one.scheme in FORMULAS
    }


def _formula_note(rows: Sequence[Row]) -> str:
    """A note on how far the planner's formulas are from the counts."""
    off = [
        (number(row, f"predicted_{key}") / number(row, key) - 1, key, str(row["name"]))
        for row in rows
        for key in FORMULAS.values()
    ]
    least = min(off)
    most = max(off)
    return (
        "the planner's formulas, which know densities, overlaps and skew but not the "
        f"sets, give {100 * least[0]:+.0f} % ({least[1]}, {least[2]}) to "
        f"{100 * most[0]:+.0f} % ({most[1]}, {most[2]}) of what is counted"
    )


def claims8(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """The claims of section 2.4, beside the rows."""
    large = [row for row in rows if row["model"] != SMALL]
    most = max(number(row, "num_ranks") for row in large)
    last = [row for row in large if row["num_ranks"] == most]
    small = next((row for row in rows if row["model"] == SMALL), None)
    return (
        _crossing(large),
        _existing(last),
        _lower(last),
        _omnireduce(large, last),
        _index(last),
        _lemma(rows),
        _small(small),
    )


def _crossing(rows: Sequence[Row]) -> Claim:
    """The claim about the number of ranks from which AGsparse is slower than an
    all-reduce.

    Its (n-1) 8 d M bytes exceed 8 (n-1)/n M from n = 1/d on: 40.5 for NMT's 2.47 %.
    """
    wrong = [
        str(row["name"])
        for row in rows
        if (number(row, "agsparse") > 1)
        != (number(row, "num_ranks") * number(row, "fraction_density") > 1)
        and abs(number(row, "agsparse") - 1) > 0.1
    ]
    crossings = {str(row["model"]): 1 / number(row, "fraction_density") for row in rows}
    ours = "; ".join(f"{model}: beyond {at:.0f}" for model, at in crossings.items())
    return Claim(
        "AGsparse grows linearly and is worse than AllReduce beyond 40 GPUs, which is "
        "1 / density of NMT's embedding",
        "section 2.4, figure 8",
        f"{ours}; 1 / density again",
        *(
            (False, f"1 / density is not where it crosses: {', '.join(wrong)}")
            if wrong
            else (
                None,
                "bytes counted as section 2.4 counts them cross at 1 / density "
                "by its sums",
            )
        ),
    )


def _times(row: Row, keys: Sequence[str]) -> str:
    return ", ".join(f"{SHOWN[key]} {number(row, key):.2f}" for key in keys)


def _verdict(last: Sequence[Row], agrees: bool, why: str) -> tuple[bool | None, str]:
    """A claim's ``agrees`` and ``why``; fewer than 128 ranks neither agree nor
    disagree.
    """
    if any(number(row, "num_ranks") < RANKS[-1] for row in last):
        return None, f"fewer than {RANKS[-1]} ranks"
    return agrees, "" if agrees else why


def _existing(last: Sequence[Row]) -> Claim:
    faster = [
        f"{row['model']} (density {100 * number(row, 'fraction_density'):.2g} %)"
        for row in last
        if any(number(row, key) < 1 - NEARLY for key in EXISTING)
    ]
    why = (
        f"some are still faster for {', '.join(faster)}: NMT's embedding has "
        f"{100 * PAPER_DENSITY:.2f} %, and what is sparser gets there with more ranks"
    )
    return Claim(
        "with 128 GPUs no existing scheme takes less than AllReduce",
        "section 2.4, figure 8",
        "; ".join(f"{row['name']}: {_times(row, EXISTING)}" for row in last),
        *_verdict(last, not faster, why),
    )


def _lower(last: Sequence[Row]) -> Claim:
    lower = {str(row["name"]): 1 - number(row, "balanced") for row in last}
    best = all(
        number(row, "balanced") < min(1.0, *(number(row, key) for key in EXISTING))
        for row in last
    )
    why = (
        "it is (1 + densification ratio) x density of an all-reduce: a sum that is "
        "denser than NMT's 61 % leaves less"
    )
    return Claim(
        "Balanced Parallelism takes less than AllReduce and all existing schemes with "
        "128 GPUs (36 % less than AllReduce for NMT's embedding)",
        "section 2.4, figure 8",
        "; ".join(f"{name}: {100 * share:.0f} % less" for name, share in lower.items()),
        *_verdict(last, best, why),
    )


def _omnireduce(rows: Sequence[Row], last: Sequence[Row]) -> Claim:
    fewest = min(number(row, "num_ranks") for row in rows)
    first = [row for row in rows if row["num_ranks"] == fewest]
    at_first = all(number(row, "omnireduce") < 1 for row in first)
    sparser = [row for row in last if number(row, "omnireduce") <= 1 - MARGINAL]
    shown = "; ".join(
        f"{row['name']}: {number(row, 'omnireduce'):.2f}" for row in (*first, *last)
    )
    why = (
        "; ".join(
            f"{row['name']}: a density of {100 * number(row, 'fraction_density'):.2g} "
            f"% times a ratio of {number(row, 'densification'):.1f} leaves blocks "
            "empty, where NMT's has none left"
            for row in sparser
        )
        or "no blocks are empty even on one rank"
    )
    return Claim(
        "OmniReduce outperforms AllReduce with few GPUs, and marginally with "
        "more than 64",
        "section 2.4, figure 8",
        shown,
        *_verdict(last, at_first and not sparser, why),
    )


def _index(last: Sequence[Row]) -> Claim:
    shares = [number(row, "balanced") / number(row, "without_index") for row in last]
    doubled = all(abs(share - 2) < 0.05 for share in shares)
    zen = ", ".join(
        f"{row['name']}: {number(row, 'zen') / number(row, 'without_index'):.2f}"
        for row in last
    )
    return Claim(
        "indices in COO double the time of Balanced Parallelism",
        "section 2.4, figure 8",
        f"x {min(shares):.2f} to {max(shares):.2f}; with the hash bitmap in the "
        f"pull: {zen}",
        *(
            (
                None,
                "counted: an index has as many bytes as a value, so it could "
                "not be otherwise",
            )
            if doubled
            else (False, "an index is as long as a value: parts must be uneven")
        ),
    )


def _lemma(rows: Sequence[Row]) -> Claim:
    """Lemma 1 for the schemes that appendix B.1 writes out, in every row."""
    better = [
        f"{SHOWN[key]} for {row['name']} "
        f"({number(row, key) / number(row, 'balanced'):.2f})"
        for row in rows
        for key in RIVALS
        if number(row, key) <= number(row, "balanced")
    ]
    ratios = {
        key: [number(row, key) / number(row, "balanced") for row in rows]
        for key in RIVALS
    }
    return Claim(
        "Balanced Parallelism always outperforms Sparse PS and Sparse PS with "
        "broadcast",
        "theorem 1, lemma 1 in appendix B.1",
        "; ".join(
            f"{SHOWN[key]} takes {min(found):.2f} to {max(found):.2f} times as long"
            for key, found in ratios.items()
        ),
        not better,
        f"not {', '.join(better)}: hashed parts are a little uneven, and a sum that is "
        "broadcast is not padded to the largest"
        if better
        else "",
    )


def _small(row: Row | None) -> Claim:
    says = (
        "at a batch of 1 and 8 GPUs SparCML takes less than AGsparse and than Balanced "
        "Parallelism (4 and 9 % less)"
    )
    place = "section 2.4"
    if row is None:
        return Claim(says, place, "not measured", None)
    than_ag = 1 - number(row, "sparcml") / number(row, "agsparse")
    than_bp = 1 - number(row, "sparcml") / number(row, "balanced")
    agrees = than_ag > 0 and than_bp > 0
    return Claim(
        says,
        place,
        f"{100 * than_ag:.0f} % and {100 * than_bp:.0f} % less, at a density of "
        f"{100 * number(row, 'fraction_density'):.2g} %",
        agrees,
        ""
        if agrees
        else "words that every sentence has are in all ranks' gradients, and SparCML "
        "receives them in each of its rounds: the densification ratio of 8 is "
        f"{number(row, 'densification'):.1f} here, and the paper's about 8",
    )


def draw8(rows: Sequence[Row], path: Path) -> Path:
    """Draws a panel for each model with a line for each scheme."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        if row["model"] == SMALL:
            continue
        panel = panels.setdefault(str(row["model"]), {})
        for key, shown in SHOWN.items():
            if key in row or key == "allreduce":
                time = 1.0 if key == "allreduce" else number(row, key)
                panel.setdefault(shown, []).append((number(row, "num_ranks"), time))
    return curves.draw_panels(
        panels,
        path,
        title="Communication time over that of an all-reduce",
        x_label="ranks",
        y_label="times an all-reduce",
        doubling=True,
    )
