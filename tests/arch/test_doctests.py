"""Examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib

from tests.arch.source import Source, sources
from tests.each import each

WITH_EXAMPLES = [source for source in sources() if ">>> " in source.text]


@each("source", WITH_EXAMPLES)
def test_examples_in_docstrings_run_and_are_found(source: Source) -> None:
    module = importlib.import_module(source.name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    assert result.attempted > 0, "the examples stand where doctest does not look"
