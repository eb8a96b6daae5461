"""hardthreshold: what a given threshold lets pass, and its bound."""

from __future__ import annotations

import torch

from gradwire_lab.compress.hardthreshold import hardthreshold


def sent(codec, grad_N, residual_N=None):
    payload, _ = codec.encode(None, grad_N, residual_N=residual_N)
    return payload["indices"].tolist(), payload["values"].tolist()


def test_equal_to_the_threshold_passes():
    codec = hardthreshold(threshold=2.0, max_density=1.0)
    assert sent(codec, torch.tensor([1.9, -2.0, 0.0, 3.0])) == ([1, 3], [-2.0, 3.0])
    assert sent(codec, torch.zeros(4)) == ([], [])


def test_beyond_max_density_the_largest_are_sent():
    residual_N = torch.zeros(4)
    codec = hardthreshold(threshold=1.0, max_density=0.5)
    assert sent(codec, torch.tensor([1.0, -4.0, 2.0, 3.0]), residual_N) == ([1, 3], [-4.0, 3.0])
    assert residual_N.tolist() == [1.0, 0.0, 2.0, 0.0]
