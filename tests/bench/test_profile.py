"""``gradwire profile``: files that can be read again, rows, pictures, and mistakes
answered.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwire.contract.units import parse_rate
from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import fit_line
from gradwire.planning.data.profile import Profile
from gradwire_bench.cli import profile as verb
from gradwire_bench.testbed import measured
from gradwire_bench.testbed.wide_area import WideArea
from tests.cli.conftest import Ended

Run = Callable[..., Ended]

SOURCE = """
from torch import nn, ones
from neighbour import WIDTH

def build():
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, 2))
    return model, lambda: model(ones(5, WIDTH)).sum().backward()

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
    """A user's file and its neighbour; what importing them leaves behind is taken
    back.
    """
    (tmp_path / "neighbour.py").write_text("WIDTH = 4\n")
    path = tmp_path / "users_model.py"
    path.write_text(SOURCE)
    before = list(sys.path)
    yield path
    sys.path[:] = before
    for name in ("users_model", "neighbour"):
        sys.modules.pop(name, None)


def test_a_model_alone_is_measured_and_saved_without_a_cluster(
    gradwire: Run, script: Path, tmp_path: Path
) -> None:
    out = tmp_path / "made"
    ended = gradwire(
        "profile", f"{script}:build", "--out", str(out), "--iterations", "2", "--json"
    )
    assert ended.code == 0
    found = Profile.load(out / "profile.json")
    assert not (out / "cluster.json").exists()
    assert [layer.name for layer in found.layers] == ["0", "1"]
    assert found.batch_size == 5
    assert "medians of 2 steps" in found.source
    rows = json.loads(ended.out)["rows"]
    assert [row["name"] for row in rows] == ["0", "1", "step"]
    assert sum(row["fraction_of_step"] for row in rows[:2]) == pytest.approx(1)
    for key in ("size_bytes", "forward_s", "backward_s", "fraction_of_step"):
        assert rows[2][key] == pytest.approx(sum(row[key] for row in rows[:2]))


def test_a_model_and_a_cluster_are_measured_and_saved(
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
    words = (
        "--iterations",
        "1",
        "--rate",
        "1gbit",
        "--no-codecs",
        "--picture",
        str(picture),
    )
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


def test_far_hosts_are_measured_as_the_options_ask(
    gradwire: Run, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[WideArea] = []

    def on_hosts(*others: Any, wide_area: WideArea, **more: Any) -> Cluster:
        asked.append(wide_area)
        return CLUSTER

    monkeypatch.setattr(measured, "measured_cluster", on_hosts)
    far = ("--delay", "40", "--jitter", "2", "--up", "1mbit", "--slow", "1=2mbit")
    words = ("--iterations", "1", "--out", str(tmp_path), *far)
    assert gradwire("profile", f"{script}:build", *words).code == 0
    links = WideArea(
        delay_s=0.04, jitter_s=0.002, up_bytes_per_s=125e3, slow=((1, 250e3),)
    )
    assert asked == [links]


@pytest.mark.parametrize("words", [("--hosts", "2"), ("--delay", "3")])
def test_ranks_of_torchrun_have_links_of_their_own(
    gradwire: Run, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    ended = gradwire("profile", "vgg16", *words)
    assert ended.code == 2
    assert "left out under torchrun" in ended.err


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
