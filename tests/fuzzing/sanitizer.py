"""AddressSanitizer and UBSan in a Python process: its environment, and the kernels'
flags.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

from gradwire.kernels import compiler

FLAGS = (
    *(flag for flag in compiler.BASE_FLAGS if flag != "-O3"),
    *("-O1", "-g1", "-fno-omit-frame-pointer", "-march=native", "-fopenmp"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    # no bytes are copied from and to nowhere: that is harmless
    "-fno-sanitize=nonnull-attribute",
)
OPTIONS = {
    # Python and torch leak at their end, and torch's libraries define some things
    # twice.
    "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0:quarantine_size_mb=32",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "OMP_NUM_THREADS": "1",
}


def why_not() -> str | None:
    """The reason why nothing can be sanitized here; None where it can."""
    found = compiler.find_compiler()
    if found is None:
        return "no C++ compiler"
    return None if _library("libasan.so") else f"{found} has no libasan.so; take g++"


def environment() -> dict[str, str]:
    """The environment of a process whose kernels are sanitized.

    The C++ library is loaded beside the sanitizer's, which must find the functions that
    throw.
    """
    libraries = " ".join(filter(None, map(_library, ("libasan.so", "libstdc++.so"))))
    return {**os.environ, **OPTIONS, "LD_PRELOAD": libraries}


def _library(name: str) -> str | None:
    """The path of a library of the compiler's; None where it has none."""
    command = [compiler.find_compiler() or "g++", f"-print-file-name={name}"]
    found = subprocess.run(
        command, capture_output=True, text=True, check=False
    ).stdout.strip()
    return found if Path(found).is_absolute() else None


HANG_S = 60.0
"""How long a hundred inputs may take before that counts as a hang."""


def watch() -> None:
    """Ends the process, with a word, unless it is called again in time."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)


def sanitize() -> None:
    """Has kernels of this process built with the sanitizers, and none run as torch
    code.

    Every thread's scratch is as long as is asked for, so that what goes beyond it is
    seen.
    """
    from gradwire.contract import member, thread_scratch
    from gradwire.dsl import generated as steps

    def exact(name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Any:
        return torch.empty(numel, dtype=dtype, device=device)

    patched: Any = compiler
    patched.FLAG_SETS = (FLAGS,)
    patched._warn, build_one = _refuse, patched._built

    def build_patiently(*given: Any) -> Any:
        faulthandler.cancel_dump_traceback_later()
        library = build_one(*given)
        watch()
        return library

    patched._built = build_patiently
    for module in (member, thread_scratch, steps):
        vars(module)["thread_scratch"] = exact


def _refuse(why: str) -> None:
    raise SystemExit(f"kernels would run as torch code: {why}")
