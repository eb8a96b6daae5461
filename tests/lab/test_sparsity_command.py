"""``gradwire sparsity``: a profile that gets its sparsity, rows, and mistakes
answered.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradwire.planning.data.profile import Profile
from tests.cli.conftest import Ended
from tests.each import each

Run = Callable[..., Ended]

SOURCE = """
from torch import nn, ones, randint

def build():
    model = nn.Sequential(nn.Embedding(4000, 16), nn.Linear(16, 4))
    return model, lambda: model(randint(0, 900, (50,))).sum().backward()

def other():
    model = nn.Sequential(nn.Linear(4, 16), nn.Embedding(4000, 16))
    return model, lambda: model[1](randint(0, 900, (50,))).sum().backward()
"""


@pytest.fixture
def script(tmp_path: Path, gradwire: Run) -> Iterator[Path]:
    """A user's file, and the profile of its model beside it."""
    path = tmp_path / "sparse_model.py"
    path.write_text(SOURCE)
    before = list(sys.path)
    words = ("--iterations", "1", "--out", str(tmp_path))
    assert gradwire("profile", f"{path}:build", *words).code == 0
    yield path
    sys.path[:] = before
    sys.modules.pop("sparse_model", None)


def test_sparsity_saves_a_table_that_plan_reads(gradwire: Run, script: Path) -> None:
    profile = script.with_name("profile.json")
    words = ("--batches", "4", "--profile", str(profile))
    ended = gradwire("sparsity", f"{script}:build", *words)
    assert ended.code == 0
    assert "rows of 16" in ended.out
    found = Profile.load(profile).sparsity
    assert found is not None
    assert [(t.name, t.units.width) for t in found.tensors] == [("0.weight", 16)]
    words = ("--planner", "zen", "--explain", "--ranks", "8", "--rate", "100mbit")
    reported = gradwire("plan", "--model", str(profile), *words)
    assert reported.code == 0
    assert "* 0.weight: " in reported.out
    assert "the runner-up is" in reported.out


def test_sparsity_measures_a_sparsifier_and_prints_json(
    gradwire: Run, script: Path
) -> None:
    profile = script.with_name("profile.json")
    words = ("--batches", "2", "--json", "--profile", str(profile))
    ended = gradwire(
        "sparsity",
        f"{script}:build",
        *words,
        "--sparsifier",
        "topk",
        "--set",
        "density=0.1",
    )
    assert ended.code == 0
    rows = json.loads(ended.out)["rows"]
    assert [row["name"] for row in rows] == ["0.weight", "1.weight"]
    assert all(row["unit"] == "elements" for row in rows)
    assert rows[0]["fraction_dense"] == pytest.approx(0.1)
    assert rows[0]["denser_among_2"] <= 2
    found = Profile.load(profile).sparsity
    assert found is not None
    assert (found.compressor, found.settings) == ("topk", {"density": 0.1})


@each(
    "words, said",
    [
        (("{}:build", "--set", "density=1"), "write --sparsifier dgc"),
        (("{}:build", "--batches", "1"), "must be 2 to 128"),
        (("{}:build", "--sparsifier", "onebit"), "payloads are indices and values"),
        (("{}:other",), "of another model"),
        (("vgg16",), "with a file that exists"),
    ],
)
def test_mistakes_are_answered(
    gradwire: Run, script: Path, words: tuple[str, ...], said: str
) -> None:
    profile = ("--profile", str(script.with_name("profile.json")))
    ended = gradwire("sparsity", *(word.format(script) for word in words), *profile)
    assert ended.code == 2
    assert said in ended.err
