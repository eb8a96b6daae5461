"""The C++ compiler and its cache: turns a source text into a loaded library, once a machine.

Hand-written kernels (csrc/*.cpp) and generated ones (dsl) both come through ``load``. A library's
file name carries a hash of all that decides its content (text, headers, flags, compiler, CPU), so a
file in the cache is either the right one or not there. It is built under another name in the same
folder and renamed, so a killed compile leaves nothing that could be loaded; a lock lets one rank
compile while the others wait for its result. Whatever fails, ``load`` says so once and returns
None: the reference implementations serve then. Nothing happens on import.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
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
from dataclasses import dataclass
from pathlib import Path

BASE_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden")
FLAG_SETS: tuple[tuple[str, ...], ...] = (
    (*BASE_FLAGS, "-march=native", "-fopenmp"),
    (*BASE_FLAGS, "-march=native"),
    BASE_FLAGS,
)
"""Tried in turn: not every compiler has OpenMP, or knows the machine it runs on."""

_COMPILE_TIMEOUT_S = 300.0
_STALE_S = 3600.0  # a temporary file this old belongs to a compile that was killed
_LIBRARY_BYTES = 1 << 18  # room that a cache folder has to have; libraries take a tenth of it

_log = logging.getLogger("gradwire")
_lock = threading.RLock()
_loaded: dict[Source, ctypes.CDLL | None] = {}
_state = {"forced": 0, "warned": 0}


@dataclass(frozen=True, eq=False)
class Source:
    """One C++ file and how it is to be compiled, beside the flags that all have.

    Each is loaded once: keep it, and loading it again costs a look into a table.
    """

    name: str
    text: str
    headers: Path
    """The folder of the headers it includes."""
    flags: tuple[str, ...] = ()
    wishes: tuple[str, ...] = ()
    """Flags that make it faster, and that not every compiler knows."""

    @property
    def flag_sets(self) -> tuple[tuple[str, ...], ...]:
        """What is tried in turn."""
        sets = tuple((*flags, *self.flags) for flags in FLAG_SETS)
        return ((*sets[0], *self.wishes), *sets) if self.wishes else sets


def load(source: Source) -> ctypes.CDLL | None:
    """The compiled ``source``, or None where its reference has to serve.

    Compiles on the first call on a machine (one or two seconds), loads from the cache on the first
    call in a process. Without a compiler, or when it fails, a warning is logged once and None is
    returned from then on.
    """
    if _state["forced"]:
        return None
    if source not in _loaded:
        with _lock:
            if source not in _loaded:
                _loaded[source] = _found_or_built(source)
    return _loaded[source]


@contextlib.contextmanager
def reference_only() -> Iterator[None]:
    """Within the block, in all threads, nothing compiled is used."""
    with _lock:
        _state["forced"] += 1
    try:
        yield
    finally:
        with _lock:
            _state["forced"] -= 1


def find_compiler() -> str | None:
    """The path of $CXX, c++, g++ or clang++: the first that there is."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def cache_folder() -> Path:
    """The first of these that can be written: XDG cache, ~/.cache, this user's temporary folder."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    wanted = [Path(given)] if given else []
    with contextlib.suppress(RuntimeError):  # a user without a home
        wanted.append(Path.home() / ".cache")
    for base in wanted:
        if _has_room(base / "gradwire"):
            return base / "gradwire"
    return _temporary_folder()


def library_path(source: Source, compiler: str, flags: tuple[str, ...]) -> Path:
    """Where the library lies, or will lie, that this compiler makes with these flags."""
    digest = hashlib.sha256(source.text.encode())
    for path in sorted(source.headers.glob("*.h")):
        digest.update(path.read_bytes())
    for text in (*flags, compiler, _compiler_version(compiler), _cpu_model()):
        digest.update(text.encode() + b"\0")
    return cache_folder() / f"{source.name}-{digest.hexdigest()[:20]}.so"


def _found_or_built(source: Source) -> ctypes.CDLL | None:
    compiler = find_compiler()
    if compiler is None:
        _warn("no C++ compiler (c++, g++ or clang++) is on the PATH")
        return None
    failure = ""
    for flags in source.flag_sets:
        try:
            return _load_or_build(source, compiler, flags)
        except (OSError, subprocess.SubprocessError) as error:
            failure = _reason(error)
    _warn(f"{compiler} could not build {source.name}: {failure}")
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


def _load_or_build(source: Source, compiler: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    path = library_path(source, compiler, flags)
    if path.exists():
        with contextlib.suppress(OSError):  # a damaged file is built again
            return ctypes.CDLL(str(path))
        path.unlink(missing_ok=True)
    with _one_builder(path.with_suffix(".lock")):
        if not path.exists():
            _remove_stale(path.parent)
            _compile(source, compiler, flags, path)
    return ctypes.CDLL(str(path))


def _compile(source: Source, compiler: str, flags: tuple[str, ...], path: Path) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    command = [compiler, *flags, f"-I{source.headers}", "-x", "c++", "-o", name, "-"]
    try:
        _said(command, source.text, _COMPILE_TIMEOUT_S)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _one_builder(path: Path) -> Iterator[None]:
    """Holds a lock file where the file system has locks.

    It only saves work: without it every rank compiles, and the last rename wins.
    """
    with path.open("wb") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel when its holder dies
        yield


def _remove_stale(folder: Path) -> None:
    for path in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()


@functools.cache
def _compiler_version(compiler: str) -> str:
    return _said([compiler, "--version"], "", 60.0)


def _said(command: list[str], text: str, timeout_s: float) -> str:
    """What a compiler prints, in English whatever the user's language, so that it can be read."""
    return subprocess.run(
        command,
        input=text,
        check=True,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "LC_ALL": "C"},
        timeout=timeout_s,
    ).stdout


@functools.cache
def _cpu_model(listing: Path = Path("/proc/cpuinfo")) -> str:
    """What -march=native depends on; a home folder may be shared by unlike machines."""
    try:
        lines = listing.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    keys = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    first = {line.split(":")[0].strip(): line for line in reversed(lines)}
    return platform.machine() + "\n".join(first[key] for key in keys if key in first)


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


def _has_room(folder: Path) -> bool:
    """Whether a library can be written here: in a full folder an empty file still can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_LIBRARY_BYTES))
            file.flush()
            return True
    except OSError:
        return False
