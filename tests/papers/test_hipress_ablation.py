"""Figure 12 of HiPress: plans can be carried out, each switches what it says, claims can fail."""

from __future__ import annotations

import pytest

from gradwire.planning import catalogue
from gradwire.planning.check import check
from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import LineFit
from gradwire.planning.exchanges import sound_exchanges
from gradwire.planning.simulation.timeline import simulate
from gradwire_bench.schedule.replay import scaled_profile
from papers.hipress import ablation

LINE = LineFit(alpha_s=2e-5, per_unit_s=2e-10)
LINK = ablation.RATE_BYTES_PER_S / (ablation.SCALE * ablation.SLOWDOWN)
CLUSTER = Cluster(
    num_ranks=4,
    rate_bytes_per_s=LINK,
    codecs={"onebit": CodecFit(encode=LINE, decode=LINE, merge=LINE)},
)


@pytest.mark.parametrize("model", ablation.SAVED)
def test_each_plan_switches_what_it_says(model: str) -> None:
    small = scaled_profile(catalogue.load(model), scale=ablation.SCALE, slowdown=ablation.SLOWDOWN)
    collective = ablation.COLLECTIVES[model]
    plans = ablation.plans_of(small, CLUSTER, collective)
    tensors = {t.name: t for layer in small.layers for t in layer.tensors}
    for plan in plans.values():
        check(plan, small)
        sound_exchanges(plan, tensors)
    default, codec, pipelining, bulk, planner = plans.values()
    assert not default.exchanges
    assert all(one.inline for one in codec.messages)
    assert not any(one.inline for plan in (pipelining, bulk) for one in plan.messages)
    assert [plan.credit for plan in plans.values()] == [1, 1, 4, 4, 4]
    assert len(bulk.messages) < len(pipelining.messages) == len(codec.messages) == len(tensors)
    assert pipelining.exchanges["onebit"].collective_settings
    assert not bulk.exchanges["onebit"].collective_settings
    assert planner.planner == "secopa"


def test_all_that_is_added_saves_time_in_the_simulator() -> None:
    """Bulk communication is not looked at: its rounds are for links that lose what overflows."""
    small = scaled_profile(
        catalogue.load("vgg19"), scale=ablation.SCALE, slowdown=ablation.SLOWDOWN
    )
    plans = ablation.plans_of(small, CLUSTER, "casync_ps")
    seconds = {name: simulate(plan, small, CLUSTER).iteration_s for name, plan in plans.items()}
    assert seconds["default"] > seconds["codec"] > seconds["pipelining"]
    assert seconds["codec"] > seconds["planner"]
