"""Hosts of several ranks in predictions: two levels of links, in formulas and on the clock."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

import gradwire as gw
from gradwire.errors import InvalidSetting
from gradwire.exchange.by_name import exchange_for
from gradwire.planning.data.cluster import Cluster, Host
from gradwire.planning.simulation.timeline import simulate, simulate_exchange
from gradwire_lab.planning.explain import alternatives
from tests.each import each
from tests.planning.profiles import vgg16

DENSE = exchange_for(gw.compress.none())
ONEBIT = exchange_for(gw.compress.onebit())
HOST = Host(num_ranks=2, rate_bytes_per_s=1e9, hop_s=1e-5)
TWO_LEVELS = Cluster(num_ranks=8, rate_bytes_per_s=25e6, hop_s=1e-4, host=HOST)
FLAT = Cluster(num_ranks=8, rate_bytes_per_s=25e6, hop_s=1e-4)
NUMEL = 1_000_000


def test_an_all_reduce_passes_both_levels() -> None:
    """By hand: 4 MB, of which half goes to the other rank of the host and half comes back."""
    within_s = 1e-5 + 2e6 / 1e9 + 1e-5 + 2e6 / 1e9
    latency_s, link_s = 6 * 1e-4, 1.5 * 4e6 / 25e6
    assert TWO_LEVELS.all_reduce_s(4e6) == pytest.approx(within_s + latency_s + link_s)
    assert TWO_LEVELS.parts_s("all_reduce", 4e6) == pytest.approx((within_s + latency_s, link_s))
    assert TWO_LEVELS.parts_s("all_reduce", 0) == (0, 0)
    assert TWO_LEVELS.wire_bytes(4_000_000) == 2 * 2_000_000 + 6 * 2_000_000 // 4


def test_the_simulated_exchange_takes_as_long_as_the_formula_says() -> None:
    trace = simulate_exchange(DENSE, NUMEL, TWO_LEVELS)
    assert trace.iteration_s == pytest.approx(TWO_LEVELS.all_reduce_s(4 * NUMEL), rel=1e-9)
    sent = {r: sum(s.size_bytes for s in trace.spans if s.rank == r) for r in range(8)}
    assert set(sent.values()) == {TWO_LEVELS.wire_bytes(4 * NUMEL)}


def test_ranks_of_a_host_share_its_link() -> None:
    """Their transfers at once take as long as one of all their bytes: twice the shares' own."""
    alone = Cluster(num_ranks=4, rate_bytes_per_s=25e6, hop_s=0.0)
    free = Host(num_ranks=2, rate_bytes_per_s=1e18)
    hosts = Cluster(num_ranks=8, rate_bytes_per_s=25e6, hop_s=0.0, host=free)
    own_s = simulate_exchange(ONEBIT, NUMEL // 2, alone).iteration_s
    assert simulate_exchange(ONEBIT, NUMEL, hosts).iteration_s == pytest.approx(2 * own_s, rel=1e-3)


@each("planner", ["ddp", "mgwfbp", "usbyte"])
def test_both_simulators_agree_on_plans_for_such_hosts(planner: str) -> None:
    plan = gw.plan(planner, vgg16(), TWO_LEVELS)
    one, every = (simulate(plan, vgg16(), TWO_LEVELS, ranks=r) for r in ("one", "all"))
    assert one.iteration_s == pytest.approx(every.iteration_s, rel=0.02)
    assert one.iteration_s < simulate(plan, vgg16(), FLAT, ranks="one").iteration_s


def test_planners_without_a_formula_for_such_hosts_are_named_as_such() -> None:
    plan = gw.plan("usbyte", vgg16(), TWO_LEVELS)
    rows = {str(row["name"]): row for row in alternatives(plan, vgg16(), TWO_LEVELS)}
    assert rows["ddp"]["simulated_s"]
    assert "no plan: verb must be all_reduce" in str(rows["ssfusion"]["why"])


def test_figures_that_no_hosts_have_are_refused() -> None:
    with pytest.raises(ValidationError, match="9 ranks are not on hosts of 2 each"):
        Cluster(num_ranks=9, rate_bytes_per_s=1e6, host=HOST)
    line = {"all_reduce": {"alpha_s": 0.1, "per_unit_s": 1e-9}}
    with pytest.raises(ValidationError, match="leave one of them out"):
        Cluster.model_validate({**TWO_LEVELS.model_dump(), "collectives": line})
    with pytest.raises(InvalidSetting, match="ranks must be a multiple of the 2 ranks of a host"):
        TWO_LEVELS.scaled(num_ranks=7)
    assert TWO_LEVELS.scaled(num_ranks=16).host == HOST
    with pytest.raises(InvalidSetting, match="verb must be all_reduce, the only one"):
        TWO_LEVELS.collective_s("all_gather", 1e6)
    with pytest.raises(InvalidSetting, match="flat vectors"):
        simulate_exchange(exchange_for(gw.compress.powersgd()), 100, TWO_LEVELS)
    assert Cluster.model_validate_json(TWO_LEVELS.model_dump_json()) == TWO_LEVELS
