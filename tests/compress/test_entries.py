"""What a sparse payload holds, as collectives read it, is what it decodes to."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.contract import Compressor, Layout
from gradwire.contract.spec import working_dtype
from tests.each import each
from tests.laws.cases import compressors, name_of

SPARSE = [codec for codec in compressors() if codec.traits.layout is Layout.SPARSE]


@each("codec", SPARSE, ids=name_of)
def test_entries_are_what_is_decoded(codec: Compressor) -> None:
    draw = torch.Generator().manual_seed(2)
    for numel, dtype in ((0, torch.float32), (1, torch.float64), (1001, torch.bfloat16)):
        grad_N = torch.randn(numel, generator=draw).to(dtype)
        payload, _ = codec.encode(codec.init(gw.TensorSpec("", numel, dtype)), grad_N)
        indices_K, values = codec.entries(payload)
        assert indices_K.dtype == torch.int32
        assert bool((indices_K[1:] > indices_K[:-1]).all()), "indices do not ascend"
        assert values.dtype in (torch.float32, working_dtype(dtype))
        units_UC = torch.zeros(-(-numel // codec.width), codec.width, dtype=torch.float64)
        units_UC[indices_K.long()] = values.double().view(-1, codec.width)
        decoded_N = codec.decode(payload, torch.empty(numel, dtype=torch.float64))
        assert torch.equal(units_UC.flatten()[:numel], decoded_N)


def test_payloads_without_places_have_none() -> None:
    for codec in (gw.compress.none(), gw.compress.onebit()):
        payload, _ = codec.encode(codec.init(gw.TensorSpec("", 8)), torch.ones(8))
        with pytest.raises(gw.InvalidSetting, match="payload must be a sparse one"):
            codec.entries(payload)
