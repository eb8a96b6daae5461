"""Pictures: every panel, row and line asked for is on them, and what cannot be drawn is
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from gradwire.contract.trace.span import Span, Trace
from gradwire_bench.report import bars, timeline

DENSE = Trace.of(
    [
        Span(0, "backward", "layer", 5.0, 5.5),
        Span(0, "communication", "AllReduce", 5.25, 6.0, size_bytes=100),
        Span(0, "communication", "Send", 5.5, 6.25, size_bytes=100),
    ]
)
ONEBIT = Trace.of([Span(rank, "compute", "encode", 0.0, 0.5) for rank in range(2)])
ROWS = [{"name": "ddp", "step_s": 1.0, "loss": 2.0}, {"name": "onebit", "step_s": 0.2}]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved, to look at what is on them."""
    saved: list[Figure] = []
    real = Figure.savefig

    def savefig(self: Figure, *args: Any, **settings: Any) -> None:
        saved.append(self)
        real(self, *args, **settings)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


def _is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.smoke
def test_a_timeline_has_a_panel_a_trace_and_a_row_a_lane(
    tmp_path: Path, figures: list[Figure]
) -> None:
    path = timeline.draw(
        {"dense": DENSE, "onebit": ONEBIT}, tmp_path / "t.png", title="one step"
    )
    assert _is_png(path)
    first, second = figures[0].axes
    assert first.get_title(loc="left") == "dense: 1.25 s"
    assert [label.get_text() for label in first.get_yticklabels()] == [
        "backward",
        "communication",
    ]
    rows = [label.get_text() for label in second.get_yticklabels()]
    assert rows == ["rank 0  compute", "rank 1  compute"]
    assert first.get_xlim() == second.get_xlim()
    assert first.get_xlim()[1] >= 1.25e3 * 1.0
    boxes = [
        path.get_extents().extents
        for collection in first.collections
        for path in collection.get_paths()
    ]
    stretches = sorted((round(x0), round(x1)) for x0, _, x1, _ in boxes)
    assert stretches == [(0, 500), (250, 1000), (500, 1250)]
    overlapping = [(y0, y1) for x0, y0, x1, y1 in boxes if x0 > 0]
    assert len(set(overlapping)) == 2


def test_bars_show_each_value_and_no_bar_for_an_absent_one(
    tmp_path: Path, figures: list[Figure]
) -> None:
    path = bars.draw(
        ROWS,
        tmp_path / "b.png",
        keys=["step_s", "loss"],
        title="runs",
        notes={"loss": "final"},
    )
    assert _is_png(path)
    step, loss = figures[0].axes
    assert [bar.get_width() for bar in step.patches] == [1.0, 0.2]
    assert [text.get_text() for text in step.texts] == ["1.00 s", "200 ms"]
    assert [text.get_text() for text in loss.texts] == ["2", "-"]
    assert loss.get_title(loc="left") == "final"
