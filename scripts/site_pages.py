"""The documentation's pages that are made of the sources, and links between pages; see mkdocs.yml.

README.md and its like become pages, every algorithm has one (``gradwire list NAME`` prints it), and
the command line and the library's names are read off the code. mkdocs calls the functions ``on_*``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import relpath
from typing import Any

import typer
from typer.cli import get_docs_for_click

from gradwire.cli.main import app_of, verbs
from gradwire.cli.report.table import markdown
from gradwire.contract.registry import KINDS, names
from gradwire_bench.report import algorithm

ROOT = Path(__file__).resolve().parents[1]
COPIED = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Files of the checkout's root, and the pages that they become."""
NAV = "Algorithms"
"""The section of mkdocs.yml to which the algorithms' pages are added."""

MENTION = re.compile(r"(?<!\[)`((?:docs/)?\w+\.md)`|(?<=\()docs/(\w+\.md)(?=\))")
LEFT_OUT = re.compile(
    r"^\* `--(?:install|show)-completion`.*\n|^\*\*Commands\*\*:\n\n(?:\* .*\n)+\n", re.M
)
"""Options of the shell, and the list of a verb's commands, which follow with their whole help."""
EXPORT = re.compile(r"^from (\.[\w.]+) import (\w+) as \2$", re.M)


def generated() -> dict[str, str]:
    """Every page that is made, by its path among the pages."""
    pages = {page: _read(file) for file, page in COPIED.items()}
    pages["cli.md"] = f"# Command line\n\n{''.join(_commands())}"
    pages["api.md"] = f"{_API}\n\n{''.join(_api())}"
    pages["algorithms/index.md"] = "\n\n".join(_overview())
    for kind in KINDS:
        for name in names(kind):
            path = f"algorithms/{algorithm.page_path(kind, name)}"
            pages[path] = algorithm.page(kind, name, _read("docs/measured.md"))
    return pages


_API = """# API

`import gradwire as gw` has these names; `gw.compress`, `gw.collective` and `gw.pilot` hold the
[algorithms](algorithms/index.md)."""


def linked(text: str, path: str) -> str:
    """A page's text as the site shows it: files that are named and are pages become links."""

    def link(found: re.Match[str]) -> str:
        file = found[1] or f"docs/{found[2]}"
        page = COPIED.get(file, file.removeprefix("docs/"))
        if page == path or not (file in COPIED or (ROOT / file).is_file()):
            return found[0]
        return f"[`{file}`]({relpath(page, Path(path).parent.as_posix())})"

    text = MENTION.sub(link, text).replace("](docs/pictures/", "](pictures/")
    for file, page in COPIED.items():
        text = text.replace(f"](../{file}", f"]({page}")
    return text


def on_config(config: Any) -> None:
    """Adds the algorithms' pages to the navigation."""
    for section in config.nav:
        if NAV in section:
            section[NAV] = [
                section[NAV],
                *({KINDS[kind].word.capitalize() + "s": _paths(kind)} for kind in KINDS),
            ]


def on_files(files: Any, config: Any) -> None:
    """Adds the pages that are made."""
    from mkdocs.structure.files import File

    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """A page's text with its links."""
    return linked(text, page.file.src_uri)


def _read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def _paths(kind: str) -> list[str]:
    return [f"algorithms/{algorithm.page_path(kind, name)}" for name in names(kind)]


def _overview() -> Iterator[str]:
    """The page of all algorithms: a table a kind, and what compressors were measured to lose."""
    yield (
        "# Algorithms\n\nEvery page is made of its file's header, its traits and the measurements; "
        "`gradwire list NAME` prints the same. Sent and kept are bytes an element with the default "
        f"settings: what a rank sends of a large matrix among {algorithm.WORLDS[-1]} ranks, and "
        "what stays in memory from step to step."
    )
    for kind, known in KINDS.items():
        yield f"## {known.word.capitalize()}s\n\n{markdown(algorithm.overview(kind))}"
        if kind == "compress":
            yield (
                "## What they lose\n\nHeld-out losses over dense training's of three small models: "
                "how they were trained, and by which command, stands in "
                "[Measured](../measured.md#training), with more."
            )
            yield markdown(algorithm.trained(_read("docs/measured.md")))


def _commands() -> Iterator[str]:
    """The help of every verb, as typer writes it in Markdown, a level deeper."""
    for name, home in verbs().items():
        command = typer.main.get_command(app_of(home))
        context = command.context_class(command, info_name=name)
        text = get_docs_for_click(obj=command, ctx=context, name=f"gradwire {name}")
        yield LEFT_OUT.sub("", re.sub(r"^#", "##", text, flags=re.M))


def _api() -> Iterator[str]:
    """A directive of mkdocstrings for each name at the library's root that is no module."""
    for module, name in EXPORT.findall(_read("src/gradwire/__init__.pyi")):
        if module != ".version":
            yield f"::: gradwire{module}.{name}\n\n"
