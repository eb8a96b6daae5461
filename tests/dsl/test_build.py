"""Generated code is compiled once for all processes, and never needed."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradwire.kernels import compiler
from gradwire_lab.compress.tbq import tbq

pytestmark = pytest.mark.slow

needs_compiler = pytest.mark.skipif(compiler.find_compiler() is None, reason="no C++ compiler")
QUICK_FLAGS = ("-std=c++17", "-O0", "-fPIC", "-shared")
LOAD = """
from gradwire_lab.compress.tbq import tbq
from gradwire.kernels import compiler
compiler.FLAG_SETS = (("-std=c++17", "-O0", "-fPIC", "-shared"),)
print(tbq().kernels().built.library() is not None)
"""
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A process that has loaded and warned nothing, with an empty compiler."""
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(compiler, "_state", {"forced": 0, "warned": 0})
    monkeypatch.setattr(compiler, "FLAG_SETS", (QUICK_FLAGS,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)


def compiler_script(path: Path, body: str) -> str:
    """A compiler that answers --version as the real one and otherwise runs ``body``."""
    real = shutil.which("c++") or shutil.which("g++") or "c++"
    text = f'#!/bin/sh\nreal={real}\n[ "$1" = --version ] && exec "$real" --version\n{body}\n'
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def encoded() -> list[int]:
    payload, _ = tbq(threshold=1.0).encode(None, torch.tensor([-1.0, 0.0, 2.0, float("inf")]))
    return payload["codes"].tolist()


def test_without_a_compiler_the_interpreter_serves_with_one_warning(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert encoded() == encoded() == [0b11_01_00_10]
    (record,) = [record for record in caplog.records if record.name == "gradwire"]
    assert "no C++ compiler" in record.getMessage()


@needs_compiler
def test_a_failing_compiler_leaves_the_interpreter_and_its_words(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CXX", compiler_script(tmp_path / "cxx", "echo 'error: old' >&2; exit 1"))
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert encoded() == [0b11_01_00_10]
    (record,) = [record for record in caplog.records if record.name == "gradwire"]
    assert "error: old" in record.getMessage()
    assert not list((tmp_path / "cache").rglob("compll-*.[st]*"))


@needs_compiler
def test_processes_that_start_together_build_once(tmp_path):
    log = tmp_path / "compiles"
    script = compiler_script(tmp_path / "cxx", f'echo run >> {log}; exec "$real" "$@"')
    environment = {**os.environ, "CXX": script, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOAD], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    assert [process.communicate(timeout=100)[0].strip() for process in processes] == ["True"] * 2
    assert len(log.read_text().split()) == 1


@needs_compiler
def test_a_damaged_library_is_built_again():
    source = tbq(threshold=1.0).kernels().built.source
    name = compiler.library_name(source, compiler.find_compiler(), source.flag_sets[0])
    library = next(compiler.paths()) / name
    library.parent.mkdir(mode=0o700, parents=True)
    library.write_bytes(b"\x7fELF and then nothing")
    assert encoded() == [0b11_01_00_10]
    assert library.stat().st_size > 1000


def test_another_setting_is_another_text():
    text = {threshold: tbq(threshold=threshold).kernels().built.text for threshold in (0.5, 0.25)}
    assert "0.5f" in text[0.5]
    assert "0.25f" in text[0.25]
