"""Table 1 of DEFT: its words for each sparsifier beside words that follow from
measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from gradwire.compress.topk import topk
from gradwire.contract.registry import load
from gradwire_lab.compress.hardthreshold import hardthreshold
from gradwire_lab.compress.sidco import sidco

from ..frame import Ask, Claim, Findings, Row
from ..rows import mean, number
from ..workloads.kept import layer_sizes
from .runs import histories, one_thread, run_of
from .selection import Selected, cltk_s, deft_parts, encode_s
from .setting import LSTM, TUNED, Application, accumulated
from .speed import REPEATS, SELECTED

YES = "yes"
NO = "no"
SPARSIFIERS = ("topk", "cltk", TUNED, "sidco", "deft")
NEAR = 0.25
"""The share by which a density may differ from the one asked for, and of the selection
in which ranks may wait, before the answer is yes.
"""
GRADES = ((0.5, "very high"), (0.1, "low"), (0.01, "very low"))
"""Words for seconds by the share of Top-k's selection from which on they hold."""


def _answer(value: float) -> str:
    return YES if value > NEAR else NO


def _grade(share: float) -> str:
    """The first word that holds; "no" for less than all of them."""
    return next((word for least, word in GRADES if share >= least), NO)


@dataclass(frozen=True)
class Column:
    """A column of the table: its words in the paper, by sparsifier, and how ours
    follow.
    """

    key: str
    """The key of the rows' figure."""
    title: str
    paper: tuple[str, ...]
    word: Callable[[float], str]
    why: str
    """The reason why words may differ."""


COLUMNS = (
    Column(
        "built_up",
        "gradient build-up",
        (YES, NO, YES, YES, NO),
        _answer,
        "how much selections overlap depends on the model and on how many ranks "
        "there are",
    ),
    Column(
        "off_density",
        "unpredictable density",
        (YES, NO, YES, YES, NO),
        _answer,
        "of so few elements the least that a layer sends, and norms that differ, show",
    ),
    Column(
        "without_density",
        "hyperparameter tuning",
        (NO, NO, YES, NO, NO),
        _answer,
        "a sparsifier here has other settings than the paper's",
    ),
    Column(
        "fraction_idle",
        "worker idling",
        (NO, YES, NO, NO, NO),
        _answer,
        "layers are whole, and the ranks' bins differ in what selecting from "
        "them takes",
    ),
    Column(
        "cost_of_topk",
        "gradient selection cost",
        ("very high", "very high", "very low", "very low", "low"),
        _grade,
        "our Top-k reads all elements about once, as a threshold does: it sorts "
        "nothing, so what reads all of them takes about as long",
    ),
    Column(
        "overhead_of_topk",
        "additional overhead",
        (NO, NO, NO, "very high", "very low"),
        _grade,
        "our SIDCo fits a histogram that one pass counts; DEFT's norms take a pass "
        "over all elements, which the paper counts nowhere",
    ),
)


def table1(ask: Ask, app: Application = LSTM, repeats: int | None = None) -> Findings:
    """Densities from the trainings of figure 4 and two more, and seconds of one
    selection.
    """
    runs = [run_of(ask, app, name) for name in SPARSIFIERS]
    densities = {
        name: (mean(found.local), mean(found.actual))
        for name, found in zip(SPARSIFIERS, histories(ask, runs), strict=True)
    }
    world = app.ranks(ask.quick)
    task = app.make(**SELECTED[ask.quick])
    given = Selected(accumulated(task), layer_sizes(task), app.density)
    ask.report(1.0, "seconds of selections")
    with one_thread():
        seconds = _seconds(given, world, repeats or REPEATS[ask.quick])
    rows = [
        _row(name, app.density, *densities[name], *seconds[name])
        for name in SPARSIFIERS
    ]
    rows = [row | {"num_ranks": world} | _relative(row, rows[0]) for row in rows]
    most = GRADES[0][0]
    least = GRADES[-1][0]
    notes = (
        f'"yes" is more than {NEAR:.0%}; seconds are "very high" from {most:.0%} '
        "of Top-k's "
        f'selection on, "low" below that, "very low" below {GRADES[1][0]:.0%}, '
        '"no" below '
        f"{least:.0%}. Hard-threshold's threshold fits the first gradient",
        f"densities: {app.task(ask.quick).description}; seconds: {task.description}",
    )
    return Findings(
        tuple(rows), tuple(_claim(column, rows) for column in COLUMNS), notes
    )


def _seconds(
    given: Selected, world: int, repeats: int
) -> dict[str, tuple[float, float, float, float]]:
    """Selection, its mean over ranks, overhead, and of the overhead norms, by
    sparsifier.
    """
    magnitudes_N = given.grad_N.abs()
    kept = max(1, round(given.density * magnitudes_N.numel()))
    threshold = float(magnitudes_N.topk(kept).values[-1])
    whole_s = encode_s(topk(density=given.density), given, repeats)
    passing_s = encode_s(hardthreshold(threshold=threshold), given, repeats)
    fitting_s = encode_s(sidco(density=given.density), given, repeats)
    leads_s, idles_s = cltk_s(given, world, repeats)
    parts = deft_parts(given, world, repeats)
    return {
        "topk": (whole_s, whole_s, 0.0, 0.0),
        "cltk": (leads_s, (leads_s + (world - 1) * idles_s) / world, 0.0, 0.0),
        TUNED: (passing_s, passing_s, 0.0, 0.0),
        "sidco": (passing_s, passing_s, max(0.0, fitting_s - passing_s), 0.0),
        "deft": (
            parts.take_s + parts.layers_s,
            parts.take_s + parts.mean_layers_s,
            parts.norms_s + parts.partition_s,
            parts.norms_s,
        ),
    }


def _row(
    name: str,
    asked: float,
    local: float,
    actual: float,
    selection_s: float,
    mean_selection_s: float,
    overhead_s: float,
    norms_s: float,
) -> Row:
    algorithm = load("compress", name)
    names = {field.name for field in fields(algorithm)}
    # A rank of shared support takes its share of what is asked for, any other one all
    # of it.
    own = asked if algorithm.traits.shared_support else local
    return {
        "name": name,
        "asked_density": asked,
        "local_density": local,
        "actual_density": actual,
        "built_up": actual / own - 1,
        "off_density": abs(actual / asked - 1),
        "without_density": float("density" not in names),
        "fraction_idle": 1 - mean_selection_s / selection_s,
        "selection_s": selection_s,
        "overhead_s": overhead_s,
        "norms_s": norms_s,
    }


def _relative(row: Row, whole: Row) -> Row:
    """The seconds of a row over those of Top-k's selection."""
    selection_s = number(whole, "selection_s")
    return {
        "cost_of_topk": number(row, "selection_s") / selection_s,
        "overhead_of_topk": number(row, "overhead_s") / selection_s,
    }


def _claim(column: Column, rows: Sequence[Row]) -> Claim:
    """A column's words against those that follow from the rows."""
    found = {str(row["name"]): number(row, column.key) for row in rows}
    paper = dict(zip(SPARSIFIERS, column.paper, strict=True))
    unlike = [name for name in SPARSIFIERS if column.word(found[name]) != paper[name]]
    return Claim(
        f"{column.title}: "
        f"{', '.join(f'{name} {word}' for name, word in paper.items())}",
        "table 1",
        ", ".join(
            f"{name} {column.word(value)} ({value:.2f})"
            for name, value in found.items()
        ),
        not unlike,
        f"not {' and '.join(unlike)}: {column.why}" if unlike else "",
    )
