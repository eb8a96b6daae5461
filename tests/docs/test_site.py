"""The documentation's pages: links lead somewhere, examples run, commands exist, all
can be found.

None of it needs mkdocs but the build itself, which is skipped where mkdocs is not
installed.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
import textwrap
from functools import cache
from pathlib import Path
from posixpath import dirname, normpath
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
import typer

from gradwire.cli.commands.list import settings
from gradwire.cli.main import app_of, verbs
from gradwire.contract.registry import KINDS, load, names
from gradwire_lab import algorithm_page as algorithm
from gradwire_lab.laws.subjects import check, held_to
from scripts.doctest_blocks import fenced
from scripts.pictures import PICTURES
from scripts.site_pages import COPIED, NAV, ROOT, exports, generated, linked, page_path
from tests.each import each
from tests.runtime.meshes import needs_reduce_scatter

together = pytest.mark.xdist_group("site")
"""One worker makes all pages, once."""

NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
WRITTEN = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)
FENCED = re.compile(r"^ *```.*?^ *```", re.M | re.S)
PROGRAM = re.compile(r"^( *)```python\n(.*?)^\1```", re.M | re.S)
COMMAND = re.compile(r"`(gradwire [^`]+)`|^ {4}(gradwire .*?)(?:  .*)?$", re.M)
LOADED = re.compile(
    r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>"
)


@cache
def pages() -> dict[str, str]:
    """Every page of the site as Markdown, with its links."""
    read = {
        name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in WRITTEN
    }
    return {path: linked(text, path) for path, text in (read | generated()).items()}


@cache
def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as mkdocs makes them."""
    heads = (
        re.sub(r"[^\w\s-]", "", head).strip().lower() for head in HEADING.findall(text)
    )
    return {re.sub(r"[-\s]+", "-", head) for head in heads}


def broken_links(path: str, text: str, known: dict[str, str]) -> list[str]:
    """Links of a page to pages or headings that are not there."""
    found = []
    for link in LINK.finditer(FENCED.sub("", text)):
        target = normpath(f"{dirname(path)}/{link[1]}".lstrip("/")) if link[1] else path
        is_there = target in known and (
            not link[2] or link[2] in anchors(known[target])
        )
        found += [] if is_there else [f"{path}: {link[0]}"]
    return found


@cache
def commands() -> dict[str, Any]:
    """The command of each verb."""
    return {
        verb: typer.main.get_command(app_of(found)) for verb, found in verbs().items()
    }


def wrong_commands(text: str) -> list[str]:
    """Commands of a page whose verb, or one of whose options, is not there."""
    found = []
    for match in COMMAND.finditer(text):
        _, verb, *words = shlex.split(
            (match[1] or match[2]).partition(" -- ")[0], comments=True
        )
        if verb not in commands():
            found += [] if verb in ("NAME", "--version") else [match[0]]
            continue
        command = commands()[verb]
        if hasattr(command, "commands") and words:
            command = command.commands.get(words[0].strip(","))
        options = (
            {one for p in command.params for one in (*p.opts, *p.secondary_opts)}
            if command
            else ()
        )
        given = [word for word in words if word.startswith("--")]
        found += [match[0]] if command is None or set(given) - {*options} else []
    return found


@together
def test_links_lead_to_pages_and_headings() -> None:
    assert [
        one
        for path, text in pages().items()
        for one in broken_links(path, text, pages())
    ] == []


@together
def test_each_picture_is_drawn_by_a_function_and_shown_on_a_page() -> None:
    shown = {
        name
        for text in pages().values()
        for name in re.findall(r"\(pictures/(\w+)\.png\)", text)
    }
    assert shown == {*PICTURES}
    assert {path.stem for path in (ROOT / "docs" / "pictures").glob("*.png")} == {
        *PICTURES
    }
    reported = {path for path, text in pages().items() if "scripts.pictures" in text}
    assert reported == {"contributing.md"}  # readers do not draw pictures


BESIDE = re.compile(r"^(?! *#).*\S {2,}# ", re.M)


@together
def test_comments_stand_above_their_line() -> None:
    """At the right of code they are wrapped in the site's column."""
    assert BESIDE.search("step()    # all ranks")
    assert not BESIDE.search("# all ranks\nstep()")
    wrong = {path: BESIDE.findall(text) for path, text in pages().items()}
    assert {path: found for path, found in wrong.items() if found} == {}


@together
def test_the_navigation_lists_every_page_once() -> None:
    listed = re.findall(r": (\S+\.md)$", NAVIGATION, re.M)
    expected = {path for path in pages() if not path.startswith("algorithms/")}
    assert sorted(listed) == sorted({*expected, "algorithms/index.md"})
    assert f"{NAV}: algorithms/index.md" in NAVIGATION
    assert {*COPIED.values()} <= {*listed}


@together
def test_every_algorithm_has_a_page_with_its_settings_and_traits() -> None:
    index = pages()["algorithms/index.md"]
    trained = next(
        x for x in algorithm.tables(pages()["measured.md"]) if x.head[0] == "compressor"
    )
    assert len(trained.rows) > 5
    assert [
        row for row in trained.rows if f"| {' | '.join(row[1:])} |" not in index
    ] == []
    assert "source repository" in algorithm.page("compress", "topk", None)
    for kind in KINDS:
        for name in names(kind):
            text = pages()[f"algorithms/{page_path(kind, name)}"]
            found = load(kind, name)
            assert f"({page_path(kind, name)})" in index
            assert all(f"- `{one}`: " in text for one in settings(found))
            assert text.count("\n## ") == {
                "compress": 2,
                "collective": 2,
                "planner": 2,
            }.get(kind, 0)


@together
def test_the_command_line_s_page_has_every_verb_and_the_reference_every_name() -> None:
    commands = pages()["cli.md"]
    headings = HEADING.findall(commands)
    assert [verb for verb in verbs() if f"`gradwire {verb}`" not in headings] == []
    assert "install-completion" not in commands
    assert "**Commands**" not in commands
    root = {f"::: {path}\n" for path in exports().values()}
    shown = "".join(
        text for path, text in pages().items() if path.startswith("reference/")
    )
    modules = ("catalogue", "planner", "fsdp", "pilot", "__version__")
    assert [
        one for one in root if one not in shown and not one.strip().endswith(modules)
    ] == []


@together
@each("name", sorted({*WRITTEN, *COPIED} - {"CHANGELOG.md"}))  # which tells what was
def test_commands_that_a_page_names_exist(name: str) -> None:
    folder = ROOT if name in COPIED else ROOT / "docs"
    assert wrong_commands((folder / name).read_text(encoding="utf-8")) == []


SURROUNDINGS = """
import torch
from torch import nn
make_model = lambda: nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 2))
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [(torch.randn(4, 64), torch.tensor([0, 1, 0, 1]))] * 2
loss = nn.functional.cross_entropy
def one_step():
    loss(model(batches[0][0]), batches[0][1]).backward()
    optimizer.zero_grad()
"""
README = (ROOT / "README.md").read_text(encoding="utf-8")
WITH_PROGRAMS = {
    name: (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in WRITTEN
    if name
    != "compll.md"  # whose programs are held to the laws: tests/dsl/test_docs.py
} | {"README.md": README}
PROGRAMS = {
    name: [textwrap.dedent(code) for _, code in PROGRAM.findall(text)]
    for name, text in WITH_PROGRAMS.items()
}


def test_readme_is_short_and_has_one_program() -> None:
    assert len(PROGRAMS["README.md"]) == 1
    assert "import gradwire as gw" in PROGRAMS["README.md"][0]
    assert "gw.attach(model" in PROGRAMS["README.md"][0]
    assert len(README.splitlines()) <= 110


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_reduce_scatter if name == "fsdp.md" else ())
        for name, found in PROGRAMS.items()
        if found
    ],
)
def test_the_programs_of_a_page_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a page in one run, one behind the other, with a model and batches."""
    monkeypatch.chdir(tmp_path)
    text = "\n".join(PROGRAMS[name])
    launched = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    launched |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for variable, value in launched.items() if "init_process_group" in text else ():
        monkeypatch.setenv(variable, value)
    program = tmp_path / "program.py"
    imported = "" if name == "README.md" else "import gradwire as gw\n"
    program.write_text(f"{SURROUNDINGS}{imported}{text}", encoding="utf-8")
    try:
        runpy.run_path(str(program))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bfloat", "plain", "backward_order"])
def test_the_algorithms_of_a_page_keep_their_laws(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("own")
    # where a dataclass looks names up
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("\n".join([SURROUNDINGS, *PROGRAMS["own.md"]]), vars(module))
    found = getattr(module, name)
    # others are of its pairs
    held, *_ = held_to(found() if isinstance(found, type) else found)
    assert [verdict for verdict in check(held) if verdict.found] == []


@together
@pytest.mark.slow
def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(site: Path) -> None:
    built = {
        path.relative_to(site).with_suffix(".md").as_posix(): path
        for path in site.rglob("*.html")
    }
    assert {*built} - {"404.md"} == {*pages()}
    for path in built.values():
        assert LOADED.findall(path.read_text(encoding="utf-8")) == [], path


@together
def test_the_rules_for_pages_find_what_is_wrong() -> None:
    known = {"start": "# One thing, or two\n", "deep/own": ""}
    heading = "../start#one-thing-or-two"
    good = f"[x]({heading}) [y](own) [z](https://pytorch.org)"
    assert broken_links("deep/own", good, known) == []
    assert len(broken_links("deep/own", f"[x]({heading}s) [y](other)", known)) == 2
    good = "`gradwire bench train --steps 3`\n\n    gradwire doctor   # this --that\n"
    assert wrong_commands(good) == []
    bad = "`gradwire bench trains` `gradwire doktor` `gradwire list --kind`"
    assert len(wrong_commands(bad)) == 3
    assert LOADED.findall('<script src="//unpkg.com/x.js">') != []
    assert fenced("It is:\n\n>>> 1\n1\n\nSo.\n>>> 2\n2") == (
        "It is:\n\n```pycon\n>>> 1\n1\n```\n\nSo.\n```pycon\n>>> 2\n2\n```"
    )


def test_files_that_are_named_become_links() -> None:
    there = "[`docs/measured.md`](measured.md)"
    assert linked("see `docs/measured.md`", "start.md") == f"see {there}"
    deep = linked("(docs/measured.md), `docs/none.md`", "algorithms/compress/topk.md")
    assert deep == f"({there.replace('](', '](../../')}), `docs/none.md`"
    alone = (
        "`docs/start.md` ![](docs/pictures/a) [x](docs/plan.md) [y](CONTRIBUTING.md#z)"
    )
    there = "`docs/start.md` ![](pictures/a) [x](plan.md) [y](contributing.md#z)"
    assert linked(alone, "start.md") == there
    assert linked("[x](../README.md#y)", "start.md") == f"[x]({COPIED['README.md']}#y)"
