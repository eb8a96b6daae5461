"""The cache of compiled libraries: folders whose files run in this process, so nobody else writes.

A folder counts only if it belongs to this user, or to root of this system or container, who needs
no library to have his way; if no group and no other user may write into it; and if its name is no
symbolic link. It is checked once it is open, and all that is done there is done through the open
folder: what becomes of its name meanwhile does not matter. A folder that does not count is passed
over with a warning that says why; one that only has no room, without a word.

A library ends in the SHA-256 digest of all that is before it. One that was cut short, or zeroed by
a crash of the machine, would end the process by a signal: it is not loaded but built again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
                    "kernel cache: whoever builds %s has not done it in %g s, and may be stopped; "
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
