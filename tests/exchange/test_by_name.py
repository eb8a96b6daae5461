"""Exchanges: small worked examples, the default choices, and what a user's mistake is
told.
"""

from __future__ import annotations

import torch

import gradwire as gw
from gradwire.contract.registry import examples
from gradwire.exchange.by_name import by_name, exchange_for
from gradwire.exchange.error_feedback import ErrorFeedback
from gradwire.exchange.pair import suited
from gradwire.exchange.without_data import wire_bytes
from tests.each import each


@each("algorithm", examples("compress"))
def test_an_algorithm_alone_gets_what_its_traits_ask_for(
    algorithm: gw.Compressor | gw.Exchange,
) -> None:
    exchange = exchange_for(algorithm)
    assert algorithm.traits is not None
    assert isinstance(exchange, ErrorFeedback) == algorithm.traits.error_feedback
    inner = exchange.inner if isinstance(exchange, ErrorFeedback) else exchange
    if isinstance(algorithm, gw.Compressor):
        assert inner == gw.pair(algorithm, suited(algorithm))
    else:
        assert inner is algorithm
    spec = gw.TensorSpec("", 100, shapes=((9, 11), (1,)))
    assert wire_bytes(exchange, spec, 4) == wire_bytes(inner, spec, 4)


@each("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_alone_what_more_ranks_left_arrives_and_its_rounding_stays(
    dtype: torch.dtype,
) -> None:
    exchange = exchange_for(gw.compress.topk())
    draw = torch.Generator().manual_seed(0)
    state = exchange.init(gw.TensorSpec("", 100, dtype), 1)
    state.residual_N.normal_(generator=draw)
    whole_N, arrived_N = state.residual_N.double().clone(), torch.zeros(100).double()
    for _ in range(3):
        grad_N = torch.randn(100, generator=draw).to(dtype)
        whole_N += grad_N
        [(mean_N, _, state)] = gw.run_local(exchange, [grad_N], [state])
        arrived_N += mean_N
    torch.testing.assert_close(arrived_N + state.residual_N, whole_N, rtol=0, atol=1e-6)
    assert float(state.residual_N.abs().max()) <= 4 * torch.finfo(dtype).eps
    grad_N[3] = float("inf")
    [(mean_N, _, state)] = gw.run_local(exchange, [grad_N], [state])
    assert mean_N[3] == float("inf")
    assert bool(state.residual_N.isfinite().all())


def test_plans_name_a_collective_for_compressors_only() -> None:
    assert by_name("powersgd", {"rank": 2}, None) == gw.compress.powersgd(rank=2)
    kept = by_name("powersgd", {}, None, error_feedback=True)
    assert kept == exchange_for(gw.compress.powersgd())
    assert kept.declared.whole_tensors
    assert not exchange_for(gw.compress.onebit()).declared.whole_tensors


def test_residuals_are_found_by_name() -> None:
    exchange = gw.with_error_feedback(
        gw.pair(gw.compress.onebit(), gw.collective.casync_ps())
    )
    state = exchange.init(gw.TensorSpec("w", 5, torch.float16), 3)
    found = gw.residuals(state)
    assert list(found) == ["residual"]
    assert found["residual"] is state.residual_N
    assert found["residual"].dtype == torch.float32
    outer = gw.with_error_feedback(exchange).init(gw.TensorSpec("w", 5), 3)
    assert sorted(gw.residuals(outer)) == ["inner.residual", "residual"]
    assert gw.residuals(None) == {}
