"""``bench device`` on a CPU: every part gives its rows, and says what it leaves out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import device
from gradwire.compress.onebit import onebit
from gradwire.compress.topk import topk
from gradwire.contract import Compressor, State
from gradwire.errors import GradwireError, InvalidSetting
from gradwire.spec import TensorSpec
from tests.testbed.forked import fork_ranks


def ignore(done: float, what: str) -> None:
    pass


def test_kernels_and_the_partition_have_their_rows() -> None:
    bench = device.DeviceBench.small(parts=("kernels", "partition"), numel=4096, zen_numel=10_000)
    rows, notes = device.run(bench, ignore, codecs=[onebit(), topk()])
    named: dict[str, Any] = {str(row["name"]): row for row in rows}
    cases = ("encode", "encode-plain", "decode", "decode-plain")
    compressors = [f"{name}/{case}" for name in ("onebit", "topk") for case in cases]
    assert [*named] == ["copy", *compressors, "partition/cpu"]
    assert all(named[name]["fraction_of_copy_bandwidth"] > 0 for name in compressors)
    assert named["onebit/encode"]["eager_s"] > 0
    assert named["partition/cpu"]["num_entries"] == 520
    assert notes == [f"device: cpu, torch {torch.__version__}"]


class nowhere(onebit):
    """A compressor that no device runs."""

    def init(self, spec: TensorSpec) -> State:
        raise RuntimeError("no such kernel\nand more of it")


def test_a_compressor_that_fails_hides_no_other() -> None:
    bench = device.DeviceBench.small(parts=("kernels",), numel=4096)
    codecs: list[Compressor] = [nowhere(), onebit()]
    rows, _ = device.run(bench, ignore, codecs=codecs)
    assert rows[1] == {"name": "nowhere", "note": "RuntimeError: no such kernel"}
    assert str(rows[2]["name"]) == "onebit/encode"


def test_nothing_is_begun_once_the_minutes_are_over() -> None:
    bench = device.DeviceBench.small(numel=4096, minutes=1e-9)
    rows, notes = device.run(bench, ignore, codecs=[onebit()])
    assert rows[1:] == [{"name": "onebit", "note": "left out: no time left"}]
    assert [note.partition(" was")[0] for note in notes[1:]] == [
        "partition",
        "training at 1.00 Gbit/s",
    ]


@pytest.mark.multi
@pytest.mark.slow
def test_each_way_to_average_trains_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch, device)
    bench = device.DeviceBench.small(parts=("training",), width=64, num_layers=1, steps=1)
    rows, _ = device.run(bench, ignore)
    assert [str(row["name"]) for row in rows] == [f"training/{side}" for side in device.SIDES]
    assert all(float(str(row["steps_per_second"])) > 0 for row in rows)
    assert len({row["num_parameters"] for row in rows}) == 1


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"parts": ("kernel",)}, "kernels"),
        ({"device": "tpu"}, "cuda or cpu"),
        ({"ranks": 1}, "at least 2"),
    ],
)
def test_what_cannot_be_measured_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(GradwireError, match=text):
        device.DeviceBench.small(**given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_runs_without_one() -> None:
    with pytest.raises(InvalidSetting, match=r"--compile-only needs none, --device cpu tries it"):
        device.DeviceBench()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="no triton")
def test_the_verb_compiles_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    variables = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    variables.pop("TRITON_INTERPRET", None)
    words = ["bench", "device", "--compile-only", "--only", "zen/permute", "--target", "90"]
    program = "from gradwire.cli.main import main; main()"
    command = [sys.executable, "-c", program, *words, "--json"]
    found = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=110)
    assert found.returncode == 0, found.stderr
    (row,) = json.loads(found.stdout)["rows"]
    assert (row["name"], row["target"]) == ("zen/permute", "sm_90")
    assert row["registers"] > 0
