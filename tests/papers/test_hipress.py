"""Table 5 of HiPress: what counts as a line, a user function, an operator and integration."""

from __future__ import annotations

import ast
import textwrap

import pytest

from gradwire.dsl import language
from gradwire.dsl.program import Program
from papers.frame import Ask, Findings
from papers.hipress import lines
from papers.hipress.page import hipress

pytestmark = pytest.mark.slow


def function(text: str) -> ast.FunctionDef:
    found = ast.parse(textwrap.dedent(text)).body[0]
    assert isinstance(found, ast.FunctionDef)
    return found


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def f(x):\n    return x", 2),
        ('def f(x):\n    """Says."""\n    return x', 2),
        ("def f(\n    x,\n) -> int:\n    # why\n\n    return g(\n        x,\n    )", 6),
        ("def f(x):\n    if x:\n        return 1\n    else:\n        return 2", 4),
    ],
)
def test_lines_that_hold_code(text: str, count: int) -> None:
    assert lines.code_lines(function(text)) == count


class Shifted(Program):
    """One user function inside, one method, one operator twice."""

    def encode(self, gradient: language.Vector) -> language.Compressed:
        def shifted(x: language.Scalar) -> language.Scalar:
            return x + self.shift()

        return language.concat(values=language.map(gradient, shifted))

    def shift(self) -> float:
        return 1.0

    def decode(self, compressed: language.Compressed) -> language.Vector:
        (values,) = language.extract(compressed)
        return language.map(values, lambda x: x - self.shift())


def test_user_functions_are_told_from_logic() -> None:
    text = lines.text_of(Shifted)
    assert [found.name for found in text.logic] == ["encode", "decode"]
    assert [found.name for found in text.udf] == ["shift"]


def test_every_operator_of_table_4_is_in_the_library() -> None:
    from gradwire_lab.dsl import matrices

    for name in lines.COMMON:
        assert callable(getattr(language, name, None) or getattr(matrices, name, None)), name


@pytest.fixture(scope="module")
def found() -> Findings:
    """Table 5, counted once."""
    ask = Ask(quick=False, report=lambda *_: None, earlier={})
    return next(one for one in hipress.figures if one.name == "table5").measure(ask)


def test_the_row_of_an_algorithm_holds_ours_and_the_papers(found: Findings) -> None:
    rows = {str(row["name"]): row for row in found.rows}
    assert set(rows) == {*lines.TABLE_5, "threelc encode"}
    assert {"filter", "sort"} <= lines.text_of(lines.load("compress", "dgc")).operators(
        lines.COMMON
    )
    assert rows["tbq"]["num_operators"] == 3  # map, concat, extract
    for row, claim in zip(found.rows, found.claims, strict=True):
        keys = [key for key in row if f"{key}_paper" in row]
        fits = all(int(str(row[key])) <= int(str(row[f"{key}_paper"])) for key in keys)
        assert claim.agrees in (fits, None)
