"""``gradwire list`` shows every file of the registries, and only those."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire.cli.commands import list as command
from gradwire.cli.commands.list import docstring, explained, settings
from gradwire.contract.registry import KINDS, load, names
from gradwire.errors import NotInstalled
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.error_feedback import ErrorFeedback
from gradwire.exchange.pair import Pair
from gradwire_lab.algorithm_page import page
from tests.cli.conftest import Ended

Run = Callable[..., Ended]


def test_every_algorithm_is_listed_with_a_line(gradwire: Run) -> None:
    ended = gradwire("list", "--json")
    assert ended.code == 0
    rows = json.loads(ended.out)["rows"]
    expected = [(KINDS[kind].word, name) for kind in KINDS for name in names(kind)]
    assert [(row["kind"], row["name"]) for row in rows] == expected
    for row in rows:
        assert len(row["description"]) > 10
        assert row["description"].rstrip(".") == row["description"]


def test_the_line_of_an_algorithm_is_a_whole_sentence() -> None:
    """The list shows the first line of a file's header, so a second line is lost."""
    every = {
        (kind, name): docstring(kind, name) for kind in KINDS for name in names(kind)
    }
    cut = [key for key, header in every.items() if "\n" in header.partition("\n\n")[0]]
    assert cut == []


def test_traits_and_settings_are_the_declared_ones(gradwire: Run) -> None:
    rows = json.loads(gradwire("list", "compress", "--json").out)["rows"]
    by_name = {row["name"]: row for row in rows}
    assert set(by_name) == set(names("compress"))
    for name in names("compress"):
        traits = load("compress", name).traits
        assert ("additive" in by_name[name]["traits"]) == traits.additive
        assert ("error feedback" in by_name[name]["traits"]) == traits.error_feedback
        assert traits.layout.value in by_name[name]["traits"]
    assert "density=0.01" in by_name["topk"]["settings"]
    # made, not given
    assert "collective=allgather_sparse()" in by_name["sharded_dgc"]["settings"]


def test_the_exchange_is_the_one_a_bare_compressor_gets(gradwire: Run) -> None:
    rows = json.loads(gradwire("list", "--json").out)["rows"]
    shown = {row["name"]: row["exchange"] for row in rows if "exchange" in row}
    assert set(shown) == set(names("compress"))
    for name, text in shown.items():
        made = exchange_for(load("compress", name)())
        inner = made.inner if isinstance(made, ErrorFeedback) else made
        own = type(inner.collective).__name__ if isinstance(inner, Pair) else "its own"
        assert text.partition(" + ")[0] == own
        assert text.endswith(" + error feedback") == isinstance(made, ErrorFeedback)
    assert shown["none"] == "allreduce"
    assert shown["onebit"] == "casync_ps + error feedback"
    assert shown["powersgd"] == "its own + error feedback"


def test_a_kind_lists_only_its_own_algorithms(gradwire: Run) -> None:
    out = gradwire("list", "collective").out
    assert "casync_ps" in out
    assert "onebit" not in out
    assert "needs sparse or transformed" in out


def test_a_name_prints_its_page_with_what_was_measured(gradwire: Run) -> None:
    """The documentation has the same page: tests/docs."""
    measured = (Path(__file__).parents[2] / "docs" / "measured.md").read_text(
        encoding="utf-8"
    )
    out = gradwire("list", "topk").out
    assert out.rstrip() == page("compress", "topk", measured).rstrip()
    figures = [row for row in measured.split("\n") if row.startswith("| topk |")]
    assert len(figures) > 3
    assert [row for row in figures if row not in out] == []


def test_every_argument_of_an_algorithm_has_words() -> None:
    every = [load(kind, name) for kind in KINDS for name in names(kind)]
    for algorithm in every:
        words = explained(algorithm)
        assert list(words) == settings(algorithm)
        assert [argument for argument, said in words.items() if len(said) < 20] == []
    assert any(
        "dtype in which values travel" in one for one in map(str, map(explained, every))
    )


def test_a_name_shows_its_arguments_in_words(gradwire: Run) -> None:
    out = gradwire("list", "topk").out
    assert "- `density=0.01`: The kept fraction k/n, in (0, 1\\]; default 0.01." in out
    (row,) = json.loads(gradwire("list", "topk", "--json").out)["rows"]
    assert row["arguments"]["density=0.01"].startswith("The kept fraction k/n")
    assert "arguments" not in json.loads(gradwire("list", "--json").out)["rows"][0]


def test_arguments_are_shown_without_the_lab_too(
    gradwire: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str, what: str) -> None:
        raise NotInstalled(what, "gradwire-lab")

    monkeypatch.setattr(command, "extension", missing)
    out = " ".join(gradwire("list", "topk").out.split())
    assert "density=0.01: The kept fraction k/n, in (0, 1]; default 0.01." in out
    assert "needs gradwire-lab" in out


def test_what_is_not_there_is_refused(gradwire: Run) -> None:
    ended = gradwire("list", "topkk")
    assert ended.code == 2
    assert "no kind or algorithm is called 'topkk'" in ended.err
    assert "did you mean 'topk'?" in ended.err
    assert "did you mean 'collective'?" in gradwire("list", "collectives").err
