"""The demo's methods follow from the compressors that are named."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradwire.contract.trace.span import Span, Trace
from gradwire.errors import InvalidSetting
from gradwire_bench.demo.demo import Demo, DemoResult, write_report
from gradwire_bench.training.tasks import make_task


@pytest.mark.smoke
def test_any_compressor_is_taken_by_name() -> None:
    assert Demo().methods[-2:] == ("gradwire-onebit", "gradwire-topk")
    demo = Demo(compressors=("qsgd", "none"))
    assert demo.methods == ("ddp", "ddp-fp16", "gradwire-qsgd", "gradwire-dense")


def test_everybody_trains_the_same_whatever_data_there_are() -> None:
    assert Demo().task == "text"
    with pytest.raises(InvalidSetting, match=r"dataset-fashion-mnist.* or use --task text"):
        make_task("fashion")  # tests find no data of others


@pytest.mark.smoke
def test_the_report_shows_loss_over_steps_and_over_seconds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = Trace.of([Span(0, "forward", "forward", 0.0, 1.0, step=0)])
    rows: list[dict[str, object]] = [
        {"name": "ddp", "step_s": 1.0, "speedup_vs_ddp": 1.0, "wire_bytes_per_step": 8.0}
    ]
    outcome = DemoResult(rows, {"ddp": trace}, {"ddp": [3.0, 2.0]}, {"ddp": [0.5, 0.25]}, [])
    page = write_report(outcome, tmp_path, command="gradwire demo", machine={})
    assert {"loss.png", "first.png"} < {p.name for p in tmp_path.iterdir()}
    text = page.read_text(encoding="utf-8")
    assert "Training loss over seconds and steps" in text
    assert "first to reach DDP&#39;s last training loss (2.00): after 0.8 s" in text


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(300)
def test_try_trains_behind_a_relay_and_writes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    module = importlib.import_module("gradwire_bench.cli.try")
    few = {"compressors": ("onebit",), "task": "convnet"}
    monkeypatch.setattr(module, "Demo", lambda **given: Demo(**given | few))
    given = ["--no-browser", "--steps", "8", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(module.app, given)
    assert done.exit_code == 0, done.output
    told = [line.split()[0] for line in done.output.splitlines() if line.startswith(("ddp", "g"))]
    assert told[-3:] == ["ddp", "ddp-fp16", "gradwire-onebit"]
    assert "Training loss over seconds" in (tmp_path / "out" / "report.html").read_text("utf-8")
