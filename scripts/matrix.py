"""Programs as people write them, by every kind of exchange: do all ranks end in the
right bits?

    python -m scripts.matrix --only gan --exchange plan --seed 1

A program is a file that runs under torchrun; ``examples/matrix/one_run.py`` says what
else it must do. It is run natively, then attached to each exchange: once through,
saving on the way, and once from what was saved, in new processes. Each cell then works
or is refused by name. Anything else is wrong: ranks that hold other parameters than one
another, than a native run where nothing is lost, or than a run that was not
interrupted; a foreign error; a program that never ends.
"""

import ast
import importlib.util
import multiprocessing
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import typer
from torch._C._distributed_c10d import TCPStore

from gradwire.cli.report.output import AsJson, Fractions, emit, progress
from gradwire.cli.report.table import Row
from gradwire.errors import RankFailed, RanksDiffer, UnknownName, invalid
from gradwire_bench.testbed.ranks import part_of
from gradwire_lab.planning.inputs import option

from .matrix_rank import EXCHANGES, OURS, PLAN, PROGRAMS, ProgramEnd, ProgramRun, live

MOST_LINES = 3
"""How many lines a program may have more than its native form."""
EXACT = ("none", PLAN)
"""The exchanges that lose nothing: among as few ranks they end in the bits of a native
run.
"""
_RUN_S = 120.0
_GRACE_S = 20.0
"""How long a run may take, and how long the other ranks may go on after an error."""
_PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "scripts.matrix_rank",
]
_FRAMEWORKS = {
    "transformers": ["transformers.trainer", "transformers.models.gpt2.modeling_gpt2"],
    "accelerate": ["accelerate"],
    "lightning": ["lightning.pytorch", "lightning.fabric"],
}
"""The modules of packages that ranks would else import one after another, in
seconds.
"""
_SECOND_HAND = (RankFailed.__name__, RanksDiffer.__name__)
"""The errors by which a rank hears of another's."""


class ProgramFile(NamedTuple):
    """A program: its file, its ranks, the packages it imports, and the lines it has for
    gradwire.

    ``world`` follows from a line "# ranks: 4", and is 2 without one.
    """

    path: Path
    world: int
    packages: frozenset[str]
    num_lines: int

    @property
    def lacks(self) -> list[str]:
        """Packages that are not installed."""
        beside = [*self.path.parent.glob("*.py"), *PROGRAMS.glob("*.py")]
        names = self.packages - {path.stem for path in beside}
        return [
            name for name in sorted(names) if importlib.util.find_spec(name) is None
        ]


class Cell(NamedTuple):
    """The outcome of a program under an exchange: "same", "refused", "skipped" or
    "WRONG".
    """

    verdict: str
    text: str = ""
    overlapped: int = 0


@dataclass(frozen=True)
class Matrix:
    """The cells to run: programs of a folder by name, exchanges by name; none stands
    for all.
    """

    folder: Path = PROGRAMS
    only: tuple[str, ...] = ()
    exchanges: tuple[str, ...] = ()
    seed: int = 0

    def programs(self) -> list[ProgramFile]:
        """The programs asked for, in order of their names."""
        paths = {path.stem: path for path in sorted(self.folder.glob("*.py"))}
        paths.pop("one_run", None)
        if not paths:
            raise invalid(
                "programs", self.folder, "a folder with programs", "write its path"
            )
        if unknown := set(self.only) - set(paths):
            raise UnknownName("program", min(unknown), paths)
        return [
            read(path) for name, path in paths.items() if name in (self.only or paths)
        ]

    def columns(self) -> list[str]:
        """The exchanges asked for."""
        if unknown := set(self.exchanges) - set(EXCHANGES):
            raise UnknownName("exchange of the matrix", min(unknown), EXCHANGES)
        return [name for name in EXCHANGES if name in (self.exchanges or EXCHANGES)]


def read(path: Path) -> ProgramFile:
    """A program, by its text."""
    text = path.read_text(encoding="utf-8")
    packages = {"torch"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            packages.add(node.module.partition(".")[0])
    ranks = re.search(r"^# ranks: (\d+)$", text, re.MULTILINE)
    world = 2 if ranks is None else int(ranks[1])
    num_lines = sum(line.endswith(OURS) for line in text.splitlines())
    return ProgramFile(path, world, frozenset(packages), num_lines)


def run(
    matrix: Matrix, report: Callable[[float, str], None] = lambda done, what: None
) -> dict[str, tuple[ProgramFile, dict[str, Cell]]]:
    """The cells of each program by exchange, by the program's name."""
    programs = matrix.programs()
    columns = matrix.columns()
    context: Any = multiprocessing.get_context("forkserver")
    used = {
        name for program in programs if not program.lacks for name in program.packages
    }
    frameworks = [
        module for name in sorted(used) for module in _FRAMEWORKS.get(name, ())
    ]
    context.set_forkserver_preload([*_PRELOADED, *frameworks])
    made = {}
    for number, program in enumerate(programs):
        row = _Row(context, program, matrix.seed)
        name = program.path.stem
        within = part_of(report, number, len(programs), f"{name}: ")
        made[name] = program, row.cells(columns, within)
    return made


class _Row:
    """One program, which runs natively and by several exchanges."""

    def __init__(self, context: Any, program: ProgramFile, seed: int) -> None:
        self._context = context
        self._program = program
        self._seed = seed

    def cells(
        self, columns: Sequence[str], announce: Callable[[float, str], None]
    ) -> dict[str, Cell]:
        program = self._program
        if lacks := program.lacks:
            return dict.fromkeys(
                columns, Cell("skipped", f"{', '.join(lacks)} not installed")
            )
        if program.num_lines > MOST_LINES:
            text = f"{program.num_lines} lines more than the native program"
            return dict.fromkeys(columns, Cell("WRONG", text))
        announce(0.0, "native")
        native = self._twice("")
        if wrong := judge(native, None):
            text = f"the native program itself is no measure: {wrong.text}"
            return dict.fromkeys(columns, Cell("WRONG", text))
        cells = {}
        for place, exchange in enumerate(columns, 1):
            announce(place / (len(columns) + 1), exchange)
            seen = self._twice(exchange)
            like = native[0][0].bits if exchange in EXACT else None
            cells[exchange] = judge(seen, like) or _right(seen[0][0])
        return cells

    def _twice(self, exchange: str) -> list[list[ProgramEnd]]:
        """The endings of a whole run, and of one from where the first has saved."""
        with TemporaryDirectory(prefix="gradwire-matrix-") as folder:
            common = ("--folder", folder, "--seed", str(self._seed))
            whole = self._run(exchange, common, Path(folder))
            if any(end.error for end in whole):
                return [whole]
            return [whole, self._run(exchange, (*common, "--resume"), Path(folder))]

    def _run(
        self, exchange: str, arguments: tuple[str, ...], folder: Path
    ) -> list[ProgramEnd]:
        program = self._program
        store: Any = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), False)
        task = ProgramRun(
            program.path.absolute(), exchange, arguments, program.world, store.port
        )
        ends: list[Connection] = []
        processes = []
        for rank in range(program.world):
            here, there = self._context.Pipe()
            log = folder / f"log_{rank}"
            process = self._context.Process(target=live, args=(task, rank, there, log))
            process.start()
            there.close()
            ends.append(here)
            processes.append(process)
        try:
            found = _collected(ends)
        finally:
            for end, process in zip(ends, processes, strict=True):
                end.close()
                process.kill()
                process.join()
        return found


def _right(end: ProgramEnd) -> Cell:
    """The cell of a program whose bits are right, if gradwire had part in them."""
    if not end.num_attached:
        return Cell("WRONG", "nothing was attached")
    return Cell("same", "", end.overlapped)


def _collected(ends: list[Connection]) -> list[ProgramEnd]:
    """The endings of all ranks; one that never came is an error by itself."""
    found: dict[int, ProgramEnd] = {}
    left = {end: rank for rank, end in enumerate(ends)}
    deadline_s = time.monotonic() + _RUN_S
    while left and (left_s := deadline_s - time.monotonic()) > 0:
        for end in wait(list(left), left_s):
            assert isinstance(end, Connection)
            rank = left.pop(end)
            try:
                found[rank] = end.recv()
            except (EOFError, ConnectionError):
                found[rank] = ProgramEnd({}, f"rank {rank} died without a word")
            if found[rank].error:
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
    return [
        found.get(rank, ProgramEnd({}, f"rank {rank} never ended"))
        for rank in range(len(ends))
    ]


def judge(
    runs: Sequence[Sequence[ProgramEnd]], native: dict[str, str] | None
) -> Cell | None:
    """The cell of a program that is wrong or refused; None where it is neither.

    ``runs`` are the endings of all ranks in the whole run and, where that had no error,
    in the resumed one. ``native`` are the bits that the whole run must end in, None for
    any.

    >>> ends = [[ProgramEnd({"w": "1"}), ProgramEnd({"w": "2"})]]
    >>> judge(ends, None).text
    'ranks end with different w'
    """
    for ends in runs:
        errors = [end for end in ends if end.error]
        if errors and all(end.is_ours for end in ends):
            first = [end for end in errors if not end.error.startswith(_SECOND_HAND)]
            return Cell("refused", (first or errors)[0].error)
        if errors:
            first = [end for end in errors if not end.is_ours]
            return Cell("WRONG", (first or errors)[0].error)
        known: dict[str, str] = {}
        for name, bits in (item for end in ends for item in end.bits.items()):
            if known.setdefault(name, bits) != bits:
                return Cell("WRONG", f"ranks end with different {name}")
    whole = runs[0]
    if not whole[0].bits:
        return Cell("WRONG", "its model has no parameters")
    if native is not None and (odd := _difference(native, whole[0].bits)):
        return Cell("WRONG", f"{odd} ends otherwise than natively")
    for rank, (one, other) in enumerate(zip(*runs, strict=True)):
        if odd := _difference(one.bits, other.bits):
            return Cell("WRONG", f"{odd} of rank {rank} ends otherwise after a resume")
    return None


def _difference(one: dict[str, str], other: dict[str, str]) -> str:
    """The first name whose bits differ, or that only one has; empty where there is
    none.
    """
    return next(
        (name for name in {**one, **other} if one.get(name) != other.get(name)), ""
    )


# ---- The table -----------------------------------------------------------------------

Found = dict[str, tuple[ProgramFile, dict[str, Cell]]]


def is_wrong(results: Found) -> bool:
    """Whether any cell is."""
    return any(
        cell.verdict == "WRONG"
        for _, cells in results.values()
        for cell in cells.values()
    )


def rows(results: Found) -> tuple[list[Row], list[str]]:
    """A row a program with its cells, and the notes to which these refer by number."""
    notes: dict[str, int] = {}
    made: list[Row] = []
    for name, (program, cells) in results.items():
        row: Row = {
            "name": name,
            "ranks": program.world,
            "lines": program.num_lines,
        }
        for exchange, cell in cells.items():
            text = cell.verdict
            if cell.overlapped:
                text += f", {cell.overlapped} overlapped"
            if cell.text:
                text += f" [{notes.setdefault(cell.text, len(notes) + 1)}]"
            row[exchange] = text
        made.append(row)
    return made, [f"[{number}] {text}" for text, number in notes.items()]


def main(
    programs: Annotated[Path, option("Their folder.")] = PROGRAMS,
    only: Annotated[list[str] | None, option("A program; may be repeated.")] = None,
    exchange: Annotated[
        list[str] | None,
        option("none, 8 bits, 4 bits, powersgd, topk, plan [all]."),
    ] = None,
    seed: Annotated[int, option("Draws of first values and data.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Run programs as people write them by every kind of exchange, and compare the
    bits.

    same: all ranks have the same parameters, also after a resume, and those of native
    DDP (none and plan). Ends with 1 if a cell is wrong.
    """
    asked = Matrix(programs, tuple(only or ()), tuple(exchange or ()), seed)
    with progress("matrix", total=1) as advance:
        results = run(asked, Fractions(advance))
    made, notes = rows(results)
    title = "programs by exchanges"
    emit("matrix", made, as_json=as_json, title=title, notes=notes)
    if is_wrong(results):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
