"""The cache of libraries: nobody else's files are loaded, and no damaged ones.

Libraries are any bytes here: what the loader is given it refuses with an OSError, which
tells a file that was found sound from one that was not, for which None is the answer.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradwire.kernels import compiler

NAME = "some-0123.so"
CONTENT = bytes(range(256)) * 3


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that has warned of nothing, and whose folders lie in ``tmp_path``."""
    monkeypatch.setattr(compiler, "_warned", set())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def folder() -> Path:
    """A cache with one library."""
    found = compiler.cache_folder()
    assert found is not None
    compiler.keep(CONTENT, found / NAME)
    return found


def is_taken(place: Path) -> bool:
    """Whether the library gets as far as the loader."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda path: path)
        return compiler.load_kept(place) is not None


def test_what_the_loader_refuses_counts_as_not_kept(folder: Path) -> None:
    """As in a home from which nothing may be run: the process then uses a library of
    its own.
    """
    place = folder / NAME
    compiler.keep(CONTENT, place)
    assert is_taken(place)
    assert compiler.load_kept(place) is None


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a folder another user's; without root's rights, in the cache's eyes
    alone.
    """
    if os.geteuid() == 0:
        os.chown(path, 4321, -1)
        return
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if record.name == "gradwire"
    ]


@pytest.mark.parametrize(
    ("owner", "mode", "user", "is_safe"),
    [
        (1000, 0o700, 1000, True),
        (1000, 0o755, 1000, True),
        (0, 0o755, 1000, True),  # root's, of the system or of this container
        (0, 0o700, 0, True),
        (1001, 0o700, 1000, False),
        (1000, 0o700, 0, False),  # root runs no user's code
        (65534, 0o700, 0, False),  # whom this container's user names do not reach
        (1000, 0o770, 1000, False),
        (1000, 0o1777, 1000, False),
        (0, 0o1777, 1000, False),
    ],
)
def test_who_may_own_what_is_loaded(
    monkeypatch: pytest.MonkeyPatch, owner: int, mode: int, user: int, is_safe: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    found = os.stat_result((stat.S_IFDIR | mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))
    assert (compiler._fault_of_folder(found) is None) == is_safe


def link(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = path.with_name("elsewhere")
    path.rename(real)
    path.symlink_to(real)


UNSAFE: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], object], str]] = {
    "group": (lambda path, _: path.chmod(0o770), "can be written by others"),
    "everyone": (lambda path, _: path.chmod(0o777), "can be written by others"),
    "link": (link, "symbolic link"),
    "owner": (give_away, "belongs to user"),
}


@pytest.mark.parametrize("how", UNSAFE)
def test_a_folder_that_others_could_write_is_passed_over_with_one_warning(
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    folder: Path,
) -> None:
    spoil, why = UNSAFE[how]
    assert compiler.cache_folder() == folder
    spoil(folder, monkeypatch)
    for _ in range(2):
        assert compiler.cache_folder() is None
    (line,) = warnings(caplog)
    assert str(folder) in line
    assert why in line


@pytest.mark.parametrize("home", ["absent", "a file"])
def test_without_a_home_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str
) -> None:
    """No warning: every process compiles for itself."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    (tmp_path / "home").touch()
    if home == "absent":
        monkeypatch.setattr(Path, "home", lambda: Path("~no such user").expanduser())
    assert compiler.cache_folder() is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_library_that_was_damaged_anywhere_is_not_loaded(
    folder: Path, data: st.DataObject
) -> None:
    place = folder / NAME
    compiler.keep(CONTENT, place)
    whole = place.read_bytes()
    assert is_taken(place)
    begin = data.draw(st.integers(0, len(whole) - 1))
    end = data.draw(st.integers(begin + 1, len(whole)))
    damage = data.draw(st.sampled_from(["cut short", "zeroed", "flipped", "longer"]))
    damaged = bytearray(whole)
    if damage == "cut short":
        del damaged[begin:]
    elif damage == "zeroed":
        damaged[begin:end] = bytes(end - begin)
    elif damage == "flipped":
        damaged[begin] ^= 1 << data.draw(st.integers(0, 7))
    else:
        damaged += bytes(end)
    place.write_bytes(damaged)
    assert is_taken(place) == (bytes(damaged) == whole)


def test_what_is_made_is_the_users_alone_whatever_the_umask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    before = os.umask(0)
    try:
        folder = compiler.cache_folder()
        assert folder is not None
        compiler.keep(CONTENT, folder / NAME)
        with compiler.one_builder(folder / NAME):
            pass
    finally:
        os.umask(before)
    for path in (folder.parent, folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {path.suffix for path in folder.iterdir()} == {".so", ".lock"}
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_library_that_finds_no_room_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    def full(path: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        compiler.keep(CONTENT, folder / "other-4567.so")
    assert [path.name for path in folder.iterdir()] == [NAME]


def test_a_process_that_was_forked_by_a_builder_does_not_keep_its_lock(
    folder: Path,
) -> None:
    leave = os.pipe()
    with compiler.one_builder(folder / NAME):
        child = os.fork()
        if child == 0:
            os.close(leave[1])
            os.read(leave[0], 1)
            os._exit(0)
    try:
        with (folder / NAME).with_suffix(".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(leave[0])
        os.close(leave[1])
        os.waitpid(child, 0)
