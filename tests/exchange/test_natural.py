"""Natural sparsity: every way gives the mean, ranks choose alike, and steps may turn
dense.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gradwire as gw
from gradwire.collective.steps.sizes import SIZE_BYTES
from gradwire.contract import Member
from gradwire.errors import InvalidSetting
from gradwire.exchange.by_name import Exchange, run_local
from gradwire.exchange.error_feedback import with_error_feedback
from gradwire.exchange.natural import INNER, Natural, count_units, with_natural_sparsity
from gradwire.exchange.sparse_schemes import counted, fastest_scheme, schemes
from gradwire.exchange.two_level import on_hosts
from gradwire.exchange.without_data import bytes_of_rank, expected_bytes, wire_bytes
from tests.lab.test_measured_scheme import ways as ways_by_step
from tests.strategies import bounded

ROWS, WIDTH = 400, 8
DENSE = with_natural_sparsity(gw.compress.none(), WIDTH)


def tables(
    world: int, count: int, *, shared: bool = False, seed: int = 0
) -> list[Tensor]:
    """One flat gradient a rank, non-zero in ``count`` rows: drawn ones, or the same on
    all.
    """
    draw = torch.Generator().manual_seed(seed)
    found, rows = [], torch.randperm(ROWS, generator=draw)[:count]
    for _ in range(world):
        table = torch.zeros(ROWS, WIDTH)
        own = rows if shared else torch.randperm(ROWS, generator=draw)[:count]
        table[own] = torch.randn(count, WIDTH, generator=draw)
        found.append(table.flatten())
    return found


def ways(exchange: Exchange, grads: list[Tensor]) -> list[str | None]:
    """The way of each rank in one step."""
    return ways_by_step(exchange, grads, 1)[0][0]


@bounded(8)
@given(
    world=st.integers(1, 9),
    count=st.sampled_from((0, 1, 7, 90, ROWS)),
    shared=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float64)),
)
def test_rows_and_dense_means_are_the_mean_in_both_steps(
    world: int, count: int, shared: bool, dtype: torch.dtype
) -> None:
    grads = [g.to(dtype) for g in tables(world, count, shared=shared, seed=count)]
    first = run_local(DENSE, grads)
    expected = torch.stack([g.double() for g in grads]).mean(0)
    for step in (first, run_local(DENSE, grads, [state for *_, state in first])):
        for mean, contributed, _ in step:
            assert torch.equal(mean, step[0][0])
            tolerance = 1e-6 if dtype != torch.bfloat16 else 2e-2
            torch.testing.assert_close(
                mean.double(), expected, rtol=tolerance, atol=tolerance
            )
            assert torch.equal(contributed, grads[0].to(contributed.dtype)) or world > 1


def test_all_ranks_take_one_way_though_counts_differ() -> None:
    grads = tables(4, 20)
    grads[2].zero_()
    grads[3] = tables(1, 60, seed=9)[0]
    found = ways(DENSE, grads)
    assert len(set(found)) == 1
    assert found[0] in schemes(by_counts=True)


def test_a_dense_step_goes_the_inner_way() -> None:
    assert set(ways(DENSE, tables(4, ROWS))) == {INNER}
    one_dense = [*tables(3, 5), *tables(1, ROWS)]
    assert set(ways(DENSE, one_dense)) == {INNER}


def test_what_the_last_step_showed_changes_the_way() -> None:
    """Rows that all ranks share: first taken for distinct ones, then known to be the
    same.
    """
    counts, numel = [4000] * 8, 50_000 * 64
    first, then = (
        fastest_scheme(
            counted(counts, numel, 64, torch.float32, g), schemes(by_counts=True)
        )
        for g in (0.0, 1.0)
    )
    assert (first.scheme, then.scheme) == ("sparcml", "zen")
    grads = tables(8, 30, shared=True)
    states = [state for *_, state in run_local(DENSE, grads)]
    assert {float(state.growth_1) for state in states} == {1.0}


class Selfish(Natural):
    """Decides from its own count: what every other rank does not know."""

    def _choose(
        self, me: Member, counts: list[int], growth: float, grad_N: Tensor
    ) -> str:
        own = count_units(grad_N, torch.zeros_like(grad_N), self.width)
        return super()._choose(me, [own] * len(counts), growth, grad_N)


def test_a_choice_of_one_rank_alone_is_caught() -> None:
    grads = [*tables(2, 3), *tables(1, ROWS)]
    run_local(Natural(DENSE.inner, WIDTH), grads)
    with pytest.raises(InvalidSetting, match="ranks call different collectives"):
        run_local(Selfish(DENSE.inner, WIDTH), grads)


def test_predictions_take_it_for_the_inner_exchange() -> None:
    spec, inner = (
        gw.TensorSpec("table", ROWS * WIDTH),
        gw.exchange_for(gw.compress.topk()),
    )
    sent = bytes_of_rank(inner, spec, 3)
    assert sent is not None
    natural = with_natural_sparsity(inner, WIDTH)
    assert expected_bytes(natural, spec, 3) == [sent + 2 * SIZE_BYTES] * 3
    assert wire_bytes(natural, spec, 3) is None, "it varies"
    assert bytes_of_rank(on_hosts(natural, 2), spec, 2), "a host alone"


def test_rows_leave_no_residual_and_dense_steps_do() -> None:
    exchange = with_natural_sparsity(gw.compress.topk(density=0.01), WIDTH)
    sparse, full = tables(3, 4), tables(3, ROWS)
    after_rows = run_local(exchange, sparse)
    assert all(not bool(state.residual_N.any()) for *_, state in after_rows)
    torch.testing.assert_close(after_rows[0][0], torch.stack(sparse).mean(0))
    after_full = run_local(exchange, full, [state for *_, state in after_rows])
    assert all(bool(state.residual_N.any()) for *_, state in after_full)


def test_error_feedback_is_taken_out() -> None:
    assert with_natural_sparsity(with_error_feedback(DENSE.inner), 4).inner == Natural(
        DENSE.inner, 4
    )
