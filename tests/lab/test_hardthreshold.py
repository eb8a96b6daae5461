"""hardthreshold: what a given threshold lets pass, and its bound."""

from __future__ import annotations

import pytest
import torch

from gradwire.contract.spec import TensorSpec
from gradwire.errors import InvalidSetting
from gradwire_lab.compress.hardthreshold import hardthreshold


def sent(codec, grad_N, residual_N=None):
    payload, _ = codec.encode(None, grad_N, residual_N=residual_N)
    return payload["indices"].tolist(), payload["values"].tolist()


def test_equal_to_the_threshold_passes():
    codec = hardthreshold(threshold=2.0, max_density=1.0)
    assert sent(codec, torch.tensor([1.9, -2.0, 0.0, 3.0])) == ([1, 3], [-2.0, 3.0])
    assert sent(codec, torch.zeros(4)) == ([], [])


def test_what_does_not_pass_stays_in_the_residual():
    residual_N = torch.tensor([1.0, 1.0, -1.0, 0.0])
    codec = hardthreshold(threshold=2.0, max_density=1.0)
    assert sent(codec, torch.tensor([1.5, 0.5, -0.5, 0.1]), residual_N) == ([0], [2.5])
    assert residual_N.tolist() == [0.0, 1.5, -1.5, pytest.approx(0.1)]


def test_beyond_max_density_the_largest_are_sent():
    residual_N = torch.zeros(4)
    codec = hardthreshold(threshold=1.0, max_density=0.5)
    assert sent(codec, torch.tensor([1.0, -4.0, 2.0, 3.0]), residual_N) == ([1, 3], [-4.0, 3.0])
    assert residual_N.tolist() == [1.0, 0.0, 2.0, 0.0]


def test_float64_is_rounded_and_the_residual_keeps_what_that_drops():
    residual_N = torch.zeros(2, dtype=torch.float64)
    grad_N = torch.tensor([1.0 + 1e-12, 0.5], dtype=torch.float64)
    assert sent(hardthreshold(threshold=1.0), grad_N, residual_N) == ([0], [1.0])
    assert residual_N[0] == pytest.approx(1e-12, rel=1e-3)


def test_plans_expect_one_percent():
    assert hardthreshold().typical(TensorSpec("g", 1000)).size_bytes == 80
    assert hardthreshold(max_density=0.005).typical(TensorSpec("g", 1000)).size_bytes == 40


@pytest.mark.parametrize("settings", [{"threshold": 0}, {"threshold": float("nan")}])
def test_threshold_is_above_zero(settings):
    with pytest.raises(InvalidSetting, match="finite number above 0"):
        hardthreshold(**settings)


def test_max_density_is_a_share():
    with pytest.raises(InvalidSetting, match="hardthreshold max_density"):
        hardthreshold(max_density=1.5)
