"""``gradwire check`` holds a user's file to the laws, and names what broke, on what,
what to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gradwire as gw
from gradwire.planning.planner.wfbp import wfbp
from gradwire_lab.cli._own import module_of
from gradwire_lab.laws import (
    collectives,
    compressors,
    densities,
    exchanges,
    planners,
    programs,
)
from gradwire_lab.laws.subjects import held_to
from tests.cli.conftest import Ended
from tests.each import each

pytestmark = pytest.mark.slow

Run = Callable[..., Ended]

TEXTS = Path(__file__).parents[1] / "lab"
ENCODE = str(TEXTS / "terngrad.compll")

COMPRESSOR = """
import torch
from gradwire.compress.none import none


class loses_the_sign(none):
    def decode(self, payload, out_N, *, scale=1.0):
        return super().decode(payload, out_N, scale=scale).abs_()
"""
COLLECTIVE = """
from tests.laws.broken_collectives import sends_before_it_receives as sends_first


class waits_for_ever(sends_first):
    pass
"""
PLANNER = """
import gradwire as gw
from gradwire.planning.planner.wfbp import wfbp


def doubles(profile, cluster) -> gw.Plan:
    plan = wfbp(profile, cluster)
    return plan.model_copy(update={"messages": (*plan.messages, *plan.messages[-1:])})
"""


def own(folder: Path, text: str) -> str:
    path = folder / "own.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def rows_of(ended: Ended) -> dict[str, dict[str, Any]]:
    return {row["law"]: row for row in json.loads(ended.out)["rows"]}


BROKEN = [
    (COMPRESSOR, "lossless_means_bit_equal", ", 1 elements, ", "own dtype"),
    (
        COLLECTIVE,
        "never_deadlocks",
        "2 ranks, 0 elements, float32, seed 0",
        "(Send(...), Recv",
    ),
    (PLANNER, "every_element_is_sent_once", "layers of", "cover each tensor"),
]


@pytest.mark.parametrize(
    ("text", "law", "given", "remedy"), BROKEN, ids=lambda word: word[:12]
)
def test_check_names_the_broken_law_its_input_and_what_to_do(
    gradwire: Run, tmp_path: Path, text: str, law: str, given: str, remedy: str
) -> None:
    """The first input that shows it is named, which is among the smallest."""
    ended = gradwire("check", own(tmp_path, text))
    assert ended.code == 1
    assert f"breaks {law}\n" in ended.out
    block = next(part for part in ended.out.split("\n\n") if f"breaks {law}\n" in part)
    reported = dict(line.strip().partition(" ")[::2] for line in block.splitlines()[1:])
    assert given in reported["input"]
    assert reported["found"].strip()
    assert reported["law"].strip().endswith(".")
    assert remedy in reported["to"]
    assert "not tried: settings other than these" in ended.out
    assert "tried with" in ended.out


@pytest.mark.smoke
def test_a_compressor_that_keeps_all(gradwire: Run) -> None:
    ended = gradwire("check", "cast16", "--json")
    assert ended.code == 0
    found = rows_of(ended)
    assert {row["verdict"] for row in found.values()} == {"holds", "not asked"}
    assert found["unbiased"]["num_inputs"] == 0
    assert found["residual_holds_what_is_missing"]["num_inputs"] > 30
    assert found["nothing_is_lost_or_made"]["num_inputs"] == 9
    assert any("not tried" in note for note in json.loads(ended.out)["notes"])


PAIR = gw.pair(gw.compress.topk(density=0.3), gw.collective.allgather_sparse())
OF_ANY = {*collectives.OF_ANY, *exchanges.OF_ANY_ACCOUNT}


@each(
    "algorithm, laws",
    [
        (gw.compress.none(), {*compressors.LAWS, *collectives.LAWS, *exchanges.LAWS}),
        (gw.compress.onebit(), {*programs.LAWS, *compressors.LAWS, *exchanges.LAWS}),
        (gw.compress.topk(), {densities.law_no_more_than_stated, *compressors.LAWS}),
        (gw.compress.powersgd(), {*collectives.OF_ANY, *exchanges.LAWS}),
        (gw.with_error_feedback(PAIR), {*collectives.LAWS, *exchanges.LAWS}),
        (
            gw.with_momentum_correction(PAIR),
            {*collectives.OF_ANY, *exchanges.OF_ANY_ACCOUNT},
        ),
        (gw.with_clipping(PAIR, 0.5), {*collectives.OF_ANY, *exchanges.OF_ANY_ACCOUNT}),
        (gw.collective.ring(), {*collectives.LAWS, *exchanges.LAWS}),
        (wfbp, {*planners.LAWS}),
    ],
    ids=lambda one: type(one).__name__,
)
def test_each_kind_is_held_to_its_laws(algorithm: Any, laws: set[Any]) -> None:
    assert laws <= {law for held in held_to(algorithm) for law in held.laws}


def test_what_raises_is_told_with_its_line(gradwire: Run, tmp_path: Path) -> None:
    text = PLANNER + "\n\ndef divides(profile, cluster) -> gw.Plan:\n    return 1 / 0\n"
    ended = gradwire("check", own(tmp_path, text) + ":divides")
    assert ended.code == 1
    assert "raised ZeroDivisionError at " in ended.out
    assert "own.py:12: division by zero" in ended.out
    assert "also    " in ended.out


@each(
    "words, message",
    [
        (("terngard",), "did you mean 'terngrad'"),
        ((ENCODE, "--set", "bitwidth=2"), "pass decode's text too"),
    ],
)
def test_a_users_mistake_is_code_2(
    gradwire: Run, words: tuple[str, ...], message: str
) -> None:
    ended = gradwire("check", *words)
    assert ended.code == 2
    assert message in ended.err


def test_a_file_with_the_name_of_a_module_does_not_replace_it(tmp_path: Path) -> None:
    """The user's file is read, and Python's own module stays."""
    import colorsys
    import sys

    path = tmp_path / f"{colorsys.__name__}.py"
    path.write_text("mine = True\n", encoding="utf-8")
    assert module_of(path).mine
    assert sys.modules["colorsys"] is colorsys
