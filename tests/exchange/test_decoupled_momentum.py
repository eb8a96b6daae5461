"""Decoupled momentum: the paper's algorithm 1, what it wraps and what it refuses."""

from __future__ import annotations

import torch

import gradwire as gw
from gradwire.exchange.by_name import run_local

WORLD, NUMEL, DECAY = 3, 200, 0.9


def test_it_is_the_papers_algorithm() -> None:
    """m = decay m + g; q of m; m = m - q; the mean of all q."""
    codec = gw.compress.demo(side=8, keep=4, values=torch.float32)
    exchange = gw.with_decoupled_momentum(codec, DECAY)
    moments = [torch.zeros(NUMEL) for _ in range(WORLD)]
    states = None
    draw = torch.Generator().manual_seed(0)
    for _ in range(5):
        grads = [torch.randn(NUMEL, generator=draw) for _ in range(WORLD)]
        results = run_local(exchange, grads, states)
        states = [state for _, _, state in results]
        sent = []
        for rank, grad_N in enumerate(grads):
            moments[rank] = DECAY * moments[rank] + grad_N
            payload, _ = codec.encode(None, moments[rank])
            sent.append(codec.decode(payload, torch.empty(NUMEL)))
            moments[rank] = moments[rank] - sent[-1]
        for rank, (mean_N, _, state) in enumerate(results):
            assert torch.allclose(mean_N, torch.stack(sent).mean(0), atol=1e-5)
            assert torch.allclose(state.residual_N, moments[rank], atol=1e-5)


def test_what_has_no_error_feedback_gets_it() -> None:
    bare = gw.pair(gw.compress.topk(), gw.collective.allgather_sparse())
    assert gw.with_decoupled_momentum(bare) == gw.with_decoupled_momentum(gw.compress.topk())
