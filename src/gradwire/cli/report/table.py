"""Rows of results as people read them: a rich table, aligned plain text, or Markdown.

A row is a mapping with a ``name`` and plain values whose unit stands in the key. The
key decides how a value is shown, so a verb that adds a figure has nothing to format.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ...contract.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Row = dict[str, object]
"""A ``name`` and plain values whose unit stands in the key."""


def columns(rows: Sequence[Row]) -> list[str]:
    """Keys of all rows in order of first appearance, ``name`` first.

    >>> columns([{"step_s": 1, "name": "a"}, {"name": "b", "loss": 2}])
    ['name', 'step_s', 'loss']
    """
    keys = dict.fromkeys(key for row in rows for key in row)
    return sorted(keys, key=lambda key: key != "name")


def in_sections(sections: Mapping[str, Sequence[Row]]) -> list[Row]:
    """The rows of all sections, each with its section's title.

    >>> in_sections({"GPU": [{"name": "cuda:0"}]})
    [{'name': 'cuda:0', 'section': 'GPU'}]
    """
    return [
        {**row, "section": title} for title, rows in sections.items() for row in rows
    ]


def without(rows: Sequence[Row], hidden: Collection[str]) -> list[Row]:
    """The rows without some keys, such as those that are the same in all rows.

    >>> without([{"name": "a", "num_hosts": 4}], {"num_hosts"})
    [{'name': 'a'}]
    """
    return [
        {key: value for key, value in row.items() if key not in hidden} for row in rows
    ]


def heading(key: str) -> str:
    """A key as a column's title, without the unit that the values carry.

    >>> [heading(key) for key in ("step_s", "wire_bytes_per_step", "speedup_vs_ddp")]
    ['step', 'wire per step', 'speedup vs ddp']
    """
    for ending in ("_s_per_byte", "_bytes_per_s", "_bytes", "_s"):
        if key.endswith(ending):
            return key.removesuffix(ending).replace("_", " ")
    key = (
        key.removeprefix("fraction_of_").removeprefix("fraction_").removeprefix("num_")
    )
    return key.replace("_bytes_", "_").replace("_", " ")


def _shown_float(key: str, value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if key.endswith("_bytes_per_s"):
        memory = "bandwidth" in key
        return f"{format_bytes(value)}/s" if memory else format_rate(value)
    if key.endswith("_s_per_byte"):
        return f"{value * 1e9:.3g} ns/B"
    if key.endswith("_s"):
        return format_seconds(value)
    if "bytes" in key.split("_"):
        return format_bytes(value)
    if key.startswith("speedup"):
        return f"{value:.2f} x"
    if key.startswith("fraction"):
        return f"{100 * value:.1f} %"
    return f"{value:.4g}"


def cell(key: str, value: object) -> str:
    """A value as text; the key tells its unit.

    >>> cell("step_s", 0.0123)
    '12.3 ms'
    >>> cell("speedup_vs_ddp", 3.456), cell("fraction_kept", 0.01)
    ('3.46 x', '1.0 %')
    >>> cell("link_bytes_per_s", 25e6), cell("copy_bandwidth_bytes_per_s", 55e9)
    ('200.0 Mbit/s', '55.0 GB/s')
    >>> cell("num_steps", 1200000), cell("ok", True), cell("loss", None)
    ('1,200,000', 'yes', '-')
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _shown_float(key, value)
    if isinstance(value, int):
        text = _shown_float(key, float(value))
        return f"{value:,}" if text == f"{float(value):.4g}" else text
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value)
    return str(value)


def is_numeric(rows: Sequence[Row], key: str) -> bool:
    """Whether every value of a column is a number or absent.

    Such columns stand to the right.
    """
    values = [row[key] for row in rows if row.get(key) is not None]
    return bool(values) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool)
        for value in values
    )


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The text of every cell, a list for each row, in ``columns(rows)``' order."""
    keys = columns(rows)
    return [[cell(key, row[key]) if key in row else "" for key in keys] for row in rows]


def print_table(rows: Sequence[Row], console: Console, *, title: str) -> None:
    """Prints the rows on a terminal, with headings over several lines if narrow.

    Names and numbers are never cut: plain columns stand for a table that is wider
    still.
    """
    anywhere = console.options.update(width=sys.maxsize)
    for is_narrow in (False, True):
        table = _rich_table(rows, title, is_narrow=is_narrow)
        if console.measure(table, options=anywhere).minimum <= console.width:
            console.print(table)
            return
    print(plain(rows, title=title), file=console.file)


def _rich_table(rows: Sequence[Row], title: str, *, is_narrow: bool) -> Table:
    """The rows as a table; ``is_narrow`` gives each word of a heading a line."""
    # Measurements make rows where rich is not installed.
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    lines = cells(rows)
    for place, key in enumerate(columns(rows)):
        numeric = is_numeric(rows, key)
        is_whole = numeric or key == "name"
        title_lines = heading(key).split(" " if is_narrow else "\n")
        longest = max(map(len, [*title_lines, *(line[place] for line in lines)]))
        table.add_column(
            "\n".join(title_lines),
            justify="right" if numeric else "left",
            style="bold" if key == "name" else "",
            no_wrap=is_whole,
            min_width=longest if is_whole else None,
        )
    for texts in lines:
        table.add_row(*(Text(text) for text in texts))
    return table


def plain(rows: Sequence[Row], *, title: str = "") -> str:
    """The rows as aligned columns two spaces apart, for a pipe or a log.

    Never cut to a width.

    >>> rows = [{"name": "ddp", "step_s": 1.5}, {"name": "onebit", "step_s": 0.25}]
    >>> print(plain(rows))
    name      step
    ddp     1.50 s
    onebit  250 ms
    """
    keys = columns(rows)
    lines = [[heading(key) for key in keys], *cells(rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(keys))]
    right = [is_numeric(rows, key) for key in keys]
    texts = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join([title, *texts] if title else texts)


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table.

    >>> print(markdown([{"name": "ddp", "step_s": 1.5}]))
    | name | step |
    | :--- | ---: |
    | ddp | 1.50 s |
    """
    keys = columns(rows)
    rule = ["---:" if is_numeric(rows, key) else ":---" for key in keys]
    lines = [[heading(key) for key in keys], rule, *cells(rows)]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
        for line in lines
    )
