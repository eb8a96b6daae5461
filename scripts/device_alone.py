"""``bench device`` from a checkout, where no package beyond torch and numpy need be
installed.

    python -m scripts.device_alone

It says first which packages are missing and what that costs, and prints each row as
soon as it is measured: a run that is cut short has told what it knew. It exits with 1
where bits differ.
"""

import argparse
import importlib
import os
import platform
import shutil
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from multiprocessing import active_children
from os import _exit
from pathlib import Path
from typing import Any

NEEDED = {
    "torch": "nothing runs without it",
    "numpy": "nothing runs without it",
    "triton": "programs have no kernels on a GPU, and compute in torch there",
    "typer": "the command gradwire does not run; this one does",
    "rich": "the command gradwire does not run; this one does",
    "pydantic": "gradwire cannot plan; nothing here does",
    "matplotlib": "no pictures; none is drawn here",
    "jinja2": "no pages; none is made here",
}
"""The packages that gradwire uses, and the effect if one is missing."""
_FATAL = ("torch", "numpy")
ROOT = Path(__file__).resolve().parents[1]
_PROJECTS = (".", "lab", "bench")


def missing(packages: Sequence[str] = tuple(NEEDED)) -> list[str]:
    """The packages that cannot be imported here.

    >>> missing(("sys", "no_such_package"))
    ['no_such_package']
    """
    missing_parts = []
    for name in packages:
        try:
            importlib.import_module(name)
        except ImportError:
            missing_parts.append(name)
    return missing_parts


@contextmanager
def as_installed(checkout: Path) -> Iterator[None]:
    """The checkout's packages count as installed, here and in processes that are
    started.

    Their sources come before those of other installations. Algorithms of the lab are
    found by entry points, which only an installed package has. So a folder gets what
    pip would write of each package that is not installed.
    """
    folder = Path(tempfile.mkdtemp(prefix="gradwire-checkout-"))
    sources = [str(checkout / project / "src") for project in _PROJECTS]
    before = os.environ.get("PYTHONPATH", "")
    path_before = [*sys.path]
    try:
        for project in _PROJECTS:
            _describe(checkout / project / "pyproject.toml", folder)
        folders = [*sources, before, str(folder)]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        sys.path[:] = [*sources, *path_before, str(folder)]
        yield
    finally:
        os.environ["PYTHONPATH"] = before
        sys.path[:] = path_before
        shutil.rmtree(folder, ignore_errors=True)


def _describe(project: Path, folder: Path) -> None:
    """Writes the name and the entry points of a package, unless it is installed."""
    if not project.exists():
        return
    about = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    try:
        distribution(about["name"])
        return
    except PackageNotFoundError:
        pass
    place = folder / f"{about['name'].replace('-', '_')}-0.dist-info"
    place.mkdir()
    head = f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: 0\n"
    (place / "METADATA").write_text(head, encoding="utf-8")
    lines = []
    for group, points in about.get("entry-points", {}).items():
        lines += [
            f"[{group}]",
            *(f"{name} = {value}" for name, value in points.items()),
        ]
    (place / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``bench device``; returns the exit code: 1 where bits differ, 78 where it
    cannot run.
    """
    options = _parser().parse_args(arguments)
    _say(f"Python {platform.python_version()}")
    lacking = missing()
    for name in lacking:
        _say(f"not installed: {name}: {NEEDED[name]}")
    if not {*_FATAL}.isdisjoint(lacking):
        _say("install these: pip install torch numpy")
        return 78
    with (
        as_installed(ROOT),
        _ended_after(options.minutes),
    ):
        return _measured(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="device_alone", description="bench device, by itself"
    )
    parser.add_argument(
        "--part", action="append", help="bits, kernels, training, ...; default all"
    )
    parser.add_argument(
        "--only", action="append", help="only these compressors; default all"
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes that share the GPU"
    )
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="the run ends after these"
    )
    parser.add_argument(
        "--device", default="cuda", help="cuda, or cpu with small sizes"
    )
    return parser


def _measured(options: argparse.Namespace) -> int:
    from gradwire.errors import GradwireError
    from gradwire_bench.micro import device, kernel

    made = device.DeviceBench.small if options.device == "cpu" else device.DeviceBench
    parts = tuple(options.part or device.PARTS)
    settings: dict[str, Any] = {
        "parts": parts,
        "ranks": options.ranks,
        "minutes": options.minutes,
    }
    try:
        bench = made(device=options.device, **settings)
        codecs = kernel.shipped(options.only or ())
        rows, notes = device.run(
            bench,
            lambda done, what: _say(f"... {what}"),
            codecs=codecs,
            announce=lambda row: _say(device.line(row)),
        )
    except GradwireError as error:
        _say(f"device_alone: {error}")
        return int(error.exit_code)
    for note in notes:
        _say(note)
    return int(any(row.get("ok") is False for row in rows))


@contextmanager
def _ended_after(minutes: float) -> Iterator[None]:
    """Ends this process once the minutes are over, even where a kernel never ends."""
    from gradwire.errors import ExitCode

    def end() -> None:
        _say(
            f"{minutes:g} minutes are over, and a measurement has not ended: "
            "what is above counts"
        )
        for process in active_children():
            process.kill()
        _exit(ExitCode.TIME_LIMIT)

    timer = threading.Timer(60 * minutes, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
