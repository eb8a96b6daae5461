"""The files in examples/ run as their docstrings say, and train.

One is started by torchrun, the others in ranks that have imported torch already.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.runtime.ranks import Ranks

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if not path.stem.startswith("with_"))
"""Those of frameworks are tested beside their integrations."""


def launched(path: Path, world: int, folder: Path) -> str:
    """What a file prints that torchrun starts."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", str(world), str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},  # torchrun leaves logs
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def forked(path: Path, world: int, folder: Path) -> str:
    """What a file prints that finds torchrun's variables, and torch imported."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = Ranks(world)
    try:
        first, *_ = ranks.run(run_file, str(path), port)
    finally:
        ranks.close()
    return str(first)


def run_file(rank: int, world: int, path: str, port: str) -> str:
    dist.destroy_process_group()  # the file joins one itself
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path, run_name="__main__")
    return out.getvalue()


@pytest.mark.multi
@pytest.mark.timeout(240)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_as_it_says_and_its_loss_falls(path: Path, tmp_path: Path) -> None:
    said = re.search(r"torchrun --nproc-per-node (\d+) examples/", path.read_text())
    assert said is not None, "its docstring does not say how it is run"
    run = launched if path.stem == "train" else forked
    out = run(path, int(said[1]), tmp_path)
    loss = re.search(r"loss ([0-9.]+)", out)
    assert loss is not None, out
    # Both start above 1: a variance of the targets of about 21 and of 1.
    assert float(loss[1]) < 0.6
