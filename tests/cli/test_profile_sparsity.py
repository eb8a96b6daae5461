"""``gradwire profile --sparsity``, and ``gradwire plan --planner zen`` on what it wrote."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradwire.planning.data.profile import Profile
from tests.cli.conftest import Ended

Run = Callable[..., Ended]

SOURCE = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Embedding(4000, 16), nn.Linear(16, 4))
    return model, lambda: model(torch.randint(0, 900, (50,))).sum().backward()

def build_dense():
    model = nn.Linear(4, 4)
    return model, lambda: model(torch.ones(2, 4)).sum().backward()
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "users_sparse_model.py"
    path.write_text(SOURCE)
    before = list(sys.path)
    yield path
    sys.path[:] = before
    sys.modules.pop("users_sparse_model", None)


def test_files_table_and_pictures_then_a_plan(gradwire: Run, script: Path, tmp_path: Path) -> None:
    picture = tmp_path / "all.png"
    words = ("--sparsity", "--batches", "4", "--iterations", "1", "--out", str(tmp_path))
    ended = gradwire("profile", f"{script}:build", *words, "--picture", str(picture))
    assert ended.code == 0
    assert "rows of 16" in ended.out
    for path in (picture, tmp_path / "all-sparsity.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    found = Profile.load(tmp_path / "profile.json").sparsity
    assert found is not None
    assert [(t.name, t.units.width) for t in found.tensors] == [("0.weight", 16)]
    words = ("--planner", "zen", "--explain", "--ranks", "8", "--rate", "100mbit")
    told = gradwire("plan", "--model", str(tmp_path / "profile.json"), *words)
    assert told.code == 0
    assert "* 0.weight: " in told.out
    assert "the runner-up is" in told.out


def test_json_and_a_sparsifier(gradwire: Run, script: Path, tmp_path: Path) -> None:
    words = ("--sparsity", "--batches", "2", "--iterations", "1", "--json", "--out", str(tmp_path))
    ended = gradwire(
        "profile", f"{script}:build", *words, "--sparsifier", "topk", "--set", "density=0.1"
    )
    assert ended.code == 0
    rows = [r for r in json.loads(ended.out)["rows"] if r["section"].startswith("sparsity")]
    assert [row["name"] for row in rows] == ["0.weight", "1.weight"]
    assert all(row["unit"] == "elements" for row in rows)
    assert rows[0]["fraction_dense"] == pytest.approx(0.1)
    assert rows[0]["denser_among_2"] <= 2
    found = Profile.load(tmp_path / "profile.json").sparsity
    assert found is not None
    assert (found.compressor, found.settings) == ("topk", {"density": 0.1})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("{}:build", "--batches", "4"), "--batches must be given with --sparsity"),
        (("{}:build", "--sparsifier", "topk"), "--sparsifier must be given with --sparsity"),
        (("{}:build", "--sparsity", "--set", "density=1"), "write --sparsifier dgc"),
        (("{}:build", "--sparsity", "--batches", "1", "--iterations", "1"), "must be 2 to 128"),
        (("vgg16", "--sparsity"), "given with FILE.py:function"),
    ],
)
def test_mistakes(gradwire: Run, script: Path, words: tuple[str, ...], said: str) -> None:
    ended = gradwire("profile", *(word.format(script) for word in words))
    assert ended.code == 2
    assert said in ended.err
