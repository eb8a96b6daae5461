"""Imports go one way and in no cycle, and only the listed files talk to
torch.distributed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from graphlib import TopologicalSorter

from tests.arch.source import PACKAGE, TOGETHER, Source, imports, module_names, sources

pytestmark = TOGETHER

FLOORS = (
    ("version", "errors"),
    ("contract",),
    ("kernels",),
    ("dsl", "collective"),
    ("compress",),
    ("planning.data", "exchange"),
    ("planning.simulation", "planning", "planning.planner", "planning.catalogue"),
    ("runtime.device", "runtime.transport"),
    ("runtime.liveness", "runtime.agreement"),
    ("runtime.engine", "runtime.grid"),
    ("runtime.step",),
    ("runtime.state", "runtime.overlap", "runtime.ddp"),
    ("runtime.survive",),
    ("runtime",),
    ("runtime.local_steps", "runtime.fsdp"),
    ("measure",),
    ("pilot",),
    ("integrations",),
    ("cli",),
)
"""The library's floors: a folder may import those above its own, those to its left, and
itself.

Every folder stands here, also one within another, and `runtime` and `planning` are
their own files. That holds for imports below ``if TYPE_CHECKING`` too: who names a type
depends on it.
"""

PACKAGES = ("gradwire_lab", "gradwire_bench", "papers")
"""What lies beside the library, each of which may import all of the library and those
before it.
"""

ORDER = {
    name: place
    for place, name in enumerate((*(name for row in FLOORS for name in row), *PACKAGES))
}

DISTRIBUTED = {
    "runtime": "carries the verbs out",
    "measure/group.py": "joins ranks of torchrun",
    "measure/links.py": "measures torch's all-reduce",
    "integrations": "meets frameworks that hold process groups",
    "gradwire_bench": "starts ranks, and compares with torch's own collectives",
    "papers": "the ranks of what they measure are joined by it",
    "cli/commands/doctor.py": "lists the back ends there are",
}
"""Files and folders that may import torch.distributed, and why."""


PROCESSES = {
    "gradwire_bench/faults/faults_trial.py": "forks ranks that are to die",
    "gradwire_bench/storm/storm.py": "forks ranks that a storm strikes",
    "gradwire_bench/micro/device_bits.py": "a kernel may break its process",
    "gradwire_bench/testbed/_orphans.py": "starts what holds and joins namespaces",
    "gradwire_bench/testbed/launch.py": "starts ranks on hosts",
    "gradwire_bench/testbed/forwarder.py": "asks what stands between far hosts",
    "gradwire_bench/testbed/relay.py": "starts the relay in user space",
    "gradwire_bench/testbed/netns.py": "runs ip and tc",
    "kernels/compiler.py": "runs the C++ compiler",
}
"""Files that may start processes, and why."""


def entry(name: str) -> str | None:
    """The entry of ``ORDER`` that a module belongs to; None for others and for
    gradwire's root.
    """
    parts = name.split(".")
    if parts[0] in PACKAGES:
        return parts[0]
    if parts[0] != "gradwire" or len(parts) == 1:
        return None
    rooms = [".".join(parts[1:end]) for end in range(len(parts), 1, -1)]
    return next((room for room in rooms if room in ORDER), parts[1])


def wrong_imports(source: Source, known: frozenset[str] | None = None) -> list[str]:
    own = entry(source.name)
    found: list[str] = []
    if own is None:
        return found
    for line, name in imports(source, known, for_types=True):
        other = entry(name)
        if name == "gradwire":
            found.append(
                f"{source.path}:{line} imports the root, which imports everything"
            )
        elif other is not None and ORDER[other] > ORDER[own]:
            found.append(
                f"{source.path}:{line} imports {name}; {own} comes before {other}"
            )
    return found


def uses_distributed(source: Source) -> bool:
    named = any(name.startswith("torch.distributed") for _, name in imports(source))
    return named or any(
        isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
        for node in source.running
    )


def test_every_module_has_a_row() -> None:
    entries = {entry(source.name) for source in sources()} - {None}
    assert entries <= set(ORDER), (
        f"add to FLOORS: {sorted(map(str, entries - set(ORDER)))}"
    )


def rooms(folders: Iterable[str]) -> set[str]:
    """The rooms among the library's folders: a top folder, or one within runtime or
    planning.
    """
    found = set()
    for folder in folders:
        parts = folder.split("/")
        if len(parts) == 1:
            found.add(parts[0])
        elif len(parts) == 2 and parts[0] in ("runtime", "planning"):
            found.add(".".join(parts))
    return found


def test_every_folder_has_a_floor_of_its_own() -> None:
    """A folder that is counted to the one around it could hide a cycle of the two."""
    files = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    folders = {path.parent.as_posix() for path in files} - {"."}
    assert rooms(folders) - set(ORDER) == set()
    assert rooms(["runtime/step", "cli", "cli/report"]) == {"runtime.step", "cli"}


def test_imports_go_one_way() -> None:
    assert [wrong for source in sources() for wrong in wrong_imports(source)] == []


def test_no_imports_go_in_a_cycle() -> None:
    known = module_names()
    graph = {
        source.name: {name for _, name in imports(source, known, for_types=True)}
        & known
        for source in sources()
    }
    TopologicalSorter(
        {name: others - {name} for name, others in graph.items()}
    ).prepare()


NEIGHBOURS = {
    (
        "gradwire_lab.compress",
        "gradwire.compress",
    ): "compressors of the lab are made as ours are",
    (
        "gradwire_lab.cli",
        "gradwire.cli.commands",
    ): "they read models and settings as ours do",
    (
        "gradwire_bench.cli",
        "gradwire.cli.commands",
    ): "simulate reads links as plan does",
}
"""Folders whose support another package may import, and why."""


def private_from_elsewhere(
    source: Source, known: frozenset[str] | None = None
) -> list[str]:
    """Imports of a module with an underscore that lies in another folder."""
    folder = (
        source.name
        if source.path.endswith("__init__.py")
        else source.name.rpartition(".")[0]
    )
    found = []
    for line, name in imports(source, known):
        home, _, private = name.partition("._")
        near = any(folder.startswith(ours) and home == one for ours, one in NEIGHBOURS)
        inside = near or f"{folder}.".startswith(f"{home}.")
        if private and entry(home) is not None and not inside:
            found.append(f"{source.path}:{line} imports {name}")
    return found


def test_an_underscore_means_private_to_its_folder() -> None:
    assert [
        wrong for source in sources() for wrong in private_from_elsewhere(source)
    ] == []


def test_only_listed_files_use_torch_distributed() -> None:
    """Others yield verbs instead, or are listed with a reason."""
    users = [source.path for source in sources() if uses_distributed(source)]
    assert [p for p in users if not {p, p.split("/")[0]} & DISTRIBUTED.keys()] == []


def test_only_listed_files_start_processes() -> None:
    """Ranks have one launcher, which ends all of them if one fails."""
    starters = {"subprocess", "multiprocessing", "torch.multiprocessing"}
    starters |= {"torch.multiprocessing.spawn"}
    users = {s.path for s in sources() if starters & {name for _, name in imports(s)}}
    assert users == set(PROCESSES)
