"""The page that says which method suits which distance: its table and its figures."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from scripts import make_map


@pytest.fixture(scope="module")
def table() -> Any:
    text = make_map.FILE.read_text(encoding="utf-8")
    return json.loads(text.removeprefix("const MAP = ").removesuffix(";\n"))


def points(seed: int, count: int) -> list[list[float]]:
    draw = random.Random(seed)
    ends = [(math.log(axis[0]), math.log(axis[-1])) for axis in make_map.AXES.values()]
    found = [[math.exp(draw.uniform(*end)) for end in ends] for _ in range(count)]
    for point in found:
        point[-1] = round(point[-1])
    return found


@pytest.mark.smoke
def test_the_pages_table_has_the_closed_forms_figures(table: Any) -> None:
    """A sample of its points; else the table is to be written anew."""
    axes = [*make_map.AXES.values()]
    assert [tuple(axis) for axis in table["axes"].values()] == axes
    draw = random.Random(0)
    sizes = [len(axis) for axis in axes]
    for exchange in ("ddp", *make_map.EXCHANGES):
        assert len(table["seconds"][exchange]) == math.prod(sizes)
        for _ in range(3):
            places = [draw.randrange(size) for size in sizes]
            point = [axis[at] for axis, at in zip(axes, places, strict=True)]
            made = make_map.exchange_s(exchange, *point)
            assert make_map.between(table, exchange, point) == pytest.approx(made, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["ddp", *make_map.EXCHANGES])
def test_figures_between_points_are_near_the_closed_form(
    table: Any, exchange: str
) -> None:
    off = sorted(
        abs(
            make_map.between(table, exchange, point)
            / make_map.exchange_s(exchange, *point)
            - 1
        )
        for point in points(1, 60)
    )
    assert off[len(off) // 2] < 0.1
    assert off[len(off) * 9 // 10] < 0.3


def test_a_table_of_other_figures_is_found_out(table: Any) -> None:
    wrong = {**table, "seconds": {"ddp": [2 * s for s in table["seconds"]["ddp"]]}}
    point = [axis[1] for axis in make_map.AXES.values()]
    made = make_map.exchange_s("ddp", *point)
    assert make_map.between(wrong, "ddp", point) != pytest.approx(made, 0.5)
