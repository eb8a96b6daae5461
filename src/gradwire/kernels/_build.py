"""Compiles csrc/*.cpp on first use and loads the result; says which backend serves.

A library's file name carries a hash of all that decides its content (sources, flags, compiler,
CPU), so a file in the cache is either the right one or not there. It is built under another name
in the same folder and renamed, so a killed compile leaves nothing that could be loaded; a lock
lets one rank compile while the others wait for its result. Nothing happens on import.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

_SOURCES = Path(__file__).parent / "csrc"
_BASE_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden")
# Tried in turn: not every compiler has OpenMP, or knows the machine it runs on.
_FLAG_SETS = (
    (*_BASE_FLAGS, "-march=native", "-fopenmp"),
    (*_BASE_FLAGS, "-march=native"),
    _BASE_FLAGS,
)
_COMPILE_TIMEOUT_S = 300.0
_STALE_S = 3600.0  # a temporary file this old belongs to a compile that was killed

_log = logging.getLogger("gradwire")
_lock = threading.RLock()
_libraries: dict[str, ctypes.CDLL | None] = {}
_state = {"forced": 0, "warned": 0}


def libraries() -> tuple[str, ...]:
    """Names that ``load_library`` knows: one for each C++ file."""
    return tuple(sorted(path.stem for path in _SOURCES.glob("*.cpp")))


def load_library(name: str) -> ctypes.CDLL | None:
    """The compiled csrc/``name``.cpp, or None where the torch reference has to serve.

    Compiles on the first call on a machine (about two seconds), loads from the cache on the first
    call in a process. Without a compiler, or when it fails, a warning is logged once and None is
    returned from then on.
    """
    if _state["forced"]:
        return None
    if name in _libraries:
        return _libraries[name]
    with _lock:
        if name not in _libraries:
            _libraries[name] = _build_and_load(name)
        return _libraries[name]


def backend() -> Literal["cpp", "reference"]:
    """Which implementation serves float32 on the CPU; compiles all kernels when none is cached.

    Calling it early (when a model is attached) keeps the compiler out of the first step.
    """
    loaded = [load_library(name) for name in libraries()]
    return "reference" if None in loaded else "cpp"


@contextlib.contextmanager
def reference_only() -> Iterator[None]:
    """Within the block, in all threads, kernels run their torch reference."""
    with _lock:
        _state["forced"] += 1
    try:
        yield
    finally:
        with _lock:
            _state["forced"] -= 1


def _build_and_load(name: str) -> ctypes.CDLL | None:
    compiler = _find_compiler()
    if compiler is None:
        _warn("no C++ compiler (c++, g++ or clang++) is on the PATH")
        return None
    failure = ""
    for flags in _FLAG_SETS:
        try:
            return _load_or_build(name, compiler, flags)
        except (OSError, subprocess.SubprocessError) as error:
            failure = _reason(error)
    _warn(f"{compiler} could not build {name}.cpp: {failure}")
    return None


def _warn(why: str) -> None:
    if not _state["warned"]:
        _state["warned"] = 1
        _log.warning("CPU kernels run as slow torch code: %s; install g++ to have them fast", why)


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError) and error.stderr:
        lines = [line for line in str(error.stderr).splitlines() if "error" in line]
        return lines[0] if lines else str(error)
    return str(error)


def _load_or_build(name: str, compiler: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    folder = _cache_folder()
    path = folder / f"{name}-{_content_hash(name, compiler, flags)}.so"
    if path.exists():
        with contextlib.suppress(OSError):  # a damaged file is built again
            return ctypes.CDLL(str(path))
        path.unlink(missing_ok=True)
    with _one_builder(path.with_suffix(".lock")):
        if not path.exists():
            _remove_stale(folder)
            _compile(name, compiler, flags, path)
    return ctypes.CDLL(str(path))


def _compile(name: str, compiler: str, flags: tuple[str, ...], path: Path) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    os.close(handle)
    command = [compiler, *flags, "-o", temporary, str(_SOURCES / f"{name}.cpp")]
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S
        )
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)


@contextlib.contextmanager
def _one_builder(path: Path) -> Iterator[None]:
    """Holds a lock file where the system and the file system have locks.

    It only saves work: without it every rank compiles, and the last rename wins.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel when its holder dies
        yield


def _remove_stale(folder: Path) -> None:
    for path in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()


def _find_compiler() -> str | None:
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _content_hash(name: str, compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in [*sorted(_SOURCES.glob("*.h")), _SOURCES / f"{name}.cpp"]:
        digest.update(path.read_bytes())
    for text in (*flags, compiler, _compiler_version(compiler), _cpu_model()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:20]


@functools.cache
def _compiler_version(compiler: str) -> str:
    return subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, text=True, timeout=60.0
    ).stdout


@functools.cache
def _cpu_model() -> str:
    """What -march=native depends on; a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    keys = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    first = {line.split(":")[0].strip(): line for line in reversed(lines)}
    return platform.machine() + "\n".join(first[key] for key in keys if key in first)


def _cache_folder() -> Path:
    """The first of these that can be written: XDG cache, ~/.cache, this user's temporary folder."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    wanted = [Path(given)] if given else []
    with contextlib.suppress(RuntimeError):  # a user without a home
        wanted.append(Path.home() / ".cache")
    for base in wanted:
        if _writable(base / "gradwire"):
            return base / "gradwire"
    return _temporary_folder()


@functools.cache
def _temporary_folder() -> Path:
    # Others may write into /tmp too: load only from a folder that is ours alone.
    shared = Path(tempfile.gettempdir()) / f"gradwire-{os.getuid()}"
    with contextlib.suppress(OSError):
        shared.mkdir(mode=0o700, exist_ok=True)
        found = shared.lstat()
        if found.st_uid == os.getuid() and found.st_mode & 0o170777 == 0o040700:
            return shared
    return Path(tempfile.mkdtemp(prefix="gradwire-"))


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
