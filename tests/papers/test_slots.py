"""Simulated slots: the same bytes as without a coordinator, in fewer sends."""

from __future__ import annotations

import pytest

from gradwire.errors import InvalidSetting
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import (
    Bulk,
    Chunk,
    ExchangeSetting,
    Plan,
    PlannedMessage,
)
from gradwire.planning.simulation.clock import Demand
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.planning.all_ranks import all_ranks
from papers.hipress.slots import Simulated, simulate_slots
from tests.each import each
from tests.planning.profiles import CODECS
from tests.runtime.plans import profile_of_model
from tests.runtime.training import Net

PROFILE = profile_of_model(Net())
CLUSTER = Cluster(num_ranks=3, rate_bytes_per_s=1e6, hop_s=1e-3, codecs=CODECS)
NEVER = 2**40


def plan_of(collective: str, bulk: Bulk | None) -> Plan:
    """Each tensor is a message, the last first."""
    tensors = [one for layer in PROFILE.layers for one in layer.tensors][::-1]
    setting = ExchangeSetting(compressor="onebit", collective=collective)
    return Plan(
        planner="test",
        model=PROFILE.model,
        messages=tuple(
            PlannedMessage(
                chunks=(Chunk(tensor=one.name, start=0, stop=one.numel),),
                exchange="onebit",
            )
            for one in tensors
        ),
        exchanges={"onebit": setting},
        bulk=bulk,
    )


def simulated(collective: str, bulk: Bulk, *slower: float) -> Simulated:
    return simulate_slots(plan_of(collective, bulk), PROFILE, CLUSTER, slower)


@each("collective", ["casync_ps", "casync_ring"])
def test_slots_send_the_same_bytes_in_fewer_batches(collective: str) -> None:
    without = all_ranks(Demand.of(plan_of(collective, None), PROFILE, CLUSTER))
    want = sum(span.size_bytes for timing in without for span in timing.spans)
    at_once = simulated(collective, Bulk(timeout_s=0.0, size_bytes=0))
    patient = simulated(collective, Bulk(timeout_s=0.01, size_bytes=NEVER))
    for found in (at_once, patient):
        assert found.sent_bytes == want
        assert found.told_bytes > 0
    assert patient.num_batches < at_once.num_batches


def test_a_time_out_that_is_longer_makes_a_step_longer() -> None:
    rules = (Bulk(timeout_s=0.001), Bulk(timeout_s=10.0))
    times_s = [
        max(one.iteration_s for one in simulated("casync_ps", own).timings)
        for own in rules
    ]
    assert times_s[0] + 10 < times_s[1]


def test_a_coordinator_on_another_rank_hears_of_a_slow_one() -> None:
    """A rank that is slower ends the step later, wherever the coordinator is."""
    for rank in range(3):
        even = simulated("casync_ps", Bulk(rank=rank)).timings
        uneven = simulated("casync_ps", Bulk(rank=rank), 1.0, 1.0, 2.0).timings
        later_s = uneven[2].backward_end_s[0] - even[2].backward_end_s[0]
        assert later_s == pytest.approx(PROFILE.backward_s)
        assert max(o.iteration_s for o in uneven) > max(o.iteration_s for o in even)


def test_the_librarys_simulator_names_what_simulates_a_coordinator() -> None:
    with pytest.raises(InvalidSetting, match=r"papers/hipress/slots\.py"):
        simulate(plan_of("casync_ps", Bulk()), PROFILE, CLUSTER)
