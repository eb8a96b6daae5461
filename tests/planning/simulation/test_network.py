"""Shares of links worked out by hand; what holds for all networks is in tests/laws/sim_laws.py."""

from __future__ import annotations

from gradwire.planning.simulation.closed_form import NEVER
from gradwire.planning.simulation.network import Network
from tests.laws.sim_laws import Transfer, played


def test_nothing_is_on_its_way() -> None:
    assert Network().next_end_s() == NEVER
    assert Network().load(0) == 0.0


def test_one_that_joins_later_takes_half_from_then_on() -> None:
    # 0->2 has 1 done when 1->2 joins; 1 more until 3, where it ends; the rest is the other's own.
    assert played(Network(), [Transfer(0.0, 0, 2, 2.0), Transfer(1.0, 1, 2, 2.0)]) == [3.0, 4.0]


def test_what_a_bottleneck_leaves_is_used_elsewhere() -> None:
    """Three leave rank 0; the one to rank 1 meets another there, which may have two thirds."""
    network = Network()
    flows = [network.transfer(0, dst, 1.0, lambda: None) for dst in (1, 2, 3)]
    other = network.transfer(4, 1, 1.0, lambda: None)
    assert [network.rate(flow) for flow in flows] == [1 / 3] * 3
    assert network.rate(other) == 1 - 1 / 3
    assert network.load(~1) == 1.0


def test_a_collective_and_a_transfer_share_the_transfers_links() -> None:
    network = Network()
    joint = network.collective(2.0, lambda: None)
    transfer = network.transfer(0, 1, 1.0, lambda: None)
    assert network.rate(joint) == network.rate(transfer) == 0.5
    assert network.load(0) == network.load(~1) == 1.0
    assert network.load(1) == network.load(5) == 0.5, "ranks that are in the collective only"


def test_collectives_share_equally() -> None:
    both = [Transfer(0.0, 0, 0, 1.0), Transfer(0.5, 0, 0, 1.0)]
    assert played(Network(), both) == [1.5, 2.0]


def test_no_work_ends_at_once() -> None:
    assert played(Network(), [Transfer(1.0, 0, 1, 0.0), Transfer(2.0, 0, 0, 0.0)]) == [1.0, 2.0]
