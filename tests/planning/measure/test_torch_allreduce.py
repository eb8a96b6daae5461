"""torch's own all-reduce in a group: the rate of a ring, and a loopback that is really measured."""

from __future__ import annotations

import math
import operator
from pathlib import Path

import pytest

from gradwire.errors import GradwireError
from gradwire.planning.data.fit import LineFit, fit_line
from gradwire.planning.measure import torch_allreduce
from gradwire.planning.measure.torch_allreduce import LinkReport

pytestmark = pytest.mark.slow


def test_the_rate_is_that_of_a_ring() -> None:
    # 4 ranks send 1.5 bytes for each byte of the buffer: 1.5 / beta.
    line = LineFit(alpha_s=0.0, per_unit_s=2.4e-7)
    report = LinkReport(world=4, backend="gloo", fit=line)
    assert report.rate_bytes_per_s == pytest.approx(6.25e6)
    flat = line.model_copy(update={"per_unit_s": 0.0})
    assert LinkReport(world=4, backend="gloo", fit=flat).rate_bytes_per_s == math.inf


@pytest.mark.multi
def test_the_loopback_is_really_measured() -> None:
    report = torch_allreduce.measure_loopback()
    assert (report.world, report.backend) == (2, "gloo")
    assert tuple(size for size, _ in report.fit.samples) == torch_allreduce.SIZES_BYTES
    assert all(seconds > 0 for _, seconds in report.fit.samples)
    # To rounding: the rank that fitted has its own memory layout, and LAPACK's sums follow it.
    again = fit_line(report.fit.samples)
    assert (again.alpha_s, again.per_unit_s) == pytest.approx(
        (report.fit.alpha_s, report.fit.per_unit_s), rel=1e-9
    )
    assert LinkReport.model_validate_json(report.model_dump_json()) == report


@pytest.mark.multi
def test_ranks_import_nothing_of_the_folder_that_they_are_started_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "datetime.py").write_text("raise SystemExit('planted')")
    monkeypatch.chdir(tmp_path)
    assert torch_allreduce.measure_loopback().world == 2


@pytest.mark.multi
def test_a_rank_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_allreduce, "_loopback_rank", operator.index)  # which takes no folder
    with pytest.raises(GradwireError, match=r"could not be measured:(.|\n)*TypeError: .*index"):
        torch_allreduce.measure_loopback()
