"""Pictures of the pages: each shows the figures of the table that it was drawn from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts import pictures


@pytest.mark.parametrize("name", ["choosing", "fastest", "fastest_far", "far", "hosts"])
def test_a_picture_shows_the_figures_of_its_table(name: str, tmp_path: Path) -> None:
    """Draw it anew where it does not: python -m scripts.pictures NAME."""
    pytest.importorskip("matplotlib")
    pictures.draw(name, tmp_path / "drawn.png")
    shown = pictures.digest_in(pictures.FOLDER / f"{name}.png")
    assert shown == pictures.digest_in(tmp_path / "drawn.png") is not None


def test_a_picture_of_other_figures_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    real = pictures.tables

    def others(text: str) -> list[Any]:
        return list(real(text.replace("| DDP | 25.5 |", "| DDP | 25.6 |")))

    monkeypatch.setattr(pictures, "tables", others)
    pictures.draw("fastest", tmp_path / "drawn.png")
    shown = pictures.digest_in(pictures.FOLDER / "fastest.png")
    assert pictures.digest_in(tmp_path / "drawn.png") != shown
