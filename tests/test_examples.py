"""The files in examples/ run as their docstrings say, and train.

One is started by torchrun, the others in ranks that have imported torch already.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.files import run_by

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(
    path for path in FOLDER.glob("*.py") if not path.stem.startswith("with_")
)
"""Those of frameworks are tested beside their integrations."""


def launched(path: Path, world: int, folder: Path) -> str:
    """What a file prints that torchrun starts."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", str(world), str(path)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
        },  # torchrun leaves logs
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.multi
@pytest.mark.timeout(240)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_as_it_says_and_its_loss_falls(path: Path, tmp_path: Path) -> None:
    said = re.search(r"torchrun --nproc-per-node (\d+) examples/", path.read_text())
    assert said is not None, "its docstring does not say how it is run"
    world = int(said[1])
    out = (
        launched(path, world, tmp_path) if path.stem == "train" else run_by(world, path)
    )
    loss = re.search(r"loss ([0-9.]+)", out)
    assert loss is not None, out
    # Both start above 1: a variance of the targets of about 21 and of 1.
    assert float(loss[1]) < 0.6
