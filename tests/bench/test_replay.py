"""The waiting model: what it waits for, what it owns, and that autograd hands out its
gradients.
"""

from __future__ import annotations

import os
from contextlib import closing
from importlib import import_module
from typing import Any

import pytest
import torch

from gradwire.contract.trace.span import Trace
from gradwire.planning import catalogue
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from gradwire.planning.make_plan import plan
from gradwire.planning.price import iteration_s
from gradwire.planning.simulation.timeline import simulate
from gradwire.runtime.attach import attach
from gradwire_bench.schedule import schedule_rank
from gradwire_bench.schedule.replay import (
    Replay,
    VirtualDevice,
    scaled_profile,
)
from tests.each import each
from tests.runtime.ranks import Ranks

OVERSHOOT_S = 0.25


class Clock:
    """A clock that only sleeping moves; every sleep lasts ``OVERSHOOT_S`` too long."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds + OVERSHOOT_S


def device() -> tuple[VirtualDevice, Clock]:
    clock = Clock()
    return VirtualDevice(clock=clock, sleep=clock.sleep), clock


def layer(
    name: str, *tensors: str, forward_s: float = 1.0, backward_s: float = 2.0
) -> Layer:
    owned = tuple(ProfiledTensor(name=tensor, shape=(4, 2)) for tensor in tensors)
    return Layer(name=name, tensors=owned, forward_s=forward_s, backward_s=backward_s)


def profile(*layers: Layer) -> Profile:
    return Profile(model="made up", source="made up", batch_size=1, layers=layers)


THREE = profile(layer("a", "a.weight", "a.bias"), layer("pool"), layer("b", "b.weight"))


@pytest.mark.smoke
def test_gradients_are_handed_out_when_their_layer_ends() -> None:
    on, clock = device()
    model = Replay(THREE, on)
    came: list[tuple[str, float]] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda p, name=name: came.append((name, clock.now_s))
        )
    model().backward()
    assert dict(came) == {
        "b.weight": 5.0 + OVERSHOOT_S,
        "a.weight": 9.0 + OVERSHOOT_S,
        "a.bias": 9.0 + OVERSHOOT_S,
    }
    assert came[0][0] == "b.weight"
    spans = [span.name for span in on.take_spans()]
    assert spans == ["a", "pool", "b", "b", "pool", "a"]


@each("name", catalogue.names())
def test_every_profile_of_the_catalogue_becomes_a_model(name: str) -> None:
    small = scaled_profile(catalogue.load(name), scale=10_000)
    model = Replay(small, device()[0])
    stated = {t.name: (t.shape, t.dtype) for la in small.layers for t in la.tensors}
    found = {
        name: (tuple(p.shape), str(p.dtype).removeprefix("torch."))
        for name, p in model.named_parameters()
    }
    assert found == stated
    model().backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.smoke
def test_a_plan_runs_under_it_with_the_forward_overlapped() -> None:
    cluster = Cluster(num_ranks=8, rate_bytes_per_s=1.25e9)
    model = Replay(THREE, device()[0], gradient=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = attach(model, plan("usbyte", THREE, cluster), optimizer=optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    handle.detach()
    assert all(bool((param == -3.0).all()) for param in model.parameters())


def test_scaling_keeps_what_is_in_proportion() -> None:
    full = profile(layer("a", "a.w"), layer("b", "b.w", "b.v"), layer("c"))
    small = scaled_profile(full, scale=4, slowdown=2.5)
    assert [la.size_bytes for la in small.layers] == [8, 16, 0]
    assert small.forward_s == 7.5
    assert small.backward_s == 15.0
    fast = Cluster(num_ranks=8, rate_bytes_per_s=4.0, hop_s=0.1)
    slow = Cluster(num_ranks=8, rate_bytes_per_s=4.0 / (4 * 2.5), hop_s=0.25)
    for planner in ("wfbp", "usbyte"):
        before = iteration_s(plan(planner, full, fast), full, fast)
        after = iteration_s(plan(planner, small, slow), small, slow)
        assert after == pytest.approx(2.5 * before)


def on_hosts_of_two(rank: int, world: int) -> dict[str, Any]:
    """A rank's figures, as `bench schedule --ranks-per-host 2` has them, by few
    messages.
    """
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    import_module("tests.bench.brief_schedule_rank")
    rows = [
        {"name": name, "planner": name, "settings": {}, "tune": name == "usbyte"}
        for name in ("wfbp", "usbyte", "omgs")
    ]
    figures = {"rate_bytes_per_s": 1e9, "scale": 2.0, "slowdown": 1.0, "rows": rows}
    counts = {"turns": 1, "iterations": 1, "trials": 1}
    return schedule_rank._measure_one(
        TWO_LAYERS, {**figures, **counts}, lambda done, what: None
    )


TWO_LAYERS = profile(
    *(
        Layer(
            name=name,
            tensors=(ProfiledTensor(name=f"{name}.weight", shape=(400, 20)),),
            forward_s=0.005,
            backward_s=0.01,
        )
        for name in ("first", "last")
    )
)


@pytest.mark.multi
def test_plans_for_hosts_of_several_ranks_are_made_simulated_and_carried_out() -> None:
    with closing(Ranks(4)) as ranks:
        found = ranks.run(on_hosts_of_two)
    cluster = Cluster.parse(found[0]["cluster"])
    assert (cluster.num_ranks, cluster.ranks_per_host) == (4, 2)
    assert set(cluster.host.shares) == {"all_reduce", "all_gather"}
    small = scaled_profile(TWO_LAYERS, scale=2.0)
    for name, row in found[0]["rows"].items():
        assert all(other["rows"][name]["plan"] == row["plan"] for other in found)
        plan = Plan.parse(row["plan"])
        simulated = simulate(plan, small, cluster)
        ((start_s, end_s),) = row["iterations"]
        assert min(simulated.iteration_s, end_s - start_s) >= 0.999 * 0.03
        names = [span.name for span in Trace.from_json(row["trace"]).spans]
        among = "AllGather" if name == "omgs" else "AllReduce"
        assert names.count(f"{among} among hosts") >= len(plan.messages)
        # Nothing is sent within a host where memory is shared.
        assert "AllGather among a host's ranks" in names
        assert "AllToAll among a host's ranks" not in names
