"""Cache folders that are full, of a process of its own.

Every case is a process of its own, as ranks are; what it prints is how it came to its kernels, and
what they give. All else of the cache, which kernels share: see kernels/test_build and test_cache.
"""

from __future__ import annotations

import os
import shutil
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
