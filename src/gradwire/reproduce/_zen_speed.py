"""Figures 15 and 17b of ZEN: communication on shaped links, every scheme in turn in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ..bench.captured import CapturedBench, run
from ..bench.captured_rank import SCHEMES
from ..report import bars
from ..units import format_rate
from ._frame import Ask, Claim, Findings, Row
from ._zen_captures import captured, present, stem
from ._zen_sparsity import absent_notes
from ._zen_values import number

MBIT = 1e6 / 8
SHOWN = {
    "dense": "AllReduce",
    "allgather_sparse": "AGsparse",
    "sparcml": "SparCML",
    "omnireduce": "OmniReduce",
    "sparse_ps": "Sparse PS",
    "zen_in_coo": "ZEN in COO",
    "zen": "ZEN",
    "zen_rows": "ZEN, whole rows",
}
BASELINES = ("allgather_sparse", "sparcml", "omnireduce", "sparse_ps")
PAPER_ZEN = {"lstm": (6.77, "LSTM"), "deepfm": (2.10, "DeepFM"), "transformer": (3.51, "Gemma2-2B")}
PAPER_OMNIREDUCE = 1.58
PAPER_OVER = {"sparcml": 2.82, "omnireduce": 5.16}
PAPER_MOST = 5.09
PAPER_COO = {"lstm": (2.74, 0.13, "LSTM"), "transformer": (1.53, 0.34, "Llama3.2-3B")}
"""Training throughput over AllReduce's with COO, and what the hash bitmap adds: figure 17b."""
COMPUTING = 0.114 / (2 * 15 / 16 * 406e6 * 4 / 3.125e9)
"""The LSTM's computation over the all-reduce of its embedding: 114 ms (section 3.2), 25 Gbit/s."""
UNPRINTED = frozenset({"tensor", "scheme", "num_hosts", "link_bytes_per_s", "numel"})


@dataclass(frozen=True)
class Links:
    """On what is measured, and how often."""

    hosts: int
    rate_bytes_per_s: float
    repeats: int


FULL = Links(16, 100 * MBIT, 5)
QUICK = Links(8, 200 * MBIT, 2)


def figure15(ask: Ask, models: Sequence[str] | None = None, links: Links | None = None) -> Findings:
    """Seconds of every scheme on shaped links, and its speedup over the all-reduce."""
    links = links or (QUICK if ask.quick else FULL)
    rows = measure(ask, models or present(), links, SCHEMES)
    notes = (
        f"{links.hosts} hosts with links of {format_rate(links.rate_bytes_per_s)}; busiest is what "
        "the interface counted on the busier side of the busiest link, floor that over the rate",
        *absent_notes(),
    )
    return Findings(rows, claims15(rows), notes, complete=not absent_notes() and is_shaped(rows))


def measure(
    ask: Ask, models: Sequence[str], links: Links, schemes: Sequence[str]
) -> tuple[Row, ...]:
    """Rows of ``bench.captured``, of the captures kept in the folder or of fresh ones."""
    with TemporaryDirectory(prefix="gradwire-") as temporary:
        paths = []
        for done, model in ask.each(models):
            ask.report(0.5 * done, f"capturing {model}")
            paths.append(Path(temporary) / f"{stem(model)}.npz")
            captured(ask, model, links.hosts).save(paths[-1])
        bench = CapturedBench(
            paths=tuple(paths),
            hosts=links.hosts,
            rate_bytes_per_s=links.rate_bytes_per_s,
            repeats=links.repeats,
            schemes=tuple(schemes),
        )
        return tuple(run(bench, lambda done, what: ask.report(0.5 + 0.5 * done, what)))


def is_shaped(rows: Sequence[Row]) -> bool:
    """Whether links had a rate: without one there is nothing to compare with the paper."""
    return all(row["link_bytes_per_s"] is not None for row in rows)


Speeds = Mapping[str, Mapping[str, float]]
"""Speedups over the all-reduce by model and scheme."""


def speeds(rows: Sequence[Row]) -> Speeds:
    """Of the rows of one run."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(str(row["tensor"]), {})[str(row["scheme"])] = number(
            row, "speedup_vs_dense"
        )
    return found


def claims15(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """What section 5.2 and the abstract say of communication, beside the rows."""
    if not is_shaped(rows):
        says = "ZEN communicates 2.10 to 6.77 times as fast as AllReduce with 16 machines"
        return (Claim(says, "section 5.2, figure 15", "not measured: links are not shaped", None),)
    found = speeds(rows)
    return (
        *(_zen_claim(model, found[model]["zen"]) for model in PAPER_ZEN if model in found),
        _omnireduce_claim(found),
        _slower_claim(found),
        *(_over_claim(found, scheme) for scheme in PAPER_OVER),
        _most_claim(found),
    )


def _zen_claim(model: str, ours: float) -> Claim:
    paper, name = PAPER_ZEN[model]
    agrees = ours >= paper
    return Claim(
        f"ZEN communicates {paper:.2f} times as fast as AllReduce for {name} with 16 machines",
        "section 5.2, figure 15",
        f"{ours:.2f} times for the {model}",
        agrees,
        ""
        if agrees
        else "what travels is small here, milliseconds at this rate, and rounds, announcements and "
        "two cores for all hosts count beside it; floor is what the bytes alone take",
    )


def _omnireduce_claim(found: Speeds) -> Claim:
    by_model = {model: own["omnireduce"] for model, own in found.items()}
    most = max(by_model.values())
    agrees = most <= PAPER_OMNIREDUCE * 1.05
    return Claim(
        f"OmniReduce is up to {PAPER_OMNIREDUCE} times as fast as AllReduce",
        "section 5.2, figure 15",
        ", ".join(f"{model}: {value:.2f}" for model, value in by_model.items()),
        agrees,
        ""
        if agrees
        else "each machine of the paper sends the sum of its 8 GPUs, with fewer empty blocks than "
        "the single ranks have here",
    )


def _slower_claim(found: Speeds) -> Claim:
    slower = [
        f"{SHOWN[scheme]} for the {model} ({own[scheme]:.2f})"
        for model, own in found.items()
        for scheme in ("allgather_sparse", "sparse_ps", "sparcml")
        if own[scheme] < 1
    ]
    return Claim(
        "AGsparse, Sparse PS and SparCML can be slower than AllReduce",
        "section 5.2, figure 15",
        ", ".join(slower) or "none is",
        bool(slower),
        ""
        if slower
        else "single ranks, not machines of 8 GPUs, are what is here: figure 8 has the numbers of "
        "ranks from which they are slower",
    )


def _over(found: Speeds, scheme: str) -> float:
    """The most that ZEN is faster than a scheme, over models."""
    return max(own["zen"] / own[scheme] for own in found.values())


def _over_claim(found: Speeds, scheme: str) -> Claim:
    ours, paper = _over(found, scheme), PAPER_OVER[scheme]
    agrees = ours >= paper
    return Claim(
        f"ZEN is up to {paper} times as fast as {SHOWN[scheme]}",
        "section 5.2, figure 15",
        f"up to {ours:.2f} times",
        agrees,
        "" if agrees else WHY_LESS,
    )


WHY_LESS = (
    "the gain grows with ranks and with the density of the sum, and the paper's machines bring "
    "128 GPUs' gradients together; see figure 8 for more ranks"
)


def _most_claim(found: Speeds) -> Claim:
    ours = {scheme: _over(found, scheme) for scheme in BASELINES}
    best = max(ours, key=lambda scheme: ours[scheme])
    agrees = ours[best] >= PAPER_MOST
    least = min(own["zen"] / max(own[scheme] for scheme in BASELINES) for own in found.values())
    return Claim(
        f"ZEN communicates up to {PAPER_MOST} times as fast as the state of the art",
        "abstract",
        f"up to {ours[best]:.2f} times as fast as {SHOWN[best]}; at least {least:.2f} times as "
        "fast as the best of all for a model",
        agrees,
        "" if agrees else WHY_LESS,
    )


def draw15(rows: Sequence[Row], path: Path) -> Path:
    """Bars of the speedups, a panel a model."""
    found = speeds(rows)
    schemes = list(dict.fromkeys(str(row["scheme"]) for row in rows if row["scheme"] != "dense"))
    drawn: list[Row] = [
        {
            "name": SHOWN[scheme],
            **{f"speedup_{model}": own[scheme] for model, own in found.items() if scheme in own},
        }
        for scheme in schemes
    ]
    return bars.draw(
        drawn,
        path,
        keys=[f"speedup_{model}" for model in found],
        title="Speedup over an all-reduce",
        notes={f"speedup_{model}": model for model in found},
    )


def figure17b(
    ask: Ask, models: Sequence[str] | None = None, links: Links | None = None
) -> Findings:
    """What hashing gives, and what the hash bitmap adds: from figure 15's run where it is there."""
    links = links or (QUICK if ask.quick else FULL)
    before = ask.earlier.get("figure15")
    if before is not None and before.rows:
        measured: Sequence[Row] = before.rows
    else:
        schemes = ("sparse_ps", "zen_in_coo", "zen")
        measured = measure(ask, models or present(), links, schemes)
    rows = tuple(_row17b(model, own) for model, own in speeds(measured).items())
    shaped = is_shaped(measured)
    notes = (
        f"training throughput: the computation of a step takes {100 * COMPUTING:.0f} % of its "
        "all-reduce's time, as the paper's LSTM does; for other models it prints no computation",
        *absent_notes(),
    )
    claims = claims17b(rows) if shaped else ()
    return Findings(rows, claims, notes, complete=shaped and not absent_notes())


def _row17b(model: str, own: Mapping[str, float]) -> Row:
    row: Row = {
        "name": model,
        "speedup_ranges_in_coo": own["sparse_ps"],
        "speedup_hashed_in_coo": own["zen_in_coo"],
        "speedup_hash_bitmap": own["zen"],
        "fraction_gained": own["zen"] / own["zen_in_coo"] - 1,
    }
    if model == "lstm":
        row["speedup_of_training_in_coo"] = _training(own["zen_in_coo"])
        row["speedup_of_training_hash_bitmap"] = _training(own["zen"])
    return row


def _training(speedup: float) -> float:
    """Of a step whose computation takes ``COMPUTING`` of the all-reduce, nothing overlapped.

    >>> 1 < _training(2.0) < 2
    True
    """
    return (COMPUTING + 1) / (COMPUTING + 1 / speedup)


def claims17b(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """What section 5.3 says of training throughput, beside communication here."""
    by_name = {str(row["name"]): row for row in rows}
    return tuple(
        claim
        for model, paper in PAPER_COO.items()
        if model in by_name
        for claim in _both_claims(model, by_name[model], paper)
    )


def _both_claims(model: str, row: Row, paper: tuple[float, float, str]) -> list[Claim]:
    coo, adds, name = paper
    key = "speedup_of_training_in_coo" if "speedup_of_training_in_coo" in row else ""
    ours, gained = number(row, key or "speedup_hashed_in_coo"), number(row, "fraction_gained")
    what = "training" if key else "communication"
    return [
        Claim(
            f"{name} trains {coo} times as fast as with AllReduce when parts are hashed, in COO",
            "section 5.3, figure 17b",
            f"{what} of the {model}: {ours:.2f} times",
            ours >= coo,
            "" if ours >= coo else WHY_LESS,
        ),
        Claim(
            f"the hash bitmap then adds {100 * adds:.0f} % for {name}",
            "section 5.3, figure 17b",
            f"{100 * gained:+.0f} % in communication of the {model}",
            gained >= adds,
            "" if gained >= adds else WHY_NO_BITMAP,
        ),
    ]


WHY_NO_BITMAP = (
    "the bitmap is smaller than COO where more than 1 / 32 of a sum is non-zero, and what it saves "
    "of a sum here is milliseconds; the paper's sums are those of 128 GPUs"
)


def draw17b(rows: Sequence[Row], path: Path) -> Path:
    """Bars: ranges, hashed parts in COO, hash bitmap."""
    keys = ("speedup_ranges_in_coo", "speedup_hashed_in_coo", "speedup_hash_bitmap")
    return bars.draw(rows, path, keys=keys, title="Communication over an all-reduce's")
