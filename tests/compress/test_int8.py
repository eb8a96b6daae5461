"""int8: the nearest level; and with fp8: blocks of their own, the ends of float32's range."""

from __future__ import annotations

import math

import pytest
import torch

import gradwire as gw
from tests.compress.quantisers import decoded, normal
from tests.each import each

int8 = gw.compress.int8
both = each("kind", [int8, gw.compress.fp8])


def test_every_element_goes_to_the_nearest_level():
    grad_N = normal(5000)
    step = float(grad_N.abs().max()) / 127
    sent_N = decoded(int8(block=8192), grad_N)[0]
    assert float((sent_N - grad_N).abs().max()) <= step / 2 * (1 + 1e-5)
    assert float(sent_N.abs().max()) == pytest.approx(127 * step, rel=1e-6)


@both
@each("bad", [math.nan, math.inf])
def test_what_is_not_finite_spoils_its_own_block_only(kind, bad):
    grad_N = torch.ones(128)
    grad_N[70] = bad
    sent_N = decoded(kind(block=64), grad_N)[0]
    assert bool(sent_N[:64].isfinite().all())
    assert not bool(sent_N[70].isfinite())


@both
@each("size", [0.0, 1e-44, 1e-38, 3.4e38])
def test_no_magnitude_grows(kind, size):
    sent_N = decoded(kind(), torch.tensor([size, -size, 0.0]))[0]
    assert bool((sent_N.abs() <= size * (1 + 1e-6)).all())
    assert sent_N[2] == 0
