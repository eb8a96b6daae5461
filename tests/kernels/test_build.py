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

from gradwire.kernels import cast, compiler, select
from gradwire.kernels import libraries as build

pytestmark = pytest.mark.slow

needs_compiler = pytest.mark.skipif(
    compiler.find_compiler() is None, reason="no C++ compiler"
)
QUICK_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared")
ROOT = Path(__file__).parents[2]
LOAD = (
    "from gradwire.kernels import libraries; print(libraries.load_library('crc') is "
    "not None)"
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A process that has loaded and warned nothing, with an empty compiler."""
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(compiler, "_state", {"forced": 0, "warned": 0, "said": 0})
    monkeypatch.setattr(compiler, "_warned", set())
    monkeypatch.setattr(
        compiler, "FLAG_SETS", ((*QUICK_FLAGS, "-fopenmp"), QUICK_FLAGS)
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "gradwire"


def compiler_script(path: Path, body: str) -> Path:
    """A compiler that answers --version as the real one and otherwise runs ``body``."""
    real = shutil.which("c++") or shutil.which("g++") or "c++"
    text = (
        f'#!/bin/sh\nreal={real}\n[ "$1" = --version ] && exec "$real" '
        f"--version\n{body}\n"
    )
    path.write_text(text)
    path.chmod(0o755)
    return path


def encode_something() -> list[int]:
    indices = torch.zeros(1, dtype=torch.int32)
    select.topk(torch.tensor([-1.0, 2.0]), indices, torch.zeros(1))
    cast.cast16_encode(torch.ones(2), torch.zeros(2, dtype=torch.float16))
    return indices.tolist()


def assert_one_warning(caplog, part):
    messages = [
        record.getMessage() for record in caplog.records if record.name == "gradwire"
    ]
    messages = [message for message in messages if not message.startswith("compiling")]
    assert len(messages) == 1
    assert part in messages[0]


def test_without_a_compiler_the_reference_serves_with_one_warning(
    monkeypatch, tmp_path, caplog
):
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert encode_something() == [1]
        assert encode_something() == [1]
        assert build.backend() == "reference"
    assert_one_warning(caplog, "no C++ compiler")


@needs_compiler
def test_a_failing_compiler_leaves_the_reference_and_its_words(
    monkeypatch, tmp_path, caplog, folder
):
    script = compiler_script(
        tmp_path / "cxx", "echo 'x.cpp:1: error: too old' >&2; exit 1"
    )
    monkeypatch.setenv("CXX", str(script))
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert encode_something() == [1]
        assert build.backend() == "reference"
    assert_one_warning(caplog, "error: too old")
    assert not list(folder.glob("*.so")) + list(folder.glob("*.tmp"))


@needs_compiler
@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_the_first_rank_says_that_kernels_are_compiled(
    monkeypatch, caplog, folder, local_rank
):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(build, "libraries", lambda: ("crc", "cast"))
    assert build.backend() == "cpp"
    said = [record.getMessage() for record in caplog.records]
    assert build.backend() == "cpp"  # nothing is compiled, and nothing said
    assert len(caplog.records) == len(said)
    where = f"once; they are kept in {folder}"
    line = f"compiling C++ kernels, which takes seconds ({where})"
    assert said == [line] * (local_rank == "0")


STEPS = """
import torch
import gradwire as gw
from gradwire.kernels import compiler
net = torch.nn.Linear(300, 200)
gw.attach(net, "uniform")
print(*sorted(source.name for source in compiler._loaded))
for _ in range(2):
    net(torch.ones(1, 300)).sum().backward()
print(*sorted(source.name for source in compiler._loaded))
"""


@needs_compiler
def test_an_attach_builds_what_its_modules_call_and_steps_build_nothing(monkeypatch):
    """Built or found in this machine's cache, where all are once the tests have run."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    done = subprocess.run(
        [sys.executable, "-c", STEPS], capture_output=True, text=True, check=True
    )
    attached, trained = (line.split() for line in done.stdout.splitlines())
    assert attached == trained
    assert "select" in attached
    assert set(attached).isdisjoint({"exponents", "merge", "cosines"})


@needs_compiler
def test_unlike_kernels_are_compiled_side_by_side(monkeypatch, tmp_path):
    """Each compiler waits until the other has begun: one after the other would never
    end.
    """
    meet = "touch $$.begun; while [ $(ls *.begun | wc -l) -lt 2 ]; do sleep 0.02; done"
    script = compiler_script(
        tmp_path / "cxx", f'(cd {tmp_path}; {meet})\nexec "$real" "$@"'
    )
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(compiler, "_COMPILE_TIMEOUT_S", 20.0)
    monkeypatch.setattr(build, "libraries", lambda: ("crc", "cast"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert build.backend() == "cpp"


@needs_compiler
def test_processes_that_start_together_build_once(folder, tmp_path):
    log = tmp_path / "compiles"
    script = compiler_script(tmp_path / "cxx", f'echo run >> {log}; exec "$real" "$@"')
    environment = {**os.environ, "CXX": str(script)}
    command = [sys.executable, "-c", LOAD]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=100)[0].strip() for process in processes] == [
        "True"
    ] * 2
    assert len(log.read_text().split()) == 1
    assert len(list(folder.glob("*.so"))) == 1
    assert not list(folder.glob("*.tmp"))


@needs_compiler
def test_a_killed_compile_leaves_nothing_that_is_loaded(monkeypatch, tmp_path, folder):
    slow = tmp_path / "slow"
    slow.touch()
    # The -o argument is the last but one; half a file is written, then nothing for a
    # minute.
    junk = f'echo junk > "$out"; touch {slow}.begun; exec sleep 60'
    hang = f"if [ -e {slow} ]; then eval out=\\${{$(($# - 1))}}; {junk}; fi"
    script = compiler_script(tmp_path / "cxx", f'{hang}\nexec "$real" "$@"')
    monkeypatch.setenv("CXX", str(script))
    process = subprocess.Popen([sys.executable, "-c", LOAD], start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not Path(f"{slow}.begun").exists():
            assert time.monotonic() < deadline, "the compile never began"
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=60)
    slow.unlink()
    assert not list(folder.glob("*.so"))
    assert build.load_library("crc") is not None


@needs_compiler
def test_a_damaged_library_is_built_again_with_a_warning(folder):
    """In processes of their own: the loader ends by a signal where half a file is
    mapped.
    """
    command = [sys.executable, "-c", LOAD]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    (library,) = folder.glob("*.so")
    whole = library.read_bytes()
    library.write_bytes(whole[: len(whole) // 2])
    process = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=100
    )
    assert process.stdout.strip() == "True"
    assert f"{library} is built again" in process.stderr
    assert process.stderr.count("kernel cache") == 1
    assert len(library.read_bytes()) == len(whole)


NO_ROOM = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
"""


@needs_compiler
def test_without_room_anywhere_the_reference_serves_and_says_so_once(tmp_path):
    command = [sys.executable, "-c", NO_ROOM + LOAD]
    environment = {
        **os.environ,
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path),
    }
    process = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
    )
    assert process.stdout.strip() == "False"
    assert process.stderr.count("could not build") == 1
    assert not list(tmp_path.rglob("crc-*.[st]*"))


@needs_compiler
@pytest.mark.parametrize("cache", ["full", "unsafe"])
def test_a_folder_that_keeps_nothing_costs_a_compile(monkeypatch, folder, cache):
    def full(content, place):
        raise OSError("No space left on device")

    if cache == "full":
        monkeypatch.setattr(compiler, "keep", full)
    else:
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    assert build.load_library("select") is not None
    assert encode_something() == [1]
    assert not list(folder.glob("select-*.so"))


@needs_compiler
def test_headers_of_the_folder_that_training_starts_in_are_not_compiled(
    monkeypatch, tmp_path
):
    (tmp_path / "packing.h").write_text("#error planted")
    source = compiler.CppSource(
        "some", '#include "packing.h"', ROOT / "src/gradwire/dsl/csrc"
    )
    monkeypatch.chdir(tmp_path)
    assert compiler.load_compiled(source) is not None


@pytest.mark.parametrize(
    "text", ["flags : fpu sse2\nmodel name : One\n", "Features : asimd\n"]
)
def test_another_processor_is_another_library(tmp_path, text):
    listing = tmp_path / "cpuinfo"
    listing.write_text(text, encoding="utf-8")
    found = {compiler._cpu_model(listing), compiler._cpu_model(tmp_path / "absent")}
    assert len(found) == 2
    assert all(name.startswith(platform.machine()) for name in found)


@needs_compiler
def test_the_reference_can_be_forced_and_nests(monkeypatch):
    monkeypatch.setattr(build, "libraries", lambda: ("crc",))
    assert build.backend() == "cpp"
    with compiler.reference_only():
        with compiler.reference_only():
            assert build.backend() == "reference"
        assert build.load_library("crc") is None
    assert build.load_library("crc") is not None


def test_the_name_of_a_library_depends_on_all_that_made_it(monkeypatch):
    program = sys.executable  # any program with a --version
    select_source, cast_source = build.source("select"), build.source("cast")
    names = {compiler.library_name(select_source, program, ("-O3",))}
    names.add(compiler.library_name(select_source, program, ("-O2",)))
    names.add(compiler.library_name(cast_source, program, ("-O3",)))
    monkeypatch.setattr(compiler, "_cpu_model", lambda: "another machine")
    names.add(compiler.library_name(select_source, program, ("-O3",)))
    monkeypatch.setattr(
        compiler, "_compiler_version", lambda program: "another compiler"
    )
    names.add(compiler.library_name(select_source, program, ("-O3",)))
    assert len(names) == 5
