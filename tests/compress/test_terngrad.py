"""terngrad: the numbers of Wen et al. 2017, and what its clipping changes."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from tests.compress.quantisers import decoded, normal

terngrad = gw.compress.terngrad


def test_three_values_and_the_largest_is_always_sent():
    grad_N = normal(1000)
    sent_N = decoded(terngrad(clip=None, block=16384), grad_N)[0]
    top = float(grad_N.abs().max())
    assert set(sent_N.tolist()) <= {-top, 0.0, top}
    place = int(grad_N.abs().argmax())
    assert sent_N[place] == grad_N[place]
    nonzero = sent_N != 0
    assert torch.equal(sent_N[nonzero].sign(), grad_N[nonzero].sign())


def test_clipping_cuts_at_so_many_deviations():
    """Section 3.3: g becomes sign(g) * c * sigma where it is larger; the rest is as before."""
    grad_N = normal(10_000)
    limit = 2.5 * float(grad_N.double().square().mean().sqrt())
    sent_N = decoded(terngrad(clip=2.5, block=16384), grad_N)[0]
    top = float(sent_N.max())
    assert top == pytest.approx(limit, rel=1e-6)
    beyond = grad_N.abs() > limit
    assert int(beyond.sum()) > 50
    assert torch.equal(sent_N[beyond], grad_N[beyond].sign() * top)


def test_clipping_costs_unbiasedness():
    assert terngrad.traits.unbiased
    assert terngrad(clip=None).traits.unbiased
    assert not terngrad().traits.unbiased
