"""Examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib

from tests.arch.source import Source, sources
from tests.each import sampled

WITH_EXAMPLES = [source for source in sources() if ">>> " in source.text]


@sampled("found", sorted(WITH_EXAMPLES, key=lambda source: source.name), every=3)
def test_examples_in_docstrings_run_and_are_found(found: list[Source]) -> None:
    for source in found:
        module = importlib.import_module(source.name)
        result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
        assert result.failed == 0, source.name
        assert result.attempted > 0, f"doctest does not look at all of {source.name}"
