"""The C++ compiler: turns a source text into a loaded library, once a machine.

Hand-written kernels (csrc/*.cpp) and generated ones (dsl) both come through ``load_compiled``. A
library's file name carries a hash of all that decides its content (text, headers, flags, compiler,
CPU), so a file in the cache (``cache``) is either the right one or not there. Whatever fails,
``load_compiled`` says so once and returns None: the reference implementations serve then. Nothing
happens on import.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import cache

BASE_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden")
FLAG_SETS: tuple[tuple[str, ...], ...] = (
    (*BASE_FLAGS, "-march=native", "-fopenmp"),
    (*BASE_FLAGS, "-march=native"),
    BASE_FLAGS,
)
"""Tried in turn: not every compiler has OpenMP, or knows the machine it runs on."""

_COMPILE_TIMEOUT_S = 300.0
_LOCK_PATIENCE_S = _COMPILE_TIMEOUT_S + 30.0  # a builder that lives is done by then

_log = logging.getLogger("gradwire")
_lock = threading.RLock()
_loaded: dict[CppSource, ctypes.CDLL | None] = {}
_state = {"forced": 0, "warned": 0}
_EXPORT = re.compile(r"^GW_EXPORT (\w+) (\w+)\(([^)]*)\)", re.M)
_C_TYPES = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


@dataclass(frozen=True, eq=False)
class CppSource:
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
        """The sets of flags to try, in turn, until one compiles."""
        sets = tuple((*flags, *self.flags) for flags in FLAG_SETS)
        return ((*sets[0], *self.wishes), *sets) if self.wishes else sets


def load_compiled(
    source: CppSource, on_build: Callable[[Path], None] = lambda folder: None
) -> ctypes.CDLL | None:
    """The compiled ``source``, or None where its reference has to serve.

    Its functions take and return what their C++ declarations say: see ``declare``.

    Compiles on the first call on a machine (one or two seconds), loads from the cache on the first
    call in a process. ``on_build`` is called before the compiler is, with the cache's folder.
    Without a compiler, or when it fails, a warning is logged once and None is returned from then
    on.
    """
    if _state["forced"]:
        return None
    if source not in _loaded:
        with _lock:
            if source not in _loaded:
                library = _found_or_built(source, on_build)
                if library is not None:
                    declare(library, source.text)
                _loaded[source] = library
    return _loaded[source]


def declare(library: ctypes.CDLL, text: str) -> None:
    """Gives every function that ``text`` exports the types of its declaration there.

    So a call passes plain numbers, addresses and arrays, and the types stand in one place.
    """
    for returned, name, parameters in _EXPORT.findall(text):
        function = getattr(library, name)
        function.restype = None if returned == "void" else _C_TYPES[returned]
        function.argtypes = [
            ctypes.c_void_p if "*" in one else _C_TYPES[one.split()[0]]
            for one in parameters.split(",")
        ]


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
    """The absolute path of $CXX, c++, g++ or clang++: the first that there is."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    return None if found is None else str(Path(found).absolute())


def library_name(source: CppSource, compiler: str, flags: tuple[str, ...]) -> str:
    """The file name, in a folder of the cache, of what this compiler makes with these flags."""
    digest = hashlib.sha256(source.text.encode())
    for path in sorted(source.headers.glob("*.h")):
        digest.update(path.read_bytes())
    for text in (*flags, compiler, _compiler_version(compiler), _cpu_model()):
        digest.update(text.encode() + b"\0")
    return f"{source.name}-{digest.hexdigest()[:24]}.so"


def _found_or_built(source: CppSource, on_build: Callable[[Path], None]) -> ctypes.CDLL | None:
    compiler = find_compiler()
    if compiler is None:
        _warn("no C++ compiler (c++, g++ or clang++) is on the PATH")
        return None
    failure = ""
    for flags in source.flag_sets:
        try:
            return _load_or_build(source, compiler, flags, on_build)
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


def _load_or_build(
    source: CppSource,
    compiler: str,
    flags: tuple[str, ...],
    on_build: Callable[[Path], None],
) -> ctypes.CDLL:
    """The library of the first folder of the cache that has it, or room for it."""
    name = library_name(source, compiler, flags)
    command = [compiler, *flags, f"-I{source.headers.absolute()}", "-x", "c++"]
    for path in cache.paths():
        with cache.opened(path) as folder:
            if folder is None:
                continue
            library = folder.load(name)
            if library is None and folder.has_room():
                on_build(folder.path)
                library = _built(command, source.text, folder, name)
            if library is not None:
                return library
    raise OSError("no folder has room for a library")


def _built(command: Sequence[str], text: str, folder: cache.Cache, name: str) -> ctypes.CDLL:
    with folder.one_builder(name, _LOCK_PATIENCE_S):
        library = folder.load(name)  # another process may have built it meanwhile
        if library is None:
            folder.remove_stale()
            with folder.draft(name) as draft:
                _compile([*command, "-o", draft, "-"], text, folder.root)
            library = folder.load(name)
    if library is None:
        raise OSError(f"{folder.path / name} is not what was written there")
    return library


def _compile(command: Sequence[str], text: str, folder: Path) -> None:
    """Runs there and not where training was started.

    Headers of a text without a file are looked for in the working folder first.
    """
    _said(command, text, _COMPILE_TIMEOUT_S, folder)


@functools.cache
def _compiler_version(compiler: str) -> str:
    return _said([compiler, "--version"], "", 60.0)


def _said(command: Sequence[str], text: str, timeout_s: float, folder: Path | None = None) -> str:
    """The output of a compiler, in English whatever the user's language, so that it can be read."""
    return subprocess.run(
        command,
        input=text,
        check=True,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "LC_ALL": "C"},
        timeout=timeout_s,
        cwd=folder,
    ).stdout


@functools.cache
def _cpu_model(listing: Path = Path("/proc/cpuinfo")) -> str:
    """The processor that -march=native depends on; unlike machines may share a home folder."""
    try:
        lines = listing.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    keys = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    first = {line.split(":")[0].strip(): line for line in reversed(lines)}
    return platform.machine() + "\n".join(first[key] for key in keys if key in first)
