"""adacomp against its algorithm written out in torch, over several steps of error feedback."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire_lab.compress.adacomp import adacomp
from gradwire_lab.laws.inputs import make_gradient
from tests.each import each

BIN = 64


def sent(whole_N: Tensor, latest_N: Tensor) -> Tensor:
    """The paper's algorithm 2: G is ``whole_N``, dW ``latest_N``; 0 where nothing is sent."""
    bins = list(zip(whole_N.split(BIN), latest_N.split(BIN), strict=True))
    most = [float(g.abs().max()) for g, _ in bins]
    level = sum(most) / len(most)
    chosen = [
        torch.where((g + d).abs() >= top, g.sign(), 0.0)
        for (g, d), top in zip(bins, most, strict=True)
    ]
    return torch.cat(chosen) * torch.tensor(level, dtype=torch.float32)


@pytest.mark.smoke
@each("numel", [1, 63, 64, 65, 1000])
def test_every_step_sends_what_the_paper_says(numel):
    codec, residual_N = adacomp(block=BIN), torch.zeros(numel)
    counts = []
    for step in range(5):
        grad_N = make_gradient("normal", numel, torch.float32, seed=step)
        whole_N = grad_N + residual_N
        payload, _ = codec.encode(None, grad_N, residual_N=residual_N)
        decoded_N = codec.decode(payload, torch.empty(numel))
        torch.testing.assert_close(decoded_N, sent(whole_N, grad_N), rtol=2e-7, atol=0)
        assert torch.equal(residual_N, whole_N - decoded_N)
        counts.append(payload["indices"].numel())
    assert numel < 1000 or counts[-1] < counts[0], "residuals make the choice no narrower"


@each("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_sent_whatever_else_its_bin_holds(bad):
    grad_N = make_gradient("normal", 300, torch.float32)
    grad_N[100] = bad
    payload, _ = adacomp(block=BIN).encode(None, grad_N)
    assert 100 in payload["indices"].tolist()
    assert not adacomp(block=BIN).decode(payload, torch.empty(300)).isfinite().all()
