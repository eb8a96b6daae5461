"""Show, check and time compressors written in CompLL's language, shipped ones and your own."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InvalidSetting, invalid
from ._inputs import read_settings
from ._output import emit, progress

app = typer.Typer(no_args_is_help=True)

CHECKED_NUMEL = 25_000_000

Name = Annotated[str, typer.Argument(help="A compressor (gradwire list compress), or a file.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="A setting of it, as bitwidth=2.")
]
Traits = Annotated[
    list[str] | None,
    typer.Option("--trait", help="What a .compll promises: unbiased, contraction, sparse, ..."),
]
More = Annotated[
    list[Path] | None, typer.Option("--with", help="A further text of the same program.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class Target(StrEnum):
    """What a program is shown as."""

    ir = "ir"
    cpp = "cpp"
    triton = "triton"


@app.callback()
def compll() -> None:
    """Show, check and time compressors written in CompLL's language, shipped ones and your own."""


@app.command()
def show(
    name: Name,
    target: Annotated[Target, typer.Option(help="In which form.")] = Target.cpp,
    settings: Settings = None,
    trait: Traits = None,
    more: More = None,
    as_json: AsJson = False,
) -> None:
    """Print what a program becomes: the expressions of the IR, C++ or Triton.

    NAME is a shipped compressor, a Python file with a Program, or a .compll text.
    """
    rows: list[dict[str, object]] = []
    for codec in programs(name, settings, trait, more):
        text = rendered(codec, target)
        rows.append({"name": type(codec).__name__, "target": target.value, "text": text})
        if not as_json:
            print(text.rstrip("\n"))
    if as_json:
        emit("compll show", rows, as_json=True, title="")


@app.command()
def check(
    file: Annotated[str, typer.Argument(help="A Python file with a Program, a .compll, a name.")],
    settings: Settings = None,
    trait: Traits = None,
    more: More = None,
    as_json: AsJson = False,
) -> None:
    """Compile a program and hold it to the laws of compressors; exit code 1 if it breaks one."""
    rows: list[dict[str, object]] = []
    with progress("compll check"):
        for codec in programs(file, settings, trait, more):
            rows += list(_checked(codec))
    emit("compll check", rows, as_json=as_json, title=f"gradwire compll check {file}")
    if any(row["verdict"] == "broken" for row in rows):
        raise typer.Exit(1)


@app.command()
def bench(
    name: Name,
    settings: Settings = None,
    trait: Traits = None,
    more: More = None,
    numel: Annotated[int, typer.Option(help="Elements of the float32 gradient.")] = CHECKED_NUMEL,
    threads: Annotated[int, typer.Option(help="OpenMP threads of both sides.")] = 2,
    rounds: Annotated[int, typer.Option(help="Turns that are measured, after one more.")] = 15,
    as_json: AsJson = False,
) -> None:
    """Time a program's encode, decode and merge against a copy, both in one run, in turn."""
    from ..bench import kernel

    for what, value, least in (("numel", numel, 1), ("threads", threads, 1), ("rounds", rounds, 4)):
        if value < least:
            raise invalid(what, value, f"at least {least}", "leave it out")
    codecs = programs(name, settings, trait, more)
    with progress("compll bench"):
        rows = kernel.measure(numel, threads, rounds, codecs)
    emit("compll bench", rows, as_json=as_json, title=f"{numel} float32, {threads} threads")


# ---- programs ----------------------------------------------------------------------------------


def programs(
    name: str, settings: list[str] | None, traits: list[str] | None, more: list[Path] | None
) -> list[Any]:
    """The programs of a file or of a name, under these settings."""
    path = Path(name)
    if path.suffix == ".compll":
        made = [_from_text(path, more or [], traits or [])]
    elif traits or more:
        extra = [*(traits or []), *map(str, more or [])]
        raise invalid("--trait and --with", extra, "given with a .compll", "leave them out")
    else:
        made = _from_python(path) if path.suffix == ".py" else [_shipped(name)]
    given = read_settings(settings or [])
    codecs = []
    for one in made:
        try:
            codecs.append(one(**given))
        except TypeError as error:  # a setting that is missing, or that it has not
            known = ", ".join(field.name for field in fields(one))
            reason = str(error).partition("() ")[2]
            raise InvalidSetting(f"{name}: {reason}; its settings are {known}") from None
    return codecs


def _shipped(name: str) -> Any:
    from ..dsl.program import Program
    from ..load import load

    found = load("compress", name)
    if not (isinstance(found, type) and issubclass(found, Program)):
        raise invalid("NAME", name, "a compressor written in the language", "try terngrad")
    return found


def _from_text(path: Path, more: list[Path], traits: list[str]) -> Any:
    from ..contract import Layout
    from ..dsl.text.compile import compile_text

    promised: dict[str, Any] = {trait.replace("-", "_"): True for trait in traits}
    if promised.pop("sparse", False):
        promised |= {"layout": Layout.SPARSE, "exact_size": False}
    try:
        return compile_text(path, *more, **promised)
    except TypeError as error:
        raise invalid("--trait", traits, "traits of compressors", str(error)) from None


def _from_python(path: Path) -> list[Any]:
    """The programs that a file defines; running it is what its user asks for."""
    from ..dsl.program import Program

    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem], before = module, sys.modules.get(path.stem)
    try:
        spec.loader.exec_module(module)
    except InvalidSetting:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's file may raise
        raise invalid("FILE", str(path), "a file that runs", repr(error)) from error
    finally:
        if before is not None:
            sys.modules[path.stem] = before
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Program)
        and value.__module__ == module.__name__
    ]
    if not found:
        raise invalid("FILE", str(path), "one that defines a Program", "see docs/compll.md")
    return found


def rendered(codec: Any, target: Target) -> str:
    """All kernels of a program in one form."""
    from ..dsl import ir
    from ..dsl.gpu.render import render

    built = codec.kernels().built
    if target is Target.ir:
        return "\n\n".join(ir.listing(kernel) for kernel in built.kernels)
    return render(*built.kernels) if target is Target.triton else str(built.text)


# ---- checks ------------------------------------------------------------------------------------


def _checked(codec: Any) -> Iterator[dict[str, object]]:
    """A row for the compilation, one for the wire and one a law."""
    from ..dsl import laws
    from ..spec import TensorSpec

    name = type(codec).__name__
    with _empty_cache():
        start_s = time.perf_counter()
        library = codec.kernels().built.library()
        compile_s = time.perf_counter() - start_s
    took = f"{compile_s:.2f} s" if library is not None else "no compiler: interpreted"
    yield {"name": name, "check": "compiles", "verdict": "holds", "detail": took}
    size_bytes = codec.format(TensorSpec("", CHECKED_NUMEL)).size_bytes
    sent = f"{8 * size_bytes / CHECKED_NUMEL:.4g} bits an element"
    least = "" if codec.traits.exact_size else "at most "
    yield {"name": name, "check": "wire", "verdict": "holds", "detail": least + sent}
    for verdict in laws.check(codec):
        check = verdict.law.replace("_", " ")
        yield {"name": name, "check": check, "verdict": verdict.word, "detail": verdict.wrong}


@contextmanager
def _empty_cache() -> Iterator[None]:
    """Inside the block kernels are compiled, whatever the user's cache holds."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before
