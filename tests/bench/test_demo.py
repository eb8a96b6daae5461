"""The demo's methods follow from the compressors that are named."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from gradwire.contract.trace.span import Span, Trace
from gradwire.errors import InvalidSetting
from gradwire_bench.demo import demo
from gradwire_bench.demo.demo import Demo, DemoResult, answer, write_report
from gradwire_bench.training.tasks import make_task


@pytest.mark.smoke
def test_any_compressor_is_taken_by_name() -> None:
    assert Demo().methods[-2:] == ("gradwire-onebit", "gradwire-topk")
    other = Demo(compressors=("qsgd", "none"))
    assert other.methods == ("ddp", "ddp-fp16", "gradwire-qsgd", "gradwire-dense")


def test_everybody_trains_the_same_whatever_data_there_are() -> None:
    assert Demo().task == "text"
    with pytest.raises(
        InvalidSetting, match=r"dataset-fashion-mnist.* or use --task text"
    ):
        make_task("fashion")  # tests find no data of others


@pytest.mark.smoke
def test_the_report_shows_loss_over_steps_and_over_seconds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = Trace.of([Span(0, "forward", "forward", 0.0, 1.0, step=0)])
    rows: list[dict[str, object]] = [
        {
            "name": "ddp",
            "step_s": 1.0,
            "speedup_vs_ddp": 1.0,
            "wire_bytes_per_step": 8.0,
        }
    ]
    outcome = DemoResult(
        rows, {"ddp": trace}, {"ddp": [3.0, 2.0]}, {"ddp": [0.5, 0.25]}, []
    )
    page = write_report(outcome, tmp_path, title="gradwire try", command="", machine={})
    assert {"loss.png", "first.png"} < {p.name for p in tmp_path.iterdir()}
    text = page.read_text(encoding="utf-8")
    assert "<h1>gradwire try</h1>" in text
    assert "Training loss over seconds and steps" in text
    assert "Here ddp is the first there, after 0.8 s; DDP takes 0.8 s." in text


NUM_STEPS = 24


def raced(losses: dict[str, list[float]], step_s: dict[str, float]) -> str:
    """The answer about trainings of these losses, whose steps take so long."""
    seconds = {name: [step_s[name]] * NUM_STEPS for name in losses}
    return answer(DemoResult([{"name": "ddp"}], {}, losses, seconds, []))


def falling(above: float) -> list[float]:
    """Losses as they fall with DDP, but this far above; some batches are harder than
    others.
    """
    luck = itertools.cycle([0.0, 0.05, -0.04])
    return [2.0 + 8.0 / step + next(luck) + above for step in range(1, NUM_STEPS + 1)]


@pytest.mark.smoke
def test_a_faster_method_as_good_as_ddp_is_first_even_with_a_higher_last_loss() -> None:
    losses = {"ddp": falling(0.0), "fast": falling(0.001), "coarse": falling(0.5)}
    text = raced(losses, {"ddp": 1.0, "fast": 0.2, "coarse": 0.1})
    assert "Here fast is the first there, after 4.0 s; DDP takes 19.0 s." in text
    assert "In 24 steps these do not get there: coarse." in text


@pytest.mark.smoke
def test_ddp_is_first_where_it_is_fastest_and_no_method_that_learns_less_is() -> None:
    losses = {"ddp": falling(0.0), "slow": falling(0.0), "coarse": falling(0.5)}
    text = raced(losses, {"ddp": 1.0, "slow": 1.1, "coarse": 0.1})
    assert "Here ddp is the first there" in text


@pytest.mark.smoke
def test_ranks_wait_20_s_for_each_other_and_longer_on_slow_links_or_few_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "_num_cores", lambda: 2)
    waits_s = [
        Demo(hosts=2, rate_bytes_per_s=rate).timeout_s
        for rate in (1.25e9, 12.5e6, 12.5e5)
    ]
    assert waits_s == [20, 20, 200]
    assert Demo(hosts=8).timeout_s == 80
