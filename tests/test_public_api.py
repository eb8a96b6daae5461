"""The public names have types that mypy and pyright see from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("src/gradwire", "lab/src/gradwire_lab", "bench/src/gradwire_bench")
WRONG = "\nHANDLE: int = gw.attach(nn.Linear(1, 1), gw.compress.uniform())\n"


def by_mypy(folder: Path) -> str:
    words = [
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--cache-dir=.cache",
        "right.py",
        "wrong.py",
    ]
    paths = os.pathsep.join(str((ROOT / package).parent) for package in PACKAGES)
    return said([sys.executable, *words], folder, {"MYPYPATH": paths})


def by_pyright(folder: Path) -> str:
    program = shutil.which("pyright")
    if program is None:
        pytest.skip("pyright is not installed: pip install pyright")
    (folder / "pyrightconfig.json").write_text(
        f'{{"extraPaths": ["{ROOT}/src", "{ROOT}/lab/src"]}}', encoding="utf-8"
    )
    return said([program, "--pythonpath", sys.executable, "-p", "."], folder, {})


def said(command: list[str], folder: Path, variables: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("checker", [by_mypy, by_pyright])
def test_a_users_file_is_checked(checker: Callable[[Path], str], tmp_path: Path) -> None:
    """What stands in the packages themselves is theirs: only the user's file counts."""
    text = (ROOT / "tests" / "public_api.py").read_text(encoding="utf-8")
    (tmp_path / "right.py").write_text(text, encoding="utf-8")
    (tmp_path / "wrong.py").write_text(text + WRONG, encoding="utf-8")
    told = checker(tmp_path)
    assert "right.py:" not in told
    assert f"wrong.py:{len(text.splitlines()) + 2}" in told


def test_each_package_says_that_it_is_typed() -> None:
    assert all((ROOT / package / "py.typed").exists() for package in PACKAGES)
