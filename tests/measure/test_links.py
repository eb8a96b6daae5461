"""The link model: the fit finds the alpha and beta that times were made of; a real group agrees."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import GradwireError, InvalidSetting
from gradwire.measure import links
from gradwire.measure.links import LinkFit, LinkReport, Sample, fit


@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-6))
def test_the_fit_finds_what_exact_times_were_made_of(alpha_s: float, beta: float) -> None:
    found = fit([Sample(size, alpha_s + beta * size) for size in links.SIZES_BYTES])
    assert math.isclose(found.beta_s_per_byte, beta, rel_tol=1e-6)
    assert math.isclose(found.alpha_s, alpha_s, rel_tol=1e-6)
    assert found.residual < 1e-6


def test_noise_ends_in_the_residual_and_not_in_alpha() -> None:
    noise = random.Random(0)
    samples = [
        Sample(size, (1e-4 + 1e-8 * size) * noise.uniform(0.9, 1.1))
        for size in links.SIZES_BYTES
        for _ in range(7)
    ]
    found = fit(samples)
    assert 0.02 < found.residual < 0.1
    assert found.alpha_s == pytest.approx(1e-4, rel=0.1)
    assert found.beta_s_per_byte == pytest.approx(1e-8, rel=0.1)


@pytest.mark.parametrize(
    "samples",
    [[], [Sample(8, 1.0)], [Sample(8, 1.0), Sample(8, 2.0)], [Sample(8, 0), Sample(9, 1)]],
)
def test_what_determines_no_line_is_refused(samples: list[Sample]) -> None:
    with pytest.raises(InvalidSetting, match="measure more sizes"):
        fit(samples)


def test_the_rate_is_that_of_a_ring() -> None:
    # 4 ranks send 1.5 bytes for each byte of the buffer: 1.5 / beta.
    report = LinkReport(4, "gloo", (), LinkFit(0.0, 2.4e-7, 0.0))
    assert report.rate_bytes_per_s == pytest.approx(6.25e6)
    assert LinkReport(4, "gloo", (), LinkFit(0.0, 0.0, 0.0)).rate_bytes_per_s == math.inf


@pytest.mark.multi
def test_the_loopback_is_really_measured() -> None:
    report = links.measure_loopback()
    assert (report.world, report.backend) == (2, "gloo")
    assert tuple(sample.size_bytes for sample in report.samples) == links.SIZES_BYTES
    assert all(sample.seconds > 0 for sample in report.samples)
    # To rounding: the rank that fitted has its own memory layout, and LAPACK's sums follow it.
    assert dataclasses.astuple(report.fit) == pytest.approx(
        dataclasses.astuple(fit(report.samples)), rel=1e-9
    )
    assert LinkReport.from_json(report.to_json()) == report


@pytest.mark.multi
def test_a_rank_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "__name__", "gradwire.measure.no_such_module")
    with pytest.raises(GradwireError, match="no_such_module"):
        links.measure_loopback()
