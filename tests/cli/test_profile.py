"""``gradwire profile``: files that can be read again, rows, pictures, and mistakes answered."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwire.cli.commands import profile as verb
from gradwire.contract.units import parse_rate
from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import fit_line
from gradwire.planning.data.profile import Profile
from gradwire_bench.testbed import measured
from tests.cli.conftest import Ended

Run = Callable[..., Ended]

SOURCE = """
from torch import nn, ones, randint
from neighbour import WIDTH

def build():
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, 2))
    return model, lambda: model(ones(5, WIDTH)).sum().backward()

def build_sparse():
    model = nn.Sequential(nn.Embedding(4000, 16), nn.Linear(16, 4))
    return model, lambda: model(randint(0, 900, (50,))).sum().backward()

def build_wrong():
    return nn.Linear(1, 1)

def fails():
    raise ZeroDivisionError("their own mistake")

number = 3
"""

LINE = fit_line([(100, 1.0), (200, 1.5), (300, 2.1)])
CLUSTER = Cluster(
    num_ranks=2,
    rate_bytes_per_s=1e6,
    collectives={"all_reduce": LINE, "send": LINE},
    codecs={"none": CodecFit(encode=LINE, decode=LINE, merge=LINE)},
    source="made up",
)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    """A user's file and its neighbour; what importing them leaves behind is taken back."""
    (tmp_path / "neighbour.py").write_text("WIDTH = 4\n")
    path = tmp_path / "users_model.py"
    path.write_text(SOURCE)
    before = list(sys.path)
    yield path
    sys.path[:] = before
    for name in ("users_model", "neighbour"):
        sys.modules.pop(name, None)


def test_a_model_alone(gradwire: Run, script: Path, tmp_path: Path) -> None:
    out = tmp_path / "made"
    ended = gradwire("profile", f"{script}:build", "--out", str(out), "--iterations", "2", "--json")
    assert ended.code == 0
    found = Profile.load(out / "profile.json")
    assert not (out / "cluster.json").exists()
    assert [layer.name for layer in found.layers] == ["0", "1"]
    assert found.batch_size == 5
    assert found.measurement.iterations == 2
    rows = json.loads(ended.out)["rows"]
    assert [row["name"] for row in rows] == ["0", "1", "step"]
    assert sum(row["fraction_of_step"] for row in rows[:2]) == pytest.approx(1)
    assert rows[2]["profiling_s"] == found.measurement.profiling_s
    assert rows[2]["step_s"] == pytest.approx(
        sum(r["forward_s"] + r["backward_s"] for r in rows[:2])
    )


def test_a_model_and_a_cluster(
    gradwire: Run, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, float, tuple[str, ...]]] = []

    def on_hosts(
        hosts: int, rate: float, compressors: tuple[str, ...], *others: Any, **more: Any
    ) -> Cluster:
        asked.append((hosts, rate, compressors))
        return CLUSTER

    monkeypatch.setattr(measured, "measured_cluster", on_hosts)
    picture = tmp_path / "all.png"
    words = ("--iterations", "1", "--rate", "1gbit", "--no-codecs", "--picture", str(picture))
    ended = gradwire("profile", f"{script}:build", "--out", str(tmp_path), *words)
    assert ended.code == 0
    assert asked == [(verb.HOSTS, parse_rate("1gbit"), ())]
    assert Cluster.load(tmp_path / "cluster.json") == CLUSTER
    assert Profile.load(tmp_path / "profile.json").layers
    for words in (
        ("all_reduce", "send"),
        ("none encode", "none merge"),
        ("made up", str(tmp_path)),
    ):
        assert all(word in ended.out for word in words)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_catalogue_model_asks_for_the_cluster_only(
    gradwire: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "measured_cluster", lambda *asked, **more: CLUSTER)
    ended = gradwire("profile", "vgg16", "--out", str(tmp_path), "--json")
    assert ended.code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.json"]
    assert {row["name"] for row in json.loads(ended.out)["rows"]} == {
        *("all_reduce", "send"),
        *("none encode", "none decode", "none merge"),
    }


def test_files_table_and_pictures_then_a_plan(gradwire: Run, script: Path, tmp_path: Path) -> None:
    picture = tmp_path / "all.png"
    words = ("--sparsity", "--batches", "4", "--iterations", "1", "--out", str(tmp_path))
    ended = gradwire("profile", f"{script}:build_sparse", *words, "--picture", str(picture))
    assert ended.code == 0
    assert "rows of 16" in ended.out
    for path in (picture, tmp_path / "all-sparsity.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    found = Profile.load(tmp_path / "profile.json").sparsity
    assert [(t.name, t.units.width) for t in found.tensors] == [("0.weight", 16)]
    words = ("--planner", "zen", "--explain", "--ranks", "8", "--rate", "100mbit")
    told = gradwire("plan", "--model", str(tmp_path / "profile.json"), *words)
    assert told.code == 0
    assert "* 0.weight: " in told.out
    assert "the runner-up is" in told.out


def test_json_and_a_sparsifier(gradwire: Run, script: Path, tmp_path: Path) -> None:
    words = ("--sparsity", "--batches", "2", "--iterations", "1", "--json", "--out", str(tmp_path))
    ended = gradwire(
        "profile", f"{script}:build_sparse", *words, "--sparsifier", "topk", "--set", "density=0.1"
    )
    assert ended.code == 0
    rows = [r for r in json.loads(ended.out)["rows"] if r["section"].startswith("sparsity")]
    assert [row["name"] for row in rows] == ["0.weight", "1.weight"]
    assert all(row["unit"] == "elements" for row in rows)
    assert rows[0]["fraction_dense"] == pytest.approx(0.1)
    assert rows[0]["denser_among_2"] <= 2
    found = Profile.load(tmp_path / "profile.json").sparsity
    assert (found.compressor, found.settings) == ("topk", {"density": 0.1})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("{}:bild",), "a function that users_model.py defines"),
        (("{}:number",), "a function that users_model.py defines"),
        (("{}:build_wrong",), "must return (model, step)"),
        (("nowhere.py:build",), "with a file that exists"),
        (("vgg61",), "vgg16"),
        (("{}:build", "--iterations", "0"), "iterations must be 1 or more"),
        (("vgg16", "--hosts", "1"), "--hosts must be 2 or more"),
        (("vgg16", "--rate", "fast"), "write 500mbit"),
        (("{}:build", "--batches", "4"), "--batches must be given with --sparsity"),
        (("{}:build", "--sparsifier", "topk"), "--sparsifier must be given with --sparsity"),
        (("{}:build", "--sparsity", "--set", "density=1"), "write --sparsifier dgc"),
        (("{}:build", "--sparsity", "--batches", "1", "--iterations", "1"), "must be 2 to 128"),
        (("vgg16", "--sparsity"), "given with FILE.py:function"),
    ],
)
def test_mistakes_are_answered(
    gradwire: Run, script: Path, words: tuple[str, ...], said: str
) -> None:
    ended = gradwire("profile", *(word.format(script) for word in words))
    assert ended.code == 2
    assert said in ended.err


def test_an_error_in_the_users_file_keeps_its_traceback(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradwire.cli.main import main

    monkeypatch.setattr(sys, "argv", ["gradwire", "profile", f"{script}:fails"])
    with pytest.raises(ZeroDivisionError, match="their own mistake"):
        main()
