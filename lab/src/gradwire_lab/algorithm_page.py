"""The page of an algorithm: its file's header, what it declares, sends and keeps, and
its figures.

``gradwire list NAME`` prints it, and the documentation has it as a page.
"""

import re
import threading
from collections.abc import Iterator
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markdown import Markdown

from gradwire.cli.commands.list import (
    description,
    docstring,
    exchange,
    explained,
    traits,
)
from gradwire.cli.report.output import emit
from gradwire.cli.report.table import Row, markdown
from gradwire.contract import Compressor, Exchange, Member
from gradwire.contract.registry import KINDS, homes, load
from gradwire.contract.spec import TensorSpec
from gradwire.contract.state import leaves
from gradwire.contract.thread_scratch import thread_scratch_bytes
from gradwire.errors import IncompatiblePair
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.error_feedback import with_error_feedback
from gradwire.exchange.pair import pair
from gradwire.exchange.without_data import expected_bytes
from gradwire.runtime.step.figures import KINDS as MEMORY
from gradwire.runtime.step.figures import kept_bytes

from .laws.cases import stepped

SPEC = TensorSpec("weight", 2**20, shapes=((1024, 1024),))
"""The gradient whose bytes a page states: a matrix of float32."""
WORLDS = (2, 4, 16)
NUMEL = 2**16
WORLD = 4
STEPS = 6
PER_ELEMENT = "bytes an element"
KEPT = "kept bytes an element"
HEADS = {
    "compress": ("compressor", "exchange", "scheme", "method"),
    "collective": ("exchange", "scheme"),
    "planner": ("planner",),
}
"""First cells of those tables of measurements that have a row for an algorithm of a
kind.
"""

_FIELD = re.compile(r"([A-Z][a-z]+(?: [a-z]+){0,3}(?: \([^)]*\))?):(?: |$)")
_CONTRIBUTED = re.compile(r"(?<=\. )Contributed: ")
_CODE = re.compile(r"(`+)(.+?)\1")
_SPECIAL = re.compile(r"([\\\[\]]|\*(?! )|(?<! )\*|\b_|_\b)")


def page(kind: str, name: str, measured: str | None) -> str:
    """The page of an algorithm as Markdown.

    ``kind`` is a key of ``registry.KINDS``. ``measured`` is the text of the page of
    measurements: all its rows that name the algorithm are shown. It is None where that
    page is not at hand.
    """
    algorithm = load(kind, name)
    lead, *fields = header_of(kind, name)
    parts = [f"# {escaped(name)}", f"{KINDS[kind].word.capitalize()}: {lead}"]
    declared = {
        "package": [homes(kind)[name].distribution],
        "declares": traits(algorithm),
        "exchange": [exchange(algorithm())] if kind == "compress" else [],
    }
    parts += [
        f"**{title.capitalize()}:** {_listed(x)}" for title, x in declared.items() if x
    ]
    if arguments := explained(algorithm):
        lines = [f"- `{name}`: {escaped(words)}" for name, words in arguments.items()]
        parts += ["**Arguments:**", "\n".join(lines)]
    parts += fields
    if kind == "compress":
        parts += [
            "## Bytes and memory",
            _SENT_BY_A_COMPRESSOR,
            markdown(sent_rows(algorithm())),
        ]
        parts += [_KEPT, markdown([_kept(exchange_for(algorithm()))])]
    if kind == "collective":
        parts += ["## Bytes", _SENT_BY_A_COLLECTIVE, markdown(_carried(algorithm()))]
    if kind == "planner":
        command = f"gradwire plan --model resnet50 --planner {name} --explain"
        parts += [
            "## Figures",
            f"`{command}` says what this planner does for a model, and why.",
        ]
    if kind in HEADS:
        parts += ["## Measured", *_figures(kind, name, measured)]
    return "\n\n".join(parts) + "\n"


_SENT_BY_A_COMPRESSOR = (
    f"A gradient of {SPEC.numel:,} float32, a square matrix, with the default "
    "settings: computed from the layouts. Where sizes vary these are typical ones. "
    "Plain float32 has 4 bytes an element."
)
_KEPT = (
    f"Bytes an element that a rank of {WORLD} keeps beside weights and gradients, "
    f"counted while this page was made: a matrix of {NUMEL:,} random float32 that "
    "travels alone. All messages share what is `thread_scratch`. One that holds "
    "several "
    "gradients keeps a copy of them besides (4)."
)
_SENT_BY_A_COLLECTIVE = (
    f"The most that one rank sends of a gradient of {SPEC.numel:,} float32 "
    "through compressors "
    "with their default settings, computed from the layouts; and what a rank of "
    f"{WORLD} keeps beside weights and gradients, counted with {NUMEL:,} elements."
)


def show(chosen: list[tuple[str, str]], rows: list[Row], *, as_json: bool) -> None:
    """Prints the pages of some algorithms, which ``gradwire list`` describes in
    ``rows``.
    """
    pages = [page(*pair, _measured()) for pair in chosen]
    if as_json:
        rows = [row | {"page": text} for row, text in zip(rows, pages, strict=True)]
        emit("list", rows, as_json=True, title="")
        return
    console = Console()
    for text in pages:
        console.print(Markdown(text)) if console.is_terminal else print(text)


def _measured() -> str | None:
    """The page of measurements, which is in a checkout and in no wheel."""
    path = Path(__file__).resolve().parents[3] / "docs" / "measured.md"
    if not path.is_file():
        return None
    return path.read_text(encoding="utf-8")


def header_of(kind: str, name: str) -> list[str]:
    """The header of an algorithm's file as paragraphs of Markdown, its first line in
    front.
    """
    _, _, rest = docstring(kind, name).partition("\n")
    return [
        f"{escaped(description(kind, name))}.",
        *map(_paragraph, _paragraphs(rest)),
    ]


def _paragraphs(header: str) -> Iterator[str]:
    """Fields, items of lists ("- ..."), formulas (indented) and other text, each on one
    line.
    """
    for block in re.split(r"\n\s*\n", header.strip("\n")):
        lines = block.split("\n")
        if all(line.startswith("    ") for line in lines):
            yield block
            continue
        paragraphs: list[str] = []
        for line in lines:
            is_item = line.startswith("    - ")
            is_in_item = bool(paragraphs) and paragraphs[-1][:2] == "- "
            begins = (
                not paragraphs
                or is_item
                or (is_in_item and not line.startswith("      "))
            )
            if begins or _FIELD.match(line):
                paragraphs.append(line.strip())
            else:
                paragraphs[-1] += f" {line.strip()}"
        yield from paragraphs


def _paragraph(text: str) -> str:
    """A paragraph of a header as Markdown; an indented one is Markdown's code
    already.
    """
    if text.startswith("    "):
        return text
    if text.startswith("- "):
        return f"- {escaped(text[2:])}"
    if field := _FIELD.match(text):
        text = f"**{field[1]}:** {escaped(text[field.end() :])}".strip()
        return _CONTRIBUTED.sub("**Contributed:** ", text)
    return escaped(text)


class Measurements(NamedTuple):
    """A table of a page of measurements, with its section and the paragraph that
    introduces it.
    """

    section: str
    said: str
    head: list[str]
    rows: list[list[str]]


def tables(text: str) -> Iterator[Measurements]:
    """All tables of a page of Markdown, in order.

    >>> page = ["## Speed", "", "In s:", "", "| a | s |", "| --- | --- |", "| b | 2 |"]
    >>> [found] = tables("\\n".join(page))
    >>> found
    Measurements(section='Speed', said='In s:', head=['a', 's'], rows=[['b', '2']])
    """
    section = said = ""
    for block in re.split(r"\n\s*\n", text):
        if block.startswith("#"):
            section = block.lstrip("# ").partition("\n")[0]
            said = ""
        elif block.lstrip().startswith("| "):
            head, _, *rows = (
                [cell.strip() for cell in line.strip().strip("|").split("|")]
                for line in block.strip().split("\n")
            )
            yield Measurements(section, said, head, rows)
        else:
            said = " ".join(block.split())


def escaped(text: str) -> str:
    """Text of a docstring as Markdown, in which only what stands in backticks is
    code.
    """
    parts = []
    end = 0
    for code in _CODE.finditer(text):
        parts += [_plain(text[end : code.start()]), f"`{code[2]}`"]
        end = code.end()
    return "".join([*parts, _plain(text[end:])])


def _plain(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text).replace("<", "&lt;")


def _listed(words: list[str]) -> str:
    return ", ".join(f"`{word}`" if "=" in word else escaped(word) for word in words)


def sent_rows(algorithm: Any) -> list[Row]:
    """Bytes of a payload, of what a rank sends by the default exchange, and of what it
    keeps.
    """
    whole = exchange_for(algorithm)
    sizes: dict[str, int | None] = {}
    if isinstance(algorithm, Compressor):
        sizes["payload"] = algorithm.typical(SPEC).size_bytes
    for world in WORLDS:
        sent = expected_bytes(whole, SPEC, world)
        sizes[f"sent by a rank, of {world}"] = None if sent is None else max(sent)
    sizes["kept from step to step"] = sum(
        tensor.nbytes for _, tensor in leaves(whole.init(SPEC, WORLDS[-1]))
    )
    return [_row(name, size_bytes) for name, size_bytes in sizes.items()]


def _row(name: str, size_bytes: int | None) -> Row:
    per_element = None
    if size_bytes is not None:
        per_element = size_bytes / SPEC.numel
    return {"name": name, "size_bytes": size_bytes, PER_ELEMENT: per_element}


def _kept(whole: Exchange) -> Row:
    """Bytes an element that a rank keeps, by kind and together."""
    size_bytes = bytes_an_element(whole)
    each = {kind: round(size, 2) for kind, size in size_bytes.items() if size >= 0.005}
    return {**each, "together": round(sum(size_bytes.values()), 2)}


def _carried(collective: Any) -> list[Row]:
    """Bytes that a rank sends of payloads of three kinds, or why the collective refuses
    them.
    """
    rows: list[Row] = []
    for name in ("none", "onebit", "topk"):
        codec = load("compress", name)()
        try:
            made = pair(codec, collective)
        except IncompatiblePair as error:
            rows.append({"name": name, "": f"refused: {str(error).partition(': ')[2]}"})
            continue
        each = ((world, expected_bytes(made, SPEC, world)) for world in WORLDS)
        sent = {f"among_{world}_bytes": max(sizes) for world, sizes in each if sizes}
        whole = with_error_feedback(made) if codec.traits.error_feedback else made
        rows.append({"name": name, **sent, KEPT: _kept(whole)["together"]})
    return rows


def _figures(kind: str, name: str, measured: str | None) -> list[str]:
    """Every row of the page of measurements that names an algorithm, with what was
    done.
    """
    if measured is None:
        return [
            "The page of measurements is in the source repository: `docs/measured.md`."
        ]
    figures = []
    for table in tables(measured):
        rows = [
            row for row in table.rows if _names(row[0], name, alone=kind == "compress")
        ]
        if table.head[0] in HEADS[kind] and rows:
            lines = [table.head, ["---"] * len(table.head), *rows]
            shown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
            figures += [f"**{table.section}:** {table.said}", shown]
    return figures or [
        "`docs/measured.md` has no figure that is of this algorithm alone."
    ]


def _names(text: str, name: str, *, alone: bool) -> bool:
    """Whether a row's first cell is of an algorithm: it stands in front, or anywhere in
    it.
    """
    words = re.findall(r"\w+", text.lower())
    return name in (words[:1] if alone else words)


def bytes_an_element(exchange: Exchange) -> dict[str, float]:
    """Bytes that a rank of 4 keeps for each element of one message, by kind, without
    its gradients.

    The message is a square matrix of 65,536 float32, normally distributed. What all
    messages share is counted with it, so of many messages it is less.
    """
    densities: list[dict[str, float]] = []
    # Scratch is a thread's own.
    counting = threading.Thread(target=lambda: densities.append(_counted(exchange)))
    counting.start()
    counting.join()
    return densities[0]


def _counted(exchange: Exchange) -> dict[str, float]:
    side = isqrt(NUMEL)
    spec = TensorSpec("weight", NUMEL, shapes=((side, side),))
    members = [Member(rank, WORLD) for rank in range(WORLD)]
    states = [exchange.init(spec, WORLD) for _ in members]
    draw = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        grads = [torch.randn(NUMEL, generator=draw) for _ in members]
        states = stepped(exchange, members, states, grads, 0)
    kept = kept_bytes(states[0], members[0])
    kept["thread_scratch"] = thread_scratch_bytes(own=True)
    return {kind: kept[kind] / NUMEL for kind in MEMORY if kind != "messages"}
