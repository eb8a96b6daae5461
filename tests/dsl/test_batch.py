"""Several gradients in one call are each encoded and decoded as they would be alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradwire.compress.int8 import int8
from gradwire.compress.onebit import onebit
from gradwire.contract.spec import TensorSpec
from gradwire.dsl.build import Built
from gradwire.kernels import compiler
from gradwire_lab.laws.tolerance import same_bits


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
    apart = [None if r is None else r.clone() for r in residuals]
    alone = [codec.encode(None, g, residual_N=r) for g, r in zip(grads, apart, strict=True)]
    calls.clear()
    sent = codec.encode_many([None] * 3, grads, residuals)
    assert all(same_bits(a.buffer, b.buffer) for (a, _), (b, _) in zip(sent, alone, strict=True))
    codec.decode_many([payload for payload, _ in sent], grads)
    assert calls == [("onebit_encode", 1), ("onebit_encode_with_residual", 2), ("onebit_decode", 3)]
