"""The C++ compiler: turns a source text into a loaded library, once a machine.

Hand-written kernels (csrc/*.cpp) and generated ones (dsl) both come through ``load_compiled``. What
the installed wheel brings is taken first (`prebuilt.py`); the rest is compiled here. A
library's file name carries a hash of all that decides its content (text, headers, flags, compiler,
CPU), so a file in the cache is either the right one or not there. Whatever fails,
``load_compiled`` says so once and returns None: the reference implementations serve then. Nothing
happens on import."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .prebuilt import load_prebuilt

# ---- The cache of compiled libraries ------------------------------------------------------------
#
# Its files run in this process, so nobody else may write there. A folder counts only if it belongs
# to this user, or to root of this system or container, who needs no library to have his way; if no
# group and no other user may write into it; and if its name is no symbolic link. It is checked once
# it is open, and all that is done there is done through the open folder: what becomes of its name
# meanwhile does not matter. A folder that does not count is passed over with a warning that says
# why; one that only has no room, without a word.
#
# A library ends in the SHA-256 digest of all that is before it. One that was cut short, or zeroed
# by a crash of the machine, would end the process by a signal: it is not loaded but built again.

_DIGEST_BYTES = 32
_LIBRARY_BYTES = 1 << 18  # room that a folder has to have; libraries take a tenth of it
_STALE_S = 3600.0  # a draft this old belongs to a compile that was killed
_POLL_S = 0.02
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC

_log = logging.getLogger("gradwire")
_told: set[Path] = set()
"""Paths that were warned of."""


def paths() -> Iterator[Path]:
    """The folders that may hold libraries, the best first: XDG cache, ~/.cache, temporary ones."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    lasting = [Path(given)] if given else []
    with contextlib.suppress(RuntimeError):  # a user without a home
        lasting.append(Path.home() / ".cache")
    yield from (base / "gradwire" for base in lasting)
    yield Path(tempfile.gettempdir()) / f"gradwire-{os.geteuid()}"
    yield _last_resort()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Cache | None]:
    """The cache in this folder, which is made if need be; None where it cannot be one."""
    handle = _open(path)
    if handle is None:
        yield None
        return
    try:
        yield Cache(path, handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Cache:
    """An open folder in which nobody else can write; ``handle`` is its file descriptor."""

    path: Path
    handle: int

    @property
    def root(self) -> Path:
        """A name that leads to this very folder for as long as it is open."""
        with contextlib.suppress(OSError):
            found = Path(f"/proc/self/fd/{self.handle}")
            if os.path.samestat(found.stat(), os.fstat(self.handle)):
                return found
        return self.path  # without /proc

    def load(self, name: str) -> ctypes.CDLL | None:
        """The library of this name; None if there is none that may be loaded.

        One that is damaged, or that someone else could have changed, is warned of.
        """
        place = self.root / name
        fault = _fault_of_library(place)
        if fault is None:
            # The loader takes equal names for equal files, so ``name`` has to tell the content.
            return ctypes.CDLL(str(place))
        if fault:
            _warn_once(self.path / name, f"is built again: it {fault}")
        return None

    def has_room(self) -> bool:
        """Whether a library can be written here: in a full folder an empty file still can."""
        try:
            with tempfile.TemporaryFile(dir=self.root) as file:
                file.write(bytes(_LIBRARY_BYTES))
                file.flush()
                return True
        except OSError:
            return False

    @contextlib.contextmanager
    def draft(self, name: str) -> Iterator[str]:
        """The name of a new file, to be filled, that becomes the library ``name`` in one step.

        Neither a killed compile nor a crash of the machine leaves a library that is none.
        """
        root = self.root
        handle, path = tempfile.mkstemp(dir=root, prefix=Path(name).stem, suffix=".tmp")
        os.close(handle)
        fresh = root / Path(path).name
        try:
            yield fresh.name
            with os.fdopen(os.open(fresh, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
                digest = hashlib.file_digest(file, "sha256").digest()
                file.seek(0, os.SEEK_END)
                file.write(digest)
                file.flush()
                os.fchmod(file.fileno(), 0o600)  # linkers give rights as the umask says
                os.fsync(file.fileno())
            fresh.replace(root / name)
            with contextlib.suppress(OSError):  # not every file system does it for folders
                os.fsync(self.handle)
        finally:
            fresh.unlink(missing_ok=True)

    @contextlib.contextmanager
    def one_builder(self, name: str, patience_s: float) -> Iterator[None]:
        """Lets one process build ``name`` while others wait until it is there or ``patience_s``.

        It only saves work. Where nothing can be locked, and when the builder is stopped, every
        process builds, and the last rename wins.
        """
        lock = (self.root / name).with_suffix(".lock")
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            yield
            return
        try:
            self._wait(handle, name, patience_s)
            yield
        finally:
            with contextlib.suppress(OSError):
                # By hand: a process forked meanwhile has the lock too, for as long as it lives.
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def _wait(self, lock: int, name: str, patience_s: float) -> None:
        """Returns with the lock, which the system takes from holders that die, or without."""
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pass
            except OSError:  # a file system without locks
                return
            if _fault_of_library(self.root / name) is None:
                return
            if time.monotonic() >= deadline_s:
                _log.warning(
                    "kernel cache: the process that builds %s has taken %g s, and may be stopped; "
                    "this process builds it too",
                    self.path / name,
                    patience_s,
                )
                return
            time.sleep(_POLL_S)

    def remove_stale(self) -> None:
        """Takes away drafts of compiles that were killed."""
        for path in self.root.glob("*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > _STALE_S:
                    path.unlink()


def _open(path: Path) -> int | None:
    """The folder's descriptor; None, with a warning if it is there and does not count."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        handle = os.open(path, _READ | os.O_DIRECTORY)
    except OSError:
        with contextlib.suppress(OSError):
            _is_safe(path, path.lstat())
        return None
    if _is_safe(path, os.fstat(handle)):
        return handle
    os.close(handle)
    return None


def _is_safe(path: Path, found: os.stat_result) -> bool:
    """Whether nobody else can change what is in the folder; warns of one where others can."""
    if stat.S_ISLNK(found.st_mode):
        fault, remedy = "is a symbolic link", "link the folder above it, or set XDG_CACHE_HOME"
    else:
        fault = _fault_of_owner(found) or ""
        remedy = "make it yours alone (chown, chmod 700), or take it away"
    if fault:
        _warn_once(path, f"is passed over: it {fault}; {remedy}")
    return not fault


def _warn_once(path: Path, what: str) -> None:
    if path not in _told:
        _told.add(path)
        _log.warning("kernel cache: %s %s", path, what)


def _fault_of_owner(found: os.stat_result) -> str | None:
    """Why someone else could have changed it; None if nobody could."""
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {found.st_uid}, and this process runs as {os.geteuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def _fault_of_library(path: Path) -> str | None:
    """Why a file must not be loaded; "" if there is none, None if it may be loaded."""
    try:
        handle = os.open(path, _READ | os.O_NONBLOCK)  # a pipe would wait for its writer
    except FileNotFoundError:
        return ""
    except OSError as error:
        linked = error.errno == errno.ELOOP
        return "is a symbolic link" if linked else f"cannot be opened ({error.strerror})"
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            return "is no file"
        fault = _fault_of_owner(found)
        if fault is not None:
            return fault
        content = memoryview(file.read())
    digest = hashlib.sha256(content[:-_DIGEST_BYTES]).digest()
    return None if content[-_DIGEST_BYTES:] == digest else "is damaged (its digest does not fit)"


@functools.cache
def _last_resort() -> Path:
    """A folder of this process's own, where no other could be had."""
    return Path(tempfile.mkdtemp(prefix="gradwire-"))


# ---- the compiler ------------------------------------------------------------------------------


BASE_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden")
FLAG_SETS: tuple[tuple[str, ...], ...] = (
    (*BASE_FLAGS, "-march=native", "-fopenmp"),
    (*BASE_FLAGS, "-march=native"),
    BASE_FLAGS,
)
"""Tried in turn: not every compiler has OpenMP, or knows the machine it runs on."""

_COMPILE_TIMEOUT_S = 300.0
_LOCK_PATIENCE_S = _COMPILE_TIMEOUT_S + 30.0  # a builder that lives is done by then

_lock = threading.Lock()
_loading: dict[CppSource, threading.Lock] = {}
"""A lock for each source: unlike ones are compiled side by side."""
_loaded: dict[CppSource, ctypes.CDLL | None] = {}
_origins: dict[CppSource, str] = {}
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

    def digest(self) -> Any:
        """A SHA-256 of its text and headers, to be updated with what else decides its content."""
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


def load_compiled(
    source: CppSource, on_build: Callable[[Path], None] = lambda folder: None
) -> ctypes.CDLL | None:
    """The compiled ``source``, or None where its reference has to serve.

    Its functions take and return what their C++ declarations say: see ``declare``.

    Loads what the wheel brings. Else it compiles on the first call on a machine (one to four
    seconds) and loads from the cache on the first call in a process. ``on_build`` is called before
    the compiler is, with the cache's folder. Without a compiler, or when it fails, a warning is
    logged once and None is returned from then on.
    """
    if _state["forced"]:
        return None
    if source not in _loaded:
        with _lock:
            own = _loading.setdefault(source, threading.Lock())
        with own:
            if source not in _loaded:
                ready = load_prebuilt(source.prebuilt_name)
                library = _found_or_built(source, on_build) if ready is None else ready[0]
                if library is not None:
                    declare(library, source.text)
                    _origins[source] = "compiled here" if ready is None else f"prebuilt {ready[1]}"
                _loaded[source] = library
    return _loaded[source]


def origins() -> list[str]:
    """Where the libraries that serve this process come from, and what it could not load."""
    return sorted({_origins.get(source, "reference") for source in _loaded})


_as_pointer = ctypes.c_void_p.from_param


class Pointer(ctypes.c_void_p):
    """A parameter that takes a tensor as the address of its first element, None as NULL, and
    addresses and arrays as they are."""

    @classmethod
    def from_param(cls, given: Any) -> Any:
        return _as_pointer(given.data_ptr() if isinstance(given, torch.Tensor) else given)


def declare(library: ctypes.CDLL, text: str) -> None:
    """Gives every function that ``text`` exports the types of its declaration there.

    So a call passes plain numbers, tensors and arrays, and the types stand in one place. A last
    parameter ``int threads`` is torch's number of threads, which no call passes.
    """
    for returned, name, parameters in _EXPORT.findall(text):
        function = getattr(library, name)
        function.restype = None if returned == "void" else _C_TYPES[returned]
        function.argtypes = [
            Pointer if "*" in one else _C_TYPES[one.split()[0]] for one in parameters.split(",")
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
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    return None if found is None else str(Path(found).absolute())


def library_name(source: CppSource, compiler: str, flags: tuple[str, ...]) -> str:
    """The file name, in a folder of the cache, of what this compiler makes with these flags."""
    digest = source.digest()
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
        name = library_name(source, compiler, flags)
        command = [compiler, *flags, f"-I{source.headers.absolute()}", "-x", "c++"]
        try:
            for path in paths():  # the first folder of the cache that has it, or room for it
                with opened(path) as folder:
                    library = None if folder is None else folder.load(name)
                    if folder is not None and library is None and folder.has_room():
                        on_build(folder.path)
                        library = _built(command, source.text, folder, name)
                    if library is not None:
                        return library
            failure = "no folder has room for a library"
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


def _built(command: Sequence[str], text: str, folder: Cache, name: str) -> ctypes.CDLL:
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
