"""Each paper's page lists all that the paper prints, and all that is measured, once."""

from __future__ import annotations

import re

import pytest

from papers import names, page
from papers.frame import BY_CONSTRUCTION, WAYS, Item
from tests.each import each

PRINTED = {
    "deft": (10, 2),
    "hipress": (16, 7),
    "ssfusion": (17, 5),
    "usbyte": (19, 5),
    "zen": (18, 4),
}
"""How many figures and tables each paper has; they are numbered from 1 without a
gap.
"""


def missing(contents: tuple[Item, ...], num_figures: int, num_tables: int) -> set[str]:
    """What a list of contents lacks, or has beyond what is printed."""
    printed = {f"figure {number + 1}" for number in range(num_figures)}
    printed |= {f"table {number + 1}" for number in range(num_tables)}
    return printed ^ {
        one.place for one in contents if re.match("figure|table", one.place)
    }


@pytest.mark.smoke
@each("name", names())
def test_every_table_and_figure_is_listed_once(name: str) -> None:
    contents = page(name).contents
    assert missing(contents, *PRINTED[name]) == set()
    places = [one.place for one in contents]
    assert len(set(places)) == len(places)


@pytest.mark.smoke
@each("name", names())
def test_what_is_reproduced_is_a_figure_here_and_others_say_why(name: str) -> None:
    paper = page(name)
    named = [figure for one in paper.contents for figure in one.figures]
    assert sorted(named) == sorted(figure.name for figure in paper.figures)
    assert [
        one.place for one in paper.contents if not one.figures and not one.why
    ] == []


@pytest.mark.smoke
@each("name", names())
def test_what_is_reproduced_is_measured_or_simulated_or_by_construction(
    name: str,
) -> None:
    for one in page(name).contents:
        if one.figures:
            assert one.how in WAYS, one.place
        else:
            assert one.how in ("", BY_CONSTRUCTION), one.place
        if one.why.startswith("simulated"):
            assert "simulated" in one.how, one.place
