"""Algorithms by name: a folder's files, and files that other packages add.

``compress/topk.py`` defines ``topk``, and that is all. An algorithm with helpers of its
own may be a folder. Files that start with an underscore are support and bear no public
name.

Another package adds algorithms by an entry point in the group of their kind. Its value
is an object (``my_package.mine:mine``, under the entry point's name), or a package
whose files are algorithms (``my_package.compress``), as gradwire's own folders are.
"""

import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ..errors import InvalidSetting, NotInstalled, UnknownName, invalid

OWN = "gradwire"
SHARED = frozenset({"steps"})
"""Folders of what algorithms share, which are no algorithms."""


class Kind(NamedTuple):
    """A kind of algorithm: its word, its folder and other packages' entry points."""

    word: str
    folder: str
    group: str = ""

    def refuse_elsewhere(self, name: object) -> None:
        """Raises ``NotInstalled`` for a name of a further package of gradwire's."""
        further = further_names().get(self.group, {})
        if isinstance(name, str) and name in further:
            raise NotInstalled(f"{self.word} {name!r}", further[name])


KINDS = {
    "compress": Kind("compressor", "gradwire.compress", "gradwire.compressors"),
    "collective": Kind("collective", "gradwire.collective", "gradwire.collectives"),
    "planner": Kind("planner", "gradwire.planning.planner", "gradwire.planners"),
    "pilot": Kind("pilot", "gradwire.pilot"),
    "sparse.formats": Kind(
        "sparse format", "gradwire.kernels.sparse.formats", "gradwire.sparse_formats"
    ),
}
"""Kinds of algorithms by the name that ``load`` takes."""

COMMANDS = Kind("command", "gradwire.cli.commands", "gradwire.commands")
"""The commands of ``gradwire``, which are found as algorithms are."""

EXTENSIONS = "gradwire.extensions"
"""The group of modules and functions that are used where they are installed."""


@cache
def further_names() -> dict[str, dict[str, str]]:
    """The package of each name that a further package of gradwire's declares, by group.

    These packages need not be installed, so the names are kept in a file, which
    ``python -m scripts.make_further`` writes.
    """
    path = Path(__file__).with_name("further.json")
    further: dict[str, dict[str, str]] = json.loads(path.read_text(encoding="utf-8"))
    return further


class Home(NamedTuple):
    """Where an algorithm is defined, and the distribution that it belongs to."""

    module: str
    attribute: str
    distribution: str
    clash: str = ""
    """The reason to refuse the name where two packages have it."""

    @property
    def algorithm(self) -> Any:
        """The object itself; its module is imported."""
        self.refuse_clash()
        return getattr(importlib.import_module(self.module), self.attribute)

    def refuse_clash(self) -> None:
        """Raises ``InvalidSetting`` where another package has the same name."""
        if self.clash:
            raise InvalidSetting(self.clash)


def names(kind: str) -> tuple[str, ...]:
    """Names of all algorithms of a kind that are installed, ascending.

    >>> "topk" in names("compress")
    True
    """
    return tuple(homes(kind))


def load(kind: str, name: object) -> Any:
    """The algorithm ``name`` of a kind.

    Raises ``UnknownName`` for a name that no installed package has, and
    ``InvalidSetting`` for one that two installed packages have.
    """
    known = homes(kind)
    if isinstance(name, str) and name in known:
        return known[name].algorithm
    KINDS[kind].refuse_elsewhere(name)
    raise UnknownName(KINDS[kind].word, name, tuple(known))


def examples(kind: str) -> tuple[Any, ...]:
    """All settings that the files of a kind list in their ``EXAMPLES``."""
    modules = (importlib.import_module(home.module) for home in homes(kind).values())
    return tuple(
        example for module in modules for example in getattr(module, "EXAMPLES", ())
    )


@cache
def homes(kind: str) -> dict[str, Home]:
    """Where each algorithm of a kind is defined, by name, ascending."""
    if kind not in KINDS:
        raise invalid(
            "kind", kind, f"one of {', '.join(KINDS)}", "ask for one of these"
        )
    return found_of(KINDS[kind])


def found_of(kind: Kind) -> dict[str, Home]:
    """Where each name of a kind is defined, ascending; ``homes`` keeps the answer."""
    homes: dict[str, Home] = {}
    for name, home in _every(kind):
        if name in homes:
            both = f"{homes[name].distribution} and {home.distribution}"
            home = homes[name]._replace(
                clash=f"{kind.word} {name!r} is defined by two installed packages, "
                f"{both}; uninstall one of them, or rename it"
            )
        homes[name] = home
    return dict(sorted(homes.items()))


def extension(name: str, what: str) -> Any:
    """A module or a function that a further package of gradwire's declares.

    Raises ``NotInstalled``, which names ``what`` is asked for, without the package.
    """
    for point in entry_points(group=EXTENSIONS, name=name):
        return point.load()
    raise NotInstalled(what, further_names()[EXTENSIONS][name])


def distribution_of(point: EntryPoint) -> str:
    """The name of the distribution that declares an entry point."""
    return point.dist.name if point.dist is not None else point.module


def _every(kind: Kind) -> Iterator[tuple[str, Home]]:
    for name in _listed(kind.folder):
        yield name, Home(f"{kind.folder}.{name}", name, OWN)
    points = entry_points(group=kind.group) if kind.group else ()
    for point in points:
        owner = distribution_of(point)
        if point.attr:
            yield point.name, Home(point.module, point.attr, owner)
            continue
        try:
            listed = _listed(point.module)
        except Exception as error:  # whatever importing somebody's package may raise
            log = logging.getLogger(OWN)
            log.warning(
                "%ss of %s are left out, as %r was raised", kind.word, owner, error
            )
            continue
        for name in listed:
            yield name, Home(f"{point.module}.{name}", name, owner)


def _listed(package: str) -> list[str]:
    """Names of the algorithms in a package's folder; none of them is imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise InvalidSetting(
            f"{package} is not a package; check the entry point that names it"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    files = [path.stem for folder in folders for path in folder.glob("*.py")]
    rooms = [
        path.parent.name for folder in folders for path in folder.glob("*/__init__.py")
    ]
    return [name for name in (*files, *rooms) if name[0] != "_" and name not in SHARED]


class Registry(ModuleType):
    """A package whose attributes are its algorithms: ``compress.topk`` is the class.

    Python binds an imported file to its package under the file's name. Here the class
    of that name is bound instead, whichever way the file was imported first.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        algorithm = load(_kind_of(self.__name__), name)
        setattr(self, name, algorithm)
        return algorithm

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and hasattr(value, name):
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return list(names(_kind_of(self.__name__)))


def make_registry(package: str) -> None:
    """Turns an imported package into a ``Registry``; called by its ``__init__``."""
    sys.modules[package].__class__ = Registry


def _kind_of(package: str) -> str:
    return next(kind for kind, known in KINDS.items() if known.folder == package)
