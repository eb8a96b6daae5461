"""What an attach imports, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

ATTACHES = """
import sys
import torch
before = set(sys.modules)
import gradwire as gw
for exchange in (gw.compress.uniform(), "topk"):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    handle = gw.attach(model, exchange)
    model(torch.ones(2, 8)).sum().backward()
    assert handle.step == 1
    print(*sorted({*sys.modules} - before))
"""
MOST = 120
"""The modules of gradwire that a plain attach and its first step may load."""
UNASKED = [
    "runtime.survive",
    "runtime.local_steps",
    "runtime.overlap",
    "runtime.fsdp",
    "pilot",
    "measure",
    "runtime.ddp",
    "runtime.state",
    "runtime.controls",
    "planning.data",
    "planning.planner",
    "planning.simulation",
    "dsl.gpu",
    "kernels.sparse",
]
"""Rooms that serve what a plain attach does not ask for."""


def test_attach_loads_what_it_is_asked_for() -> None:
    """Dynamo and sympy take seconds, which a job that compiles nothing need not wait
    for.
    """
    done = subprocess.run(
        [sys.executable, "-c", ATTACHES], capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    uniform, topk = (line.split() for line in done.stdout.splitlines())
    assert not {"torch._dynamo", "sympy"} & {*topk}
    # The command line and the files of plans need these, and a training job does not.
    assert not {"typer", "rich", "pydantic"} & {*topk}
    own = [name for name in uniform if f"{name}.".startswith("gradwire.")]
    assert len(own) <= MOST
    asked_for = [
        name for name in own if f"{name}.".startswith("gradwire.runtime.step.")
    ]
    assert len(asked_for) >= 10, "modules are named otherwise"
    rooms = tuple(f"gradwire.{room}." for room in UNASKED)
    assert [name for name in own if f"{name}.".startswith(rooms)] == []
    assert "gradwire.kernels.sparse" in topk, "topk asks for it"
