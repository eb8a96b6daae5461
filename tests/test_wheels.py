"""The wheel of a platform: made of the source archive, installed alone, used without a
compiler.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from gradwire.kernels import compiler, libraries, prebuilt
from scripts import hatch_build

ROOT = Path(__file__).parents[1]
LEVEL = "x86-64-v2"  # the farthest from what is compiled here
BITS = """
import hashlib, sys, warnings
import torch
from gradwire.contract.registry import load, names
from gradwire.contract.spec import TensorSpec
from gradwire.dsl.generated import Generated
from gradwire.kernels.compiler import origins

grad_N = torch.randn(70001, generator=torch.Generator().manual_seed(3)) * 0.1
for name in names("compress"):
    kind = load("compress", name)
    if kind.__module__.startswith("gradwire.") and issubclass(kind, Generated):
        for codec in sys.modules[kind.__module__].EXAMPLES:
            state = codec.init(TensorSpec("a", 70001))
            residual_N = torch.zeros_like(grad_N)
            payload, _ = codec.encode(state, grad_N, residual_N=residual_N)
            sum_N = codec.decode(payload, torch.empty_like(grad_N))
            codec.merge(payload, sum_N)
            digest = hashlib.sha256(payload.buffer.numpy())
            for one in (residual_N, sum_N):
                digest.update(one.numpy())
            print(codec, digest.hexdigest())
print(origins())
"""
UNUSUAL = """
import torch, gradwire as gw
from gradwire.contract.spec import TensorSpec
from gradwire.kernels.compiler import origins

for block in (192, 320):
    codec = gw.compress.uniform(block=block)
    codec.encode(codec.init(TensorSpec("a", 99)), torch.ones(99))
print(origins())
"""


def said(command: list[str], variables: dict[str, str], cwd: Path) -> tuple[str, str]:
    done = subprocess.run(
        command,
        env=variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this platform, made of the source archive."""
    folder = tmp_path_factory.mktemp("wheel")
    hatch = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "sdist",
        "-d",
        str(folder),
    ]
    said(hatch, {**os.environ}, ROOT)
    (archive,) = folder.glob("*.tar.gz")
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    wanted = {**os.environ, "GRADWIRE_WHEEL": f"x86_64/{LEVEL}"}
    said([sys.executable, "-m", "pip", *build, str(archive)], wanted, folder)
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.endswith("-py3-none-manylinux_2_28_x86_64.whl")
    packed = ZipFile(wheel).namelist()
    assert {"gradwire/py.typed", "gradwire/kernels/csrc/select.cpp"} <= set(packed)
    assert any(
        name.startswith(f"gradwire/kernels/built/{LEVEL}/compll-") for name in packed
    )
    return wheel


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with torch and, from its wheel, gradwire."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "env", with_pip=False)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    own = sysconfig.get_paths()["purelib"]
    (site / "this.pth").write_text(
        f"import site; site.addsitedir({own!r})\n", encoding="utf-8"
    )
    found = folder / "env" / "bin" / "python"
    install = ["--python", str(found), "install", "--quiet", "--no-deps", "--no-index"]
    said([sys.executable, "-m", "pip", *install, str(wheel)], {**os.environ}, folder)
    return found


def used(python: Path, folder: Path, *words: str) -> tuple[str, str]:
    """Output and errors of a program there, with no program on its path and an empty
    cache.
    """
    (folder / "nothing").mkdir(exist_ok=True)
    variables = {
        "PATH": str(folder / "nothing"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    return said([str(python), *words], {**variables, "OMP_NUM_THREADS": "2"}, folder)


x86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="builds for this platform"
)
together = pytest.mark.xdist_group("wheel")
"""On one worker, which makes the wheel once."""


@x86
@together
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_prebuilt_kernels_have_the_bits_of_compiled_ones(
    python: Path, tmp_path: Path
) -> None:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    *here, origin = said([sys.executable, "-c", BITS], variables, tmp_path)[
        0
    ].splitlines()
    assert origin == "['compiled here']"
    out, errors = used(python, tmp_path, "-c", BITS)
    assert out.splitlines() == [*here, f"['prebuilt {LEVEL}']"]
    assert len(here) >= 8
    assert errors == ""


@x86
@together
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_is_not_in_the_wheel_is_served_by_torch_with_one_warning(
    python: Path, tmp_path: Path
) -> None:
    out, errors = used(python, tmp_path, "-c", UNUSUAL)
    assert out == "['reference']\n"
    assert errors.count("no C++ compiler") == 1
    rows = json.loads(
        used(python, tmp_path, "-m", "gradwire.cli.main", "doctor", "--json")[0]
    )["rows"]
    (kernels,) = [row for row in rows if row["name"] == "CPU kernels"]
    assert (kernels["backend"], kernels["served by"]) == ("cpp", f"prebuilt {LEVEL}")


DEBIAN = """
mount --bind "$1" "$2/job"
mount -t proc proc "$2/proc"
mount -t tmpfs tmpfs "$2/dev/shm"
cp /etc/resolv.conf "$2/etc/"
shift 2
while [ "$1" != -- ]; do mkdir -p "$0$1"; mount --bind "$1" "$0$1"; shift; done
shift
exec chroot "$0" "$@"
"""


def pip_settings() -> dict[str, str]:
    """pip's settings on this machine, as variables."""
    listed = said(
        [sys.executable, "-m", "pip", "config", "list"], {**os.environ}, ROOT
    )[0]
    pairs = [line.split("=", 1) for line in listed.splitlines()]
    values = {key.rpartition(".")[2]: ast.literal_eval(value) for key, value in pairs}
    return {
        f"PIP_{key.upper().replace('-', '_')}": value for key, value in values.items()
    }


def core_seconds() -> float:
    """Seconds of a core that programs which have ended took: others may use this
    machine.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@x86
@together
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_minimal_debian_trains_without_a_compiler_within_a_minute(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """From the wheel to a loss; torch is installed before, as its download takes what
    it takes.
    """
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip(
            "makes a Debian of its own: run as root, after apt-get install debootstrap"
        )
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("mounts folders, which this machine does not allow")
    root, job, settings = tmp_path / "debian", tmp_path / "job", pip_settings()
    packages = "--include=python3,python3-venv,ca-certificates"
    make = ["debootstrap", "--variant=minbase", packages, "bookworm", str(root)]
    if (
        made := subprocess.run(make, capture_output=True, text=True, check=False)
    ).returncode:
        pytest.skip(f"no Debian could be made: {made.stdout[-200:]}")
    for folder in (job, root / "job", root / "dev" / "shm"):
        folder.mkdir(exist_ok=True)
    wheel: Path = request.getfixturevalue("wheel")
    shutil.copy(ROOT / "examples" / "train.py", job)
    shutil.copy(wheel, job)
    named = re.findall(r"(/[^\s:]+)", " ".join(settings.values()))
    # an index names others
    given = {path.parent for path in map(Path, named) if path.exists()}
    enter = [
        "unshare",
        "--mount",
        "bash",
        "-euc",
        DEBIAN,
        str(root),
        str(job),
        str(root),
    ]
    enter += [*(str(path) for path in sorted(given)), "--"]
    variables = {
        **settings,
        "PATH": "/env/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
    }

    def inside(*command: str) -> str:
        return said([*enter, *command], variables, ROOT)[0]

    assert "no compiler" in inside(
        "bash", "-c", "which cc c++ g++ gcc || echo no compiler"
    )
    inside("python3", "-m", "venv", "/env")
    inside("pip", "install", "--quiet", f"torch=={torch.__version__.partition('+')[0]}")
    start_s = core_seconds()
    inside("pip", "install", "--quiet", f"/job/{wheel.name}")
    assert f"prebuilt {LEVEL}" in inside("gradwire", "doctor")
    said_last = inside("torchrun", "--nproc-per-node", "2", "/job/train.py")
    assert core_seconds() - start_s < 60
    assert "bytes sent a step" in said_last


def test_settings_of_the_wheel_are_further_kernels() -> None:
    few, many = (hatch_build.sources(given) for given in ({}, hatch_build.SETTINGS))
    assert len(few) + 15 < len(many)
    assert few.keys() < many.keys()


def test_the_newest_level_that_a_processor_has_is_taken_first(tmp_path: Path) -> None:
    listing = tmp_path / "cpuinfo"
    second, third = (" ".join(prebuilt.X86_LEVELS[f"x86-64-v{n}"]) for n in (2, 3))
    for flags, wanted in (
        (f"{second} {third} avx512f", ("x86-64-v3", "x86-64-v2")),
        (f"{third} fpu", ()),  # a level without the one before is none
        (second, ("x86-64-v2",)),
    ):
        listing.write_text(f"processor: 0\nflags\t\t: {flags}\n", encoding="utf-8")
        prebuilt.levels.cache_clear()
        prebuilt.cpu_lines.cache_clear()
        assert prebuilt.levels("x86_64", listing) == wanted
    assert prebuilt.levels("x86_64", tmp_path / "absent") == ()


def test_a_kernel_that_does_not_load_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = libraries.source("crc")
    name = source.prebuilt_name
    edited = compiler.CppSource("crc", source.text + "\n", source.headers)
    assert edited.prebuilt_name != name
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(prebuilt, "levels", lambda: ("some", "other"))
    assert prebuilt.load_prebuilt(name) is None
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / name).write_bytes(b"made for another machine")
    assert prebuilt.load_prebuilt(name) is None
