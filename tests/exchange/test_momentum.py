"""Momentum correction and decoupled momentum: the papers' algorithms, and what they
wrap.
"""

from __future__ import annotations

import torch
from torch import Tensor

import gradwire as gw
from gradwire.exchange.by_name import run_local
from gradwire.exchange.error_feedback import ErrorFeedback
from tests.each import each

WORLD, NUMEL, KEPT, MOMENTUM = 3, 50, 10, 0.9
topk = gw.compress.topk(density=KEPT / NUMEL)


def gradients(step: int, world: int = WORLD, numel: int = NUMEL) -> list[Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(numel, generator=draw) for _ in range(world)]


class OfThePaper:
    """One rank's algorithm, line by line, with an exact top-k for its threshold."""

    def __init__(self, nesterov: bool, masking: bool) -> None:
        self.nesterov, self.masking = nesterov, masking
        self.u_N, self.v_N = torch.zeros(NUMEL), torch.zeros(NUMEL)

    def step(self, grad_N: Tensor) -> Tensor:
        """What this rank sends, zeros where it sends nothing."""
        if self.nesterov:
            self.u_N = MOMENTUM * (self.u_N + grad_N)
            self.v_N = self.v_N + self.u_N + grad_N
        else:
            self.u_N = MOMENTUM * self.u_N + grad_N
            self.v_N = self.v_N + self.u_N
        mask_N = torch.zeros(NUMEL)
        mask_N[self.v_N.abs().topk(KEPT).indices] = 1
        sent_N = self.v_N * mask_N
        self.v_N = self.v_N * (1 - mask_N)
        if self.masking:
            self.u_N = self.u_N * (1 - mask_N)
        return sent_N


@each("masking", [False, True])
@each("nesterov", [False, True])
def test_it_is_the_papers_algorithm(nesterov: bool, masking: bool) -> None:
    exchange = gw.with_momentum_correction(topk, MOMENTUM, nesterov, masking)
    ranks, states = [OfThePaper(nesterov, masking) for _ in range(WORLD)], None
    for step in range(30):
        grads = gradients(step)
        results = run_local(exchange, grads, states, seed=step)
        states = [state for _, _, state in results]
        sent = [rank.step(grad_N) for rank, grad_N in zip(ranks, grads, strict=True)]
        torch.testing.assert_close(results[0][0], torch.stack(sent).mean(0))


@each("world", [2, 4])
def test_what_16_bits_cannot_hold_has_not_stayed(world: int) -> None:
    """Velocity without gradients decays until its W-th part is 0 on the wire."""
    exchange = gw.with_momentum_correction(gw.compress.none())
    states, want_N = None, torch.zeros(8)
    for step in range(150):
        grad_N = torch.full((8,), 0.01, dtype=torch.float16)
        grad_N[0] = 0.0 if step else 0.1
        results = run_local(exchange, [grad_N] * world, states)
        states = [state for _, _, state in results]
        want_N = MOMENTUM * want_N + grad_N.float()
    assert bool(states[0].residual_N[0]), "no element was too small"
    torch.testing.assert_close(states[0].velocity_N, want_N)
    torch.testing.assert_close(results[0][0].float(), want_N, rtol=2e-3, atol=1e-6)


@each("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_that_travels_dense_has_momentum_sgds_steps(
    dtype: torch.dtype,
) -> None:
    """Beside a sparse one in its message, of which most elements stay."""
    inner = gw.compress.selective(sparsifier="topk", density=0.01, num_dense=1)
    exchange = gw.with_momentum_correction(inner, MOMENTUM)
    spec = gw.TensorSpec("small and large", 1020, dtype, shapes=((4, 5), (1000,)))
    states, want_D = [exchange.init(spec, 2) for _ in range(2)], torch.zeros(20)
    for step in range(30):
        grads = [grad_N.to(dtype) for grad_N in gradients(step, world=2, numel=1020)]
        results = run_local(exchange, grads, states)
        states = [state for _, _, state in results]
        want_D = MOMENTUM * want_D + torch.stack(grads).float().mean(0)[:20]
        torch.testing.assert_close(
            results[0][0][:20].float(), want_D, rtol=1e-2, atol=1e-2
        )
    assert not bool(states[0].velocity_N[20:].all()), "nothing was masked"


def test_error_feedback_is_taken_out_wherever_it_is() -> None:
    pair = gw.pair(topk, gw.collective.allgather_sparse())
    twice = gw.with_error_feedback(gw.with_error_feedback(pair))
    for given in (topk, pair, twice):
        assert gw.with_momentum_correction(given).inner == pair
    warming = gw.with_density_warmup(topk, steps_per_stage=3)
    assert isinstance(warming.inner, ErrorFeedback)
    assert gw.with_momentum_correction(warming).inner == gw.with_density_warmup(
        pair, steps_per_stage=3
    )


def test_a_rank_with_an_infinite_gradient_tells_it_and_gives_nothing_else() -> None:
    exchange = gw.with_clipping(gw.compress.none(), 1.0)
    for spoil in (float("inf"), float("nan")):
        mean_N = run_local(
            exchange, [torch.tensor([spoil, 1e30, 0.0]), torch.zeros(3)]
        )[0][0]
        assert bool(mean_N[0].isnan())
        assert mean_N[1:].tolist() == [0.0, 0.0]


# ---- decoupled momentum --------------------------------------------------------------

DECAY = 0.9


def test_decoupled_momentum_is_the_papers_algorithm() -> None:
    """m = decay m + g; q of m; m = m - q; the mean of all q."""
    codec = gw.compress.demo(side=8, keep=4, values=torch.float32)
    exchange = gw.with_decoupled_momentum(codec, DECAY)
    moments = [torch.zeros(200) for _ in range(WORLD)]
    states = None
    draw = torch.Generator().manual_seed(0)
    for _ in range(5):
        grads = [torch.randn(200, generator=draw) for _ in range(WORLD)]
        results = run_local(exchange, grads, states)
        states = [state for _, _, state in results]
        sent = []
        for rank, grad_N in enumerate(grads):
            moments[rank] = DECAY * moments[rank] + grad_N
            payload, _ = codec.encode(None, moments[rank])
            sent.append(codec.decode(payload, torch.empty(200)))
            moments[rank] = moments[rank] - sent[-1]
        for rank, (mean_N, _, state) in enumerate(results):
            assert torch.allclose(mean_N, torch.stack(sent).mean(0), atol=1e-5)
            assert torch.allclose(state.residual_N, moments[rank], atol=1e-5)


def test_decoupled_momentum_brings_error_feedback() -> None:
    bare = gw.pair(gw.compress.topk(), gw.collective.allgather_sparse())
    assert gw.with_decoupled_momentum(bare) == gw.with_decoupled_momentum(
        gw.compress.topk()
    )


def test_decoupled_momentum_of_sparseloco_is_the_feedback_of_its_paper() -> None:
    """The residual decays by 5 % in each step, before the pseudo-gradient is added.

    By default it does not, and no part of a pseudo-gradient is lost.
    """
    codec = gw.compress.sparseloco(density=0.1)
    exchange = gw.with_decoupled_momentum(codec, decay=0.95)
    kept = [torch.zeros(NUMEL) for _ in range(WORLD)]
    states = None
    for step in range(5):
        grads = gradients(step)
        results = run_local(exchange, grads, states)
        states = [state for _, _, state in results]
        for rank, grad_N in enumerate(grads):
            payload, _ = codec.encode(None, 0.95 * kept[rank] + grad_N)
            sent_N = codec.decode(payload, torch.empty(NUMEL))
            kept[rank] = 0.95 * kept[rank] + grad_N - sent_N
            torch.testing.assert_close(states[rank].residual_N, kept[rank])
