"""Kernels that a platform's wheel brings, one build for each level of processors.

They lie in ``built/LEVEL/NAME-DIGEST.so`` (`scripts/hatch_build.py` puts them there),
and are as trusted as the Python files beside them. A digest of text, headers and flags
is part of the name, so a kernel of other settings or of an edited file is not found,
and is compiled. A checkout and the pure wheel have none.
"""

import ctypes
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "built"

X86_LEVELS = {
    "x86-64-v2": ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"),
    "x86-64-v3": ("abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}
"""Levels of the x86-64 psABI and what each adds to the last, by Linux's names."""


@cache
def cpu_lines(listing: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Linux's lines about the first processor, by name; empty where it has none."""
    try:
        lines = listing.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {line.split(":")[0].strip(): line for line in reversed(lines)}


@cache
def levels(
    machine: str = platform.machine(), listing: Path = Path("/proc/cpuinfo")
) -> tuple[str, ...]:
    """The levels that run on this machine, the newest first.

    >>> levels("aarch64")
    ('aarch64',)
    """
    if machine != "x86_64":
        return (machine,)
    flags = cpu_lines(listing).get("flags", "").split()
    runnable: list[str] = []
    for level, added in X86_LEVELS.items():
        if not {*added} <= {*flags}:
            break
        runnable.insert(0, level)
    return tuple(runnable)


def load_prebuilt(name: str) -> tuple[ctypes.CDLL, str] | None:
    """The library of the newest level that is there and loads, and that level."""
    for level in levels() if FOLDER.is_dir() else ():
        with suppress(OSError):  # absent, or made for a newer libc
            return ctypes.CDLL(str(FOLDER / level / name)), level
    return None
