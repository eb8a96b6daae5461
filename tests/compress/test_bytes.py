"""The bytes of payloads, by the formulas that papers and docstrings state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import gradwire as gw
from gradwire.contract import Compressor
from gradwire.kernels.sparse.formats.elias_fano import elias_fano
from gradwire_lab.compress.sparseloco import CHUNK
from tests.each import each

NUMELS = (0, 1, 5, 49, 64, 65, 129, 1000, CHUNK, CHUNK + 1, 250_000)


def of_blocks(numel: int, header: int, bits: float) -> int:
    """Blocks of 64 elements with a header each, and so many bits an element."""
    return header * -(-numel // 64) + -(-bits * numel // 8)  # type: ignore[return-value]


def of_topk(numel: int) -> int:
    return 8 * max(1, round(0.01 * numel)) if numel else 0


def of_sparseloco(numel: int) -> int:
    """Two bfloat16 a chunk; two bits and a place's an element that is sent."""
    whole, rest = divmod(numel, CHUNK)
    kept = 64 * whole + (max(1, round(rest / 64)) if rest else 0)
    places = elias_fano().size_bytes(kept, numel, 0) if kept < numel else 0
    return 4 * -(-numel // CHUNK) + places + -(-kept // 4)


@each(
    "codec, formula",
    [
        (gw.compress.cast16(dtype=torch.float16), lambda numel: 2 * numel),
        (gw.compress.cast16(dtype=torch.bfloat16), lambda numel: 2 * numel),
        (gw.compress.topk(density=0.01), of_topk),
        (gw.compress.sparseloco(), of_sparseloco),
        *(
            (kind(block=64), partial(of_blocks, header=4, bits=8))
            for kind in (gw.compress.int8, gw.compress.fp8)
        ),
        (gw.compress.onebit(block=64), partial(of_blocks, header=8, bits=1)),
        (gw.compress.terngrad(block=64), partial(of_blocks, header=4, bits=2)),
        *(
            (
                gw.compress.qsgd(bitwidth=bits, block=64),
                partial(of_blocks, header=4, bits=bits),
            )
            for bits in (2, 4, 8)
        ),
        *(
            (
                gw.compress.uniform(bitwidth=bits, block=64),
                partial(of_blocks, header=8, bits=bits),
            )
            for bits in (1, 2, 4, 8)
        ),
    ],
)
def test_bytes_are_those_of_the_formula(
    codec: Compressor, formula: Callable[[int], int]
) -> None:
    for numel in NUMELS:
        payload, _ = codec.encode(
            codec.init(gw.TensorSpec("weight", numel)), torch.randn(numel)
        )
        assert payload.size_bytes == formula(numel), f"{numel} elements"


def test_sparseloco_sends_an_element_in_few_bits() -> None:
    """The entropy of places, signs and levels is 0.147 bits an element."""
    numel = 1_000_000
    payload, _ = gw.compress.sparseloco().encode(None, torch.randn(numel))
    assert 8 * payload.size_bytes / numel <= 0.165


def test_demos_bytes_are_those_of_the_formula() -> None:
    """32 of 4096 coefficients: 16 bits of value, 7 low and 2 high bits of the place
    each.
    """
    spec = gw.TensorSpec("weight", 10 * 4096)
    assert gw.compress.demo().format(spec).size_bytes == 10 * 32 * (16 + 7 + 2) // 8
    assert (
        gw.compress.demo(values=torch.float32).format(spec).size_bytes
        == 10 * 32 * 41 // 8
    )


def test_payloads_without_places_have_none() -> None:
    for codec in (gw.compress.none(), gw.compress.onebit()):
        payload, _ = codec.encode(codec.init(gw.TensorSpec("", 8)), torch.ones(8))
        with pytest.raises(gw.InvalidSetting, match="payload must be a sparse one"):
            codec.entries(payload)
