"""Triton kernels are compiled for GPUs that need not be there, by a process that does not interpret
them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from gradwire.cli.report.table import Row
from gradwire_bench.micro import ahead
from tests.cli.conftest import Ended

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no triton")

PROGRAM = """
import json, sys
from gradwire_bench.micro import ahead

architecture, names = int(sys.argv[1]), sys.argv[2:]
found = [one for one in ahead.launches() if one.name in names]
print(json.dumps([ahead.compiled(one, architecture) for one in found]))
"""
MORE = {
    "decode": "merge",
    "encode": "encode_with_residual",
    "encode_count": "encode_with_residual_count",
    "stage0": "stage0_with_residual",
}
"""Forms that do all that another one does, and more."""
ROUNDED = ("fma.", ".approx", ".ftz", "div.full")
"""The instructions that round in another way than is written."""


def compiled(folder: Path, architecture: int, *names: str) -> list[Row]:
    variables = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    variables["PYTHONPATH"] = str(Path(__file__).parents[2])
    variables.pop("TRITON_INTERPRET", None)
    words = [sys.executable, "-c", PROGRAM, str(architecture), *names]
    found = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=280)
    assert found.returncode == 0, found.stderr
    rows: list[Row] = json.loads(found.stdout)
    for row in rows:
        text = str(row["_ptx"])
        assert f".target sm_{architecture}" in text
        assert not any(bad in text for bad in ROUNDED), row["name"]
        assert 8 <= int(str(row["registers"])) <= 255, row["name"]
        # Nothing is spilled: 8 bytes hold the way back from a division that is called.
        assert int(str(row["stack_bytes"])) <= 8, row["name"]
    return rows


@needs_triton
def test_one_tensor_and_several_are_compiled_with_wide_loads(tmp_path: Path) -> None:
    rows = compiled(tmp_path, 80, "int8/merge", "int8/merge, many", "runs/count_runs")
    alone, several, runs = rows
    assert [row["name"] for row in (several, runs)] == [
        "int8/merge, many",
        "runs/count_runs",
    ]
    wide = [str(row["_ptx"]).count("ld.global.v4.b32") for row in (alone, several)]
    assert wide == [5, 4]  # 4096 elements by 256 threads; of several, codes may lie anywhere


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_kernel_is_compiled(tmp_path: Path) -> None:
    listed = {one.name for one in ahead.launches() if not one.name.endswith("many")}
    parts = {name: name.partition("/") for name in listed}
    less = {name for name, (own, _, part) in parts.items() if f"{own}/{MORE.get(part)}" in listed}
    assert 30 < len(listed - less) < len(listed)
    rows = compiled(tmp_path, 90, *sorted(listed - less))
    names = {str(row["name"]).partition("/")[0] for row in rows}
    assert {"dgc", "onebit", "onebit65536", "threelc", "runs", "zen"} <= names
    (long,) = [row for row in rows if row["name"] == "onebit65536/encode_with_residual"]
    assert int(str(long["registers"])) <= 128  # of 65536, so that 512 threads have room


def test_every_form_of_every_program_is_listed() -> None:
    names = [one.name for one in ahead.launches()]
    assert len(set(names)) == len(names)
    listed = set(names)
    for name in ("threelc/merge", "dgc/encode_count", "adacomp/stage0_fold", "uniform/decode"):
        assert {name, f"{name}, many"} <= listed
    assert {"zen/hash_entries", "runs/read_runs"} <= listed
    assert [one.name for one in ahead.launches(["zen/p"])] == ["zen/permute"]


def test_the_command_has_a_row_a_kernel_and_target(
    gradwire: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what is private in a row; nothing is compiled here."""

    def row(launch: ahead.Launch, architecture: int) -> Row:
        return {"name": launch.name, "target": architecture, "_ptx": ""}

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(ahead, "has_triton", lambda: True)
    monkeypatch.setattr(ahead, "compiled", row)
    words = (
        "--compile-only",
        "--only",
        "zen/permute",
        "--target",
        "80",
        "--target",
        "90",
        "--json",
    )
    rows = json.loads(gradwire("bench", "device", *words).out)["rows"]
    assert rows == [{"name": "zen/permute", "target": target} for target in (80, 90)]
