"""The build cache: shared by processes, and never worse than the torch reference."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gradwire.kernels import _build, cast, compiler, select

needs_compiler = pytest.mark.skipif(compiler.find_compiler() is None, reason="no C++ compiler")
QUICK_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared")
LOAD = "from gradwire.kernels import _build; print(_build.load_library('select') is not None)"


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A process that has loaded and warned nothing, with an empty cache."""
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(compiler, "_state", {"forced": 0, "warned": 0})
    monkeypatch.setattr(compiler, "FLAG_SETS", ((*QUICK_FLAGS, "-fopenmp"), QUICK_FLAGS))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "gradwire"


def compiler_script(path: Path, body: str) -> Path:
    """A compiler that answers --version as the real one and otherwise runs ``body``."""
    real = shutil.which("c++") or shutil.which("g++") or "c++"
    text = f'#!/bin/sh\nreal={real}\n[ "$1" = --version ] && exec "$real" --version\n{body}\n'
    path.write_text(text)
    path.chmod(0o755)
    return path


def encode_something() -> list[int]:
    indices = torch.zeros(1, dtype=torch.int32)
    select.topk(torch.tensor([-1.0, 2.0]), indices, torch.zeros(1))
    cast.cast16_encode(torch.ones(2), torch.zeros(2, dtype=torch.float16))
    return indices.tolist()


def assert_one_warning(caplog, part):
    messages = [record.getMessage() for record in caplog.records if record.name == "gradwire"]
    assert len(messages) == 1
    assert part in messages[0]


def test_without_a_compiler_the_reference_serves_with_one_warning(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert encode_something() == [1]
        assert encode_something() == [1]
        assert _build.backend() == "reference"
    assert_one_warning(caplog, "no C++ compiler")


@needs_compiler
def test_a_failing_compiler_leaves_the_reference_and_its_words(
    monkeypatch, tmp_path, caplog, folder
):
    script = compiler_script(tmp_path / "cxx", "echo 'x.cpp:1: error: too old' >&2; exit 1")
    monkeypatch.setenv("CXX", str(script))
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert encode_something() == [1]
        assert _build.backend() == "reference"
    assert_one_warning(caplog, "error: too old")
    assert not list(folder.glob("*.so")) + list(folder.glob("*.tmp"))


@needs_compiler
def test_flags_a_compiler_lacks_are_left_out(monkeypatch, tmp_path):
    refuse = (
        'case "$*" in *-fopenmp*) echo "error: no OpenMP" >&2; exit 1;; esac; exec "$real" "$@"'
    )
    monkeypatch.setenv("CXX", str(compiler_script(tmp_path / "cxx", refuse)))
    assert _build.load_library("select") is not None
    assert encode_something() == [1]


@needs_compiler
def test_processes_that_start_together_build_once(folder, tmp_path):
    log = tmp_path / "compiles"
    script = compiler_script(tmp_path / "cxx", f'echo run >> {log}; exec "$real" "$@"')
    environment = {**os.environ, "CXX": str(script)}
    command = [sys.executable, "-c", LOAD]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate(timeout=100)[0].strip() for process in processes] == ["True"] * 3
    assert len(log.read_text().split()) == 1
    assert len(list(folder.glob("select-*.so"))) == 1
    assert not list(folder.glob("*.tmp"))


@needs_compiler
def test_a_killed_compile_leaves_nothing_that_is_loaded(monkeypatch, tmp_path, folder):
    slow = tmp_path / "slow"
    slow.touch()
    # The -o argument is the last but one; half a file is written, then nothing for a minute.
    hang = (
        f'if [ -e {slow} ]; then eval out=\\${{$(($# - 1))}}; echo junk > "$out"; exec sleep 60; fi'
    )
    script = compiler_script(tmp_path / "cxx", f'{hang}\nexec "$real" "$@"')
    monkeypatch.setenv("CXX", str(script))
    process = subprocess.Popen([sys.executable, "-c", LOAD], start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not any(path.stat().st_size for path in folder.glob("*.tmp")):
            assert time.monotonic() < deadline, "the compile never began"
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
    slow.unlink()
    assert not list(folder.glob("*.so"))
    assert _build.load_library("select") is not None
    assert encode_something() == [1]


@needs_compiler
def test_a_damaged_file_is_built_again(folder):
    source = _build.source("select")
    damaged = compiler.library_path(source, compiler.find_compiler(), source.flag_sets[0])
    assert damaged.parent == folder
    damaged.write_bytes(b"\x7fELF and then nothing")
    assert _build.load_library("select") is not None
    assert damaged.stat().st_size > 1000


def test_a_cache_that_cannot_be_written_moves_to_a_private_folder(monkeypatch, tmp_path):
    blocked = tmp_path / "a file, so no folder can be made below it"
    blocked.touch()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setenv("HOME", str(blocked))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    compiler._temporary_folder.cache_clear()
    try:
        found = compiler.cache_folder()
    finally:
        compiler._temporary_folder.cache_clear()
    assert found.parent == temporary
    assert found.stat().st_mode & 0o777 == 0o700


def test_a_user_without_a_home_has_a_cache(monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(compiler.Path, "home", homeless)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    compiler._temporary_folder.cache_clear()
    try:
        assert compiler.cache_folder().parent == tmp_path
    finally:
        compiler._temporary_folder.cache_clear()


@pytest.mark.parametrize("text", ["flags : fpu sse2\nmodel name : One\n", "Features : asimd\n"])
def test_another_processor_is_another_library(tmp_path, text):
    listing = tmp_path / "cpuinfo"
    listing.write_text(text, encoding="utf-8")
    found = {compiler._cpu_model(listing), compiler._cpu_model(tmp_path / "absent")}
    assert len(found) == 2
    assert all(name.startswith(platform.machine()) for name in found)


def test_a_compiler_is_asked_to_speak_english(monkeypatch, tmp_path, caplog):
    """Its words are read; what it says in another encoding is no reason to fail."""
    monkeypatch.setenv("LC_ALL", "de_DE.ISO-8859-1")
    script = tmp_path / "cxx"
    said = r"""[ "$LC_ALL" = C ] && word=error || word=Fehler; printf 'x: %s: \344\n' "$word" >&2"""
    script.write_text(f'#!/bin/sh\n{said}\n[ "$1" = --version ]\n', encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert _build.load_library("select") is None
    assert_one_warning(caplog, "x: error: \ufffd")


def test_a_temporary_folder_of_someone_else_is_not_trusted(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    planted = tmp_path / f"gradwire-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    compiler._temporary_folder.cache_clear()
    try:
        assert compiler._temporary_folder() != planted
    finally:
        compiler._temporary_folder.cache_clear()


@needs_compiler
def test_leftovers_of_killed_compiles_are_swept(folder):
    folder.mkdir(parents=True)
    old, young = folder / "select-1.tmp", folder / "select-2.tmp"
    for path in (old, young):
        path.touch()
    os.utime(old, (0, 0))
    assert _build.load_library("select") is not None
    assert not old.exists()
    assert young.exists()


def test_importing_compiles_nothing(folder):
    modules = "gradwire.kernels.select, gradwire.kernels.cast, gradwire.compress.onebit"
    subprocess.run([sys.executable, "-c", f"import {modules}"], check=True, timeout=100)
    assert not folder.exists()


@needs_compiler
def test_the_reference_can_be_forced_and_nests():
    assert _build.backend() == "cpp"
    with compiler.reference_only():
        with compiler.reference_only():
            assert _build.backend() == "reference"
        assert _build.load_library("select") is None
    assert _build.load_library("select") is not None


def test_the_name_of_a_library_depends_on_all_that_made_it(monkeypatch):
    program = sys.executable  # any program with a --version
    select_source, cast_source = _build.source("select"), _build.source("cast")
    names = {compiler.library_path(select_source, program, ("-O3",))}
    names.add(compiler.library_path(select_source, program, ("-O2",)))
    names.add(compiler.library_path(cast_source, program, ("-O3",)))
    monkeypatch.setattr(compiler, "_cpu_model", lambda: "another machine")
    names.add(compiler.library_path(select_source, program, ("-O3",)))
    monkeypatch.setattr(compiler, "_compiler_version", lambda program: "another compiler")
    names.add(compiler.library_path(select_source, program, ("-O3",)))
    assert len(names) == 5
