"""Several gradients in one call are each encoded and decoded as they would be alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradwire.compress.dgc import dgc
from gradwire.compress.int8 import int8
from gradwire.compress.none import none
from gradwire.compress.onebit import onebit
from gradwire.compress.qsgd import qsgd
from gradwire.compress.terngrad import terngrad
from gradwire.compress.topk import topk
from gradwire.contract import Compressor
from gradwire.contract.spec import TensorSpec
from gradwire.dsl.build import Built
from gradwire.kernels import compiler
from gradwire_lab.compress.adacomp import adacomp
from gradwire_lab.compress.threelc import threelc
from gradwire_lab.laws.inputs import make_gradient
from gradwire_lab.laws.tolerance import same_bits
from tests.strategies import bounded

CODECS = (
    onebit(block=128),
    qsgd(),
    int8(),
    terngrad(block=64),
    dgc(density=0.1),
    adacomp(),
    threelc(),
    topk(density=0.1),
    none(),
)
KINDS = ("normal", "zeros", "one nan", "both infs")
TENSORS = st.tuples(
    st.sampled_from([0, 1, 2, 63, 64, 65, 700, 20_000]),
    st.sampled_from(KINDS),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
"""(elements, kind, dtype, whether there is a residual)"""


def gradients_of(tensors: list[tuple[Any, ...]]) -> tuple[list[Tensor], list[Tensor | None]]:
    grads: list[Tensor] = []
    residuals: list[Tensor | None] = []
    for seed, (numel, kind, dtype, kept) in enumerate(tensors):
        grads.append(make_gradient(kind if numel > 1 else "normal", numel, dtype, seed=seed))
        residual_N = make_gradient("normal", numel, torch.float32, seed=99 + seed)
        residuals.append(residual_N if kept else None)
    return grads, residuals


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_many_are_encoded_and_decoded_as_one_by_one(codec: Compressor) -> None:
    @bounded(12)
    @given(tensors=st.lists(TENSORS, max_size=7))
    def holds(tensors: list[tuple[Any, ...]]) -> None:
        grads, residuals = gradients_of(tensors)
        apart = [None if r is None else r.clone() for r in residuals]
        specs = [TensorSpec(f"g{i}", g.numel(), g.dtype) for i, g in enumerate(grads)]
        states = [codec.init(spec) for spec in specs]
        for _ in range(2):
            many = codec.encode_many(states, grads, residuals)
            alone = [
                codec.encode(state, grad_N, residual_N=residual_N)
                for state, grad_N, residual_N in zip(states, grads, apart, strict=True)
            ]
            for (a, next_a), (b, next_b) in zip(many, alone, strict=True):
                assert same_bits(a.buffer, b.buffer)
                assert (next_a is None) == (next_b is None)
                assert next_a is None or torch.equal(next_a, next_b)
            assert_same(residuals, apart)
            states = [state for _, state in many]
        outs = [[torch.full_like(grad_N, 7.0) for grad_N in grads] for _ in range(2)]
        codec.decode_many([payload for payload, _ in many], outs[0], scale=0.5)
        for (payload, _), out_N in zip(many, outs[1], strict=True):
            codec.decode(payload, out_N, scale=0.5)
        assert_same(outs[0], outs[1])

    holds()


def assert_same(many: Any, alone: Any) -> None:
    for a, b in zip(many, alone, strict=True):
        assert (a is None) == (b is None)
        assert a is None or same_bits(a, b)


def test_buffers_are_used_where_given() -> None:
    codec, grads = int8(), [torch.ones(5), torch.ones(300)]
    buffer = torch.zeros(codec.format(TensorSpec("a", 300)).size_bytes, dtype=torch.uint8)
    (_, (payload, _)) = codec.encode_many([None, None], grads, buffers=[None, buffer])
    assert payload.buffer is buffer
    assert bool(buffer.any())


@pytest.mark.skipif(compiler.find_compiler() is None, reason="no C++ compiler")
def test_many_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, calls = onebit(), []
    run_many = Built.run_many

    def counted(self: Built, kernel: Any, given: Any) -> list[int]:
        calls.append((kernel.name, len(given)))
        return run_many(self, kernel, given)

    monkeypatch.setattr(Built, "run_many", counted)
    grads = [torch.randn(n) for n in (3, 400, 5)]
    residuals = [torch.zeros(3), None, torch.zeros(5)]
    sent = codec.encode_many([None] * 3, grads, residuals)
    codec.decode_many([payload for payload, _ in sent], grads)
    assert calls == [("onebit_encode", 1), ("onebit_encode_with_residual", 2), ("onebit_decode", 3)]


def test_lists_of_different_lengths_are_refused() -> None:
    codec = onebit()
    with pytest.raises(ValueError, match="zip"):
        codec.encode_many([None], [torch.ones(3), torch.ones(4)])
    payload, _ = codec.encode(None, torch.ones(3))
    with pytest.raises(ValueError, match="zip"):
        codec.decode_many([payload], [])
