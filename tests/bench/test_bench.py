"""`gradwire bench`: what lies beside src/ is found in a checkout, and named where it is not."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire_bench.cli import _checkout
from tests.cli.conftest import Ended

Run = Callable[..., Ended]
KERNEL = ("bench", "kernel", "--only", "onebit", "--numel", "70000", "--rounds", "4", "--json")


@pytest.fixture
def from_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checkout, "PACKAGE", tmp_path / "site-packages" / "gradwire")


def columns(ended: Ended) -> set[str]:
    assert ended.code == 0, ended.err
    return {key for row in json.loads(ended.out)["rows"] for key in row}


def test_kernels_stand_beside_torch_in_a_checkout(gradwire: Run) -> None:
    assert {"kernel_s", "eager_s", "speedup_vs_eager"} <= columns(gradwire(*KERNEL))


@pytest.mark.usefixtures("from_a_wheel")
def test_kernels_of_a_wheel_stand_alone_and_it_is_said(
    gradwire: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gradwire"):
        found = columns(gradwire(*KERNEL))
    assert "kernel_s" in found
    assert not {"eager_s", "speedup_vs_eager"} & found
    assert "gradwire_bench/ is in gradwire's source repository only" in caplog.text


@pytest.mark.usefixtures("from_a_wheel")
@pytest.mark.parametrize(
    "words",
    [
        ("kernel", "--compiled"),
        ("batch",),
        ("partition",),
        ("schedule", "--idle"),
        ("device",),
        ("device", "--compile-only"),
    ],
)
def test_a_wheel_says_where_developers_benchmarks_are(gradwire: Run, words: tuple[str]) -> None:
    ended = gradwire("bench", *words)
    assert ended.code == 2
    assert "gradwire_bench/ is part of gradwire's source repository" in ended.err
    assert ended.out == ""


def test_developers_benchmarks_run_in_a_checkout(gradwire: Run) -> None:
    words = ("partition", "--numel", "20000", "--hosts", "5", "--rounds", "4", "--json")
    assert {"kernel_s", "saved_s"} <= columns(gradwire("bench", *words))
