"""The glossary and the code speak the same words."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.arch.source import PACKAGE, ROOT, Source, read, sources
from tests.arch.test_names import library
from tests.each import each

ROOMS = ("planning/data", "collective/steps", "planning")
"""Folders whose classes are the words in which everybody else speaks."""
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \|$", re.M)
ASIDE = re.compile(r"\([^)]*\)")
PLURAL = re.compile(r"(?<=\w\w)s$")


def rows(text: str) -> list[tuple[str, str]]:
    """(terms, meaning) of each row of the glossary, without the head of its table."""
    return ROW.findall(text)[2:]


def terms(text: str) -> list[str]:
    """Every term of the glossary: several of one row stand between commas."""
    return [ASIDE.sub("", one).strip() for row, _ in rows(text) for one in row.split(", ")]


def head(name: str) -> str:
    """The noun of a class's name, in the singular: ``PlannedMessage`` is a message.

    >>> head("PlannedMessage"), head("Shards")
    ('message', 'shard')
    """
    return PLURAL.sub("", re.findall(r"[A-Z][a-z0-9]*", name)[-1].lower())


def unknown_nouns(source: Source, known: frozenset[str]) -> list[str]:
    """Classes of a room that are named after no word of the glossary."""
    nouns = (node.name for node in source.tree.body if isinstance(node, ast.ClassDef))
    return [name for name in nouns if not name.startswith("_") and head(name) not in known]


def words_of(text: str) -> frozenset[str]:
    """The words of all terms, in the singular."""
    return frozenset(PLURAL.sub("", word.lower()) for term in terms(text) for word in term.split())


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


def test_the_nouns_of_the_rooms_are_words_of_the_glossary() -> None:
    known = words_of(glossary())
    rooms = [source for source in library() if source.path.rpartition("/")[0] in ROOMS]
    assert {source.path.rpartition("/")[0] for source in rooms} == set(ROOMS)
    assert [(s.path, name) for s in rooms for name in unknown_nouns(s, known)] == []


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


SPECIMEN = """
| word | meaning |
| --- | --- |
| message | gradients |
| push, pull | ways |
| density asked | (of two) |
| common (DEFT) | a layer |
"""


def test_the_glossary_is_read_row_by_row() -> None:
    assert terms(SPECIMEN) == ["message", "push", "pull", "density asked", "common"]


@each(
    "code, num_unknown",
    [
        ("class PlannedMessage: ...\nclass Pulls: ...\nclass _Bundle: ...", 0),
        ("class Bundle: ...", 1),
        ("class MessageBundle: ...", 1),
    ],
)
def test_the_rule_of_nouns_bites(code: str, num_unknown: int) -> None:
    assert (
        len(unknown_nouns(read("planning/data/plan.py", code), words_of(SPECIMEN))) == num_unknown
    )


def test_the_rule_of_use_bites() -> None:
    written = "class PlannedMessage: push, pull; density_asked"
    assert unused(SPECIMEN, written) == ["common"]
