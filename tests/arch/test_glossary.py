"""The glossary and the code speak the same words."""

from __future__ import annotations

import re
from functools import cache

from tests.arch.source import PACKAGE, ROOT, TOGETHER, sources

pytestmark = TOGETHER

MOST_ROWS = 40
"""A page that explains more words is written in words that its reader does not have."""
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \|$", re.M)
ASIDE = re.compile(r"\([^)]*\)")


def rows(text: str) -> list[tuple[str, str]]:
    """(terms, meaning) of each row of the glossary, without the head of its table."""
    return ROW.findall(text)[2:]


def terms(text: str) -> list[str]:
    """Every term of the glossary: several of one row stand between commas."""
    return [
        ASIDE.sub("", one).strip() for row, _ in rows(text) for one in row.split(", ")
    ]


def unused(text: str, written: str) -> list[str]:
    """Terms that nobody says: neither as words nor as a name in code."""
    said = written.lower()
    return [
        term
        for term in terms(text)
        if not re.search(r"[\s_-]*".join(map(re.escape, term.lower().split())), said)
    ]


@cache
def glossary() -> str:
    return (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")


def test_a_word_has_one_row() -> None:
    found = [term for term, _ in rows(glossary())]
    assert [term for term in found if found.count(term) > 1] == []


def test_there_are_few_rows() -> None:
    assert 20 < len(rows(glossary())) <= MOST_ROWS


def test_every_word_is_used() -> None:
    code = [*PACKAGE.rglob("*.cpp"), *PACKAGE.rglob("*.h"), ROOT / "ARCHITECTURE.md"]
    written = [path.read_text(encoding="utf-8") for path in code]
    written += [source.text for source in sources()]
    assert unused(glossary(), "\n".join(written)) == []


def test_names_in_the_glossary_are_names_in_the_code() -> None:
    """Backticks say that a word is written so in code."""
    named = re.findall(r"`([A-Za-z_]\w*)", glossary())
    written = "\n".join(source.text for source in sources())
    assert [name for name in named if not re.search(rf"\b{name}\b", written)] == []
