"""What must hold of any figure of any paper, measured in small."""

from __future__ import annotations

from pathlib import Path

from papers import page
from papers.frame import Ask, Findings, Reproduction

PLACES = ("section", "table", "figure", "experiment", "insight", "theorem", "abstract")


def ask(folder: Path | None = None, **earlier: Findings) -> Ask:
    return Ask(quick=True, report=lambda fraction, what: None, earlier=earlier, folder=folder)


def law_of_figures(paper: str, name: str, found: Findings, folder: Path) -> None:
    """Claims stand somewhere, and say why where they differ; a picture is drawn where there is."""
    assert found.rows
    assert found.claims
    for claim in found.claims:
        assert claim.place.startswith(PLACES)
        assert claim.says
        assert claim.ours
        is_measured = not claim.ours.startswith("not measured")
        assert bool(claim.why) == (claim.agrees is not True) or not is_measured, claim
    reproduction: Reproduction = page(paper)
    draw = next(one.draw for one in reproduction.figures if one.name == name)
    if draw is not None:
        assert draw(found.rows, folder / "x.png").read_bytes().startswith(b"\x89PNG")
