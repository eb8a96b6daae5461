"""What an attach imports, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

ATTACHES = """
import sys
import torch
before = set(sys.modules)
import gradwire as gw
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
handle = gw.attach(model, "topk")
model(torch.ones(2, 8)).sum().backward()
assert handle.step == 1
print(sorted({"torch._dynamo", "sympy"} & {*sys.modules} - before))
"""


def test_attach_imports_neither_dynamo_nor_sympy() -> None:
    """They take seconds, which a job that compiles nothing need not wait for."""
    done = subprocess.run([sys.executable, "-c", ATTACHES], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
