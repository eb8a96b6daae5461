"""The benchmark beside DeMo's own program, with a stand-in of its interface."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradwire_bench.runs import demo_peer

STAND_IN = """
import torch

class TransformDCT:
    def __init__(self, param_groups, target_chunk):
        assert target_chunk == 64

    def encode(self, x):
        return x.view(-1, 64, 64)

    def decode(self, x):
        return x.view(1024, 2048)

class CompressDCT:
    def compress(self, x, topk):
        assert topk == 32
        return None, x, x.shape, 4096

    def decompress(self, p, idx, val, xshape, totalk):
        return val
"""


def test_both_sides_are_timed_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo.py").write_text(STAND_IN, encoding="utf-8")
    monkeypatch.setattr(demo_peer, "ROUNDS", 2)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "demo", raising=False)
    found = demo_peer.measure(str(tmp_path))
    assert {name: len(seconds) for name, seconds in found.items()} == {"gradwire": 2, "peer": 2}
    assert min(found["peer"]) < min(found["gradwire"]), "the stand-in computes nothing"
    del sys.modules["demo"]
