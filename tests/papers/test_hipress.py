"""Table 5 of HiPress: what counts as a line, a user function, an operator and integration."""

from __future__ import annotations

import ast
import textwrap

import pytest

from gradwire.dsl import language
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


def test_every_operator_of_table_4_is_in_the_library() -> None:
    from gradwire_lab.dsl import matrices

    for name in lines.COMMON:
        assert callable(getattr(language, name, None) or getattr(matrices, name, None)), name


@pytest.fixture(scope="module")
def found() -> Findings:
    """Table 5, counted once."""
    ask = Ask(quick=False, report=lambda *_: None, earlier={})
    return next(one for one in hipress.figures if one.name == "table5").measure(ask)
