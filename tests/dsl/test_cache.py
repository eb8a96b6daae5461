"""Several processes and one cache folder: killed compilers, folders that are full or no folders.

Every case is a process of its own, as ranks are; what it prints is how it came to its kernels, and
what they give. Ranks that start together, and no compiler at all: see test_build.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire.kernels import compiler

pytestmark = [
    pytest.mark.skipif(compiler.find_compiler() is None, reason="no C++ compiler"),
    pytest.mark.slow,
]

PROGRAM = """
import logging, resource, signal, tempfile
from pathlib import Path
logging.basicConfig(format="warned: %(message)s")
import torch
from gradwire_lab.compress.tbq import tbq
from gradwire.kernels import compiler
compiler.FLAG_SETS = (("-std=c++17", "-O0", "-fPIC", "-shared"),)
{before}
codec = tbq(threshold=1.0)
library = codec.kernels().built.library()
payload, _ = codec.encode(None, torch.tensor([-1.0, 0.0, 2.0, float("inf")]))
mapped = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
print(next((path for path in mapped if "/compll-" in path), None), payload["codes"].tolist())
"""
CODES = "[210]"


def started(folder: Path, before: str = "", **environment: str) -> subprocess.Popen[str]:
    """A rank whose cache, home and temporary folder lie in ``folder``."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    places = {"XDG_CACHE_HOME": "cache", "HOME": "home", "TMPDIR": "tmp"}
    own = {name: str(folder / place) for name, place in places.items()}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        env={**os.environ, "CXX": "", **own, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that it can be killed with its compiler
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, list[str]]:
    """The library it loaded (None if the interpreter served) and what it warned of."""
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    library, codes = out.strip().split(" ", 1)
    assert codes == CODES
    return library, [line for line in err.splitlines() if line.startswith("warned: ")]


def script(path: Path, body: str) -> str:
    """A compiler that answers --version as the real one and otherwise runs ``body``."""
    real = shutil.which("c++") or shutil.which("g++") or "c++"
    text = f'#!/bin/sh\nreal={real}\n[ "$1" = --version ] && exec "$real" --version\n{body}\n'
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_a_rank_takes_over_from_one_that_is_killed_while_it_compiles(tmp_path: Path) -> None:
    """The other is given the lock by the system, and finds half a library under another name."""
    reached = tmp_path / "reached"
    os.mkfifo(reached)
    find_name = 'while [ "$1" != -o ]; do shift; done'
    for_ever = f'{find_name}; echo half > "$2"; echo > {reached}; exec cat {reached}'
    first = started(tmp_path, CXX=script(tmp_path / "cxx", for_ever))
    reached.read_text()  # returns when the compiler got there
    left = {path.suffix for path in (tmp_path / "cache" / "gradwire").iterdir()}
    assert left == {".lock", ".tmp"}
    script(tmp_path / "cxx", 'exec "$real" "$@"')  # the same path: the same library's name
    second = started(tmp_path, CXX=str(tmp_path / "cxx"))
    os.killpg(first.pid, signal.SIGKILL)
    assert first.wait(timeout=60) == -signal.SIGKILL
    library, warnings = ended(second)
    assert library.startswith(str(tmp_path / "cache"))
    assert not warnings
    first.stdout.close()
    first.stderr.close()


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A folder in which small files fit and libraries do not."""
    folder = tmp_path / "cache"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "none", str(folder)]
    tool = shutil.which("mount")
    if tool is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system takes root, and mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_cache_moves_to_the_next_folder(full: Path, tmp_path: Path) -> None:
    library, warnings = ended(started(tmp_path))
    assert library.startswith(str(tmp_path / "home" / ".cache" / "gradwire"))
    assert not warnings
    assert not list(full.rglob("*.tmp"))


@pytest.mark.parametrize("place", ["cache", "home"])
def test_a_cache_that_others_can_write_moves_to_the_next_folder(tmp_path: Path, place: str) -> None:
    """What was planted there is not loaded, be it the very file that would have been built."""
    first, _ = ended(started(tmp_path))
    shutil.move(tmp_path / "cache" / "gradwire", tmp_path / "made")
    planted = tmp_path / ("cache" if place == "cache" else "home/.cache") / "gradwire"
    planted.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(tmp_path / "made", planted)
    planted.chmod(0o777)
    own = {} if place == "cache" else {"XDG_CACHE_HOME": ""}
    library, warnings = ended(started(tmp_path, **own))
    assert Path(library).name == Path(first).name
    assert Path(library).parent != planted
    (line,) = warnings
    assert f"{planted} is passed over" in line


def test_a_cache_that_is_a_file_moves_to_the_next_folder(tmp_path: Path) -> None:
    for place in ("cache", "home"):
        (tmp_path / place).write_text("a file stops even root, whom no permission does")
    library, warnings = ended(started(tmp_path))
    assert library.startswith(str(tmp_path / "tmp" / f"gradwire-{os.getuid()}"))
    assert not warnings


NOWHERE = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
"""


def test_without_room_anywhere_the_interpreter_serves_and_says_so_once(tmp_path: Path) -> None:
    library, warnings = ended(started(tmp_path, NOWHERE))
    assert library == "None"
    assert len(warnings) == 1
    assert "could not build" in warnings[0]
    assert not list(tmp_path.rglob("compll-*.[st]*"))
