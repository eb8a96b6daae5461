"""Kept elements: what is sent of a filtered gradient, in how many bytes, and what stays
behind.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradwire.contract import Layout
from gradwire.contract.spec import TensorSpec
from gradwire.dsl.language import (
    concat,
    extract,
    filter,
    indices,
    map,
    reduce,
    scatter,
    smaller,
    top,
    uint,
    uint2,
    uint8,
    where,
    whole,
)
from gradwire.dsl.program import Program
from gradwire.errors import InvalidSetting
from gradwire.kernels.compiler import reference_only
from tests.each import each
from tests.strategies import bounded


class Sparse(Program, layout=Layout.SPARSE, exact_size=False):
    """A program with kept fields is declared so."""

    def encode(self, gradient):
        kept = filter(gradient, lambda x: ~(abs(x) < 1))
        return concat(indices=indices(kept), values=kept)

    def decode(self, compressed):
        return scatter(*extract(compressed))


class passed(Sparse):
    """All that reaches 1 in magnitude."""


class largest(Sparse):
    """The largest quarter of all that is not 0."""

    def encode(self, gradient):
        kept = top(filter(gradient, lambda x: x != 0), 0.25)
        return concat(indices=indices(kept), values=kept)

    def decode(self, compressed):
        return scatter(*extract(compressed))


class signs(Sparse):
    """The signs of the largest quarter, times the least of what is not 0."""

    bitwidth: int = 2

    def encode(self, gradient):
        least = whole(
            reduce(map(filter(gradient, lambda x: x != 0), abs), smaller), smaller
        )
        kept = top(filter(gradient, lambda x: x != 0), 0.25)
        code = uint(self.bitwidth)
        return concat(
            codes=map(kept, lambda x: code(where(x > 0, 1, 0))),
            places=indices(kept),
            least=least,
        )

    def decode(self, compressed):
        codes, places, least = extract(compressed)
        return scatter(places, map(codes, lambda code: where(code == 1, least, -least)))


PROGRAMS = (
    passed(),
    passed(block=64),
    largest(),
    signs(),
    signs(bitwidth=1, block=128),
)
GRADIENT = torch.tensor([0.5, -3.0, 0.0, 1.0, 2.0, -1.5, 0.25, -0.75])


@pytest.fixture(params=["interpreted", "compiled"])
def _served(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "compiled":
        assert passed().kernels().built.library() is not None
        yield
        return
    with reference_only():
        yield


def decoded(codec: Program, payload, numel: int) -> Tensor:
    return codec.decode(payload, torch.full((numel,), 9.0))


@pytest.mark.usefixtures("_served")
def test_what_passes_is_sent_by_place():
    payload, _ = passed().encode(None, GRADIENT)
    assert payload["indices"].tolist() == [1, 3, 4, 5]
    assert payload["values"].tolist() == [-3.0, 1.0, 2.0, -1.5]
    assert payload.size_bytes == 32
    assert decoded(passed(), payload, 8).tolist() == [0, -3, 0, 1, 2, -1.5, 0, 0]


@pytest.mark.usefixtures("_served")
def test_top_cuts_what_passed_and_gives_the_rest_back():
    residual_N = torch.zeros(8)
    payload, _ = largest().encode(None, GRADIENT, residual_N=residual_N)
    assert payload["indices"].tolist() == [1, 4]
    assert residual_N.tolist() == [0.5, 0, 0, 1, 0, -1.5, 0.25, -0.75]
    payload, _ = largest().encode(None, torch.tensor([0.0, 0, 0, 0, 0, 0.1, 0, 0]))
    assert payload["indices"].tolist() == [5]  # fewer pass, fewer are sent
    ties = torch.tensor([1.0, -2, 2, 2, torch.nan, torch.inf, 1, 1])
    assert largest().encode(None, ties)[0]["indices"].tolist() == [4, 5]
    assert largest().encode(None, ties[:4])[0]["indices"].tolist() == [1]


@pytest.mark.usefixtures("_served")
def test_what_is_not_finite_is_sent_and_never_kept():
    grad_N = torch.tensor([torch.inf, torch.nan, -torch.inf, 5.0])
    residual_N = torch.full((4,), 0.5)
    payload, _ = largest().encode(None, grad_N, residual_N=residual_N)
    assert payload["indices"].tolist() == [1]
    # dropped infinities are not kept either
    assert residual_N.tolist() == [
        0.5,
        0.5,
        0.5,
        5.5,
    ]


@each("codec", PROGRAMS)
def test_a_payload_is_known_by_its_size(codec):
    @bounded(40)
    @given(numel=st.integers(0, 700), num_kept=st.integers(0, 700))
    def holds(numel: int, num_kept: int) -> None:
        spec = TensorSpec("", numel)
        form = codec.holding(spec, num_kept)
        assert codec.received(spec, form.size_bytes) == form
        for wrong in (form.size_bytes - 1, form.size_bytes + 1):
            with pytest.raises(InvalidSetting, match="give every rank"):
                codec.received(spec, wrong)

    holds()
    with pytest.raises(InvalidSetting, match="give every rank"):
        codec.received(
            TensorSpec("", 100), codec.format(TensorSpec("", 100)).size_bytes + 8
        )


def test_fields_lie_by_kind_and_bytes_between_them_are_zero():
    class mixed(Sparse):
        def encode(self, gradient):
            kept = filter(gradient, lambda x: x > 0)
            few = uint8(reduce(map(gradient, lambda x: 1), smaller))
            return concat(codes=map(kept, uint2), indices=indices(kept), few=few)

        def decode(self, compressed):
            codes, places, _ = extract(compressed)
            return scatter(places, codes)

    buffer = torch.full(
        (mixed().format(TensorSpec("", 5)).size_bytes,), 0xA5, dtype=torch.uint8
    )
    payload, _ = mixed().encode(None, torch.tensor([1.0, -1, 2, 3, -4]), buffer=buffer)
    assert [field.name for field in payload.format] == ["few", "codes", "indices"]
    assert payload.buffer.tolist() == [
        1,
        0b11_10_01,
        0,
        0,
        0,
        0,
        0,
        0,
        2,
        0,
        0,
        0,
        3,
        0,
        0,
        0,
    ]
    assert decoded(mixed(), payload, 5).tolist() == [1, 0, 2, 3, 0]
