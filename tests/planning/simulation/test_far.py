"""Hosts with distances and rates of their own on the virtual clock."""

from __future__ import annotations

import pytest
from torch import Tensor

from gradwire.compress.onebit import onebit
from gradwire.contract.spec import TensorSpec
from gradwire.contract.verbs import AllReduce, Recv, Send
from gradwire.exchange.pair import pair
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.make_plan import plan
from gradwire.planning.simulation.events import Traffic, play
from gradwire.planning.simulation.network import Network
from gradwire.planning.simulation.representative import alone
from gradwire.planning.simulation.supersteps import Tariff, supersteps_of
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.collective.casync_ring import casync_ring
from gradwire_lab.laws.inputs import profile_of
from papers.one_exchange import simulate_exchange
from tests.each import each
from tests.planning.simulation.test_events import NUMEL, Row, Says

SIZE_BYTES = 4 * NUMEL
HOME = Cluster(
    num_ranks=3,
    rate_bytes_per_s=1e6,
    hop_s=0.0,
    up_bytes_per_s=(1e6, 2e6, 2e6),
    down_bytes_per_s=(8e6, 1.5e6, 4e6),
    latencies_s=((0, 0.1, 0.2), (0.3, 0, 0.1), (0.1, 0.1, 0)),
)
EVEN = Cluster(num_ranks=3, rate_bytes_per_s=1e6, hop_s=0.0, latency_s=0.2)


@each("src, dst, rate", [(0, 1, 1e6), (1, 0, 2e6), (2, 1, 1.5e6)])
def test_a_send_takes_its_own_distance_and_the_slower_of_two_sides(
    src: int, dst: int, rate: float
) -> None:
    def rows(rank: int, world: int, grad_N: Tensor) -> list[Row]:
        if rank == src:
            return [Send(dst, grad_N)]
        return [Recv(src, grad_N)] if rank == dst else []

    trace = simulate_exchange(Says(rows), NUMEL, HOME)
    expected = HOME.hop_between_s(src, dst) + SIZE_BYTES / rate
    assert trace.iteration_s == pytest.approx(expected)


def test_two_senders_share_a_receiver_that_is_slower_than_both() -> None:
    def rows(rank: int, world: int, grad_N: Tensor) -> list[Row]:
        if rank == 1:
            return [(Recv(0, grad_N), Recv(2, grad_N))]
        return [Send(1, grad_N)]

    near = HOME.model_copy(update={"latencies_s": ()})
    trace = simulate_exchange(Says(rows), NUMEL, near)
    assert trace.iteration_s == pytest.approx(2 * SIZE_BYTES / 1.5e6)


def test_a_collective_is_as_slow_as_the_farthest_and_slowest() -> None:
    def rows(rank: int, world: int, grad_N: Tensor) -> list[Row]:
        return [AllReduce(grad_N)]

    trace = simulate_exchange(Says(rows), NUMEL, HOME)
    expected = HOME.evened.all_reduce_s(SIZE_BYTES)
    assert trace.iteration_s == pytest.approx(expected)
    assert HOME.evened.latency_s == pytest.approx(0.2)
    assert HOME.evened.rate_bytes_per_s == 1e6


def test_a_slow_side_leaves_the_rest_to_other_flows() -> None:
    """Rank 0 sends at 1 and receives at 4; rank 1 sends and receives at 2."""
    network = Network(((1.0, 4.0), (2.0, 2.0), (2.0, 2.0)))
    ended: list[str] = []
    flows = {
        "alone": network.transfer(0, 1, 1.0, lambda: ended.append("alone")),
        "first": network.transfer(1, 0, 1.0, lambda: ended.append("first")),
        "second": network.transfer(2, 0, 2.0, lambda: ended.append("second")),
    }
    network.next_end_s()
    assert {name: flow.share for name, flow in flows.items()} == {
        "alone": 1.0,
        "first": 2.0,
        "second": 2.0,
    }
    flow = network.collective(1.0, lambda: None)
    network.next_end_s()
    # It is on rank 0's slowest side too, which it shares with "alone".
    assert flow.share == pytest.approx(0.5)


@each("name", ["ddp", "mgwfbp"])
def test_one_rank_stands_for_all_of_far_hosts(name: str) -> None:
    profile = profile_of(([300_000], 1e-3, 2e-3), ([2_000, 70_000], 1e-3, 2e-3))
    for cluster in (EVEN, HOME):
        made = plan(name, profile, cluster)
        one = simulate(made, profile, cluster).iteration_s
        every = simulate(made, profile, cluster, ranks="all").iteration_s
        assert one == pytest.approx(every)


def test_a_ring_of_sends_does_not_wait_for_a_pair_that_is_not_on_it() -> None:
    exchange = pair(onebit(), casync_ring())
    rows = [[0.01] * 4 for _ in range(4)]
    rows[0][2] = rows[2][0] = 0.3
    far = Cluster(num_ranks=4, rate_bytes_per_s=1e6, hop_s=0.0, latencies_s=rows)
    near = far.model_copy(update={"latencies_s": (), "latency_s": 0.01})
    ring_s, near_s = (
        simulate_exchange(exchange, NUMEL, one).iteration_s for one in (far, near)
    )
    assert ring_s == pytest.approx(near_s)
    assert ring_s < simulate_exchange(exchange, NUMEL, far.evened).iteration_s
    spec = TensorSpec("", NUMEL)
    played = alone(exchange, spec, Tariff.of(exchange, far))
    expected = alone(exchange, spec, Tariff.of(exchange, near))
    wire_s = [
        sum(sum(verb.price) for one in every for verb in one.wire)
        for every in (played, expected)
    ]
    assert wire_s[0] == pytest.approx(wire_s[1])


def test_figures_for_each_host_that_are_alike_change_nothing() -> None:
    rows = ((0.0, 0.2, 0.2), (0.2, 0.0, 0.2), (0.2, 0.2, 0.0))
    listed = EVEN.model_copy(
        update={
            "latency_s": 0.0,
            "latencies_s": rows,
            "up_bytes_per_s": (1e6,) * 3,
            "down_bytes_per_s": (1e6,),
        }
    )
    exchange = pair(onebit(), casync_ring())
    assert simulate_exchange(exchange, NUMEL, listed).iteration_s == pytest.approx(
        simulate_exchange(exchange, NUMEL, EVEN).iteration_s
    )
    tariff = Tariff.of(exchange, listed)
    every = [[own] for own in supersteps_of(exchange, TensorSpec("", NUMEL), tariff)]
    ready_s = [[0.0]] * 3
    alike = play(Traffic(every, ready_s, [""])).end_s
    assert play(Traffic(every, ready_s, [""], speeds=tariff.speeds)).end_s == alike
