"""``bench device`` on a CPU: every part gives its rows, and says what it leaves out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.compress.int8 import int8
from gradwire.compress.onebit import onebit
from gradwire.dsl.build import Built
from gradwire.errors import ExitCode
from gradwire_bench.micro import device, device_bits, offload
from gradwire_bench.micro.kernel import COPY_BYTES
from scripts import device_alone
from tests.bench.testbed.forked import fork_ranks
from tests.runtime.device import late
from tests.runtime.ranks import Ranks


def ignore(done: float, what: str) -> None:
    pass


@pytest.fixture
def late_one() -> Iterator[Ranks]:
    """A process of its own, as the device stays in it."""
    ranks = Ranks(1)
    yield ranks
    ranks.close()


@pytest.mark.smoke
def test_kernels_and_the_partition_have_their_rows() -> None:
    bench = device.DeviceBench.small(
        parts=("kernels", "partition"), numel=4096, zen_numel=10_000
    )
    reported = list[Any]()
    rows, notes = device.run(bench, ignore, codecs=[onebit()], announce=reported.append)
    assert reported == rows
    named: dict[str, Any] = {str(row["name"]): row for row in rows}
    assert {"copy", "onebit/decode-plain", "partition/cpu"} < {*named}
    assert named["onebit/encode"]["fraction_of_copy_bandwidth"] > 0
    assert named["onebit/encode"]["eager_s"] > 0
    rate, kernel_s = (
        named["copy"][key] for key in ("bandwidth_bytes_per_s", "kernel_s")
    )
    assert rate * kernel_s == pytest.approx(COPY_BYTES * 4096)
    assert named["partition/cpu"]["num_entries"] == 520
    assert notes == [f"device: cpu, torch {torch.__version__}"]


@pytest.mark.smoke
def test_a_kernel_of_other_bits_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (right,) = device_bits.rows(torch.device("cpu"), [int8()])
    assert (right["name"], right["ok"]) == ("bits/int8", True)
    assert int(str(right["num_compared"])) > 50
    real = Built.run_many

    def off_by_a_bit(built: Built, kernel: Any, calls: Any) -> list[int]:
        found = real(built, kernel, calls)
        for call in calls:
            call.tensors[kernel.stores[0].arg.name].view(torch.uint8)[0] ^= 1
        return found

    monkeypatch.setattr(Built, "run_many", off_by_a_bit)
    (wrong,) = device_bits.rows(torch.device("cpu"), [int8()])
    assert wrong["ok"] is False
    assert str(wrong["note"]).startswith("other bits: 300 of normal, ")


@pytest.mark.slow
def test_bits_are_compared_by_processes_of_their_own() -> None:
    names, host = ("int8", "onebit"), torch.device("cpu")
    rows = {str(row["name"]): row for row in device_bits.rows_apart(names, host, 100)}
    assert {name: row["ok"] for name, row in rows.items()} == {
        "bits/int8": True,
        "bits/onebit": True,
    }
    (late,) = device_bits.rows_apart(names, host, 0)
    assert late["note"] == "no answer in 0 s: int8, onebit"


def test_a_part_that_fails_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> Any:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(device_bits, "rows", fail)
    bench = device.DeviceBench.small(parts=("bits", "partition"), zen_numel=10_000)
    rows, _ = device.run(bench, ignore, codecs=[onebit()])
    assert rows[0] == {"name": "bits", "note": "RuntimeError: no kernel image"}
    assert rows[1]["name"] == "partition/cpu"


def test_no_part_begins_once_the_minutes_are_over() -> None:
    bench = device.DeviceBench.small(minutes=1e-9)
    rows, notes = device.run(bench, ignore, codecs=[onebit()])
    assert rows == []
    late = "was left out: its share of 1e-09 minutes is over"
    assert notes[1:] == [f"{part} {late}" for part in device.PARTS]


# ---- From a checkout, on a machine that has torch and numpy --------------------------

WITHOUT = """
import sys

class Without:
    names = {names!r}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Without())
"""
COMMANDS = {"typer", "rich", "pydantic", "matplotlib", "jinja2", "click"}


def alone(
    folder: Path, names: set[str], *words: str
) -> subprocess.CompletedProcess[str]:
    """The command, by a Python that finds no package of these names."""
    (folder / "sitecustomize.py").write_text(WITHOUT.format(names=names))
    variables = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-W", "ignore", "-m", device_alone.__name__, *words]
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=110
    )


def test_it_says_what_is_missing_and_goes_on(tmp_path: Path) -> None:
    words = ("--device", "cpu", "--part", "bits", "--only", "int8")
    found = alone(tmp_path, COMMANDS, *words)
    lines = found.stdout.splitlines()
    assert found.returncode == 0, found.stderr
    missing = [
        line.split(": ")[1] for line in lines if line.startswith("not installed: ")
    ]
    assert {*missing} >= COMMANDS - {"click"}
    at = lines.index(
        next(line for line in lines if line.startswith("bits/int8: compared "))
    )
    assert lines[at].endswith("ok yes")
    assert all(
        lines.index(f"not installed: {name}: {device_alone.NEEDED[name]}") < at
        for name in missing
    )


def test_it_does_not_run_without_numpy(tmp_path: Path) -> None:
    found = alone(tmp_path, {"numpy"})
    assert found.returncode == 78
    assert "not installed: numpy: nothing runs without it\n" in found.stdout
    assert found.stdout.endswith("pip install torch numpy\n")


def test_it_ends_once_the_minutes_are_over(tmp_path: Path) -> None:
    """A measurement that never ends, as of a kernel that hangs, is ended too."""
    hangs = "threading.Event().wait()"
    code = (
        "import threading\nfrom gradwire_bench.micro import device\n"
        "from scripts import device_alone\n"
        f"device.run = lambda *args, **named: {hangs}\n"
        "device_alone.main(['--device', 'cpu', '--minutes', '0.001'])"
    )
    words = [sys.executable, "-W", "ignore", "-c", code]
    found = subprocess.run(words, capture_output=True, text=True, timeout=110)
    assert found.returncode == ExitCode.TIME_LIMIT
    assert "0.001 minutes are over" in found.stdout


def test_a_gpu_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert device_alone.main([]) == ExitCode.MISTAKE
    assert (
        "device must be a GPU that torch finds, got 'none'" in capsys.readouterr().out
    )


def test_a_checkout_is_found_as_if_it_were_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "lab" / "pyproject.toml"
    project.parent.mkdir()
    project.write_text(
        '[project]\nname = "some-lab"\n'
        '[project.entry-points."gradwire.compressors"]\nlab = "some_lab.compress"\n'
    )
    before = [*sys.path]
    monkeypatch.setenv("PYTHONPATH", "src")
    with device_alone.as_installed(tmp_path):
        (point,) = [
            one
            for one in entry_points(group="gradwire.compressors")
            if one.dist.name == "some-lab"
        ]
        assert (point.name, point.value) == ("lab", "some_lab.compress")
        *sources, after, folder = os.environ["PYTHONPATH"].split(os.pathsep)
        assert sources == [
            str(tmp_path / name / "src") for name in (".", "lab", "bench")
        ]
        assert (after, folder) == ("src", sys.path[-1])
        assert sys.path[:3] == sources
    assert sys.path == before
    assert os.environ["PYTHONPATH"] == "src"


def offloaded(rank: int, world: int) -> list[dict[str, Any]]:
    """The rows of a device that is none, whose products and selections are small."""
    noted = late.install()
    where = torch.device("late:0")
    rows = offload.rows(where, (4_000, 10_000), 2, width=32, loop_s=0.005)
    assert noted.wrong == []
    return rows


@pytest.mark.multi
def test_a_device_has_both_ways_and_what_they_cost(late_one: Ranks) -> None:
    ((small, large),) = late_one.run(offloaded)
    assert (small["name"], large["name"]) == ("offload/4 KB", "offload/10 KB")
    for row in (small, large):
        assert min(row[key] for key in ("on_host_s", "on_device_s", "loop_s")) > 0
        assert {"loop_per_selection_on_host_s", "loop_per_selection_on_device_s"} < {
            *row
        }
    assert "paper_host_s" not in small
    assert large["paper_host_s"] == 1.49e-3


@pytest.mark.multi
@pytest.mark.slow
def test_each_way_to_average_trains_the_same_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork_ranks(monkeypatch, device, _VOCABULARY=64, _CONTEXT=16, _BATCH=1)
    bench = device.DeviceBench.small(
        parts=("training",), width=64, num_layers=1, steps=1
    )
    rows, _ = device.run(bench, ignore)
    assert [str(row["name"]) for row in rows] == [
        f"training/{side}" for side in device.SIDES
    ]
    assert all(float(str(row["steps_per_second"])) > 0 for row in rows)
    assert len({row["num_parameters"] for row in rows}) == 1
