"""What docs/compll.md shows is true: its programs run, its table names every
operator.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.own_compressor import ternary
from gradwire.dsl import language
from gradwire.dsl.program import Program
from gradwire_lab.compll_text.compile import compile_text
from gradwire_lab.laws.subjects import check, held_to
from gradwire_lab.laws.tolerance import same_bits

PAGE = (Path(__file__).parents[2] / "docs" / "compll.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.M | re.S)


def defined() -> list[Program]:
    """A compressor of each class of the page, in order."""
    namespace: dict[str, Any] = {}
    for text in blocks("python"):
        exec(text, namespace)
    made = [
        v for v in namespace.values() if isinstance(v, type) and issubclass(v, Program)
    ]
    return [one() for one in made if one.__module__ == "builtins"]


def test_the_first_program_is_the_examples() -> None:
    """Whose laws ``tests/lab/test_check.py`` holds."""
    first, _ = defined()
    grad_N = torch.randn(300, generator=torch.Generator().manual_seed(1))
    shown, shipped = (codec.encode(None, grad_N)[0] for codec in (first, ternary()))
    assert same_bits(shown.buffer, shipped.buffer)


@pytest.mark.slow
def test_the_second_program_keeps_its_laws() -> None:
    _, second = defined()
    grad_N = torch.randn(300, generator=torch.Generator().manual_seed(1))
    assert second.encode(None, grad_N)[0].buffer.numel() > 0
    subject, *_ = held_to(second)
    assert [verdict for verdict in check(subject) if verdict.found] == []


def test_the_text_is_that_of_the_tests() -> None:
    folder = Path(__file__).parents[1] / "lab"
    files = [folder / "terngrad.compll", folder / "terngrad_decode.compll"]
    assert blocks("c") == [path.read_text() for path in files]
    assert compile_text(*blocks("c"))(bitwidth=2).traits.exact_size


def test_every_operator_is_in_the_table() -> None:
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.M | re.S)
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`", prose))))
    classes = {"Compressed", "Repeated", "Scalar", "Scattered", "Type", "Vector"}
    assert set(language.__all__) - classes - words == set()
