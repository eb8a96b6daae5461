"""Figure 17b of ZEN: the gain by hashing, and the further gain by the hash bitmap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gradwire_bench.micro.sparse_rank import PAPER as ZEN
from gradwire_bench.report import bars

from ..frame import Ask, Claim, Findings, Row, effect
from .captures import MODELS, present
from .sparsity import findings
from .speed import (
    FULL,
    MACHINES,
    QUICK,
    Gain,
    Links,
    gains,
    is_shaped,
    measure,
    of_as_many,
)
from .values import number

PAPER_COO = {"lstm": (2.74, 0.13, "LSTM"), "transformer": (1.53, 0.34, "Llama3.2-3B")}
"""The training throughput over AllReduce's with COO, the share that the hash bitmap
adds, and the paper's model: figure 17b.
"""
LSTM_S = 0.114
"""The seconds of the LSTM's iteration on one GPU: section 3.2."""
COMPUTING = LSTM_S / (2 * 15 / 16 * 406e6 * 4 / 3.125e9)
"""The time of the LSTM's computation over that of the all-reduce of its
embedding at 25 Gbit/s."""


def figure17b(
    ask: Ask, models: Sequence[str] = MODELS, links: Links | None = None
) -> Findings:
    """The gains by hashing and by the hash bitmap, from figure 15's run if there was
    one.
    """
    links = links or (QUICK if ask.quick else FULL)
    before = ask.earlier.get("figure15")
    if before is not None and before.rows:
        measured: Sequence[Row] = before.rows
    else:
        schemes = ("sparse_ps", "zen_in_coo", ZEN)
        measured = measure(ask, present(models), links, schemes)
    hosts = max((number(row, "num_hosts") for row in measured), default=MACHINES)
    rows = tuple(
        {**_row17b(model, own), "num_hosts": round(hosts)}
        for model, own in gains(measured).items()
    )
    shaped = is_shaped(measured)
    notes = (
        f"training throughput: the computation of a step takes {100 * COMPUTING:.0f} % "
        "of its all-reduce's time, as the paper's LSTM does; for other models it "
        "prints no computation",
    )
    claims = claims17b(rows) if shaped else ()
    return findings(rows, claims, models, notes, complete=shaped)


def _row17b(model: str, own: Mapping[str, Gain]) -> Row:
    ranges = own["sparse_ps"]
    in_coo = own["zen_in_coo"]
    bitmap = own[ZEN]
    row: Row = {
        "name": model,
        "speedup_ranges_in_coo": ranges.measured,
        "speedup_hashed_in_coo": in_coo.measured,
        "speedup_hash_bitmap": bitmap.measured,
        "fraction_gained": bitmap.measured / in_coo.measured - 1,
        "fraction_gained_by_bytes": bitmap.by_bytes / in_coo.by_bytes - 1,
    }
    if model == "lstm":
        hashed = _training(in_coo.measured)
        all_of_it = _training(bitmap.measured)
        row["speedup_of_training_in_coo"] = hashed
        row["speedup_of_training_hash_bitmap"] = all_of_it
        row["fraction_gained_in_training"] = all_of_it / hashed - 1
    return row


def _training(speedup: float) -> float:
    """The speedup of training whose communication has this speedup.

    A step's computation takes ``COMPUTING`` of the all-reduce's time, and nothing
    overlaps.

    >>> 1 < _training(2.0) < 2
    True
    """
    return (COMPUTING + 1) / (COMPUTING + 1 / speedup)


def claims17b(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """The claims of section 5.3 about training throughput, for models in
    ``PAPER_COO``.
    """
    by_name = {str(row["name"]): row for row in rows}
    found = [
        claim
        for model, paper in PAPER_COO.items()
        if model in by_name
        for claim in _both_claims(model, by_name[model], paper)
    ]
    return of_as_many(found, rows)


def _both_claims(model: str, row: Row, paper: tuple[float, float, str]) -> list[Claim]:
    coo, adds, name = paper
    says = (
        f"{name} trains {coo} times as fast as with AllReduce when parts are "
        "hashed, in COO",
        f"the hash bitmap then adds {100 * adds:.0f} % for {name}",
    )
    place = "section 5.3, figure 17b"
    by_bytes = f"by bytes alone {100 * number(row, 'fraction_gained_by_bytes'):+.0f} %"
    if "fraction_gained_in_training" not in row:
        ours = (
            f"communication of the {model}: "
            f"{number(row, 'speedup_hashed_in_coo'):.2f} times",
            f"{100 * number(row, 'fraction_gained'):+.0f} % in communication of the "
            f"{model}, {by_bytes}",
        )
        return [
            Claim(*pair, None, WHY_UNLIKE)
            for pair in zip(says, (place,) * 2, ours, strict=True)
        ]
    speedup = number(row, "speedup_of_training_in_coo")
    gained = number(row, "fraction_gained_in_training")
    in_words = f"training of the {model}: {speedup:.2f} times"
    adds_in_words = (
        f"{100 * gained:+.0f} % in training of the {model}, in communication "
        f"{100 * number(row, 'fraction_gained'):+.0f} %, {by_bytes}"
    )
    why = WHY_MORE if speedup > coo else WHY_SLOW
    why_adds = WHY_MORE if gained > adds else WHY_NO_BITMAP
    return [
        effect(says[0], place, in_words, speedup - 1, coo - 1, why),
        effect(says[1], place, adds_in_words, gained, adds, why_adds),
    ]


WHY_UNLIKE = (
    "the paper's is of training, and it prints the computation of a step for the LSTM "
    "alone: communication is not held against it"
)
WHY_MORE = (
    "more than printed: the sparsity of gradients and sums is that of another model"
)
WHY_SLOW = (
    "messages of a few megabytes spend a larger part of their time in rounds "
    "and in work on this "
    "machine's cores than the paper's of gigabytes do; see the floor in figure 15"
)
WHY_NO_BITMAP = (
    "a bitmap is smaller than COO where more than 1 / 32 of a sum is non-zero, and "
    "saves up to half of the pull; what is not bytes is the same in both"
)


def draw17b(rows: Sequence[Row], path: Path) -> Path:
    """Draws bars for ranges, hashed parts in COO, and the hash bitmap."""
    keys = ("speedup_ranges_in_coo", "speedup_hashed_in_coo", "speedup_hash_bitmap")
    return bars.draw(rows, path, keys=keys, title="Communication over an all-reduce's")
