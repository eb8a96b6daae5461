"""README's programs run as they are printed."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch.distributed as dist

from gradwire.planning.data.cluster import Cluster

README = Path(__file__).parents[1] / "README.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
SURROUNDINGS = """
import torch
from torch import nn
make_model = lambda: nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 2))
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [(torch.randn(4, 64), torch.tensor([0, 1, 0, 1]))] * 2
loss = nn.functional.cross_entropy
def one_step():
    loss(model(batches[0][0]), batches[0][1]).backward()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("place", range(len(PROGRAMS)))
def test_a_program_runs(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model, batches and a measured cluster; ``gw`` is imported where its reader has it."""
    monkeypatch.chdir(tmp_path)
    Cluster(num_ranks=4, rate_bytes_per_s=1.25e9).save(tmp_path / "cluster.json")
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in launched.items() if "init_process_group" in PROGRAMS[place] else ():
        monkeypatch.setenv(name, value)
    imported = "" if "import gradwire as gw" in PROGRAMS[place] else "import gradwire as gw\n"
    program = tmp_path / "program.py"
    program.write_text(SURROUNDINGS + imported + PROGRAMS[place], encoding="utf-8")
    try:
        runpy.run_path(str(program))["handle"].detach()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_the_loop_is_there() -> None:
    assert len(PROGRAMS) == 1
    assert "gw.attach(model" in PROGRAMS[0]
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 110
