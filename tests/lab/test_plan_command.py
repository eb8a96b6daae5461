"""`gradwire plan`: a plan as a table, as a file, explained; and mistakes answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire.contract.registry import names
from gradwire.planning import catalogue
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.price import iteration_s
from gradwire_lab.laws.inputs import profile_of
from gradwire_lab.planner.bytescheduler import bytescheduler
from gradwire_lab.planner.usbyte import usbyte
from tests.cli.conftest import Ended
from tests.each import each

Gradwire = Callable[..., Ended]
VGG16 = catalogue.load("vgg16")
EIGHT = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)


def _rows(ended: Ended) -> list[dict[str, object]]:
    assert ended.code == 0, ended.err
    found: list[dict[str, object]] = json.loads(ended.out)["rows"]
    return found


def test_a_row_a_message_with_its_times_under_the_model(gradwire: Gradwire) -> None:
    rows = _rows(gradwire("plan", "--model", "vgg16", "--json"))
    plan = usbyte(VGG16, EIGHT)
    assert [row["name"] for row in rows] == [str(n) for n in range(len(plan.messages))]
    assert sum(int(str(row["size_bytes"])) for row in rows) == VGG16.size_bytes
    for row in rows:
        ready, start, end = (
            float(str(row[key])) for key in ("ready_s", "start_s", "end_s")
        )
        assert 0 <= ready <= start < end
        assert 0 <= float(str(row["fraction_hidden"])) <= 1 + 1e-9
    assert str(rows[0]["behind"]).startswith("backward of ")


def test_out_and_show_are_the_same_plan(gradwire: Gradwire, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    words = (
        "--planner",
        "bytescheduler",
        "--set",
        "partition_bytes=16MiB",
        "--set",
        "credit=1",
    )
    first = gradwire("plan", "--model", "vgg16", *words, "--out", path)
    assert Plan.load(path) == bytescheduler(
        VGG16, EIGHT, partition_bytes=2**24, credit=1
    )
    assert gradwire("plan", "--show", path).out == first.out
    assert "classifier.6.weight[0:" in first.out


def test_tuned_is_written_with_its_settings(gradwire: Gradwire, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    words = ("--planner", "bytescheduler", "--set", "credit=2", "--tune", "--out", path)
    assert gradwire("plan", "--model", "vgg16", *words).code == 0
    tuned, default = Plan.load(path), bytescheduler(VGG16, EIGHT)
    assert tuned.settings["credit"] == 2
    assert iteration_s(tuned, VGG16, EIGHT) < iteration_s(default, VGG16, EIGHT)


def test_plan_takes_a_profile_and_a_cluster_from_files(
    gradwire: Gradwire, tmp_path: Path
) -> None:
    profile = profile_of(([2**20], 0.1, 0.1), ([2**18], 0.1, 0.1), model="mine")
    profile.save(tmp_path / "profile.json")
    Cluster(num_ranks=4, rate_bytes_per_s=1e6, hop_s=0.5).save(
        tmp_path / "cluster.json"
    )
    words = ["plan", "--model", str(tmp_path / "profile.json")]
    words += [
        "--cluster",
        str(tmp_path / "cluster.json"),
        "--planner",
        "wfbp",
        "--json",
    ]
    rows = _rows(gradwire(*words))
    assert float(str(rows[0]["end_s"])) == pytest.approx(0.1 + 3.0 + 1.5 * 2**20 / 1e6)
    faster = _rows(gradwire(*words, "--rate", "16mbit", "--ranks", "2"))
    assert float(str(faster[0]["end_s"])) == pytest.approx(0.1 + 1.0 + 2**20 / 2e6)


def test_a_delay_makes_far_hosts(gradwire: Gradwire) -> None:
    words = ("plan", "--model", "vgg16", "--planner", "mgwfbp", "--json")
    ends_s = [
        float(str(_rows(gradwire(*words, *delay))[-1]["end_s"]))
        for delay in ((), ("--delay", "0"), ("--delay", "40"))
    ]
    assert ends_s[0] == ends_s[1] < ends_s[2]
    refused = gradwire("plan", "--model", "vgg16", "--delay", "nan")
    assert "latency_s must be 0 to" in refused.err


def test_explained_in_words_with_all_planners_beside_it(gradwire: Gradwire) -> None:
    said = gradwire("plan", "--model", "vgg16", "--explain").out
    for words in (
        "Computation alone takes",
        "No plan takes less than",
        "Forward of",
        "Below",
    ):
        assert words in said
    rows = _rows(gradwire("plan", "--model", "vgg16", "--explain", "--json"))
    assert {row["name"] for row in rows} == set(names("planner"))
    own = next(row for row in rows if row["name"] == "usbyte")
    reasons = own["reasons"]
    assert isinstance(reasons, list)
    assert all(f"* {reason}" in said for reason in reasons)
    assert own["simulated_s"] == iteration_s(usbyte(VGG16, EIGHT), VGG16, EIGHT)


@each(
    "words, said",
    [
        ((), "write --model vgg16, or --show plan.json"),
        (("--model", "vg16"), "did you mean 'vgg16'"),
        (
            ("--show", "x.json", "--tune"),
            "--show must be given without --planner, --set and",
        ),
        (
            ("--model", "vgg16", "--set", "basic_partition_byte=2"),
            "did you mean 'basic_partition_bytes'",
        ),
        (
            ("--model", "vgg16", "--set", "credit"),
            "--set must be name=value, got 'credit'",
        ),
        (
            ("--model", "vgg16", "--planner", "secopa", "--set", "credit=many"),
            "credit must be a whole number",
        ),
        (
            ("--model", "vgg16", "--set", "basic_partition_bytes=4 parsecs"),
            "size must be",
        ),
        (("--model", "vgg16", "--rate", "fast"), "write 500mbit"),
        (
            ("--model", "vgg16", "--ranks", "0"),
            "ranks must be a whole number, 1 to 2**16, got 0",
        ),
        (("--show", "no.json"), "no.json cannot be read"),
    ],
)
def test_mistakes_are_answered(
    gradwire: Gradwire, words: tuple[str, ...], said: str
) -> None:
    ended = gradwire("plan", *words)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err


def test_local_proposes_settings_of_local_steps(gradwire: Gradwire) -> None:
    words = ["plan", "--model", "googlenet", "--ranks", "2", "--local", "--json"]
    rows = _rows(gradwire(*words, "--rate", "100gbit", "--speeds", "1,0.25"))
    assert [row["name"] for row in rows] == ["quorum=1", "lock step"]
    assert [row["keeps_up"] for row in rows] == [True, False]
    assert float(str(rows[1]["useful_time"])) < 0.63
    even = _rows(gradwire(*words, "--rate", "100gbit"))
    assert [row["name"] for row in even] == ["lock step", "quorum=1"]


@each(
    "words, said",
    [
        (["--speeds", "1,1"], "--local"),
        (["--local", "--speeds", "1,1"], "3 numbers above 0"),
        (["--local", "--speeds", "1,1,0"], "3 numbers above 0"),
        (["--local", "--speeds", "1,fast,1"], "3 numbers above 0"),
    ],
)
def test_speeds_without_a_meaning_are_refused(
    gradwire: Gradwire, words: list[str], said: str
) -> None:
    ended = gradwire("plan", "--model", "vgg16", "--ranks", "3", *words)
    assert ended.code == 2
    assert said in ended.err
