"""Tables: all three forms show the same cells, and the key decides how a value
looks.
"""

from __future__ import annotations

import io
import math

from rich.console import Console

from gradwire.cli.report.table import Row, cell, cells, markdown, plain, print_table
from tests.each import each

ROWS: list[Row] = [
    {"name": "ddp", "step_s": 1.25, "speedup_vs_ddp": 1.0, "tags": ["a", "b"]},
    {"name": "onebit", "step_s": 0.0123, "speedup_vs_ddp": 101.6, "loss": None},
]


@each(
    "key, value, text",
    [
        ("step_s", 0.0123, "12.3 ms"),
        ("step_s", 2, "2.00 s"),
        ("beta_s_per_byte", 1.6e-8, "16 ns/B"),
        ("size_bytes", 4096, "4.10 kB"),
        ("wire_bytes_per_step", 1.5e6, "1.50 MB"),
        ("rate_bytes_per_s", 25e6, "200.0 Mbit/s"),
        ("copy_bandwidth_bytes_per_s", 5e9, "5.00 GB/s"),
        ("speedup_vs_ddp", 3, "3.00 x"),
        ("fraction_of_copy_bandwidth", 0.615, "61.5 %"),
        ("num_steps", 1_000_000, "1,000,000"),
        ("loss", 2.345678, "2.346"),
        ("loss", math.nan, "nan"),
        ("loss", None, "-"),
        ("available", False, "no"),
        ("tags", ("a", "b"), "a, b"),
        ("name", "x|y", "x|y"),
    ],
)
def test_the_key_decides_how_a_value_looks(key: str, value: object, text: str) -> None:
    assert cell(key, value) == text


def test_absent_cells_are_empty_and_none_is_a_dash() -> None:
    assert cells(ROWS)[0][-1] == ""
    assert cells(ROWS)[1][-1] == "-"


def test_plain_columns_line_up_and_are_never_cut() -> None:
    rows = [{"name": "n" * 300, "step_s": 1.0}, {"name": "m", "step_s": 0.5}]
    lines = plain(rows, title="two").splitlines()
    assert lines[0] == "two"
    assert len({len(line) for line in lines[1:]}) == 1
    assert "n" * 300 in lines[2]


def test_markdown_escapes_bars_and_aligns_numbers() -> None:
    lines = markdown([{"name": "a|b", "step_s": 1.0}]).splitlines()
    assert lines[1] == "| :--- | ---: |"
    assert lines[2] == "| a\\|b | 1.00 s |"


def printed(rows: list[Row], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_table(rows, console, title="[all]")
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


WIDE: list[Row] = [
    {
        "name": f"gradwire-method-{place}",
        "step_s": 0.0123 + place,
        "step_p20_s": 0.0111 + place,
        "step_p80_s": 0.0144 + place,
        "speedup_vs_ddp": 101.6,
        "wire_bytes_per_step": 677e3,
        "loss": 1.906,
    }
    for place in range(3)
]


MARKUP: list[Row] = [*ROWS, {"name": "[red]x[/red]"}]


@each("rows, width", [(MARKUP, 200), (MARKUP, 80), (WIDE, 200), (WIDE, 80), (WIDE, 20)])
def test_a_terminal_gets_every_cell_and_reads_no_markup(
    rows: list[Row], width: int
) -> None:
    text = printed(rows, width)
    for row in cells(rows):
        assert all(cell in text for cell in row)
    assert "…" not in text


def test_headings_take_more_lines_before_a_table_is_wider_than_the_terminal() -> None:
    for width, num_lines in ((200, 1), (80, 3)):
        lines = printed(WIDE, width).splitlines()
        assert max(map(len, lines)) <= width
        rule = next(place for place, line in enumerate(lines) if "──" in line)
        assert sum(bool(line.strip()) for line in lines[1:rule]) == num_lines
