"""Every compressor, with every example of its settings, keeps every law."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from torch import Tensor

from gradwire.contract import Compressor
from gradwire.laws.compressors import LAWS, law_unbiased
from gradwire.load import examples
from tests.strategies import bounded, gradients, panel

from .cases import compressors


@pytest.mark.parametrize("codec", compressors(), ids=repr)
def test_laws(codec: Compressor) -> None:
    @bounded(15)
    @given(grad_N=gradients())
    def hold(grad_N: Tensor) -> None:
        for law in LAWS:
            law(codec, grad_N)

    for grad_N, law in product(panel(), LAWS):
        if law is not law_unbiased:  # it takes hundreds of steps
            law(codec, grad_N)
    hold()


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec", [made for made in compressors() if made.traits.unbiased], ids=repr
)
def test_unbiased_over_the_whole_panel(codec: Compressor) -> None:
    for grad_N in panel():
        law_unbiased(codec, grad_N)


@pytest.mark.parametrize("algorithm", examples("compress"), ids=repr)
def test_header_fields(algorithm: Any) -> None:
    """The file's docstring states what the design asks of every algorithm."""
    text = __import__(type(algorithm).__module__, fromlist=["_"]).__doc__
    for heading in ("Source:", "Differences", "Wire:", "State:", "Contributed:"):
        assert heading in text, f"{type(algorithm).__module__} does not state {heading}"
