"""Figure 18 of ZEN: the loss of every step is the same whichever scheme carries the
gradients.

Training is real, in one process that stands for all ranks; the schemes are run by the
local driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from gradwire.collective.allgather_sparse import allgather_sparse
from gradwire.collective.allreduce import allreduce
from gradwire.collective.zen import zen
from gradwire.compress.none import none
from gradwire.compress.nonzero import nonzero
from gradwire.contract import Exchange
from gradwire.exchange.error_feedback import with_error_feedback
from gradwire.exchange.pair import pair
from gradwire_bench.report import curves
from gradwire_bench.workloads.task import TrainingTask
from gradwire_bench.workloads.train import History, train
from gradwire_lab.compress.dgc import dgc

from ..frame import Ask, Claim, Findings, Row
from ..workloads.applications import text_lstm, text_transformer
from .captures import DENSITY
from .hashing import strawman

RANKS = 4
STEPS = 120
QUICK_STEPS = 12
POINTS = "losses"
"""The key of a row's curve: the loss of each step, in the JSON file and the picture
only.
"""
UNPRINTED = frozenset({POINTS})
NEAR = 1e-3
"""The share of a loss by which sums in another order may make it differ, step after
step.
"""


@dataclass(frozen=True)
class Part:
    """One half of the figure: a task, the paper's scheme to compare with, and ZEN."""

    name: str
    says: str
    task: Callable[[], TrainingTask]
    exchanges: dict[str, Exchange]
    is_same: bool = True
    """Whether losses are the same; else they go apart, as gradients are lost."""


PARTS = (
    Part(
        "natural",
        "with natural sparsity, accuracy by iterations is that of training with "
        "all-reduce",
        partial(text_lstm, vocabulary=5_000, hidden=64),
        {
            "all_reduce": pair(none(), allreduce()),
            "zen": pair(nonzero(), zen(formats="paper")),
        },
    ),
    Part(
        "strawman",
        "appendix A's strawman loses gradients, so training with it goes apart",
        partial(text_lstm, vocabulary=5_000, hidden=64),
        {
            "all_reduce": pair(none(), allreduce()),
            "strawman": pair(nonzero(), strawman()),
        },
        is_same=False,
    ),
    Part(
        "sparsified",
        "ZEN and AGsparse have identical losses by iterations under DGC of 5 %",
        partial(text_transformer, vocabulary=2_000, width=64),
        {
            "agsparse": with_error_feedback(
                pair(dgc(density=DENSITY), allgather_sparse())
            ),
            "zen": with_error_feedback(
                pair(dgc(density=DENSITY), zen(formats="paper"))
            ),
        },
    ),
)


def figure18(
    ask: Ask, parts: Sequence[Part] = PARTS, num_steps: int | None = None
) -> Findings:
    """Losses of every step under each scheme, and how far apart they are at most."""
    num_steps = num_steps or (QUICK_STEPS if ask.quick else STEPS)
    rows: list[Row] = []
    claims = []
    for done, part in ask.each(parts):
        found = {}
        for place, (name, exchange) in enumerate(part.exchanges.items()):
            start = done + place / len(part.exchanges) / len(parts)
            ask.report(start, f"{part.name}: {num_steps} steps with {name}")
            found[name] = train(
                part.task(), exchange, world=RANKS, num_steps=num_steps, num_scores=1
            )
        own = [_row(part, name, one) for name, one in found.items()]
        rows += own
        claims.append(_claim(part, [one.losses for one in found.values()]))
    return Findings(
        tuple(rows), tuple(claims), tuple(part.task().description for part in parts)
    )


def _row(part: Part, name: str, found: History) -> Row:
    return {
        "name": name,
        "sparsity": part.name,
        "num_ranks": RANKS,
        "num_steps": len(found.losses),
        "first_loss": found.losses[0],
        "last_loss": found.losses[-1],
        "score": found.scores[-1][1],
        "sent_bytes": sum(found.sent_bytes) / len(found.sent_bytes),
        POINTS: found.losses,
    }


def _claim(part: Part, losses: Sequence[Sequence[float]]) -> Claim:
    """Each scheme against the one before it, step by step."""
    apart = max(
        abs(one - other) / abs(other)
        for before, after in pairwise(losses)
        for other, one in zip(before, after, strict=True)
    )
    same = sum(
        one == other
        for before, after in pairwise(losses)
        for other, one in zip(before, after, strict=True)
    )
    agrees = (apart <= NEAR) == part.is_same
    ours = (
        f"losses of {len(losses[0])} steps differ by at most {apart:.2g} of "
        "themselves, where "
        f"{NEAR:g} counts as rounding; {same} of them are equal to the last bit"
    )
    why = "sums in another order round otherwise, and training goes apart from there"
    if not part.is_same:
        why = "what is lost changes no loss by more than rounding does here"
    return Claim(
        part.says, "section 5.3, figure 18", ours, agrees, "" if agrees else why
    )


def draw18(rows: Sequence[Row], path: Path) -> Path:
    """A panel for each kind of sparsity, a line for each scheme."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        losses = row[POINTS]
        assert isinstance(losses, (list, tuple))
        panel = panels.setdefault(str(row["sparsity"]), {})
        panel[str(row["name"])] = [
            (step + 1.0, float(loss)) for step, loss in enumerate(losses)
        ]
    return curves.draw_panels(
        panels, path, title="Losses by scheme", x_label="step", y_label="loss (nats)"
    )
