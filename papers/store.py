"""run: measures the figures that are asked for and keeps each as soon as it is there.

One JSON file holds everything, so a run that was cut short goes on where it ended: a
figure in it that was measured by the same version, as quickly or as fully as now asked
for, is not measured again.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradwire.errors import InvalidSetting, UnknownName
from gradwire.version import __version__

from .frame import Ask, Claim, Figure, Findings, Report, Reproduction
from .whole import write_whole

SCHEMA = 1
KEPT = "kept"
"""The folder, beside tables and pictures, for data that figures keep for each other."""
ENTRY = frozenset({"rows", "claims", "notes", "complete", "quick", "version"})
"""The keys of each figure's entry in the file."""


@dataclass(frozen=True)
class Done:
    """A figure with its findings; ``kept`` if an earlier run measured it."""

    figure: Figure
    findings: Findings
    kept: bool


def chosen(name: str, paper: Reproduction, wanted: Sequence[str]) -> list[Figure]:
    """The figures of these names in the paper's order, all of them if none is named.

    Raises ``UnknownName``, which lists the names there are.
    """
    known = tuple(figure.name for figure in paper.figures)
    for one in wanted:
        if one not in known:
            raise UnknownName(f"figure of {name}", one, known)
    return [figure for figure in paper.figures if not wanted or figure.name in wanted]


def run(
    name: str,
    paper: Reproduction,
    wanted: Sequence[str],
    path: Path,
    *,
    quick: bool,
    fresh: bool,
    report: Report,
) -> Iterator[Done]:
    """Yields the figures one by one, each after it was written to ``path``.

    ``report`` is told which fraction of all figures is done. Raises ``InvalidSetting``
    for a file that is not of this reproduction, before anything is measured.
    """
    figures = chosen(name, paper, wanted)
    stored = _read(path, name)
    kept = path.with_suffix("") / KEPT
    if fresh:
        shutil.rmtree(kept, ignore_errors=True)
    for place, figure in enumerate(figures):
        part = _part(report, figure.name, place, len(figures))
        entry = None if fresh else stored.get(figure.name)
        if entry is not None and _counts(entry, quick):
            part(1.0, "measured before")
            yield Done(figure, _findings(entry), kept=True)
            continue
        earlier = {
            other: _findings(one)
            for other, one in stored.items()
            if _counts(one, quick)
        }
        findings = figure.measure(Ask(quick, part, earlier, kept))
        stored[figure.name] = _entry(findings, quick)
        _write(path, name, paper, stored)
        part(1.0, "done")
        yield Done(figure, findings, kept=False)


def document(name: str, paper: Reproduction, done: Sequence[Done]) -> dict[str, object]:
    """The JSON of a reproduction, which ``--json`` prints and the file holds.

    It has plain values only, with null for a figure that is not finite.
    """
    figures = {one.figure.name: _entry(one.findings, None) for one in done}
    return _document(name, paper, figures)


def _part(
    report: Report, figure: str, place: int, total: int
) -> Callable[[float, str], None]:
    return lambda fraction, what: report(
        (place + fraction) / total, f"{figure}: {what}"
    )


def _counts(entry: dict[str, Any], quick: bool) -> bool:
    """Whether a stored figure need not be measured again."""
    same = (entry["quick"], entry["version"]) == (quick, __version__)
    return same and bool(entry["complete"])


def _entry(findings: Findings, quick: bool | None) -> dict[str, Any]:
    kept: dict[str, Any] = _plain(asdict(findings))
    return kept if quick is None else {**kept, "quick": quick, "version": __version__}


def _findings(entry: dict[str, Any]) -> Findings:
    return Findings(
        rows=tuple(entry["rows"]),
        claims=tuple(Claim(**claim) for claim in entry["claims"]),
        notes=tuple(entry["notes"]),
        complete=entry["complete"],
    )


def _document(
    name: str, paper: Reproduction, figures: dict[str, Any]
) -> dict[str, object]:
    return {
        "schema_version": SCHEMA,
        "reproduction": name,
        "paper": paper.paper,
        "assumptions": list(paper.assumptions),
        "figures": figures,
    }


def _write(path: Path, name: str, paper: Reproduction, stored: dict[str, Any]) -> None:
    text = json.dumps(_document(name, paper, stored), indent=1, allow_nan=False)
    write_whole(path, f"{text}\n".encode())


def _read(path: Path, name: str) -> dict[str, Any]:
    """The figures that the file holds; empty if there is no file."""
    if not path.exists():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        figures: dict[str, Any] = stored["figures"]
        same = (stored["schema_version"], stored["reproduction"]) == (SCHEMA, name)
        same = same and all(set(entry) >= ENTRY for entry in figures.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        same = False
    if not same:
        raise InvalidSetting(
            f"{path} is not a file of gradwire reproduce {name} (schema {SCHEMA}); "
            "give another --out, or take it away"
        )
    return figures


def _plain(value: Any) -> Any:
    """A nested value with lists for tuples, and None for figures that are not
    finite.
    """
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
