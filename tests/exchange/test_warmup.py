"""Warm-up: dense first steps, or the paper's densities in stages, which all ranks count
alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

import gradwire as gw
from gradwire.collective.steps.travel import sent_bytes
from gradwire.contract import Exchange
from gradwire.exchange.by_name import run_local
from gradwire.exchange.without_data import expected_bytes, record, wire_bytes
from gradwire_lab.collective.casync_ring import casync_ring
from tests.each import each
from tests.run import Run

PAPER = (0.25, 0.0625, 0.015625, 0.004, 0.001)
NUMEL, WORLD = 20_000, 2


def gradients(step: int, numel: int = NUMEL) -> list[Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(numel, generator=draw) for _ in range(WORLD)]


def test_the_first_steps_are_dense_and_the_others_are_the_inner_exchanges() -> None:
    inner = gw.exchange_for(gw.compress.topk(density=0.1))
    exchange = gw.with_warmup(gw.compress.topk(density=0.1), steps=2)
    states, others = None, None
    for step in range(5):
        grads = gradients(step, 64)
        results = run_local(exchange, grads, states, seed=step)
        states = [state for _, _, state in results]
        if step < 2:
            torch.testing.assert_close(results[0][0], torch.stack(grads).mean(0))
        else:
            want = run_local(inner, grads, others, seed=step)
            others = [state for _, _, state in want]
            assert all(
                torch.equal(a[0], b[0]) for a, b in zip(results, want, strict=True)
            )


def test_a_saved_count_goes_on_where_it_was() -> None:
    exchange = gw.with_warmup(gw.compress.onebit(), steps=3)
    spec = gw.TensorSpec("two", 64, shapes=((16,), (48,)))
    run = Run(exchange, spec, WORLD)
    for state in run.states:  # as loaded: one parameter was not used in a step
        state.step_T[0].fill_(1)
        state.step_T[1].fill_(2)
    dense = []
    for step in range(2):
        grads = gradients(step, 64)
        dense.append(torch.allclose(run.step(grads), torch.stack(grads).mean(0)))
        assert [int(count) for count in run.states[0].step_T] == [3 + step] * 2
    assert dense == [True, False]


def test_bytes_are_expected_of_what_comes_after() -> None:
    spec, inner = gw.TensorSpec("weight", 64), gw.exchange_for(gw.compress.onebit())
    exchange = gw.with_warmup(gw.compress.onebit(), steps=5)
    assert wire_bytes(exchange, spec, 4) is None
    assert expected_bytes(exchange, spec, 4) == expected_bytes(inner, spec, 4)


# ---- densities -----------------------------------------------------------------------


def selected(exchange: Exchange, num_steps: int) -> list[int]:
    """How many elements rank 0 selects in each step."""
    run, found = Run(exchange, gw.TensorSpec("weight", NUMEL), WORLD), []
    for step in range(num_steps):
        run.step(gradients(step))
        assert run.members[0].selection is not None
        found.append(run.members[0].selection.selected)
    return found


def test_the_densities_are_those_of_the_paper() -> None:
    exchange = gw.with_density_warmup(
        gw.compress.topk(density=0.001), steps_per_stage=2
    )
    assert exchange.densities == PAPER
    kept = [round(density * NUMEL) for density in PAPER]
    assert kept == [5000, 1250, 312, 80, 20]
    assert (
        selected(exchange, 12)
        == [count for count in kept for _ in range(2)] + kept[-1:] * 2
    )


def test_deep_gradient_compression_warms_up_to_its_density() -> None:
    exchange = gw.deep_gradient_compression(warmup_steps=8, sample_share=0.01)
    kept = [round(density * NUMEL) for density in PAPER for _ in range(2)]
    for count, most in zip(selected(exchange, 10), kept, strict=True):
        assert most / 2 < count <= most
    assert gw.deep_gradient_compression(warmup_steps=30, density=0.01).densities == (
        *(0.25, 0.0625, 0.015625, 0.01),
    )
    for without in ({"warmup_steps": 0}, {"warmup_steps": 9, "density": 0.5}):
        made = gw.deep_gradient_compression(clip_norm=0.25, **without)
        assert type(made).__name__ == "Clipping"
        assert type(made.inner).__name__ == "MomentumCorrection"
        assert made.inner.masking
    assert not gw.deep_gradient_compression(warmup_steps=0, masking=False).masking


@each(
    "algorithm",
    [
        gw.compress.topk(density=0.05),
        gw.compress.graddrop(density=0.05),
        gw.compress.randomk(density=0.05),
        gw.compress.selective(density=0.05),
        gw.compress.deft(density=0.05),
        gw.pair(gw.compress.dgc(density=0.05), gw.collective.casync_ps()),
        gw.with_clipping(
            gw.with_momentum_correction(gw.compress.dgc(density=0.05)), 1.0
        ),
    ],
)
def test_whatever_has_a_density_is_warmed_up(
    algorithm: gw.Exchange | gw.Compressor,
) -> None:
    exchange = gw.with_density_warmup(algorithm, steps_per_stage=1)
    assert exchange.densities == (0.25, 0.0625, 0.05)
    states, shares = None, []
    for step in range(4):
        results = run_local(exchange, gradients(step, 2000), states, seed=step)
        states = [state for _, _, state in results]
        shares.append(int(results[0][1].count_nonzero()) / 2000)
    assert shares[0] > 2 * max(shares[2:])


def test_sizes_are_expected_of_the_last_stage() -> None:
    spec = gw.TensorSpec("weight", NUMEL)
    exchange = gw.with_density_warmup(gw.compress.topk(density=0.01), steps_per_stage=9)
    assert wire_bytes(exchange, spec, 4) is None
    last = gw.exchange_for(gw.compress.topk(density=0.01))
    assert expected_bytes(exchange, spec, 4) == wire_bytes(last, spec, 4)
    for wrapped in (exchange, gw.with_clipping(exchange, 1.0)):
        assert sent_in_simulation(wrapped, spec) == sent_in_simulation(last, spec) > 0


def sent_in_simulation(exchange: Exchange, spec: gw.TensorSpec) -> int:
    """Bytes that rank 1 of 4 sends."""
    rows = record(exchange, spec, 1, 4).rows
    return sum(sent_bytes(verb, 1, 4) for row in rows for verb in row)


def test_a_ring_keeps_one_state_at_all_densities() -> None:
    """The state has an entry for each part of a message, and the first payloads are
    larger.
    """
    around = gw.pair(gw.compress.topk(density=0.001), casync_ring(half_bytes=1024))
    exchange = gw.with_density_warmup(around, steps_per_stage=1)
    states = None
    for step in range(len(PAPER) + 1):
        found = run_local(exchange, gradients(step), states)
        states = [state for _, _, state in found]
    assert 0 < int(found[0][0].count_nonzero()) <= round(PAPER[-1] * NUMEL)
