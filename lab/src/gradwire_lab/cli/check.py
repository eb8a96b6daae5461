"""Hold an algorithm of your own to the laws: which law broke, on which input, what to
do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradwire.cli.report.output import AsJson, emit, progress
from gradwire.cli.report.table import Row

from ..planning.inputs import read_settings
from ._own import More, ProgramSettings, PromisedTraits, subjects_of

if TYPE_CHECKING:
    from gradwire.dsl.program import Program

    from ..laws.subjects import Subject, Verdict

app = typer.Typer()

HIDDEN = ("given", "found", "sentence", "remedy")
WIRE_NUMEL = 25_000_000


@app.command()
def check(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE[:NAME]",
            help="A Python file, one name of it, a .compll, a shipped name.",
        ),
    ],
    settings: ProgramSettings = None,
    trait: PromisedTraits = None,
    more: More = None,
    as_json: AsJson = False,
) -> None:
    """Hold an algorithm of your own to the laws: which law broke, on which input, what
    to do.

    FILE may define compressors, exchanges, collectives and planners; each is held to
    the laws of its kind. Exit code 1 if one breaks a law.
    """
    from gradwire.dsl import program

    from ..laws.subjects import NOT_TRIED

    rows: list[Row] = []
    notes: list[str] = []
    with progress("check") as advance:
        for algorithm in subjects_of(file, read_settings(settings or []), trait, more):
            advance(0, _name(algorithm))
            if isinstance(algorithm, program.Program):
                _try_out(algorithm)
            own_rows, tried = _checked(algorithm)
            rows += own_rows
            notes += [*_findings(own_rows), *tried]
    notes.append(f"not tried: {NOT_TRIED}")
    emit(
        "check",
        rows,
        as_json=as_json,
        title=f"gradwire check {file}",
        hidden=HIDDEN,
        notes=notes,
    )
    if any(row["verdict"] == "broken" for row in rows):
        raise typer.Exit(1)


def _try_out(codec: Program) -> None:
    """Raises ``InvalidSetting`` where a program cannot be traced, or is a text without
    decode.

    That is a mistake in the file, and no law is broken by it.
    """
    import torch

    from gradwire.contract.spec import TensorSpec

    grad_N = torch.ones(1)
    payload, _ = codec.encode(codec.init(TensorSpec("gradient", 1)), grad_N)
    codec.decode(payload, torch.empty(1))


def _checked(algorithm: Any) -> tuple[list[Row], list[str]]:
    """A row for each law that an algorithm is held to, and what was tried."""
    from ..laws import subjects

    name = _name(algorithm)
    subjects_held = subjects.held_to(algorithm)
    kind = subjects.kind_of(algorithm)
    rows: list[Row] = [
        {
            "name": name,
            "kind": kind,
            "law": verdict.law.__name__.removeprefix("law_"),
            "verdict": verdict.word,
            "num_inputs": verdict.num_inputs,
            "given": verdict.given,
            "found": verdict.found,
            "sentence": verdict.sentence,
            "remedy": verdict.remedy,
        }
        for verdict in _each_law_once(subjects_held)
    ]
    tried = dict.fromkeys(
        f"tried with {name}: {subject.tried}"
        for subject in subjects_held
        if subject.tried
    )
    return rows, [*_wire(algorithm), *tried]


def _each_law_once(subjects_held: Iterable[Subject]) -> Iterator[Verdict]:
    """Verdicts on one law with several companions as one: the first that is broken, or
    the sum.
    """
    from ..laws import subjects

    verdicts: dict[object, Verdict] = {}
    for subject in subjects_held:
        for verdict in subjects.check(subject):
            before = verdicts.get(verdict.law)
            if before is None:
                verdicts[verdict.law] = verdict
            elif not before.found:
                num_inputs = before.num_inputs + verdict.num_inputs
                verdicts[verdict.law] = subjects.Verdict(
                    verdict.law, num_inputs, verdict.given, verdict.found
                )
    yield from verdicts.values()


def _findings(rows: list[Row]) -> Iterator[str]:
    """A text for each finding: the law, the input, what to do; laws with one finding
    share it.
    """
    broken = [row for row in rows if row["verdict"] == "broken"]
    for fault in dict.fromkeys(row["found"] for row in broken):
        first, *others = [row for row in broken if row["found"] == fault]
        also = ""
        if others:
            also = f"\n  also    {', '.join(str(row['law']) for row in others)}"
        yield (
            f"{first['name']} breaks {first['law']}\n"
            f"  law     {first['sentence']}\n"
            f"  input   {first['given']}\n"
            f"  found   {first['found']}\n"
            f"  to do   {first['remedy']}{also}"
        )


def _name(algorithm: Any) -> str:
    if isinstance(algorithm, partial):
        settings = ", ".join(
            f"{name}={value!r}" for name, value in algorithm.keywords.items()
        )
        return f"{algorithm.func.__name__}({settings})"
    return algorithm.__name__ if hasattr(algorithm, "__name__") else repr(algorithm)


def _wire(algorithm: Any) -> list[str]:
    """A line on the bits that a compressor sends for an element; none for other
    algorithms.
    """
    from gradwire.contract import Compressor
    from gradwire.contract.spec import TensorSpec

    if not isinstance(algorithm, Compressor):
        return []
    size_bytes = algorithm.format(TensorSpec("", WIRE_NUMEL)).size_bytes
    most = "" if algorithm.traits.exact_size else "at most "
    return [
        f"{algorithm!r} sends {most}{8 * size_bytes / WIRE_NUMEL:.4g} bits a "
        "float32 element"
    ]
