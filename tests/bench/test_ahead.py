"""Triton kernels are compiled for GPUs that need not be there, by a process that does
not interpret them.
"""

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
from tests.bench.specimens import rounds
from tests.cli.conftest import Ended

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no triton")

PROGRAM = """
import json, os, sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from gradwire_bench.micro import ahead
from tests.bench.specimens import rounds

target, *names = sys.argv[1:]
found = [one for one in (*ahead.launches(), *rounds.launches()) if one.name in names]
with ThreadPoolExecutor(os.cpu_count()) as pool:
    print(json.dumps([*pool.map(partial(ahead.compiled, target=target), found)]))
"""


def compiled(folder: Path, target: str, *names: str) -> list[Row]:
    """Rows of the launches of these names, by a process that compiles."""
    variables = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    variables["PYTHONPATH"] = str(Path(__file__).parents[2])
    variables.pop("TRITON_INTERPRET", None)
    words = [sys.executable, "-c", PROGRAM, target, *names]
    found = subprocess.run(
        words, env=variables, capture_output=True, text=True, timeout=580
    )
    assert found.returncode == 0, found.stderr
    rows: list[Row] = json.loads(found.stdout)
    return rows


def refuse_rounding(row: Row) -> None:
    """The static law of a kernel: each operation rounds as it is written, and nothing
    is spilled.

    To do: give its launch ``enable_fp_fusion=False``, and write divisions as
    ``tl.div_rn``.
    """
    others = ahead.rounding_otherwise(str(row["_ptx"]))
    assert not others, f"{row['name']}: {others}"
    assert row["num_rounding_otherwise"] == 0
    assert 8 <= int(str(row["registers"])) <= 255, row["name"]
    # 8 bytes hold the way back from a division that is called.
    assert int(str(row["stack_bytes"])) <= 8, row["name"]


@needs_triton
def test_one_tensor_and_several_are_compiled_with_wide_loads(tmp_path: Path) -> None:
    rows = compiled(
        tmp_path, "sm_80", "int8/merge", "int8/merge, many", "runs/count_runs"
    )
    alone, several, runs = rows
    assert [row["name"] for row in (several, runs)] == [
        "int8/merge, many",
        "runs/count_runs",
    ]
    for row in rows:
        refuse_rounding(row)
    wide = [str(row["_ptx"]).count("ld.global.v4.b32") for row in (alone, several)]
    # 4096 elements by 256 threads; of several, codes may lie anywhere
    assert wide == [
        5,
        4,
    ]


@needs_triton
def test_the_law_rejects_kernels_that_round_otherwise(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    rows = compiled(tmp_path, "sm_80", *rounds.EXPECTED)
    assert [row["name"] for row in rows] == [*rounds.EXPECTED]
    for row, part in zip(rows, rounds.EXPECTED.values(), strict=True):
        with subtests.test(str(row["name"])):
            with pytest.raises(AssertionError, match="rounds/"):
                refuse_rounding(row)
            found = ahead.rounding_otherwise(str(row["_ptx"]))
            assert any(part in one.split(".") for one in found), found


@needs_triton
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(590)
@pytest.mark.parametrize("target", ahead.ALL_TARGETS)
@pytest.mark.parametrize("several", [False, True], ids=["one tensor", "several"])
def test_every_kernel_compiles_for_a_target(
    target: str, several: bool, tmp_path: Path
) -> None:
    """It takes 30 to 50 s on two cores, and no GPU. Those of AMD are compiled, and no
    more said.
    """
    names = [
        one.name for one in ahead.launches() if one.name.endswith("many") == several
    ]
    rows = compiled(tmp_path, target, *names)
    assert len(rows) > 50
    assert [row["name"] for row in rows] == names
    assert {row["target"] for row in rows} == {target}
    if target.startswith("gfx"):
        return
    for row in rows:
        assert f".target {target}" in str(row["_ptx"])
        refuse_rounding(row)
        if str(row["name"]).startswith("onebit65536/encode_with_residual"):
            assert int(str(row["registers"])) <= 128  # so that 512 threads have room


def test_every_form_of_every_program_is_listed() -> None:
    names = [one.name for one in ahead.launches()]
    assert len(set(names)) == len(names)
    listed = set(names)
    for name in (
        "threelc/merge",
        "dgc/encode_count",
        "adacomp/stage0_fold",
        "uniform/decode",
    ):
        assert {name, f"{name}, many"} <= listed
    assert {"zen/hash_entries", "runs/read_runs"} <= listed
    assert [one.name for one in ahead.launches(["zen/p"])] == ["zen/permute"]


def test_the_command_has_a_row_a_kernel_and_target(
    gradwire: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what is private in a row; nothing is compiled here."""

    def row(launch: ahead.Launch, target: str) -> Row:
        return {"name": launch.name, "target": target, "_ptx": ""}

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
        "gfx942",
        "--json",
    )
    rows = json.loads(gradwire("bench", "device", *words).out)["rows"]
    assert rows == [
        {"name": "zen/permute", "target": target} for target in ("80", "gfx942")
    ]
