"""redsync: between k and 2k by halving, exactly k by trimming."""

from __future__ import annotations

import torch

from gradwire.compress.topk import topk
from gradwire_lab.compress.redsync import redsync
from gradwire_lab.laws.densities import KINDS, drawn
from tests.each import each


def sent(grad_N, **settings):
    payload, _ = redsync(**settings).encode(None, grad_N)
    return payload["indices"]


@each("kind", KINDS)
def test_trimmed_is_exact(kind):
    grad_N = drawn(kind, 50_000)
    want, _ = topk(density=0.01).encode(None, grad_N)
    assert torch.equal(sent(grad_N, density=0.01), want["indices"])


def test_where_no_threshold_is_right_the_largest_twice_k_are_sent():
    grad_N = torch.ones(1_000)
    grad_N[5] = 7.0
    assert sent(grad_N, density=0.01, trimmed_below=0).tolist() == list(range(20))
