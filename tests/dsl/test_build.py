"""Generated code is compiled once for all processes, and never needed."""

from __future__ import annotations

import logging

import pytest
import torch

from gradwire.kernels import compiler
from gradwire_lab.compress.tbq import tbq

pytestmark = pytest.mark.slow
QUICK_FLAGS = ("-std=c++17", "-O0", "-fPIC", "-shared")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A process that has loaded and warned nothing, with an empty cache."""
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(compiler, "_state", {"forced": 0, "warned": 0})
    monkeypatch.setattr(compiler, "FLAG_SETS", (QUICK_FLAGS,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)


def encoded() -> list[int]:
    payload, _ = tbq(threshold=1.0).encode(None, torch.tensor([-1.0, 0.0, 2.0, float("inf")]))
    return payload["codes"].tolist()


def test_without_a_compiler_the_interpreter_serves_with_one_warning(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert encoded() == encoded() == [0b11_01_00_10]
    (record,) = [record for record in caplog.records if record.name == "gradwire"]
    assert "no C++ compiler" in record.getMessage()


def test_another_setting_is_another_text():
    text = {threshold: tbq(threshold=threshold).kernels().built.text for threshold in (0.5, 0.25)}
    assert "0.5f" in text[0.5]
    assert "0.25f" in text[0.25]
