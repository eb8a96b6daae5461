"""Each framework trains through gradwire, and goes on from a checkpoint with the same
bits.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.files import run_by
from tests.runtime.meshes import needs_reduce_scatter

pytestmark = [pytest.mark.slow, pytest.mark.multi, pytest.mark.timeout(400)]

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
NIGHTLY = {"torchtitan": pytest.mark.nightly}
"""Examples whose runs take long, and whose parts other tests hold."""
FRAMEWORKS = {
    # How it is started; its arguments for a whole run, a first part, and the rest of
    # it.
    "ray": ((), ("--steps", "8"), ("--steps", "4"), ("--steps", "4")),
    "accelerate": (
        TORCHRUN,
        ("--steps", "8"),
        ("--steps", "4"),
        ("--steps", "4", "--resume"),
    ),
    "transformers": (
        TORCHRUN,
        ("--steps", "10"),
        ("--steps", "5"),
        ("--steps", "10", "--resume"),
    ),
    "torchtitan": (
        TORCHRUN,
        ("--steps", "20"),
        ("--steps", "12"),
        ("--steps", "20", "--resume"),
    ),
    "lightning": (
        (),
        ("--epochs", "2"),
        ("--epochs", "1"),
        ("--epochs", "2", "--resume"),
    ),
}


def said(
    how: tuple[str, ...], name: str, folder: Path, arguments: tuple[str, ...]
) -> list[str]:
    """The last two lines of an example: step and bytes, and the bits of the
    parameters.
    """
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
    return [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("step", "parameters"))
    ]


def test_a_job_of_slurm_that_is_requeued_goes_on(tmp_path: Path) -> None:
    def by_srun(folder: str, num_steps: int) -> str:
        given = ("--folder", str(tmp_path / folder), "--steps", str(num_steps))
        return run_by(2, EXAMPLES / "with_slurm.py", given, "slurm")

    whole, before = by_srun("whole", 8), by_srun("parts", 4)
    assert before != whole
    assert by_srun("parts", 4) == whole
    script = (EXAMPLES / "with_slurm.sbatch").read_text()
    assert "srun python examples/with_slurm.py --folder" in script
    subprocess.run(["bash", "-n", EXAMPLES / "with_slurm.sbatch"], check=True)


@pytest.mark.parametrize(
    ("name", "world", "more"),
    [
        ("fsdp", 4, ()),
        pytest.param("fsdp_alone", 2, (), marks=needs_reduce_scatter),
        pytest.param("torchtitan", 4, ("--shard", "2"), marks=pytest.mark.nightly),
    ],
)
def test_sharded_layers_go_on_with_the_bits_of_one_run(
    name: str, world: int, more: tuple[str, ...], tmp_path: Path
) -> None:
    def trained(folder: str, *options: str) -> list[str]:
        given = ("--folder", str(tmp_path / folder), *more, "--steps", *options)
        return run_by(world, EXAMPLES / f"with_{name}.py", given).splitlines()

    at_once, before = trained("whole", "8"), trained("parts", "4")
    assert before[-1] != at_once[-1]
    assert trained("parts", "4", "--resume")[-2:] == at_once[-2:]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=NIGHTLY.get(name, ())) for name in FRAMEWORKS],
)
def test_a_run_in_two_parts_ends_in_the_bits_of_one(name: str, tmp_path: Path) -> None:
    # that example has torchtitan's loop, and does not import it
    if name != "torchtitan" and importlib.util.find_spec(name) is None:
        package = "ray[train]" if name == "ray" else "gradwire[frameworks]"
        pytest.skip(f"{name} is not installed; run: pip install '{package}'")
    how, whole, first, rest = FRAMEWORKS[name]
    at_once = said(how, name, tmp_path / "whole", whole)
    before = said(how, name, tmp_path / "parts", first)
    assert before[1] != at_once[1]
    assert said(how, name, tmp_path / "parts", rest) == at_once


def test_adapters_are_trained_over_two_sites(tmp_path: Path) -> None:
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed; run: pip install peft transformers")
    arguments = ("--base-steps", "20", "--steps", "41", "--folder", str(tmp_path))
    done = subprocess.run(
        [sys.executable, *TORCHRUN, str(EXAMPLES / "with_peft.py"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    loss, sent = re.findall(r"loss ([\d.]+), (\d+) bytes", done.stdout)[0]
    assert 1.0 < float(loss) < 4.5  # 5.5 without training
    # three exchanges of 21,000 adapters in 4 bits
    assert 300 < int(sent) < 1200
    assert (tmp_path / "adapter_model.safetensors").is_file()
