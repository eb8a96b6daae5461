"""ZEN's figures in small, on made-up captures: what the tests of all of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from papers.frame import Ask, Claim, Findings, Row
from papers.workloads.applications import text_lstm, text_transformer
from papers.zen import balance as zen_balance
from papers.zen import formats as zen_formats
from papers.zen import hashing as zen_hashing
from papers.zen import losses as zen_losses
from papers.zen import schemes as zen_schemes
from papers.zen import sparsity as zen_sparsity
from papers.zen import training as zen_training
from papers.zen.captured_rank import SCHEMES
from papers.zen.captures import Capture
from papers.zen.training_model import step_row

RANKS = 32
MODELS = ("lstm", "transformer")


def made(name: str, num_units: int, width: int, kept: int) -> Capture:
    """Zipf's law over the units: low numbers are in every rank's gradient, high ones in few."""
    random = np.random.default_rng(0)
    weights = 1 / np.arange(1, num_units + 1)
    units = tuple(
        np.sort(random.choice(num_units, kept, replace=False, p=weights / weights.sum())).astype(
            np.int32
        )
        for _ in range(RANKS)
    )
    return Capture(name, "made up", num_units, width, units)


TASKS = (
    partial(text_lstm, vocabulary=200, embedding=8, hidden=8, num_held_out=8),
    partial(text_transformer, vocabulary=200, width=8, num_held_out=8),
)
LOSSES = tuple(replace(part, task=task) for part, task in zip(zen_losses.PARTS, TASKS, strict=True))
"""Figure 18's two halves, each on a model of a few thousand elements."""

SMALL: dict[str, Callable[[Ask], Findings]] = {
    "figure2a": lambda asked: zen_sparsity.figure2a(asked, MODELS),
    "figure2b": lambda asked: zen_sparsity.figure2b(asked, MODELS),
    "figure3a": lambda asked: zen_sparsity.figure3a(asked, MODELS),
    "figure3b": lambda asked: zen_sparsity.figure3b(asked, MODELS),
    "figure8": lambda asked: zen_schemes.figure8(asked, MODELS, (4, 32)),
    "theorem2": lambda asked: zen_balance.theorem2(asked, MODELS, (4, 16), numel=2**16),
    "figure16": lambda asked: zen_hashing.figure16(asked, numel=200_000),
    "figure17a": lambda asked: zen_formats.figure17a(
        asked, (0.01, 0.05, 0.4, 0.6, 0.95), MODELS, numel=2**14
    ),
    "figure18": lambda asked: zen_losses.figure18(asked, LOSSES, num_steps=40),
}


def trained(asked: Ask, part: zen_training.Part) -> tuple[list[Row], bool]:
    """A row as a measurement on two hosts gives it."""
    step_s = {scheme: 2.0 - 0.1 * at for at, scheme in enumerate(zen_training.SCHEMES)}
    return [step_row("measured", "lstm", 2, step_s, 0.5)], True


for _name in zen_training.PARTS:
    SMALL[_name] = partial(zen_training.figure, name=_name, run=trained)

ALL = (*SMALL, "figure15", "figure17b")


def by_name(found: Findings) -> dict[str, Row]:
    return {str(row["name"]): row for row in found.rows}


def claim_of(found: tuple[Claim, ...], words: str) -> Claim:
    (one,) = [claim for claim in found if words in claim.says]
    return one


def speed_rows(shaped: bool = True, **changed: float) -> tuple[Row, ...]:
    """Rows as the benchmark gives them, for one model."""
    speedups = dict.fromkeys(SCHEMES, 1.0) | {"dense": 1.0, "zen_in_coo": 6.0, "zen_paper": 7.0}
    return tuple(
        {
            "name": f"lstm, {scheme}",
            "tensor": "lstm",
            "scheme": scheme,
            "num_hosts": 16,
            "link_bytes_per_s": 1e6 if shaped else None,
            "speedup_vs_dense": value,
            "busiest_bytes": 1000 / value / (2 if value > 1 else 1) if shaped else None,
        }
        for scheme, value in (speedups | changed).items()
    )
