"""Algorithms that users write in files of their own, or name: read, found, given their
settings.
"""

import importlib.util
import inspect
import sys
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Annotated, Any

from gradwire.errors import InvalidSetting, UnknownName, invalid

from ..planning.inputs import option

TEXT = ".compll"
ProgramSettings = Annotated[
    list[str] | None, option("A setting of it, as bitwidth=2.", "--set")
]
PromisedTraits = Annotated[
    list[str] | None,
    option("What a .compll promises: unbiased, nonexpansive, sparse, ...", "--trait"),
]
More = Annotated[
    list[Path] | None, option("A further text of the same program.", "--with")
]


def module_of(path: Path) -> ModuleType:
    """A Python file as a module; running it is what its user asks for.

    Modules beside the file can be imported by it, as if it were a program.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except InvalidSetting:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's file may raise
        raise invalid("FILE", str(path), "a file that runs", repr(error)) from error
    finally:
        sys.path.remove(folder)
        if before is not None:
            sys.modules[path.stem] = before
    return module


def program_of_text(path: Path, more: list[Path], traits: list[str]) -> Any:
    """The program of a text in the paper's form."""
    from gradwire.contract import Layout
    from gradwire.contract.registry import extension

    promised: dict[str, Any] = {trait.replace("-", "_"): True for trait in traits}
    if promised.pop("sparse", False):
        promised |= {"layout": Layout.SPARSE, "exact_size": False}
    try:
        text = extension("compll_text", "a program in the C-like text")
        return text.compile_text(path, *more, **promised)
    except TypeError as error:
        raise invalid("--trait", traits, "traits of compressors", str(error)) from None


def check_no_text(traits: list[str] | None, more: list[Path] | None) -> None:
    """Refuses options that only a text takes."""
    if traits or more:
        extra = [*(traits or []), *map(str, more or [])]
        raise invalid(
            "--trait and --with", extra, f"given with a {TEXT}", "leave them out"
        )


def made_with(algorithm: Any, settings: Mapping[str, object], where: str) -> Any:
    """An instance of a class under these settings."""
    try:
        return algorithm(**settings)
    except UnknownName as error:
        raise InvalidSetting(f"{where}: {error}; give settings by --set") from None
    except (
        TypeError
    ) as error:  # a setting that is missing, or one that a user's class has not
        known = ""
        if is_dataclass(algorithm):
            known = ", ".join(part.name for part in fields(algorithm))
        reason = str(error).partition("() ")[2] or str(error)
        raise InvalidSetting(
            f"{where}: {algorithm.__name__} {reason}; its settings are {known}: "
            "give them by --set"
        ) from None


# ---- what laws are about -------------------------------------------------------------


def subjects_of(
    file: str,
    settings: Mapping[str, object],
    traits: list[str] | None,
    more: list[Path] | None,
) -> list[Any]:
    """The algorithms that ``FILE[:NAME]`` stands for: those of a file, one of them, or
    a shipped.

    A class comes as those of the file's ``EXAMPLES`` that are of it, else under its
    defaults.
    """
    head, colon, name = file.rpartition(":")
    path = Path(head if colon and Path(head).suffix in (".py", TEXT) else file)
    wanted = None
    if path == Path(head) and colon:
        wanted = name
    if path.suffix == TEXT:
        made = program_of_text(path, more or [], traits or [])
        return [made_with(made, settings, file)]
    check_no_text(traits, more)
    if path.suffix != ".py":
        return _instances(_shipped(file), (), settings, file)
    module = module_of(path)
    examples = tuple(getattr(module, "EXAMPLES", ()))
    if wanted is not None:
        if wanted not in vars(module):
            raise UnknownName(f"algorithm of {path}", wanted, _named(module))
        return _instances(getattr(module, wanted), examples, settings, file)
    subjects: list[Any] = []
    for value in _named(module).values():
        made = _instances(value, examples, settings, file)
        subjects += [
            subject
            for subject in made
            if not any(subject is other or _same(subject, other) for other in subjects)
        ]
    if not subjects:
        accepted = (
            "one that defines a compressor, an exchange, a collective or a planner"
        )
        remedy = (
            "name what is none by its looks as FILE:NAME; for a compressor see "
            "docs/compll.md"
        )
        raise invalid("FILE", str(path), accepted, remedy)
    return subjects


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and repr(one) == repr(other)


def _named(module: ModuleType) -> dict[str, Any]:
    """Public names of a module that are algorithms: classes and functions of its own,
    instances.
    """
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and _is_algorithm(value, module)
    }


def _is_algorithm(value: Any, module: ModuleType) -> bool:
    from gradwire.contract import Compressor, Exchange
    from gradwire.contract.collective import Collective

    if isinstance(value, type):
        is_own = value.__module__ == module.__name__ and not inspect.isabstract(value)
        return is_own and issubclass(value, Compressor | Exchange | Collective)
    if isinstance(value, partial):
        return _plans(value.func)
    if isinstance(value, FunctionType):
        return value.__module__ == module.__name__ and _plans(value)
    return isinstance(value, Compressor | Exchange | Collective)


def _plans(function: Any) -> bool:
    """Whether a function looks like a planner: it returns a Plan of a profile and a
    cluster.
    """
    from gradwire.planning.data.plan import Plan

    try:
        returns = typing.get_type_hints(function).get("return")
    except Exception:  # annotations may name what is imported for type checkers only
        returns = getattr(function, "__annotations__", {}).get("return")
    names = list(inspect.signature(function).parameters)[:2]
    return returns in (Plan, "Plan", "gw.Plan") or names == ["profile", "cluster"]


def _instances(
    value: Any, examples: tuple[Any, ...], settings: Mapping[str, object], where: str
) -> list[Any]:
    if isinstance(value, type):
        listed = [example for example in examples if type(example) is value]
        if listed and not settings:
            return listed
        return [made_with(value, settings, where)]
    if not settings:
        return [value]
    if isinstance(value, FunctionType | partial):
        return [partial(value, **settings)]
    raise invalid(
        "--set",
        dict(settings),
        "given for a class or a planner",
        f"leave it out for {value!r}",
    )


def _shipped(name: str) -> Any:
    """The compressor, collective or planner that is shipped under a name."""
    from gradwire.contract.registry import load, names

    kinds = ("compress", "collective", "planner")
    for kind in kinds:
        if name in names(kind):
            return load(kind, name)
    known = [known for kind in kinds for known in names(kind)]
    raise UnknownName("file or algorithm", name, known)
