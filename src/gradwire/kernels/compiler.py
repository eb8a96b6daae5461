"""The C++ compiler: turns a source text into a loaded library, once a machine.

Hand-written kernels (csrc/*.cpp) and generated ones (dsl) both come through
``load_compiled``. What the installed wheel brings is taken first (`prebuilt.py`); the
rest is compiled here. A library's file name carries a hash of all that decides its
content (text, headers, flags, compiler, CPU), so a file in the cache is either the
right one or not there. Whatever fails, ``load_compiled`` says so once and returns None:
the reference implementations serve then. Nothing happens on import.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import log
from .prebuilt import cpu_lines, load_prebuilt

# ---- The cache of compiled libraries -------------------------------------------------
#
# Its files run in this process, so nobody else may write there: the folder belongs to
# this user, or to root of this system or container, who needs no library to have his
# way; no group and no other user may write into it; and its name is no symbolic link.
#
# A library ends in the SHA-256 digest of all that is before it. One that was cut short,
# or zeroed by a crash of the machine, would end the process by a signal: it is not
# loaded but built again.

_DIGEST_BYTES = 32

_warned: set[Path] = set()
"""Paths that were warned of."""


def cache_folder() -> Path | None:
    """The folder that keeps libraries: $XDG_CACHE_HOME/gradwire or ~/.cache/gradwire.

    None where it cannot be made, or with a warning where others can write there.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME", "")
        folder = (Path(base) if base else Path.home() / ".cache") / "gradwire"
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except (OSError, RuntimeError):  # a user may have no home
        return None
    fault = _fault_of_folder(status)
    if fault is None:
        return folder
    remedy = "make it a folder of yours alone (chown, chmod 700), or set XDG_CACHE_HOME"
    _warn_once(folder, f"is passed over: it {fault}; {remedy}")
    return None


def _fault_of_folder(status: os.stat_result) -> str | None:
    """Why someone else could change what is in the folder; None if nobody could."""
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if status.st_uid not in (os.geteuid(), 0):
        return (
            f"belongs to user {status.st_uid}, and this process runs as {os.geteuid()}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def load_kept(place: Path) -> ctypes.CDLL | None:
    """The library that is kept there.

    None if there is none, or with a warning if it is damaged.
    """
    try:
        content = memoryview(place.read_bytes())
    except OSError:
        return None
    if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]:
        # as in a folder from which nothing may be run
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(place))
        return None
    _warn_once(place, "is built again: it is damaged (its digest does not fit)")
    return None


def keep(content: bytes, place: Path) -> None:
    """Makes a library under this name, in one step: nobody ever sees a part of it."""
    handle, temporary = tempfile.mkstemp(
        dir=place.parent, prefix=place.stem, suffix=".tmp"
    )
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content + hashlib.sha256(content).digest())
        Path(temporary).replace(place)
    finally:
        Path(temporary).unlink(missing_ok=True)


@contextlib.contextmanager
def one_builder(place: Path) -> Iterator[None]:
    """Lets one process build a library while others wait until it is there.

    It only saves work. Where nothing can be locked every process builds, and the last
    rename wins. A builder that is stopped, and not ended, makes the others wait.
    """
    try:
        handle = os.open(
            place.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            # the system takes it from holders that die
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):
            # By hand: a process forked meanwhile has the lock too, for as long as it
            # lives.
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _warn_once(path: Path, what: str) -> None:
    if path not in _warned:
        _warned.add(path)
        log.warning("kernel cache: %s %s", path, what)


# ---- the compiler --------------------------------------------------------------------


BASE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
)
FLAG_SETS: tuple[tuple[str, ...], ...] = (
    (*BASE_FLAGS, "-march=native", "-fopenmp"),
    (*BASE_FLAGS, "-march=native"),
    BASE_FLAGS,
)
"""Tried in turn: not every compiler has OpenMP, or knows the machine it runs on."""

_COMPILE_TIMEOUT_S = 300.0

_lock = threading.Lock()
_loading: dict[CppSource, threading.Lock] = {}
"""A lock for each source: unlike ones are compiled side by side."""
_loaded: dict[CppSource, ctypes.CDLL | None] = {}
_origins: dict[CppSource, str] = {}
_state = {"forced": 0, "warned": 0, "said": 0}
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

    def digest(self) -> Any:
        """A SHA-256 of its text and headers, to be updated with other inputs."""
        digest = hashlib.sha256(self.text.encode())
        for path in sorted(self.headers.glob("*.h")):
            digest.update(path.read_bytes())
        return digest

    @property
    def prebuilt_name(self) -> str:
        """The name of its file in a wheel, where levels are folders."""
        digest = self.digest()
        digest.update("".join(f"{flag}\0" for flag in self.flags).encode())
        return f"{self.name}-{digest.hexdigest()[:24]}.so"


def load_compiled(source: CppSource) -> ctypes.CDLL | None:
    """The compiled ``source``, or None where its reference has to serve.

    Its functions take and return what their C++ declarations say: see ``declare``.

    Loads what the wheel brings. Else it compiles on the first call on a machine (one to
    four seconds) and loads from the cache on the first call in a process. The first
    rank of a machine says once that it compiles. Without a compiler, or when it fails,
    a warning is logged once and None is returned from then on.
    """
    if _state["forced"]:
        return None
    if source not in _loaded:
        with _lock:
            lock = _loading.setdefault(source, threading.Lock())
        with lock:
            if source not in _loaded:
                ready = load_prebuilt(source.prebuilt_name)
                library = _found_or_built(source) if ready is None else ready[0]
                if library is not None:
                    declare(library, source.text)
                    _origins[source] = (
                        "compiled here" if ready is None else f"prebuilt {ready[1]}"
                    )
                _loaded[source] = library
    return _loaded[source]


def origins() -> list[str]:
    """Where this process's libraries come from, and which it could not load."""
    return sorted({_origins.get(source, "reference") for source in _loaded})


_as_pointer = ctypes.c_void_p.from_param


class Pointer(ctypes.c_void_p):
    """A parameter that takes a tensor as the address of its first element, None as
    NULL, and addresses and arrays as they are.
    """

    @classmethod
    def from_param(cls, operand: Any) -> Any:
        return _as_pointer(
            operand.data_ptr() if isinstance(operand, torch.Tensor) else operand
        )


def declare(library: ctypes.CDLL, text: str) -> None:
    """Gives every function that ``text`` exports the types of its declaration there.

    So a call passes plain numbers, tensors and arrays, and the types stand in one
    place. A last parameter ``int threads`` is torch's number of threads, which no call
    passes.
    """
    for returned, name, parameters in _EXPORT.findall(text):
        function = getattr(library, name)
        function.restype = None if returned == "void" else _C_TYPES[returned]
        function.argtypes = [
            Pointer if "*" in parameter else _C_TYPES[parameter.split()[0]]
            for parameter in parameters.split(",")
        ]
        if parameters.endswith("int threads"):
            setattr(library, name, _on_threads(function))


def _on_threads(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*operands: Any) -> Any:
        return function(*operands, torch.get_num_threads())

    return call


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
    compiler = next(
        (path for name in names if name and (path := shutil.which(name))), None
    )
    return None if compiler is None else str(Path(compiler).absolute())


def library_name(source: CppSource, compiler: str, flags: tuple[str, ...]) -> str:
    """The file name in a cache folder for this compiler's output with these flags."""
    digest = source.digest()
    for text in (*flags, compiler, _compiler_version(compiler), _cpu_model()):
        digest.update(text.encode() + b"\0")
    return f"{source.name}-{digest.hexdigest()[:24]}.so"


def _found_or_built(source: CppSource) -> ctypes.CDLL | None:
    compiler = find_compiler()
    if compiler is None:
        _warn("no C++ compiler (c++, g++ or clang++) is on the PATH")
        return None
    failure = ""
    folder = cache_folder()
    for flags in source.flag_sets:
        command = [compiler, *flags, f"-I{source.headers.absolute()}", "-x", "c++"]
        try:
            name = library_name(source, compiler, flags)
            if folder is None:
                _announce("for this process alone")
                return _built(command, source.text, None, name)
            place = folder / name
            library = load_kept(place)
            if library is None:
                _announce(f"once; they are kept in {folder}")
                with one_builder(place):
                    # another process may have built it meanwhile
                    library = load_kept(place)
                    return library or _built(command, source.text, folder, name)
            return library
        except (OSError, subprocess.SubprocessError) as error:
            failure = _reason(error)
    _warn(f"{compiler} could not build {source.name}: {failure}")
    return None


def _announce(where: str) -> None:
    """Says once, on a machine's first rank, that kernels are compiled or waited for."""
    with _lock:
        is_first = not _state["said"] and os.environ.get("LOCAL_RANK", "0") == "0"
        _state["said"] = 1
    if is_first:
        # As a warning: lines of lower levels are not shown unless they are asked for.
        log.warning("compiling C++ kernels, which takes seconds (%s)", where)


def _built(
    command: Sequence[str], text: str, folder: Path | None, name: str
) -> ctypes.CDLL:
    """A new library, kept in ``folder`` if there is room.

    Raises an error of the compiler's.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-") as private:
        built = Path(private, name)
        # There and not where training was started: headers of a text without a file are
        # looked for in the working folder first.
        _said(
            [*command, "-o", str(built), "-"], text, _COMPILE_TIMEOUT_S, Path(private)
        )
        library = None
        if folder is not None:
            try:
                keep(built.read_bytes(), folder / name)
                library = load_kept(folder / name)
            except OSError as error:
                _warn_once(
                    folder,
                    f"keeps no kernels, so each process compiles its own: {error}",
                )
        return library or ctypes.CDLL(str(built))


def _warn(why: str) -> None:
    if not _state["warned"]:
        _state["warned"] = 1
        log.warning(
            "CPU kernels run as slow torch code: %s; install g++ to have them fast", why
        )


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError) and error.stderr:
        lines = [line for line in str(error.stderr).splitlines() if "error" in line]
        return lines[0] if lines else str(error)
    return str(error)


@functools.cache
def _compiler_version(compiler: str) -> str:
    return _said([compiler, "--version"], "", 60.0)


def _said(
    command: Sequence[str], text: str, timeout_s: float, folder: Path | None = None
) -> str:
    """The output of a compiler in English, whatever the user's language."""
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
    """The processor that -march=native depends on.

    Unlike machines may share a home folder.
    """
    first = cpu_lines(listing)
    keys = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return platform.machine() + "\n".join(first[key] for key in keys if key in first)
