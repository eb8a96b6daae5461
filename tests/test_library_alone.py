"""The library's own tests pass where the lab and the bench are not installed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WHERE = (
    "contract",
    "compress",
    "exchange",
    "kernels",
    "runtime/test_world_one.py",
    "runtime/step/test_local_gradients.py",
)
"""Algorithms by name, their exchanges, and ranks that train."""
MANY = 30
"""Far fewer tests would mean that they were not found."""


@pytest.mark.slow
@pytest.mark.multi
def test_the_librarys_own_tests_pass_without_the_other_packages() -> None:
    options = [
        "-p",
        "tests.library_alone",
        "-p",
        "no:cacheprovider",
        "-q",
        "-m",
        "not slow",
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n0",
            *options,
            *(f"tests/{name}" for name in WHERE),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (count,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(count) > MANY
