"""The table of ``gradwire bench matrix``: rows for a terminal, and the text that stands in docs."""

from __future__ import annotations

from pathlib import Path

from gradwire.errors import invalid

from .matrix import Cell, ProgramFile

VERDICTS = ("same", "refused", "skipped", "WRONG")
Found = dict[str, tuple[ProgramFile, dict[str, Cell]]]
BEGIN, END = "<!-- matrix -->", "<!-- end of the matrix -->"


def is_wrong(found: Found) -> bool:
    """Whether any cell is."""
    return any(cell.verdict == "WRONG" for _, cells in found.values() for cell in cells.values())


def rows(found: Found) -> tuple[list[dict[str, object]], list[str]]:
    """A row a program with its cells, and the notes to which these refer by number."""
    notes: dict[str, int] = {}
    made: list[dict[str, object]] = []
    for name, (program, cells) in found.items():
        row: dict[str, object] = {"name": name, "ranks": program.world, "lines": program.num_lines}
        for exchange, cell in cells.items():
            text = cell.verdict
            if cell.overlapped:
                text += f", {cell.overlapped} overlapped"
            if cell.text:
                text += f" [{notes.setdefault(cell.text, len(notes) + 1)}]"
            row[exchange] = text
        made.append(row)
    return made, [f"[{number}] {text}" for text, number in notes.items()]


def markdown(found: Found) -> str:
    """The table as docs have it, and its notes."""
    made, notes = rows(found)
    columns = list(made[0])
    lines = [f"| program | {' | '.join(columns[1:])} |", f"|{' --- |' * len(columns)}"]
    lines += [f"| {' | '.join(str(value) for value in row.values())} |" for row in made]
    counted = [cell.verdict for _, cells in found.values() for cell in cells.values()]
    told = ", ".join(f"{counted.count(one)} {one}" for one in VERDICTS)
    return "\n".join([*lines, "", f"{len(counted)} cells: {told}.", *(f"\n{one}" for one in notes)])


def write(found: Found, path: Path) -> None:
    """Puts the table between the two marks of a page."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if BEGIN not in text or END not in text:
        raise invalid("out", path, f"a page with {BEGIN} and {END}", "write both into it")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n{markdown(found)}\n{END}{after}", encoding="utf-8")
