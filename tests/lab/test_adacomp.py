"""adacomp against its algorithm written out in torch, over several steps of error feedback."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.contract.spec import TensorSpec
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


def test_without_a_residual_half_of_the_largest_is_enough():
    payload, _ = adacomp(block=BIN).encode(None, torch.tensor([4.0, -2.0, 1.9, 0.0]))
    assert payload["indices"].tolist() == [0, 1]


def test_the_largest_stays_if_the_latest_gradient_turned_against_it():
    residual_N = torch.tensor([5.0, 1.0])
    payload, _ = adacomp(block=BIN).encode(None, torch.tensor([-1.0, 0.0]), residual_N=residual_N)
    assert payload["indices"].numel() == 0
    assert residual_N.tolist() == [4.0, 1.0]


def test_of_zeros_nothing_is_sent():
    payload, _ = adacomp(block=BIN).encode(None, torch.zeros(200))
    assert payload.size_bytes == 4


def test_it_is_no_contraction_and_declares_none():
    """A bin of small elements beside a large one is sent at the mean of both bins' largest."""
    grad_N = torch.cat([torch.full((BIN,), 1.0), torch.tensor([100.0]), torch.zeros(BIN - 1)])
    payload, _ = adacomp(block=BIN).encode(None, grad_N)
    left_N = grad_N - adacomp(block=BIN).decode(payload, torch.empty_like(grad_N))
    assert float(left_N.norm()) > 3 * float(grad_N.norm())
    assert not adacomp.traits.contraction


@each("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_sent_whatever_else_its_bin_holds(bad):
    grad_N = make_gradient("normal", 300, torch.float32)
    grad_N[100] = bad
    payload, _ = adacomp(block=BIN).encode(None, grad_N)
    assert 100 in payload["indices"].tolist()
    assert not adacomp(block=BIN).decode(payload, torch.empty(300)).isfinite().all()


def test_a_wire_of_five_a_bin_is_typical():
    spec = TensorSpec("gradient", 512 * 1000)
    assert adacomp().typical(spec).size_bytes == 4 + 4 * 5000 + 625
    assert adacomp().format(spec).size_bytes == 4 + 4 * spec.numel + spec.numel // 8
