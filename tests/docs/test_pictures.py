"""Pictures of the pages: each shows the figures of the table that it was drawn from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from scripts import pictures
from scripts.storm_picture import WIDTH, Picture


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


STORM = pictures.FOLDER / "storm.svg"
COURSE = {"counted": [[0.0, 4.0]], "lost": [[4.0, 5.0]], "dead": [[5.0, 8.0]]}
RECORD = {
    "settings": {"seconds": 10, "faults": [[5.0, 8.0, "kill", 0]]},
    "rows": [{"name": "some way", "fraction_counted": 0.4}],
    "ways": {"some way": [{**COURSE, "losses": [[1.0, 10, 5.2], [9.0, 90, 2.1]]}]},
}


def test_a_storm_is_drawn_second_by_second() -> None:
    root = ElementTree.fromstring(Picture(RECORD).svg())
    boxes = [one.attrib for one in root.iter() if one.tag.endswith("rect")]
    spans = {
        box["fill"]: (float(box["x"]), float(box["width"]))
        for box in boxes
        if float(box["y"]) > 64 and float(box["height"]) == 10
    }
    second = WIDTH / 10
    assert spans["#3d6fb6"] == (0, 4 * second)
    assert spans["#d9822b"] == (4 * second, second)
    assert spans["#24292f"] == (5 * second, 3 * second)
    covers = [box for box in boxes if box.get("class") == "cover"]
    # where nothing moves, all is seen
    assert [float(box["x"]) for box in covers] == [WIDTH, WIDTH]
    [line] = [one for one in root.iter() if one.tag.endswith("polyline")]
    first, last = (pair.split(",") for pair in line.attrib["points"].split())
    assert (float(first[0]), float(last[0])) == (second, 9 * second)
    assert float(first[1]) < float(last[1])


def test_the_storm_shows_the_figures_of_its_table() -> None:
    """If not, draw it anew: python -m scripts.storm_picture RECORD PICTURE."""
    rows = pictures.measured("What is left of the time in a storm?", "", "useful time")
    told = [pictures.number(row["useful time"]) for row in rows]
    shown = re.findall(r">(\d+)% useful<", STORM.read_text(encoding="utf-8"))
    assert [float(one) for one in shown] == pytest.approx(told, abs=0.6)
