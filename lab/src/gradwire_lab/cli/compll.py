"""Show and time compressors written in CompLL's language, shipped ones and your own."""

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire.cli.report.output import AsJson, emit, progress
from gradwire.cli.report.table import Row
from gradwire.contract.bounds import check_whole
from gradwire.errors import invalid

from ..planning.inputs import option, read_settings
from ._own import (
    TEXT,
    More,
    ProgramSettings,
    PromisedTraits,
    check_no_text,
    made_with,
    module_of,
    program_of_text,
)

app = typer.Typer(no_args_is_help=True)

CHECKED_NUMEL = 25_000_000

Name = Annotated[
    str, typer.Argument(help="A compressor (gradwire list compress), or a file.")
]


class Target(StrEnum):
    """The form in which a program is shown."""

    ir = "ir"
    cpp = "cpp"
    triton = "triton"


@app.callback()
def compll() -> None:
    """Show and time compressors written in CompLL's language, shipped ones and your
    own.
    """


@app.command()
def show(
    name: Name,
    target: Annotated[Target, option("In which form.")] = Target.cpp,
    settings: ProgramSettings = None,
    trait: PromisedTraits = None,
    more: More = None,
    as_json: AsJson = False,
) -> None:
    """Print what a program becomes: the expressions of the IR, C++ or Triton.

    NAME is a shipped compressor, a Python file with a Program, or a .compll text.
    """
    rows: list[Row] = []
    for codec in programs(name, settings, trait, more):
        text = rendered(codec, target)
        rows.append(
            {"name": type(codec).__name__, "target": target.value, "text": text}
        )
        if not as_json:
            print(text.rstrip("\n"))
    if as_json:
        emit("compll show", rows, as_json=True, title="")


@app.command()
def bench(
    name: Name,
    settings: ProgramSettings = None,
    trait: PromisedTraits = None,
    more: More = None,
    numel: Annotated[int, option("Elements of the float32 gradient.")] = CHECKED_NUMEL,
    threads: Annotated[int, option("OpenMP threads of both sides.")] = 2,
    rounds: Annotated[int, option("Turns that are measured, after one more.")] = 15,
    as_json: AsJson = False,
) -> None:
    """Time a program's encode, decode and merge against a copy, both in one run, in
    turn.
    """
    from gradwire.contract.registry import extension

    for what, value, least in (
        ("numel", numel, 1),
        ("threads", threads, 1),
        ("rounds", rounds, 4),
    ):
        check_whole(what, value, "leave it out", least=least)
    codecs = programs(name, settings, trait, more)
    with progress("compll bench"):
        kernel_bench = extension("kernel_bench", "a measurement of kernels")
        rows = kernel_bench.measure(numel, threads, rounds, codecs)
    emit(
        "compll bench",
        rows,
        as_json=as_json,
        title=f"{numel} float32, {threads} threads",
    )


# ---- programs ------------------------------------------------------------------------


def programs(
    name: str,
    settings: list[str] | None,
    traits: list[str] | None,
    more: list[Path] | None,
) -> list[Any]:
    """The programs of a file or of a name, under these settings."""
    path = Path(name)
    if path.suffix == TEXT:
        made = [program_of_text(path, more or [], traits or [])]
        _check_no_matrices(name, made)
    else:
        check_no_text(traits, more)
        made = _from_python(path) if path.suffix == ".py" else [_shipped(name)]
    values = read_settings(settings or [])
    return [made_with(program, values, name) for program in made]


def _shipped(name: str) -> Any:
    from gradwire.contract.registry import load
    from gradwire.dsl.program import Program

    algorithm = load("compress", name)
    if not (isinstance(algorithm, type) and issubclass(algorithm, Program)):
        raise invalid(
            "NAME", name, "a compressor written in the language", "try terngrad"
        )
    return algorithm


def _check_no_matrices(name: str, values: Iterable[object]) -> None:
    """Refuses a program of matrices, which has no kernels of its own."""
    from gradwire_lab.dsl.lowrank import MatrixProgram

    if any(
        isinstance(value, type) and issubclass(value, MatrixProgram) for value in values
    ):
        accepted = (
            "a program that becomes C++ or Triton; torch carries those of matrices out"
        )
        raise invalid(
            "NAME", name, accepted, f"time it by gradwire bench exchange --only {name}"
        )


def _from_python(path: Path) -> list[Any]:
    """The programs that a file defines."""
    from gradwire.dsl.program import Program

    module = module_of(path)
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    programs = [value for value in classes if issubclass(value, Program)]
    if not programs:
        _check_no_matrices(path.stem, classes)
        raise invalid(
            "FILE", str(path), "one that defines a Program", "see docs/compll.md"
        )
    return programs


def rendered(codec: Any, target: Target) -> str:
    """All kernels of a program in one form."""
    from gradwire.dsl.gpu.render import render_triton

    built = codec.kernels().built
    if target is Target.ir:
        return "\n\n".join(_listing(kernel) for kernel in built.kernels)
    if target is Target.triton:
        return render_triton(*built.kernels)
    return str(built.text)


def _listing(kernel: Any) -> str:
    """The kernel as text: one numbered line a node, operands before what uses them."""
    from gradwire.dsl.ir import Node, walk

    numbers: dict[Node, int] = {}
    lines = [f"{kernel.name}: blocks of {kernel.block}"]
    for node in walk(kernel.stores):
        numbers[node] = len(numbers)
        operands = " ".join(f"%{numbers[source]}" for source in node.sources)
        lines.append(f"  %{numbers[node]} = {node!r} {operands}".rstrip())
    return "\n".join(lines)
