"""Warm-up of compression: dense first steps, which all ranks count alike, then the inner one."""

from __future__ import annotations

import torch
from torch import Tensor

import gradwire as gw
from gradwire.contract import Member
from gradwire.exchange.by_name import run_local
from gradwire.exchange.local import drive

NUMEL, WORLD = 64, 3


def gradients(step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(NUMEL, generator=draw) for _ in range(WORLD)]


def test_the_first_steps_are_dense_and_the_others_are_the_inner_exchanges() -> None:
    inner = gw.exchange_for(gw.compress.topk(density=0.1))
    exchange = gw.with_warmup(gw.compress.topk(density=0.1), steps=2)
    states, others = None, None
    for step in range(5):
        grads = gradients(step)
        results = run_local(exchange, grads, states, seed=step)
        states = [state for _, _, state in results]
        if step < 2:
            torch.testing.assert_close(results[0][0], torch.stack(grads).mean(0))
        else:
            want = run_local(inner, grads, others, seed=step)
            others = [state for _, _, state in want]
            assert all(torch.equal(a[0], b[0]) for a, b in zip(results, want, strict=True))


def test_a_saved_count_goes_on_where_it_was() -> None:
    exchange = gw.with_warmup(gw.compress.onebit(), steps=3)
    spec = gw.TensorSpec("two", NUMEL, shapes=((16,), (48,)))
    states = [exchange.init(spec, WORLD) for _ in range(WORLD)]
    members = [Member(rank, WORLD) for rank in range(WORLD)]
    for state in states:  # as loaded: one parameter was not used in a step
        state.step_T[0].fill_(1)
        state.step_T[1].fill_(2)
    dense = []
    for step in range(2):
        grads = gradients(step)
        mean_N = torch.stack(grads).mean(0)
        ranks = zip(members, states, grads, strict=True)
        states = drive([exchange.synchronise(me, s, g, g) for me, s, g in ranks]).results
        dense.append(torch.allclose(grads[0], mean_N))
        assert [int(count) for count in states[0].step_T] == [3 + step] * 2
    assert dense == [True, False]


def test_bytes_are_expected_of_what_comes_after() -> None:
    spec, inner = gw.TensorSpec("weight", NUMEL), gw.exchange_for(gw.compress.onebit())
    exchange = gw.with_warmup(gw.compress.onebit(), steps=5)
    assert exchange.wire_bytes(spec, 4) is None
    assert exchange.expected_bytes(spec, 4) == inner.expected_bytes(spec, 4)
