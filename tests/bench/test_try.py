"""gradwire try: four methods behind a relay or on two machines, and a live page."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradwire.errors import InvalidSetting
from gradwire_bench.errors import TestbedUnavailable
from gradwire_bench.report.live import LivePage, write_points
from gradwire_bench.testbed.hosts import Testbed, shaped_hosts
from gradwire_bench.testbed.launch import launch
from gradwire_bench.training.training_links import LinksResult

try_module = importlib.import_module("gradwire_bench.cli.try")


def page_in(folder: Path, *methods: str) -> LivePage:
    return LivePage(
        folder=folder / "page",
        methods=list(methods) or ["DDP"],
        place="An LSTM.",
        steps=10,
        command="gradwire try",
    )


def data_of(page: LivePage) -> dict[str, Any]:
    """What a page's script begins with."""
    text = page.path.read_text(encoding="utf-8")
    (data,) = re.findall(r"^const page = (.*);$", text, re.M)
    found: dict[str, Any] = json.loads(data)
    return found


@pytest.mark.smoke
def test_a_live_page_reads_points_until_it_holds_them_itself(tmp_path: Path) -> None:
    page = page_in(tmp_path)
    page.begin()
    assert data_of(page)["points"] is None
    assert page.points.read_text("utf-8") == "points([[]], false);\n"
    lines = [[{"step": 5, "seconds": 1.0, "loss": 2.0}]]
    write_points(page.points, lines)
    assert page.points.read_text("utf-8").startswith('points([[{"step": 5')
    page.end(lines, 2.5, "DDP is first.")
    assert data_of(page)["points"] == lines
    assert (data_of(page)["goal"], data_of(page)["answer"]) == (2.5, "DDP is first.")
    assert page.points.read_text("utf-8").endswith(", true);\n"), "an open page reloads"


@pytest.mark.smoke
def test_no_text_ends_the_pages_script(tmp_path: Path) -> None:
    page = page_in(tmp_path, "</script><b>")
    page.begin()
    assert page.path.read_text("utf-8").count("</script>") == 1
    assert data_of(page)["methods"] == ["</script><b>"]


def outcome(**to_goal_s: float | None) -> LinksResult:
    names = {"ddp": "ddp", "muloco": "muloco-4bit@5"}
    rows: list[dict[str, object]] = [
        {"name": names[name], "to_goal_s": at} for name, at in to_goal_s.items()
    ]
    return LinksResult(rows, {})


@pytest.mark.smoke
def test_the_answer_names_the_first_method_also_where_it_is_ddp() -> None:
    said = try_module.answer(outcome(ddp=30.0, muloco=3.0))
    assert said == (
        "gradwire local steps, Muon: 3.0 s to DDP's loss. DDP itself takes 30.0 s."
    )
    said = try_module.answer(outcome(ddp=2.0, muloco=None))
    assert said.startswith("DDP, AdamW: 2.0 s to DDP's loss.")


@pytest.mark.smoke
@pytest.mark.parametrize(
    "more", [["--far"], ["--rate", "10mbit"], ["--delay", "5"]], ids=" ".join
)
def test_a_real_link_takes_no_options_of_links(more: list[str]) -> None:
    done = CliRunner().invoke(try_module.app, ["--join", "127.0.0.1", *more])
    assert isinstance(done.exception, InvalidSetting)
    assert "as the link is real" in str(done.exception)


@pytest.mark.smoke
def test_an_address_that_nobody_reaches_is_named() -> None:
    done = CliRunner().invoke(try_module.app, ["--join", "no.such.invalid"])
    assert isinstance(done.exception, InvalidSetting)
    assert "no.such.invalid" in str(done.exception)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(300)
def test_try_trains_behind_a_relay_and_fills_its_page(tmp_path: Path) -> None:
    given = ["--no-browser", "--steps", "10", "--rate", "1gbit", "--out", str(tmp_path)]
    done = CliRunner().invoke(try_module.app, given)
    assert done.exit_code == 0, done.output
    assert str(tmp_path / "index.html") in done.output
    page = page_in(tmp_path)
    object.__setattr__(page, "folder", tmp_path)
    lines = data_of(page)["points"]
    assert [[point["step"] for point in line] for line in lines] == [[0, 5, 10]] * 4
    assert "to DDP's loss" in data_of(page)["answer"]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.multi
@pytest.mark.timeout(300)
def test_two_machines_join_by_one_line(tmp_path: Path) -> None:
    """Both type the same line; each finds out which of the two it is."""
    try:
        with shaped_hosts(Testbed(hosts=2, rate_bytes_per_s=1e9)) as hosts:
            program = Path(sys.executable).with_name("gradwire")
            line = [str(program), "try", "--no-browser"]
            more = ["--steps", "10", "--out", str(tmp_path)]
            launch(
                hosts,
                [*line, "--join", hosts.addresses[0], *more],
                timeout_s=240,
                output="none",
                check=True,
            )
    except TestbedUnavailable as problem:
        pytest.skip(str(problem))
    text = (tmp_path / "index.html").read_text("utf-8")
    assert "to DDP's loss" in text
    assert "2 machines" in text
