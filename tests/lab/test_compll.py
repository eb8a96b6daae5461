"""``gradwire compll``: programs are shown and timed; mistakes end in code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Ended
from tests.each import each

Run = Callable[..., Ended]

TEXTS = Path(__file__).parent
ENCODE, DECODE = str(TEXTS / "terngrad.compll"), str(TEXTS / "terngrad_decode.compll")
FIGURE = (ENCODE, "--with", DECODE, "--set", "bitwidth=2")

OWN = """
from gradwire.dsl.language import *
from gradwire.dsl.program import Program


class halved(Program{traits}):
    block: int = 256

    def encode(self, gradient):
        top = reduce(map(gradient, abs), greater)
        return concat(top=top, signs=map(gradient, lambda x: uint1(x >= 0)))

    def decode(self, compressed):
        top, signs = extract(compressed)
        return map(signs, lambda sign: where(sign == 1, {value}, -{value}))
"""


def own(folder: Path, value: str = "top / 2", traits: str = "") -> str:
    path = folder / "own.py"
    path.write_text(OWN.format(value=value, traits=traits))
    return str(path)


@pytest.mark.smoke
@each(
    "target, words",
    [
        ("ir", ["terngrad_encode: blocks of 16384", "random() 0", "store(uint2) 'Q'"]),
        ("cpp", ['#include "compll.h"', "GW_EXPORT void terngrad_merge"]),
        ("triton", ["@triton.jit", "def terngrad_decode("]),
    ],
)
def test_a_text_is_shown_in_every_form(
    gradwire: Run, target: str, words: list[str]
) -> None:
    ended = gradwire("compll", "show", *FIGURE, "--target", target)
    assert ended.code == 0
    assert [word for word in words if word not in ended.out] == []


def test_compll_shows_a_shipped_program_and_a_file_of_yours(
    gradwire: Run, tmp_path: Path
) -> None:
    out = gradwire("compll", "show", "tbq", "--set", "threshold=0.5", "--json").out
    (row,) = json.loads(out)["rows"]
    assert row["name"] == "tbq"
    assert "0.5f" in row["text"]
    assert "halved_encode" in gradwire("compll", "show", own(tmp_path)).out


@each(
    "words, message",
    [
        (("show", "powersgd"), "written in the language"),
        (("show", "terngard"), "did you mean 'terngrad'"),
        (("show", ENCODE), "bitwidth"),
        (("show", *FIGURE, "--trait", "unbaised"), "unbaised"),
        (("show", "tbq", "--trait", "unbiased"), "given with a .compll"),
        (("show", "tbq", "--set", "level=3"), "there are: block, threshold"),
        (("show", "nowhere.compll"), "a file that can be read"),
        (("show", "nowhere.py"), "a file that runs"),
        (("bench", "tbq", "--rounds", "1"), "4 to"),
    ],
)
def test_a_users_mistake_is_code_2(
    gradwire: Run, words: tuple[str, ...], message: str
) -> None:
    ended = gradwire("compll", *words)
    assert ended.code == 2
    assert message in ended.err
