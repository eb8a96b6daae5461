"""Exchanges: small worked examples, the default choices, and what a user's mistake is told."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.contract import Layout, Result, State, Traits
from gradwire.contract.registry import examples
from gradwire.contract.verbs import AllReduce, Steps
from gradwire.errors import IncompatiblePair, InvalidSetting
from gradwire.exchange.by_name import by_name, exchange_for, texts
from gradwire.exchange.error_feedback import ErrorFeedback
from gradwire.exchange.pair import suited
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
    assert exchange.wire_bytes(spec, 4) == inner.wire_bytes(spec, 4)


@each("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_alone_what_more_ranks_left_arrives_and_its_rounding_stays(dtype: torch.dtype) -> None:
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


def test_an_exchange_defines_one_of_its_two_forms() -> None:
    with pytest.raises(TypeError, match="neither run nor synchronise"):
        type("nothing", (gw.Exchange,), {"init": lambda self, spec, world: None})


def test_plans_name_a_collective_for_compressors_only() -> None:
    assert by_name("powersgd", {"rank": 2}, None) == gw.compress.powersgd(rank=2)
    kept = by_name("powersgd", {}, None, error_feedback=True)
    assert kept == exchange_for(gw.compress.powersgd())
    assert kept.declared.whole_tensors
    assert not exchange_for(gw.compress.onebit()).declared.whole_tensors
    with pytest.raises(ValueError, match="powersgd is an exchange of its own, got 'allreduce'"):
        by_name("powersgd", {}, "allreduce")
    with pytest.raises(ValueError, match="collective must be one that onebit can use, got None"):
        by_name("onebit", {}, None)


class Shaped(gw.compress.none):
    traits = Traits(layout=Layout.DENSE, whole_tensors=True)


def test_a_compressor_that_wants_whole_tensors_is_told_what_can_have_them() -> None:
    with pytest.raises(IncompatiblePair, match="as an exchange of its own, as powersgd is"):
        gw.pair(Shaped(), gw.collective.casync_ps())


@each(
    "codec, collective, remedy",
    [
        ("topk", gw.collective.ring(), r"codec must be a compressor, got 'topk'; write"),
        (gw.compress.topk, gw.collective.ring(), r"codec must be a compressor, got <class"),
        (gw.compress.topk(), "ring", r"collective must be a collective, got 'ring'; write"),
    ],
)
def test_pair_takes_a_compressor_and_a_collective(codec, collective, remedy: str) -> None:
    with pytest.raises(InvalidSetting, match=remedy):
        gw.pair(codec, collective)


def test_error_feedback_wraps_exchanges_not_compressors() -> None:
    with pytest.raises(InvalidSetting, match=r"must be an exchange, got topk.*gw.pair\("):
        gw.with_error_feedback(gw.compress.topk())


class halves(gw.Exchange):
    """Defines only ``init`` and ``run``: half of each gradient arrives, in the gradient's dtype."""

    def init(self, spec: gw.TensorSpec, world: int) -> State:
        return (spec.dtype,)

    def run(self, rank: int, world: int, state: State, grad_N: torch.Tensor) -> Steps[Result]:
        assert state == (grad_N.dtype,), f"initialised for {state[0]}, given {grad_N.dtype}"
        half_N = grad_N / 2
        mean_N = half_N / world
        yield AllReduce(mean_N)
        return mean_N, half_N.float(), state


class only_the_form:
    """No exchange, though it has the methods of one."""

    init, run, synchronise = halves.init, halves.run, halves.synchronise


def test_residuals_are_found_by_name() -> None:
    exchange = gw.with_error_feedback(gw.pair(gw.compress.onebit(), gw.collective.casync_ps()))
    state = exchange.init(gw.TensorSpec("w", 5, torch.float16), 3)
    found = gw.residuals(state)
    assert list(found) == ["residual"]
    assert found["residual"] is state.residual_N
    assert found["residual"].dtype == torch.float32
    outer = gw.with_error_feedback(exchange).init(gw.TensorSpec("w", 5), 3)
    assert sorted(gw.residuals(outer)) == ["inner.residual", "residual"]
    assert gw.residuals(None) == {}


@each(
    "grads, states, message",
    [
        ([], None, "one gradient a rank"),
        ([torch.zeros(2, 2)], None, r"pass grad.flatten\(\)"),
        ([torch.zeros(2), torch.zeros(3)], None, "of one length and dtype"),
        ([torch.zeros(2), torch.zeros(2).half()], None, "of one length and dtype"),
        ([torch.zeros(2)] * 2, [None], "one a rank, 2"),
    ],
)
def test_gradients_must_match(grads, states, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        texts(exchange_for(gw.compress.none()), grads, states)


@each("given", [gw.compress.topk(), "topk", gw.compress.deft, only_the_form()])
def test_what_is_no_exchange_is_refused_where_one_is_run(given: object) -> None:
    with pytest.raises(InvalidSetting, match=r"gw.exchange_for\(compressor\)"):
        gw.run_local(given, [torch.ones(3)])  # type: ignore[arg-type]
