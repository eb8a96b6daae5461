"""Tensors of one message, each encoded by itself: as alone, whatever lies beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.collective.casync_ps import casync_ps
from gradwire.collective.steps.ordered_sums import num_entries
from gradwire.collective.steps.size_only import SizeOnlyCompressor
from gradwire.collective.steps.tensorwise import Tensorwise, tensor_sizes, tensorwise
from gradwire.compress.onebit import onebit
from gradwire.compress.topk import topk
from gradwire.contract import Compressor
from gradwire.contract.payload import Payload
from gradwire.contract.spec import TensorSpec
from gradwire.errors import InvalidSetting, RanksDiffer
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.pair import Pair
from gradwire.exchange.without_data import wire_bytes
from gradwire_lab.compress.adacomp import adacomp
from gradwire_lab.compress.threelc import threelc
from gradwire_lab.laws.compressors import LAWS
from gradwire_lab.laws.tolerance import same_bits
from tests.each import each
from tests.laws.cases import compressors
from tests.run import Run

NOT_ITS = {
    "law_settings_are_frozen_values": "its settings are not a user's",
    "law_many_are_as_each_alone": "it takes gradients of one length only",
}
"""Laws that are not asked of it, and why."""
SHARING = [codec for codec in compressors() if codec.traits.shared_scale]


def _sizes(numel: int) -> tuple[int, ...]:
    """Three tensors of unlike, odd lengths."""
    first = numel // 3
    return (first, 1, numel - first - 1)


def _draw(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def test_what_shares_a_scale_says_so() -> None:
    """Programs by their fields; a threshold that is not sent is none."""
    sharing = {type(codec).__name__ for codec in SHARING}
    quantisers = {"onebit", "terngrad", "uniform", "qsgd", "threelc", "int8", "fp8"}
    assert sharing == {*quantisers, "adacomp", "demo", "sparseloco"}


@each("codec", {type(codec): codec for codec in SHARING}.values())
def test_it_keeps_the_laws_of_compressors(codec: Compressor) -> None:
    for law in LAWS:
        if law.__name__ not in NOT_ITS:
            law(Tensorwise(codec, _sizes(300)), _draw(300))


@each("codec", SHARING)
def test_every_tensor_is_encoded_as_alone(codec: Compressor) -> None:
    sizes, grad_N = _sizes(1000), _draw(1000)
    joint, spec = Tensorwise(codec, sizes), TensorSpec("gradient", 1000)
    states, residual_N = joint.init(spec), 0.5 * _draw(1000).flip(0)
    kept_N = residual_N.clone()
    payload, _ = joint.encode(states, grad_N, residual_N=kept_N)
    parts = zip(joint.parts(payload), states, grad_N.split(sizes), strict=True)
    residuals = zip(residual_N.split(sizes), kept_N.split(sizes), strict=True)
    for (part, state, tensor_N), (before_N, after_N) in zip(
        parts, residuals, strict=True
    ):
        alone_N = before_N.clone()
        alone, _ = codec.encode(state, tensor_N, residual_N=alone_N)
        assert same_bits(part.buffer, alone.buffer)
        assert same_bits(after_N, alone_N)


def test_entries_of_all_tensors_are_what_is_decoded() -> None:
    """Each tensor's values outlive the next tensor's, which are decoded into the same
    buffer.
    """
    codec, grad_N = Tensorwise(adacomp(block=64), _sizes(300)), _draw(300)
    payload, _ = codec.encode(codec.init(TensorSpec("gradient", 300)), grad_N)
    indices_K, values_K = codec.entries(payload)
    scattered_N = torch.zeros(300)
    scattered_N[indices_K.long()] = values_K
    assert torch.equal(scattered_N, codec.decode(payload, torch.empty(300)))
    assert num_entries(payload.format) == indices_K.numel()


def test_what_is_taken_of_all_tensors_is_noted() -> None:
    exchange, spec = (
        exchange_for(adacomp(block=64)),
        TensorSpec("m", 300, shapes=((10, 20), (100,))),
    )
    run = Run(exchange, spec, 2)
    mean_N = run.step([_draw(300), _draw(300).flip(0)])
    for me in run.members:
        assert me.selection is not None
        assert me.selection.arrived == int(mean_N.count_nonzero())
        assert 0 < me.selection.selected <= me.selection.arrived


def test_it_is_used_where_elements_share_a_scale() -> None:
    spec = TensorSpec("message", 30, shapes=((4, 5), (0,), (10,)))
    assert tensor_sizes(spec) == (20, 10)
    assert tensor_sizes(TensorSpec("vector", 7)) == (7,)
    assert tensorwise(onebit(), (20, 10)) == Tensorwise(onebit(), (20, 10))
    assert tensorwise(topk(), (20, 10)) == topk()
    assert tensorwise(onebit(), (30,)) == onebit()
    assert tensorwise(SizeOnlyCompressor(onebit()), (20, 10)) == SizeOnlyCompressor(
        Tensorwise(onebit(), (20, 10))
    )


def test_bytes_are_stated_for_the_tensors_of_a_message() -> None:
    """Of chunk 0, two tensors of 12 and 28 bytes, each rounded up; of chunk 1, one of
    32.
    """
    exchange = Pair(onebit(block=64), casync_ps())
    assert wire_bytes(exchange, TensorSpec("m", 256), 2) == [32 + 32, 32 + 32]
    spec = TensorSpec("m", 256, shapes=((32,), (224,)))
    assert wire_bytes(exchange, spec, 2) == [32 + 48, 48 + 48]


@each("sizes", [(-8, 40, 0), (2**40, 0, 0), (8, 8, 8)])
def test_sizes_that_no_tensor_has_are_refused(sizes: tuple[int, ...]) -> None:
    joint, grad_N = Tensorwise(threelc(block=64), _sizes(300)), _draw(300)
    payload, _ = joint.encode(joint.init(TensorSpec("g", 300)), grad_N)
    payload["sizes"].copy_(torch.tensor(sizes))
    with pytest.raises(RanksDiffer, match="announces tensors"):
        joint.decode(payload, torch.empty(300))


def test_another_payload_or_length_is_refused() -> None:
    joint = Tensorwise(onebit(block=64), (10, 20))
    payload, _ = onebit(block=64).encode(None, _draw(30))
    with pytest.raises(InvalidSetting, match="decode what it encoded"):
        joint.decode(payload, torch.empty(30))
    with pytest.raises(InvalidSetting, match="decode what it encoded"):
        joint.decode(Payload(joint.format(TensorSpec("g", 30))), torch.empty(30))
    with pytest.raises(InvalidSetting, match="elements of a message"):
        joint.encode(None, _draw(31))
