"""Figure 15 of ZEN: communication on shaped links, every scheme in turn in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from gradwire.contract.units import format_rate
from gradwire_bench.micro.sparse_rank import PAPER as ZEN
from gradwire_bench.report import bars

from ..frame import Ask, Claim, Findings, Row, effect
from .captured import CapturedBench, run
from .captured_rank import SCHEMES
from .captures import MODELS, Capture, captured, present, stem
from .sparsity import findings
from .values import number

PLACE = "section 5.2, figure 15"
MBIT = 1e6 / 8
SHOWN = {
    "dense": "AllReduce",
    "allgather_sparse": "AGsparse",
    "sparcml": "SparCML",
    "omnireduce": "OmniReduce",
    "sparse_ps": "Sparse PS",
    "sparse_ps_broadcast": "Sparse PS with broadcast",
    "zen_in_coo": "ZEN in COO",
    "zen_paper": "ZEN",
    "zen_rows": "ZEN, whole rows",
    "zen": "ZEN, Elias-Fano",
}
MACHINES = 16
"""The machines of figures 15 and 17b in the paper; on fewer, gains cannot be
compared.
"""
BASELINES = ("allgather_sparse", "sparcml", "omnireduce", "sparse_ps")
PAPER_ZEN = {
    "lstm": (6.77, "LSTM"),
    "deepfm": (2.10, "DeepFM"),
    "transformer": (3.51, "Gemma2-2B"),
}
PAPER_OMNIREDUCE = 1.58
PAPER_OVER = {"sparcml": 2.82, "omnireduce": 5.16}
PAPER_MOST = 5.09
UNPRINTED = frozenset({"tensor", "scheme", "num_hosts", "link_bytes_per_s", "numel"})


@dataclass(frozen=True)
class Links:
    """The links that are measured on, and the number of repeats."""

    hosts: int
    rate_bytes_per_s: float
    repeats: int
    most_gpus: int = 8
    """The most gradients that a host adds up before it sends the sum."""


FULL = Links(16, 100 * MBIT, 3)
QUICK = Links(8, 200 * MBIT, 2, 4)
GPUS = {"lstm": 8, "deepfm": 8, "transformer": 1}
"""The gradients of a host, as in the paper. Its machines have 8 GPUs, which together
hold one replica of a large model (tensor parallelism).
"""


def figure15(
    ask: Ask, models: Sequence[str] = MODELS, links: Links | None = None
) -> Findings:
    """The seconds of every scheme on shaped links, and its speedup over the
    all-reduce.
    """
    links = links or (QUICK if ask.quick else FULL)
    rows = measure(ask, present(models), links, SCHEMES)
    notes = (
        f"{links.hosts} hosts with links of {format_rate(links.rate_bytes_per_s)}; "
        "busiest is what the interface counted on the busier side of the busiest link, "
        "floor that over the rate",
    )
    return findings(rows, claims15(rows), models, notes, complete=is_shaped(rows))


def measure(
    ask: Ask, models: Sequence[str], links: Links, schemes: Sequence[str]
) -> tuple[Row, ...]:
    """The rows of ``captured``, from captures kept in the folder or from fresh ones."""
    with TemporaryDirectory(prefix="gradwire-") as temporary:
        paths = []
        for done, model in ask.each(models):
            ask.report(0.5 * done, f"capturing {model}")
            paths.append(Path(temporary) / f"{stem(model)}.npz")
            num_gpus = min(GPUS[model], links.most_gpus)
            found = captured(ask, model, links.hosts * num_gpus)
            machines(found, links.hosts, num_gpus).save(paths[-1])
        bench = CapturedBench(
            paths=tuple(paths),
            hosts=links.hosts,
            rate_bytes_per_s=links.rate_bytes_per_s,
            repeats=links.repeats,
            schemes=tuple(schemes),
        )
        return tuple(run(bench, lambda done, what: ask.report(0.5 + 0.5 * done, what)))


def machines(found: Capture, hosts: int, num_gpus: int) -> Capture:
    """The capture of hosts each of which adds up the gradients of ``num_gpus``
    ranks.
    """
    groups = [
        found.units[host * num_gpus : (host + 1) * num_gpus] for host in range(hosts)
    ]
    return replace(
        found, units=tuple(np.unique(np.concatenate(group)) for group in groups)
    )


def is_shaped(rows: Sequence[Row]) -> bool:
    """Whether links had a rate; without one nothing can be compared with the paper."""
    return all(row["link_bytes_per_s"] is not None for row in rows)


@dataclass(frozen=True)
class Gain:
    """The speedup of a scheme over the all-reduce for one model: measured, and by bytes
    alone.
    """

    measured: float
    by_bytes: float

    def over(self, other: Gain) -> Gain:
        """The gain of this scheme over another one."""
        return Gain(self.measured / other.measured, self.by_bytes / other.by_bytes)


Gains = Mapping[str, Mapping[str, Gain]]
"""Gains by model and scheme."""


def gains(rows: Sequence[Row]) -> Gains:
    """The gains in the rows of one run.

    Where bytes are not known, the gain by bytes is 1.
    """
    found: dict[str, dict[str, Gain]] = {}
    dense = {
        row["tensor"]: row["busiest_bytes"] for row in rows if row["scheme"] == "dense"
    }
    for row in rows:
        bytes_of = dense[row["tensor"]], row["busiest_bytes"]
        known = all(isinstance(one, (int, float)) for one in bytes_of)
        by_bytes = float(str(bytes_of[0])) / float(str(bytes_of[1])) if known else 1.0
        own = found.setdefault(str(row["tensor"]), {})
        own[str(row["scheme"])] = Gain(number(row, "speedup_vs_dense"), by_bytes)
    return found


def claims15(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """The claims of section 5.2 and the abstract about communication, beside the
    rows.
    """
    if not is_shaped(rows):
        says = (
            "ZEN communicates 2.10 to 6.77 times as fast as AllReduce with 16 machines"
        )
        return (Claim(says, PLACE, "not measured: links are not shaped", None),)
    found = gains(rows)
    figures = (
        *(
            _zen_claim(model, found[model][ZEN])
            for model in PAPER_ZEN
            if model in found
        ),
        _omnireduce_claim(found),
        *(_over_claim(found, scheme) for scheme in PAPER_OVER),
        _most_claim(found),
    )
    return (*of_as_many(figures, rows), _slower_claim(found))


def of_as_many(claims: Sequence[Claim], rows: Sequence[Row]) -> tuple[Claim, ...]:
    """The claims; on fewer hosts than the paper's they neither agree nor disagree."""
    fewer = {number(row, "num_hosts") for row in rows} - {MACHINES}
    if not fewer:
        return tuple(claims)
    why = (
        f"measured on {min(fewer):.0f} hosts, the paper's figure is of {MACHINES} "
        "machines"
    )
    return tuple(replace(one, agrees=None, why=why) for one in claims)


def faster(says: str, place: str, in_words: str, ours: Gain, paper: float) -> Claim:
    """A printed number of times as fast beside ours: what agrees is a quarter of the
    gain over 1.

    Where ours differs the reason is bytes, or other work.
    """
    if ours.measured > paper:
        why = (
            f"more than printed, by bytes alone {ours.by_bytes:.2f}: sparsity is of "
            "other models"
        )
    elif ours.by_bytes < paper:
        why = (
            f"the bytes alone allow {ours.by_bytes:.2f}: how dense gradients and sums "
            "are decides, and the models here are not the paper's"
        )
    else:
        why = (
            f"by bytes alone it would be {ours.by_bytes:.2f}; of a message of a few "
            "megabytes, rounds, telling of sizes and the work of all hosts on this "
            "machine's cores take a larger part"
        )
    return effect(says, place, in_words, ours.measured - 1, paper - 1, why)


def _zen_claim(model: str, ours: Gain) -> Claim:
    paper, name = PAPER_ZEN[model]
    says = (
        f"ZEN communicates {paper:.2f} times as fast as AllReduce for {name} with 16 "
        "machines"
    )
    in_words = (
        f"{ours.measured:.2f} times for the {model}, by bytes alone {ours.by_bytes:.2f}"
    )
    return faster(says, PLACE, in_words, ours, paper)


def _omnireduce_claim(found: Gains) -> Claim:
    """The most that OmniReduce gains, for the model where it gains most."""
    own = {model: gains["omnireduce"] for model, gains in found.items()}
    says = f"OmniReduce is up to {PAPER_OMNIREDUCE} times as fast as AllReduce"
    in_words = ", ".join(f"{model}: {gain.measured:.2f}" for model, gain in own.items())
    best = max(own.values(), key=lambda gain: gain.measured)
    return faster(says, PLACE, in_words, best, PAPER_OMNIREDUCE)


def _slower_claim(found: Gains) -> Claim:
    slower = [
        f"{SHOWN[scheme]} for the {model} ({own[scheme].measured:.2f})"
        for model, own in found.items()
        for scheme in ("allgather_sparse", "sparse_ps", "sparcml")
        if own[scheme].measured < 1
    ]
    return Claim(
        "AGsparse, Sparse PS and SparCML can be slower than AllReduce",
        PLACE,
        ", ".join(slower) or "none is",
        bool(slower),
        ""
        if slower
        else "too few gradients are in a sum here; figure 8 shows from where on",
    )


def _best_over(found: Gains, scheme: str) -> Gain:
    """ZEN's gain over a scheme, for the model where it gains most."""
    return max(
        (own[ZEN].over(own[scheme]) for own in found.values()),
        key=lambda gain: gain.measured,
    )


def _over_claim(found: Gains, scheme: str) -> Claim:
    ours = _best_over(found, scheme)
    paper = PAPER_OVER[scheme]
    says = f"ZEN is up to {paper} times as fast as {SHOWN[scheme]}"
    return faster(says, PLACE, f"up to {ours.measured:.2f} times", ours, paper)


def _most_claim(found: Gains) -> Claim:
    ours = {scheme: _best_over(found, scheme) for scheme in BASELINES}
    best = max(ours, key=lambda scheme: ours[scheme].measured)
    least = min(
        own[ZEN].measured / max(own[scheme].measured for scheme in BASELINES)
        for own in found.values()
    )
    says = f"ZEN communicates up to {PAPER_MOST} times as fast as the state of the art"
    in_words = (
        f"up to {ours[best].measured:.2f} times as fast as {SHOWN[best]}; at least "
        f"{least:.2f} times as fast as the best of all for a model"
    )
    return faster(says, "abstract", in_words, ours[best], PAPER_MOST)


def draw15(rows: Sequence[Row], path: Path) -> Path:
    """Draws bars of the speedups, with a panel for each model."""
    found = gains(rows)
    schemes = list(
        dict.fromkeys(str(row["scheme"]) for row in rows if row["scheme"] != "dense")
    )
    drawn: list[Row] = [
        {
            "name": SHOWN[scheme],
            **{
                f"speedup_{model}": own[scheme].measured
                for model, own in found.items()
                if scheme in own
            },
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
