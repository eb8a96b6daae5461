"""The library's own tests pass where the lab and the bench are not installed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("collective", "contract", "exchange", "integrations")
RUNTIME = ("test_world_one.py", "test_sharded.py", "test_unused.py")
MANY = 200
"""Far fewer tests and subtests would mean that they were not found."""


@pytest.mark.slow
@pytest.mark.multi
def test_the_librarys_own_tests_pass_without_the_other_packages() -> None:
    where = [*(f"tests/{folder}" for folder in FOLDERS), *(f"tests/runtime/{f}" for f in RUNTIME)]
    options = ["-p", "tests.library_alone", "-p", "no:cacheprovider", "-q", "-m", "not slow"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", *options, *where],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    counts = re.findall(r"(\d+) (?:subtests )?passed", done.stdout)
    assert sum(map(int, counts)) > MANY
