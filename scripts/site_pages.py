"""The documentation's pages that are made of the sources, and links between pages; see
mkdocs.yml.

README.md and its like become pages, every algorithm has one (``gradwire list NAME``
prints it), and the command line and the library's names are read off the code. mkdocs
calls the functions ``on_*``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from posixpath import relpath
from typing import Any

import typer
from typer.cli import get_docs_for_click

from gradwire.cli.commands.list import description
from gradwire.cli.main import app_of, verbs
from gradwire.cli.report.table import Row, markdown
from gradwire.contract.registry import EXTENSIONS, KINDS, homes, load, names
from gradwire_lab import algorithm_page as algorithm

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
    r"^\* `--(?:install|show)-completion`.*\n|^\*\*Commands\*\*:\n\n(?:\* .*\n)+\n",
    re.M,
)
"""Options of the shell, and the list of a verb's commands, which follow with their
whole help.
"""
INLINE = re.compile(r"(?<=<code>)[^<\n]+(?=</code>)")
"""Code within a sentence or a table."""
WORD = re.compile(r"(?<!\S)\S{1,40}(?!\S)")
"""A word that fits on a phone."""
EXPORT = re.compile(r"^from (\.[\w.]+) import (?:\(\s+)?(\w+) as \2,?$", re.M)


def generated() -> dict[str, str]:
    """Every page that is made, by its path among the pages."""
    pages = {page: _read(file) for file, page in COPIED.items()}
    pages["cli.md"] = f"# Command line\n\n{''.join(_commands())}"
    pages |= {f"reference/{page}": text for page, text in _reference().items()}
    pages["algorithms/index.md"] = "\n\n".join(_overview())
    for kind in KINDS:
        for name in names(kind):
            path = f"algorithms/{page_path(kind, name)}"
            pages[path] = algorithm.page(kind, name, _read("docs/measured.md"))
    return pages


REFERENCE: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "attach.md": ("attach", "Average the gradients of a model.", ("attach", "serve")),
    "local_steps.md": (
        "local_steps",
        "Let ranks train alone, and exchange once in some steps.",
        (
            "local_steps",
            ".runtime.local_steps.local_steps.LocalSteps",
            ".runtime.local_steps.recipes",
        ),
    ),
    "handle.md": (
        "Handle and checkpoints",
        "`gw.attach` returns a handle: figures, checkpoints, and the end.",
        ("Handle", "redistribute", "mean_residual_norm"),
    ),
    "exchanges.md": (
        "Exchanges",
        "Choose how a gradient becomes a mean. [Algorithms](../algorithms/index.md) "
        "lists all compressors and collectives.",
        (
            "pair",
            "exchange_for",
            "with_error_feedback",
            "with_warmup",
            "with_density_warmup",
            "with_clipping",
            "with_momentum_correction",
            "with_decoupled_momentum",
            "with_natural_sparsity",
            "with_measured_scheme",
            "deep_gradient_compression",
            "adapt",
            ".pilot.auto.auto",
            ".pilot.by_planner.by_planner",
        ),
    ),
    "plans.md": (
        "Plans and predictions",
        "Measure a model and a cluster, plan, and predict. `gw.catalogue` has "
        "measured models.",
        (
            "profile",
            "plan",
            "simulate",
            "Profile",
            "Cluster",
            "Plan",
            "measure_sparsity",
            "SparsityProfile",
            ".planning.catalogue",
        ),
    ),
    "fsdp.md": (
        "FSDP2",
        "Compress the gradients that FSDP2 reduces and scatters.",
        (".runtime.fsdp.reduce_scatter", ".runtime.fsdp.reduction.ShardReduction"),
    ),
    "frameworks.md": (
        "Frameworks",
        "Attach to the DDP model that a framework makes.",
        (
            ".integrations.accelerate.prepare",
            ".integrations.transformers.hook_trainer",
            ".integrations.lightning.GradwireStrategy",
            ".integrations.lightning.GradwireFabric",
            ".integrations.framework_attachment.FrameworkAttachment",
        ),
    ),
    "errors.md": (
        "Errors",
        "Every error that gradwire raises on purpose.",
        (
            "InvalidSetting",
            "RankFailed",
            "RanksLost",
            "RanksDiffer",
            "LoopMistake",
            ".errors.ExitCode",
        ),
    ),
    "contracts.md": (
        "Contracts",
        "The classes behind a [compressor of your own](../own.md).",
        (
            "Compressor",
            "Traits",
            "Layout",
            "Format",
            "Field",
            "Payload",
            "TensorSpec",
            "Exchange",
            "Collective",
            "run_local",
            ".exchange.without_data.wire_bytes",
            ".exchange.without_data.expected_bytes",
            "residuals",
            "Trace",
            "Span",
        ),
    ),
}
"""Pages of the reference: title, first sentence, and names at the root or from a
module's dot on.

The first page also has each class at the root that comes from ``runtime`` and is on no
other page.
"""
CONTENTS = """# Reference

`import gradwire as gw` has these names. `gradwire list` prints every algorithm, and
`gradwire list NAME` its page.

| you want to | see |
| --- | --- |
| average gradients | [attach](attach.md) |
| exchange once in some steps | [local_steps](local_steps.md) |
| read figures, save, load, stop | [Handle and checkpoints](handle.md) |
| combine compressor, collective and error feedback | [Exchanges](exchanges.md) |
| measure, plan, predict | [Plans and predictions](plans.md) |
| shard by FSDP2 | [FSDP2](fsdp.md) |
| train by Accelerate, Transformers, Lightning | [Frameworks](frameworks.md) |
| handle an error | [Errors](errors.md) |
| write an algorithm | [Contracts](contracts.md) |
| look up a compressor, collective or planner | [Algorithms](../algorithms/index.md) |
| use the command line | [Command line](../cli.md) |
"""


def linked(text: str, path: str) -> str:
    """A page's text as the site shows it: files that are named and are pages become
    links.
    """

    def link(found: re.Match[str]) -> str:
        file = found[1] or f"docs/{found[2]}"
        page = COPIED.get(file, file.removeprefix("docs/"))
        if page == path or not (file in COPIED or (ROOT / file).is_file()):
            return found[0]
        return f"[`{file}`]({relpath(page, Path(path).parent.as_posix())})"

    text = text.replace("](docs/", "](")
    for file, page in COPIED.items():
        text = re.sub(rf"\]\((\.\./)?{file}", f"]({page}", text)
    return MENTION.sub(link, text)


def on_config(config: Any) -> None:
    """Adds the algorithms' pages to the navigation."""
    (reference,) = (
        section["Reference"] for section in config.nav if "Reference" in section
    )
    (section,) = (one for one in reference if NAV in one)
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


def on_page_content(text: str, **_: Any) -> str:
    """A page's HTML, in which words of code never break: a browser would break them at
    hyphens.
    """
    marked = r'<span class="word">\g<0></span>'
    return INLINE.sub(lambda code: WORD.sub(marked, code[0]), text)


def _read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def _paths(kind: str) -> list[str]:
    return [f"algorithms/{page_path(kind, name)}" for name in names(kind)]


def _overview() -> Iterator[str]:
    """The page of all algorithms: a table a kind, and what compressors were measured to
    lose.
    """
    yield (
        "# Algorithms\n\nEvery page is made of its file's header, its traits "
        "and the measurements; `gradwire list NAME` prints the same. Sent and kept are "
        "bytes an element with the default settings: what a rank sends of a large "
        f"matrix among {algorithm.WORLDS[-1]} ranks, and what stays in memory from "
        "step to step."
    )
    for kind, known in KINDS.items():
        yield f"## {known.word.capitalize()}s\n\n{markdown(overview(kind))}"
        if kind == "compress":
            yield (
                "## What they lose\n\nHeld-out losses over dense training's of "
                "three small models: "
                "how they were trained, and by which command, stands in "
                "[Measured](../measured.md#what-does-a-compressor-cost-in-loss), "
                "with more."
            )
            yield markdown(trained(_read("docs/measured.md")))


def overview(kind: str) -> list[Row]:
    """A row for each algorithm of a kind, with what compressors send and keep.

    Bytes are those of an element, and of a rank among the most of a page.
    """
    rows: list[Row] = []
    for name in names(kind):
        about = {"package": homes(kind)[name].distribution}
        about["what it does"] = algorithm.escaped(description(kind, name))
        rows.append({"name": _link(kind, name), **about})
        if kind == "compress":
            *_, sent, kept = algorithm.sent_rows(load(kind, name)())
            rows[-1] |= {
                "sent": sent[algorithm.PER_ELEMENT],
                "kept": kept[algorithm.PER_ELEMENT],
            }
    return rows


def trained(measured: str) -> list[Row]:
    """The rows of the first table of compressors on the page of measurements, as they
    are there.
    """
    table = next(
        table
        for table in algorithm.tables(measured)
        if table.head[0] == algorithm.HEADS["compress"][0]
    )
    return [
        {
            "name": _link("compress", name),
            **dict(zip(table.head[1:], figures, strict=True)),
        }
        for name, *figures in table.rows
    ]


def _link(kind: str, text: str) -> str:
    """An algorithm's name, which settings may follow, as a link to its page if it has
    one.
    """
    name = text.partition("(")[0]
    shown = algorithm.escaped(text)
    return f"[{shown}]({page_path(kind, name)})" if name in names(kind) else shown


def page_path(kind: str, name: str) -> str:
    """The place of an algorithm's page among those of all."""
    return f"{kind.replace('.', '-')}/{name}.md"


def _commands() -> Iterator[str]:
    """The help of every verb, as typer writes it in Markdown, a level deeper."""
    for name, home in verbs().items():
        command = typer.main.get_command(app_of(home))
        context = command.context_class(command, info_name=name)
        text = get_docs_for_click(obj=command, ctx=context, name=f"gradwire {name}")
        yield LEFT_OUT.sub("", re.sub(r"^#", "##", text, flags=re.M))


def _reference() -> dict[str, str]:
    """The pages of the reference: a directive of mkdocstrings for each name."""
    root = exports()
    listed = {name for _, _, found in REFERENCE.values() for name in found}
    first = next(iter(REFERENCE))
    pages = {"index.md": CONTENTS}
    for page, (title, said, found) in REFERENCE.items():
        paths = [
            f"gradwire{name}" if name.startswith(".") else root[name] for name in found
        ]
        if page == first:
            rest = {
                path
                for name, path in root.items()
                if name not in listed and name[0].isupper()
            }
            # Options, then FailurePolicy
            paths += sorted(
                (path for path in rest if path.startswith("gradwire.runtime.")),
                reverse=True,
            )
        shown = "\n\n".join(f"::: {path}" for path in paths)
        pages[page] = f"# {title}\n\n{said}\n\n{shown}\n"
    return pages


def exports() -> dict[str, str]:
    """The dotted path of each name at the library's root."""
    stub = _read("src/gradwire/__init__.pyi")
    paths = {name: f"gradwire{module}.{name}" for module, name in EXPORT.findall(stub)}
    for point in entry_points(group=EXTENSIONS):
        if f"def {point.name}(" in stub:
            paths[point.name] = point.value.replace(":", ".")
    return paths
