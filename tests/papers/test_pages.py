"""Each paper's page lists all that the paper prints, and all that is measured, once."""

from __future__ import annotations

import re

import pytest

from papers import names, page
from papers.frame import Item

pytestmark = pytest.mark.slow

PRINTED = {
    "deft": (10, 2),
    "hipress": (16, 7),
    "ssfusion": (17, 5),
    "usbyte": (19, 5),
    "zen": (18, 4),
}
"""How many figures and tables each paper has; they are numbered from 1 without a gap."""


def missing(contents: tuple[Item, ...], num_figures: int, num_tables: int) -> set[str]:
    """What a list of contents lacks, or has beyond what is printed."""
    printed = {f"figure {number + 1}" for number in range(num_figures)}
    printed |= {f"table {number + 1}" for number in range(num_tables)}
    return printed ^ {one.place for one in contents if re.match("figure|table", one.place)}


@pytest.mark.smoke
@pytest.mark.parametrize("name", names())
def test_every_table_and_figure_is_listed_once(name: str) -> None:
    contents = page(name).contents
    assert missing(contents, *PRINTED[name]) == set()
    places = [one.place for one in contents]
    assert len(set(places)) == len(places)


@pytest.mark.smoke
@pytest.mark.parametrize("name", names())
def test_every_figure_here_shows_something_listed(name: str) -> None:
    paper = page(name)
    named = [figure for one in paper.contents for figure in one.figures]
    assert sorted(named) == sorted(figure.name for figure in paper.figures)


@pytest.mark.parametrize("name", names())
def test_what_is_not_reproduced_says_why(name: str) -> None:
    assert [one.place for one in page(name).contents if not one.figures and not one.why] == []


def test_the_rule_sees_gaps() -> None:
    contents = page("deft").contents
    assert missing(contents[1:], 10, 2) == {"figure 1"}
    assert missing(contents, 10, 3) == {"table 3"}
    assert missing(contents, 9, 2) == {"figure 10"}
