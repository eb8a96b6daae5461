"""Kernels built into the wheel of a platform: a build hook of hatchling's.

``python -m build`` makes the wheel that every machine takes, with C++ sources only.
``GRADWIRE_WHEEL=x86_64`` or ``aarch64`` before it makes the wheel of that platform:
each kernel built for each level below, which ``gradwire/kernels/prebuilt.py`` chooses
from. ``x86_64/x86-64-v3`` builds for that level alone, and not for ``SETTINGS``: a
wheel to try. The other platform needs a cross compiler
(``apt-get install g++-aarch64-linux-gnu``). Kernels are those of ``kernels/csrc`` and
what CompLL generates for each compressor under ``SETTINGS`` and its examples.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if TYPE_CHECKING:
    from gradwire.kernels.compiler import CppSource

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = "GRADWIRE_WHEEL"
LEVELS = {
    "x86_64": ("x86-64-v2", "x86-64-v3", "x86-64-v4"),
    "aarch64": ("aarch64",),
}
MARCH = {"aarch64": "armv8-a"}
NEWEST_GLIBC = (2, 28)
"""The newest symbols that a kernel may need, as the wheel's tag says; torch's wheels
are as new.
"""
DENSITIES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1)
BLOCKS = (128, 256, 512, 1024, 4096)
SETTINGS: dict[str, list[dict[str, object]]] = {
    "uniform": [
        *({"bitwidth": width} for width in (1, 2, 4, 8)),
        *({"bitwidth": width, "block": block} for width in (4, 8) for block in BLOCKS),
    ],
    "dgc": [{"density": density} for density in DENSITIES],
    "int8": [{"block": block} for block in BLOCKS],
    "fp8": [{"block": block} for block in BLOCKS],
    "onebit": [{"stretch": 1.0}],
}
"""What people set, beside the defaults and the examples of each compressor's file."""


def sources(settings: dict[str, list[dict[str, object]]]) -> dict[str, CppSource]:
    """Every kernel to be built, by its file name; those of compressors also for these
    settings.
    """
    from gradwire.contract.registry import KINDS, load, names
    from gradwire.dsl.generated import Generated
    from gradwire.kernels import libraries

    found = [libraries.source(name) for name in libraries.libraries()]
    for name in names("compress"):
        kind = load("compress", name)
        if not kind.__module__.startswith(KINDS["compress"].folder) or not issubclass(
            kind, Generated
        ):
            continue
        codecs = [*sys.modules[kind.__module__].EXAMPLES]
        codecs += [kind(**given) for given in settings.get(name, [])]
        codecs += [codec.for_sums() for codec in codecs]
        found += [codec.kernels().built.source for codec in codecs]
    return {source.prebuilt_name: source for source in found}


def compile_all(target: str, only: str, folder: Path) -> int:
    """Builds ``folder``/LEVEL/NAME of every kernel for these levels; returns how
    many.
    """
    compiler = compiler_for(target)
    levels = (only,) if only else LEVELS[target]
    sys.path.insert(0, str(ROOT / "src"))  # before an installed gradwire
    from gradwire.kernels.compiler import BASE_FLAGS

    def compile_one(level: str, name: str, source: CppSource) -> None:
        out = folder / level / name
        out.parent.mkdir(parents=True, exist_ok=True)
        flags = [
            *BASE_FLAGS,
            f"-march={MARCH.get(level, level)}",
            "-fopenmp",
            "-s",
            *source.flags,
        ]
        flags += source.wishes if level == "x86-64-v4" else ()
        command = [
            compiler,
            *flags,
            f"-I{source.headers}",
            "-x",
            "c++",
            "-o",
            str(out),
            "-",
        ]
        subprocess.run(command, input=source.text.encode(), check=True)
        check_glibc(out)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = [
            pool.submit(compile_one, level, name, source)
            for name, source in sources({} if only else SETTINGS).items()
            for level in levels
        ]
        return len([job.result() for job in jobs])


def compiler_for(target: str) -> str:
    """g++ for a platform: this machine's own, or a cross compiler."""
    named = f"{target}-linux-gnu-g++"
    wanted = (
        [os.environ.get("CXX", "g++"), named]
        if target == platform.machine()
        else [named]
    )
    found = next((path for name in wanted if (path := shutil.which(name))), None)
    if found is None:
        raise SystemExit(
            f"no {named} for {VARIABLE}={target}: apt-get install "
            f"g++-{target}-linux-gnu"
        )
    return found


def check_glibc(library: Path) -> None:
    """Refuses a kernel that would not load where the wheel's tag says it does."""
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())
    newest = max((tuple(map(int, one)) for one in versions), default=(0, 0))
    if newest > NEWEST_GLIBC:
        raise SystemExit(
            f"{library.name} needs glibc {newest}, newer than {NEWEST_GLIBC}"
        )


class Kernels(BuildHookInterface[Any]):
    """Puts them into the wheel, and the platform into its name."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """What generating C++ imports."""
        return self.metadata.core.dependencies if os.environ.get(VARIABLE) else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds them where the variable asks for it; an editable install compiles for
        itself.
        """
        target, _, only = os.environ.get(VARIABLE, "").partition("/")
        if self.target_name != "wheel" or not target or version == "editable":
            return
        levels = LEVELS.get(target, ())
        if only not in ("", *levels) or not levels:
            raise SystemExit(f"{VARIABLE}={target}/{only}: there are {LEVELS}")
        self._made = tempfile.TemporaryDirectory(prefix="gradwire-kernels-")
        folder = Path(self._made.name)
        print(f"built {compile_all(target, only, folder)} kernels for {target}")
        build_data["pure_python"] = False
        build_data["tag"] = (
            f"py3-none-manylinux_{'_'.join(map(str, NEWEST_GLIBC))}_{target}"
        )
        build_data["force_include"][str(folder)] = "gradwire/kernels/built"

    def finalize(
        self, version: str, build_data: dict[str, Any], artifact_path: str
    ) -> None:
        """Takes the built files away again."""
        if hasattr(self, "_made"):
            self._made.cleanup()
