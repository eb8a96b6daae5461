"""Each framework trains through gradwire, and goes on from a checkpoint with the same bits."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.multi, pytest.mark.timeout(400)]

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
FRAMEWORKS = {
    # How it is started; its arguments for a whole run, a first part, and the rest of it.
    "fsdp": (
        (*TORCHRUN[:-1], "4"),
        ("--steps", "8"),
        ("--steps", "4"),
        ("--steps", "4", "--resume"),
    ),
    "fsdp_alone": (
        (*TORCHRUN[:-1], "4"),
        ("--steps", "8"),
        ("--steps", "4"),
        ("--steps", "4", "--resume"),
    ),
    "ray": ((), ("--steps", "8"), ("--steps", "4"), ("--steps", "4")),
    "accelerate": (TORCHRUN, ("--steps", "8"), ("--steps", "4"), ("--steps", "4", "--resume")),
    "transformers": (TORCHRUN, ("--steps", "10"), ("--steps", "5"), ("--steps", "10", "--resume")),
    "lightning": ((), ("--epochs", "2"), ("--epochs", "1"), ("--epochs", "2", "--resume")),
}


def said(how: tuple[str, ...], name: str, folder: Path, arguments: tuple[str, ...]) -> list[str]:
    """The last two lines of an example: step and bytes, and the bits of the parameters."""
    path = EXAMPLES / f"with_{name}.py"
    done = subprocess.run(
        [sys.executable, *how, str(path), "--folder", str(folder), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if line.startswith(("step", "parameters"))]


def by_srun(folder: Path, num_steps: int) -> list[str]:
    """What rank 0 of two tasks prints that find Slurm's variables, and no Slurm."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    path, options = EXAMPLES / "with_slurm.py", ["--folder", folder, "--steps", str(num_steps)]
    tasks = [
        subprocess.Popen(
            [sys.executable, path, *options],
            env={**os.environ, **meeting, "SLURM_NTASKS": "2", "SLURM_PROCID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [task.communicate(timeout=120)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0]
    return said[0].splitlines()


def test_a_job_of_slurm_that_is_requeued_goes_on(tmp_path: Path) -> None:
    whole, before = by_srun(tmp_path / "whole", 8), by_srun(tmp_path / "parts", 4)
    assert before != whole
    assert by_srun(tmp_path / "parts", 4) == whole
    script = (EXAMPLES / "with_slurm.sbatch").read_text()
    assert "srun python examples/with_slurm.py --folder" in script
    subprocess.run(["bash", "-n", EXAMPLES / "with_slurm.sbatch"], check=True)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_run_in_two_parts_ends_in_the_bits_of_one(name: str, tmp_path: Path) -> None:
    if not name.startswith("fsdp") and importlib.util.find_spec(name) is None:  # torch's own
        package = "ray[train]" if name == "ray" else "gradwire[frameworks]"
        pytest.skip(f"{name} is not installed; run: pip install '{package}'")
    how, whole, first, rest = FRAMEWORKS[name]
    at_once = said(how, name, tmp_path / "whole", whole)
    before = said(how, name, tmp_path / "parts", first)
    assert before[1] != at_once[1]
    assert said(how, name, tmp_path / "parts", rest) == at_once
