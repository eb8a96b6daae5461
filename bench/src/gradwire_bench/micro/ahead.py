"""Every Triton kernel compiled ahead of time for GPUs that need not be there.

The kernels are those that gradwire launches: generated ones of every shipped program,
for one tensor and for several, coders of runs, and the partition of sparse gradients.
They are compiled with the types, alignment and shapes of a launch. What the assembler
gave each is read off the compiled object (an ELF file): registers a thread, and the
bytes of its stack, which spilled registers lie in. A program's bits are those of its
definition only if each operation rounds as it is written, so instructions of NVIDIA's
that round otherwise are counted.

Triton's own assemblers do the work, so neither a GPU nor CUDA's tools are needed.
"""

import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from gradwire.cli.report.table import Row
from gradwire.compress.onebit import onebit
from gradwire.contract import registry as load
from gradwire.dsl.gpu.launch import Launcher, launch_shape
from gradwire.dsl.gpu.render import FIRST, counting, parameters, row, type_of
from gradwire.dsl.ir import Kernel
from gradwire.dsl.program import Program
from gradwire.errors import InvalidSetting, NotInstalled, invalid
from gradwire.kernels.libraries import has_triton

TARGETS = ("sm_80", "sm_90")
"""The GPUs that are compiled for where none is named: A100 and H100."""
ALL_TARGETS = (*TARGETS, "sm_100", "sm_120", "gfx942", "gfx950", "gfx1100")
"""The GPUs that all kernels compile for."""
LONG_BLOCK = 65536
"""A block of ``onebit`` that is longer than one tile."""
_POINTERS = {"float32": "*fp32", "int32": "*i32", "uint8": "*u8"}
_SHAPES = {"WORLD": 8, "BLOCK": 1024, "REHASHES": 3, "OF": 0, "MOST": 14, "TILE": 1024}
_SIZES = {"num_entries", "num_blocks", "num_bytes", "block_bytes", "length", "last"}
_NUMBERS = _SIZES | {"parallel", "serial"}


@dataclass(frozen=True)
class Launch:
    """One kernel with what a launch tells the compiler of its arguments."""

    name: str
    kernel: Callable[[], Any]
    """Gives the function that triton compiles."""
    types: dict[str, str]
    constants: dict[str, int] = field(default_factory=dict)
    is_aligned: bool = False
    num_warps: int = 4


def launches(only: Sequence[str] = ()) -> list[Launch]:
    """Every kernel that there is, or those whose names begin with one of ``only``."""
    codecs: dict[str, Program] = {}
    for kind in (load.load("compress", name) for name in load.names("compress")):
        if isinstance(kind, type) and issubclass(kind, Program):
            codecs[kind.__name__] = kind()
    codecs[f"onebit{LONG_BLOCK}"] = onebit(block=LONG_BLOCK)
    kernels = [
        kernels
        for label, codec in codecs.items()
        for kernels in _generated(label, codec)
    ]
    kernels += _written()
    return [
        kernel for kernel in kernels if not only or kernel.name.startswith(tuple(only))
    ]


def _generated(label: str, codec: Program) -> Iterator[Launch]:
    kernels = codec.kernels().built.kernels
    launcher = Launcher(*kernels)
    counts = [
        counted for kernel in kernels if (counted := counting(kernel)) is not None
    ]
    for kernel in (*kernels, *counts):
        shape = launch_shape(row(kernel))
        warps = shape.pop("num_warps")
        name = f"{label}/{kernel.name.removeprefix(f'{type(codec).__name__}_')}"

        yield Launch(
            name, _of(launcher, kernel.name), _types(kernel), shape, True, warps
        )
        types = {"table": "*i64", "num_tensors": "i32"}
        constants = {"ALIGN": 4, **shape}
        yield Launch(
            f"{name}, many",
            _of(launcher, f"{kernel.name}_many"),
            types,
            constants,
            False,
            warps,
        )


def _of(launcher: Launcher, form: str) -> Callable[[], Any]:
    return lambda: getattr(launcher.module, form)


def _giving(kernel: Any) -> Callable[[], Any]:
    return lambda: kernel


def _types(kernel: Kernel) -> dict[str, str]:
    known = {f"{buffer.name}_": _POINTERS[type_of(buffer)] for buffer in kernel.buffers}
    known[FIRST] = "*i32"
    return {name: known.get(name, "i32") for name in parameters(kernel)}


def _written() -> Iterator[Launch]:
    """The kernels that are written by hand."""
    from gradwire.kernels.sparse.permutation_device import permute
    from gradwire_lab.dsl import runs_device
    from gradwire_lab.kernels.hashing_device import hash_entries

    pointers = {"plain": "*u8", "coded": "*u8"}
    pointers |= dict.fromkeys(("single", "run", "lengths", "starts"), "*i64")
    pointers |= dict.fromkeys(("byte", "times", "wrong"), "*i64")
    of_runs = (runs_device.count_runs, runs_device.write_runs, runs_device.read_runs)
    of_zen = (permute, hash_entries)
    for group, kernels, known in (("runs", of_runs, pointers), ("zen", of_zen, {})):
        for kernel in kernels:
            names: list[str] = kernel.arg_names
            constants = {name: _SHAPES[name] for name in names if name in _SHAPES}
            types = {
                name: "i32" if name in _NUMBERS else known.get(name, "*i32")
                for name in names
                if name not in constants
            }
            yield Launch(
                f"{group}/{kernel.__name__}", _giving(kernel), types, constants
            )


def target_of(name: str) -> Any:
    """Triton's target of a GPU: ``sm_90`` or ``90`` of NVIDIA's, ``gfx942`` of AMD's.

    Raises ``InvalidSetting`` for another name.
    """
    from triton.backends.compiler import GPUTarget

    if matched := re.fullmatch(r"(?:sm_)?(\d+)", name):
        return GPUTarget("cuda", int(matched[1]), 32)
    if re.fullmatch(r"gfx[0-9a-f]+", name):
        return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)
    accepted = f"sm_ or gfx and a number, such as {', '.join(ALL_TARGETS)}"
    raise invalid("--target", name, accepted, "leave it out for sm_80 and sm_90")


def rounding_otherwise(ptx: str) -> list[str]:
    """The instructions of a PTX text that round in another way than is written.

    >>> divided = "  div.rn.f32 %f1, %f2, %f3;"
    >>> fused = "  @%p1 fma.rn.f32 %f1, %f2, %f3, %f4;"
    >>> rounding_otherwise(divided + fused)
    ['fma.rn.f32']
    """
    words = re.findall(r"(?:^|[;{}\s])([a-z]\w*(?:\.\w+)+)(?=\s)", ptx)
    return [word for word in words if _rounds_otherwise(word.split("."))]


def _rounds_otherwise(parts: Sequence[str]) -> bool:
    fuses = parts[0] == "fma" or (parts[0] == "mad" and parts[-1] in ("f32", "f64"))
    return fuses or not {"approx", "full", "ftz"}.isdisjoint(parts)


def compiled(launch: Launch, target: str) -> Row:
    """A row of one kernel: registers a thread, bytes of stack and of shared memory.

    For a GPU of NVIDIA's it has also the number of instructions that round otherwise,
    and ``_ptx`` is its text. Raises triton's own error where it cannot be compiled.
    """
    import triton
    from triton.compiler import ASTSource

    types = {**launch.types, **dict.fromkeys(launch.constants, "constexpr")}
    pointers = [
        at for at, kind in enumerate(launch.types.values()) if kind.startswith("*")
    ]
    numbers = [at for at, name in enumerate(launch.types) if name == "num_elements"]
    aligned = {(at,): [["tt.divisibility", 16]] for at in (*pointers, *numbers)}
    source = ASTSource(
        launch.kernel(), types, launch.constants, aligned if launch.is_aligned else None
    )
    options = {"num_warps": launch.num_warps, "enable_fp_fusion": False}
    made = triton.compile(source, target_of(target), options)
    is_nvidia = "ptx" in made.asm
    if is_nvidia:
        registers, stack_bytes = resources(made.asm["cubin"])
    else:
        registers, stack_bytes = (
            max(map(int, re.findall(rf"\.{key}:\s*(\d+)", made.asm["amdgcn"])))
            for key in ("vgpr_count", "private_segment_fixed_size")
        )
    row: Row = {
        "name": launch.name,
        "target": f"sm_{target}" if target.isdigit() else target,
        "registers": registers,
        "stack_bytes": stack_bytes,
        "shared_bytes": made.metadata.shared,
        "warps": launch.num_warps,
    }
    if is_nvidia:
        ptx = made.asm["ptx"]
        row |= {"num_rounding_otherwise": len(rounding_otherwise(ptx)), "_ptx": ptx}
    return row


def compile_all(
    targets: Sequence[str] = TARGETS, only: Sequence[str] = ()
) -> list[Row]:
    """A row for each kernel and target; several are compiled at a time.

    Raises ``NotInstalled`` without triton, and ``InvalidSetting`` where it interprets.
    """
    if not has_triton():
        raise NotInstalled("kernels for a GPU", "triton", "triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise InvalidSetting(
            "TRITON_INTERPRET is 1, so triton compiles nothing; run: unset "
            "TRITON_INTERPRET"
        )
    for target in targets:
        target_of(target)  # before minutes are spent on others
    work = [(launch, each) for each in targets for launch in launches(only)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(lambda row: compiled(*row), work))
    return [
        {name: value for name, value in row.items() if name[0] != "_"} for row in rows
    ]


# ---- what an assembler leaves in its object ------------------------------------------

_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_FRAME_SIZE = 0x11
_REGISTERS = 0x2F
"""The attributes of section .nv.info that tell a function's stack and registers
(EIATTR_*).
"""


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of stack a thread) of the one kernel of a compiled
    object.

    A stack of 8 bytes holds the way back from a division that is called, and no
    register.
    """
    *_, start, _, _, _, _, size, count, names_at = _HEADER.unpack_from(cubin)
    sections = [_SECTION.unpack_from(cubin, start + size * at) for at in range(count)]
    names = sections[names_at][4]
    for name_at, _, _, _, offset, length, *_ in sections:
        if cubin[names + name_at :].startswith(b".nv.info\0"):
            attributes = _attributes(cubin[offset : offset + length])
            return attributes[_REGISTERS], attributes[_FRAME_SIZE]
    raise ValueError("a compiled object without a section .nv.info")


def _attributes(section: bytes) -> dict[int, int]:
    """The largest value of each attribute: a form, a number, a value or the bytes that
    follow.
    """
    at = 0
    most = dict.fromkeys((_REGISTERS, _FRAME_SIZE), 0)
    while at + 4 <= len(section):
        form, number, size = struct.unpack_from("<BBH", section, at)
        at += 4
        if form != 4:  # the value stands in the place of the length
            continue
        if number in most:  # of a function, whose number comes first
            most[number] = max(
                most[number], struct.unpack_from("<I", section, at + 4)[0]
            )
        at += size
    return most
