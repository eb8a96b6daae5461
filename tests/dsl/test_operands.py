"""What does not fit is refused: kernels trust the addresses and lengths that they are
given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradwire.contract import Layout
from gradwire.contract.payload import Payload
from gradwire.contract.spec import TensorSpec
from gradwire.errors import GradwireError, InvalidSetting
from gradwire_lab.compress.adacomp import adacomp
from gradwire_lab.compress.dgc import dgc
from gradwire_lab.compress.qsgd import qsgd
from gradwire_lab.compress.terngrad import terngrad
from gradwire_lab.compress.threelc import threelc
from tests.each import each

CODECS = (terngrad(block=64), threelc(block=64), dgc(density=0.1), adacomp(block=64))


@pytest.fixture
def bfloat16_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@each("codec", CODECS)
@each("numel", [1, 999, 1001])
def test_a_residual_of_another_length_is_refused(codec: Any, numel: int) -> None:
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(InvalidSetting, match="residual"):
            codec.encode(
                None, torch.ones(1000), residual_N=torch.zeros(numel, dtype=dtype)
            )
    with pytest.raises(InvalidSetting, match="residual"):
        codec.encode_many([None], [torch.ones(1000)], [torch.zeros(numel)])


@each("codec", CODECS)
def test_a_payload_of_another_length_is_refused(codec: Any) -> None:
    payload, _ = codec.encode(None, torch.ones(1000))
    # A longer gradient may well have so few kept elements.
    for numel in (0, 10) if codec.traits.layout is Layout.SPARSE else (0, 10, 100_000):
        out_N = torch.zeros(numel)
        for use in (codec.decode, codec.merge):
            with pytest.raises(InvalidSetting):
                use(payload, out_N)
        assert not out_N.any()


def test_a_payload_of_another_program_or_without_content_is_refused() -> None:
    payload, _ = terngrad().encode(None, torch.ones(1000))
    with pytest.raises(InvalidSetting, match="payload"):
        qsgd().decode(payload, torch.empty(1000))
    with pytest.raises(InvalidSetting, match="size only"):
        terngrad().decode(Payload(payload.format), torch.empty(1000))


@each("codec", CODECS)
@each("numel", [1, 65, 20_001])
def test_any_bytes_decode_or_are_refused_untouched(codec: Any, numel: int) -> None:
    spec, draw = TensorSpec("any", numel), torch.Generator().manual_seed(numel)
    most = codec.format(spec).size_bytes
    for size_bytes in {codec.encode(None, torch.ones(numel))[0].size_bytes, most}:
        format = codec.received(spec, size_bytes)
        buffer = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=draw)
        out_N = torch.zeros(numel)
        try:
            codec.merge(Payload(format, buffer), out_N)
        except GradwireError:
            assert not out_N.any()


@pytest.mark.usefixtures("bfloat16_by_default")
@each("codec", CODECS)
def test_torch_s_default_dtype_changes_nothing(codec: Any) -> None:
    grad_N = torch.randn(
        100_000, dtype=torch.float32, generator=torch.Generator().manual_seed(1)
    )
    payload, _ = codec.encode(None, grad_N)
    rounded_N = codec.decode(payload, torch.empty(100_000, dtype=torch.bfloat16))
    exact_N = codec.decode(payload, torch.empty_like(grad_N))
    assert torch.equal(rounded_N, exact_N.bfloat16())
