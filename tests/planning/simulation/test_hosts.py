"""Hosts of several ranks in predictions: two levels of links, in formulas and on the
clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from pydantic import ValidationError

import gradwire as gw
from gradwire.contract.spec import TensorSpec
from gradwire.errors import InvalidSetting
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.two_level import on_hosts
from gradwire.exchange.without_data import expected_bytes
from gradwire.planning.data.cluster import Cluster, Host
from gradwire.planning.data.fit import fit_line
from gradwire.planning.simulation.representative import alone, estimate
from gradwire.planning.simulation.supersteps import Superstep, Tariff
from papers.one_exchange import simulate_exchange
from tests.each import each

DENSE = exchange_for(gw.compress.none())
ONEBIT = exchange_for(gw.compress.onebit())
HOST = Host(num_ranks=2, rate_bytes_per_s=1e9, hop_s=1e-5)
TWO_LEVELS = Cluster(num_ranks=8, rate_bytes_per_s=25e6, hop_s=1e-4, host=HOST)
FLAT = Cluster(num_ranks=8, rate_bytes_per_s=25e6, hop_s=1e-4)
NUMEL = 1_000_000


def test_an_all_reduce_passes_both_levels() -> None:
    """By hand: 4 MB, of which half goes to the other rank of the host and half comes
    back.
    """
    within_s = 1e-5 + 2e6 / 1e9 + 1e-5 + 2e6 / 1e9
    latency_s, link_s = 6 * 1e-4, 1.5 * 4e6 / 25e6
    assert TWO_LEVELS.all_reduce_s(4e6) == pytest.approx(within_s + latency_s + link_s)
    assert TWO_LEVELS.parts_s("all_reduce", 4e6) == pytest.approx(
        (within_s + latency_s, link_s)
    )
    assert TWO_LEVELS.parts_s("all_reduce", 0) == (0, 0)
    assert TWO_LEVELS.wire_bytes(4_000_000) == 2 * 2_000_000 + 6 * 2_000_000 // 4


def test_the_simulated_exchange_takes_as_long_as_the_formula_says() -> None:
    trace = simulate_exchange(DENSE, NUMEL, TWO_LEVELS)
    assert trace.iteration_s == pytest.approx(
        TWO_LEVELS.all_reduce_s(4 * NUMEL), rel=1e-9
    )
    sent = {r: sum(s.size_bytes for s in trace.spans if s.rank == r) for r in range(8)}
    assert set(sent.values()) == {TWO_LEVELS.wire_bytes(4 * NUMEL)}


def test_measured_lines_of_shares_and_of_the_host_are_what_messages_take() -> None:
    """Costs bend, as a short message's bytes hide behind its latency. Shares meet on
    one link.
    """
    sizes, levels = [2**power for power in range(10, 24, 2)], TWO_LEVELS.shares
    within = fit_line(
        (size, max(1e-3, TWO_LEVELS.within_line.seconds(size))) for size in sizes
    )
    lines = {
        verb: fit_line(
            (size, max(5e-3, levels.line(verb).seconds(size))) for size in sizes
        )
        for verb in ("all_reduce", "all_gather")
    }
    host = HOST.model_copy(update={"line": within, "shares": lines})
    hosts = Cluster.parse(TWO_LEVELS.model_copy(update={"host": host}).to_json())
    for size in sizes[:-1]:
        among_s = lines["all_reduce"].measured_s(size)
        stated_s = within.measured_s(2 * size) + among_s
        assert sum(hosts.parts_s("all_reduce", 2 * size)) == pytest.approx(stated_s)
        assert hosts.all_reduce_s(2 * size) == pytest.approx(stated_s)
        slower_s = hosts.slower(2.0).all_reduce_s(2 * size) - stated_s
        assert slower_s == pytest.approx(among_s)
    # A part of latencies that cannot pass at once is work; by itself a message takes as
    # long.
    busy = hosts.model_copy(update={"host_share": 0.5})
    for size in sizes[:-1]:
        latency_s, work_s = busy.parts_s("all_reduce", 2 * size)
        assert latency_s + work_s == pytest.approx(hosts.all_reduce_s(2 * size))
        assert work_s > hosts.parts_s("all_reduce", 2 * size)[1]
    for numel, cluster in itertools.product((10_000, 500_000), (hosts, busy)):
        trace = simulate_exchange(
            exchange_for(gw.compress.topk(density=0.5)), numel, cluster
        )
        gathers = [span for span in trace.spans if span.name == "AllGather"]
        assert len(gathers) == 8
        for span in gathers:  # each host's share goes to three others
            expected_s = lines["all_gather"].measured_s(span.size_bytes / 3)
            assert span.duration_s == pytest.approx(expected_s)
    other = hosts.scaled(num_ranks=16).host
    assert (other.line, other.shares) == (within, {})


def test_ranks_of_a_host_share_its_link_in_estimates_and_beside_other_messages() -> (
    None
):
    """A rank's supersteps have the link's seconds of all ranks of its host, and none
    within it.
    """
    spec, exchange = TensorSpec("", NUMEL), on_hosts(ONEBIT, 2)
    tariff = Tariff.of(exchange, TWO_LEVELS)
    of_share = Tariff.of(ONEBIT, TWO_LEVELS.shares)
    share = TensorSpec("", NUMEL // 2)

    def work_s(supersteps: Iterable[Superstep]) -> float:
        return sum(verb.price.work_s for one in supersteps for verb in one.wire)

    own_s = work_s(alone(ONEBIT, share, of_share))
    assert work_s(alone(exchange, spec, tariff)) == pytest.approx(own_s)
    dtype = spec.dtype
    about_s = work_s(estimate(exchange, NUMEL, dtype, tariff))
    assert about_s == pytest.approx(
        work_s(estimate(ONEBIT, NUMEL // 2, dtype, of_share)), rel=0.01
    )


WHOLE = [
    gw.compress.powersgd(),
    gw.compress.deft(),
    gw.compress.selective(sparsifier="topk"),
]
"""Exchanges that take tensors whole: each rank of a host has some."""


@each("exchange", map(exchange_for, WHOLE))
def test_ranks_of_a_host_exchange_tensors_of_their_own(exchange: gw.Exchange) -> None:
    one = TensorSpec("", 490_000, shapes=((700, 700),))
    spec = TensorSpec("", 2 * one.numel, shapes=2 * one.shapes)
    trace = simulate_exchange(exchange, spec.numel, TWO_LEVELS, shapes=spec.shapes)
    sent = [
        sum(s.size_bytes for s in trace.spans if s.rank == rank) for rank in range(8)
    ]
    stated = expected_bytes(on_hosts(exchange, 2), spec, 8)
    assert abs(sum(sent) - sum(stated)) <= 8
    # Within the host one matrix goes to the other rank, and the mean of the other one.
    across = [size - 2 * one.size_bytes for size in sent]
    of_one = expected_bytes(exchange, one, 4)
    assert abs(sum(across) - 2 * sum(of_one)) <= 16


def test_figures_that_no_hosts_have_are_refused() -> None:
    with pytest.raises(ValidationError, match="9 ranks are not on hosts of 2 each"):
        Cluster(num_ranks=9, rate_bytes_per_s=1e6, host=HOST)
    line = {"all_reduce": {"alpha_s": 0.1, "per_unit_s": 1e-9}}
    with pytest.raises(ValidationError, match="leave one of them out"):
        Cluster.model_validate({**TWO_LEVELS.model_dump(), "collectives": line})
    with pytest.raises(
        InvalidSetting, match="ranks must be a multiple of the 2 ranks of a host"
    ):
        TWO_LEVELS.scaled(num_ranks=7)
    assert TWO_LEVELS.scaled(num_ranks=16).host == HOST
    with pytest.raises(InvalidSetting, match="verb must be all_reduce, the only one"):
        TWO_LEVELS.collective_s("all_gather", 1e6)
    assert Cluster.model_validate_json(TWO_LEVELS.model_dump_json()) == TWO_LEVELS
