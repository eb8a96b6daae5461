"""The cache of libraries: nobody else's files are loaded, and no damaged ones.

Libraries are any bytes here: what the loader is given it refuses with an OSError, which tells a
file that was found sound from one that was not, for which None is the answer.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
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
    monkeypatch.setattr(compiler, "_told", set())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[compiler.Cache]:
    """A cache with one library."""
    with compiler.opened(tmp_path / "cache" / "gradwire") as folder:
        assert folder is not None
        put(folder)
        yield folder


def put(folder: compiler.Cache, content: bytes = CONTENT) -> None:
    with folder.draft(NAME) as draft:
        (folder.root / draft).write_bytes(content)


def is_taken(folder: compiler.Cache) -> bool:
    """Whether the library gets as far as the loader."""
    try:
        return folder.load(NAME) is not None
    except OSError:
        return True


def first() -> Path:
    """The folder that is used."""
    for path in compiler.paths():
        with compiler.opened(path) as folder:
            if folder is not None:
                return folder.path
    raise AssertionError("there is always one")


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a file or folder another user's; without root's rights, in the cache's eyes alone."""
    if os.geteuid() == 0:
        os.chown(path, 4321, -1, follow_symlinks=False)
        return
    real, inode = compiler._fault_of_owner, path.lstat().st_ino

    def seen(found: os.stat_result) -> str | None:
        if found.st_ino == inode:
            found = os.stat_result((*found[:4], found.st_uid + 1, *found[5:10]))
        return real(found)

    monkeypatch.setattr(compiler, "_fault_of_owner", seen)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "gradwire"]


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
    assert (compiler._fault_of_owner(found) is None) == is_safe


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
    kept: compiler.Cache,
    tmp_path: Path,
) -> None:
    spoil, why = UNSAFE[how]
    assert first() == kept.path
    spoil(kept.path, monkeypatch)
    for _ in range(2):
        assert first() != kept.path
    found = [line for line in warnings(caplog) if str(kept.path) in line]
    assert len(found) == 1
    assert why in found[0]


@pytest.mark.parametrize("how", UNSAFE)
def test_a_library_that_others_could_write_is_not_loaded(
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kept: compiler.Cache,
) -> None:
    spoil, why = UNSAFE[how]
    assert is_taken(kept)
    spoil(kept.path / NAME, monkeypatch)
    for _ in range(2):
        assert not is_taken(kept)
    (line,) = warnings(caplog)
    assert why in line
    monkeypatch.undo()
    put(kept)
    assert is_taken(kept)
    assert (kept.path / NAME).stat().st_uid == os.geteuid()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_library_that_was_damaged_anywhere_is_not_loaded(
    kept: compiler.Cache, data: st.DataObject
) -> None:
    put(kept)
    whole = (kept.path / NAME).read_bytes()
    assert is_taken(kept)
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
    (kept.path / NAME).write_bytes(damaged)
    assert is_taken(kept) == (bytes(damaged) == whole)


def test_what_is_made_is_the_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with compiler.opened(tmp_path / "new" / "gradwire") as folder:
            assert folder is not None
            put(folder)
            with folder.one_builder(NAME, 0.0):
                pass
    finally:
        os.umask(before)
    for path in (folder.path.parent, folder.path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {path.suffix for path in folder.path.iterdir()} == {".so", ".lock"}
    for path in folder.path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_that_is_exchanged_while_it_is_open_is_not_used(
    kept: compiler.Cache, tmp_path: Path
) -> None:
    """Whoever may rename in the folder above cannot put one of his own under the name."""
    own = kept.path.rename(tmp_path / "moved")
    kept.path.mkdir()
    (kept.path / NAME).write_bytes(b"planted")
    assert is_taken(kept)
    (own / NAME).unlink()
    assert not is_taken(kept)
    put(kept)
    assert (own / NAME).exists()
    assert (kept.path / NAME).read_bytes() == b"planted"


def test_a_library_is_on_the_disk_before_it_has_its_name(
    monkeypatch: pytest.MonkeyPatch, kept: compiler.Cache
) -> None:
    """A crash of the machine leaves no file that is whole by its length only."""
    (kept.path / NAME).unlink()
    synced: list[tuple[bool, bool]] = []

    def fsync(handle: int, real: Callable[[int], None] = os.fsync) -> None:
        real(handle)
        is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        synced.append((is_folder, (kept.path / NAME).exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    put(kept)
    assert synced == [(False, False), (True, True)]


@pytest.fixture
def held(kept: compiler.Cache) -> Iterator[None]:
    """Someone holds the library's lock, as a builder that is stopped does."""
    with (kept.path / NAME).with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("there", [b"", b"damaged"])
def test_who_waited_long_enough_builds_too_and_says_so(
    kept: compiler.Cache, caplog: pytest.LogCaptureFixture, there: bytes
) -> None:
    (kept.path / NAME).unlink()
    if there:
        (kept.path / NAME).write_bytes(there)
    with kept.one_builder(NAME, 0.0):
        put(kept)
    (line,) = warnings(caplog)
    assert "may be stopped" in line
    assert NAME in line


def test_a_process_that_was_forked_by_a_builder_does_not_keep_its_lock(
    kept: compiler.Cache,
) -> None:
    (kept.path / NAME).unlink()
    leave = os.pipe()
    with kept.one_builder(NAME, 0.0):
        child = os.fork()
        if child == 0:
            os.close(leave[1])
            os.read(leave[0], 1)
            os._exit(0)
    try:
        with (kept.path / NAME).with_suffix(".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(leave[0])
        os.close(leave[1])
        os.waitpid(child, 0)


def test_leftovers_of_killed_compiles_are_swept(kept: compiler.Cache) -> None:
    old, young = kept.path / "some-1.tmp", kept.path / "some-2.tmp"
    for path in (old, young):
        path.touch()
    os.utime(old, (0, 0))
    kept.remove_stale()
    assert not old.exists()
    assert young.exists()


def test_without_any_folder_a_private_one_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").touch()
    (tmp_path / "home").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    planted = tmp_path / f"gradwire-{os.geteuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    compiler._last_resort.cache_clear()
    try:
        found = first()
    finally:
        compiler._last_resort.cache_clear()
    assert found not in (tmp_path / "cache" / "gradwire", planted)
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    (line,) = warnings(caplog)
    assert str(planted) in line
