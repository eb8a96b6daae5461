"""A pilot changes the plan of a model that trains: nothing is lost, and replicas stay
equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.errors import InvalidSetting, RanksDiffer
from gradwire.planning.data.plan import ExchangeSetting, Plan
from gradwire.runtime.controls import Controls, Flight, Pilot
from gradwire.runtime.handle import Handle
from tests.each import each
from tests.runtime import plans
from tests.runtime.given import keywords
from tests.runtime.meshes import mesh
from tests.runtime.ranks import Ranks
from tests.runtime.state.test_checkpoint import through_a_file
from tests.runtime.training import DENSE, Net, ddp, digest, loss_of, momentum, train

pytestmark = pytest.mark.multi
ONEBIT = ExchangeSetting(
    compressor="onebit",
    settings={"block": 64},
    collective="casync_ps",
    error_feedback=True,
)
TOPK = ExchangeSetting(
    compressor="topk",
    settings={"density": 0.1},
    collective="allgather_sparse",
    error_feedback=True,
)


POWER = ExchangeSetting(
    compressor="powersgd", settings={"rank": 2}, error_feedback=True
)


def lossy(seed: int, exchange: ExchangeSetting = ONEBIT, cuts: int = 4) -> Plan:
    return plans.through(plans.drawn(seed, cuts=cuts), exchange.compressor, exchange)


@dataclass(frozen=True)
class Route(Pilot):
    """Goes other ways after given steps."""

    ways: Mapping[int, Plan | None]

    def begin(self, controls: Controls) -> Flight:
        return OnRoute(self.ways, controls)


class OnRoute(Flight):
    def __init__(self, ways: Mapping[int, Plan | None], controls: Controls) -> None:
        self.ways, self.controls, self.num_steps = ways, controls, 0

    def step_ended(self) -> None:
        self.num_steps += 1
        if self.num_steps in self.ways:
            self.controls.switch(self.ways[self.num_steps])

    def stats(self) -> dict[str, Any]:
        return {"steps": self.num_steps}

    def end(self) -> None:
        self.ways = {}


LOSSLESS = {
    2: plans.drawn(1),
    5: plans.drawn(2),
    6: plans.drawn(3),
    8: None,
    9: plans.drawn(4),
}
"""Cut anywhere, some with the next forward pass overlapped; 1 to 3 channels."""
BOTH = plans.in_turn(plans.drawn(3), {"onebit": ONEBIT, "topk": TOPK})
"""Parts of one tensor take different exchanges."""
THERE_AND_BACK = {
    2: lossy(1),
    5: lossy(2),
    7: lossy(3, TOPK),
    9: BOTH,
    12: plans.drawn(5),
    14: None,
}
ON_HOSTS = {
    **THERE_AND_BACK,
    4: lossy(4, POWER, cuts=0),
    5: lossy(5, POWER, cuts=0),
    6: lossy(2),
}
"""Tensors that stay whole go from rank to rank of a host, as others travel with
them.
"""
NUM_STEPS = 16


def route(where: str) -> Route:
    return Route(ON_HOSTS if "hosts" in where else THERE_AND_BACK)


def put(
    net: nn.Module, where: str, chosen: Any, **settings: Any
) -> tuple[nn.Module, Handle]:
    """A model that is attached plain, under DDP, in two hosts of two ranks, or both."""
    model = ddp(net) if "ddp" in where and isinstance(net, Net) else net
    if "hosts" in where:
        settings["mesh"] = mesh()
    return model, gw.attach(model, chosen, **keywords(**settings))


def with_and_without(rank: int, world: int, where: str) -> list[tuple[str, Any]]:
    found = []
    for chosen in (DENSE, Route(LOSSLESS)):
        net = Net()
        optimizer = momentum(net.parameters())
        model, handle = put(net, where, chosen, optimizer=optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        for step in range(NUM_STEPS):
            if step % 3 == 0:  # gradients accumulate on this rank first
                with handle.no_sync():
                    loss_of(model, rank, 100 + step).backward()
                loss_of(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                train(model, optimizer, rank, [step])
            scheduler.step()
        handle.synchronize()
        stats = handle.stats()
        assert handle.step == NUM_STEPS
        handle.detach()
        found.append((digest(net), (stats["overlapped_steps"], stats["fallbacks"])))
    return found


@pytest.mark.parametrize("where", ["plain", "ddp"])
def test_training_through_switches_has_the_bits_of_training_without(
    two: Ranks, where: str
) -> None:
    """Two ranks: a sum of two numbers is the same in any order."""
    (without, _), (through, (num_overlapped, fallbacks)) = two.run(
        with_and_without, where
    )[0]
    assert without == through
    assert (num_overlapped > 0) is (where == "plain"), (
        "under DDP no forward pass is overlapped"
    )
    assert fallbacks == {}


def adder(total: Tensor) -> Callable[[Tensor], None]:
    def add(grad: Tensor) -> None:
        total.add_(grad)

    return add


def account(
    rank: int, world: int, where: str, skipped: int
) -> tuple[str, dict[str, Tensor], dict[str, Tensor], float]:
    """What this rank's gradients and the means add up to; no residual is left at the
    end.

    In step ``skipped`` all ranks use the first layer only.
    """
    net = Net()
    given = {
        name: torch.zeros_like(p, dtype=torch.float64)
        for name, p in net.named_parameters()
    }
    means = {name: torch.zeros_like(total) for name, total in given.items()}
    for name, param in net.named_parameters():
        param.register_hook(adder(given[name]))
    optimizer = momentum(net.parameters())
    model, handle = put(net, where, route(where), optimizer=optimizer)
    owed = 0.0
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = (
            net.first.weight.square().sum()
            if step == skipped
            else loss_of(model, rank, step)
        )
        loss.backward()
        handle.synchronize()
        for name, param in net.named_parameters():
            assert param.grad is not None or step == skipped
            means[name] += 0 if param.grad is None else param.grad
        optimizer.step()
        owed = max(owed, handle.stats()["residual_norm"])
    assert handle.residuals() == {}
    handle.detach()
    return (
        digest(net),
        given,
        {name: world * mean for name, mean in means.items()},
        owed,
    )


@pytest.mark.parametrize(
    ("where", "skipped"),
    [
        ("plain", 12),
        pytest.param("ddp on hosts", NUM_STEPS, marks=pytest.mark.slow),
    ],  # residuals are delivered from step 12 on
)
def test_no_gradient_and_no_residual_is_lost_at_a_switch(
    two: Ranks, four: Ranks, where: str, skipped: int
) -> None:
    found = (four if "hosts" in where else two).run(account, where, skipped)
    assert len({bits for bits, *_ in found}) == 1, "replicas differ"
    assert max(owed for *_, owed in found) > 0.1, (
        "nothing was owed: this shows less than it says"
    )
    for name, mean in found[0][2].items():
        given = torch.stack([totals[name] for _, totals, _, _ in found]).sum(0)
        torch.testing.assert_close(mean, given, rtol=1e-5, atol=1e-5)


Owed = dict[str, Tensor]


def resumed(
    rank: int, world: int, where: str, saved_at: int
) -> tuple[Owed, Owed, float, int]:
    """A run saved at some step of a route, and gone on with by a new one that begins
    dense.

    Returns this rank's residuals before and after, and what is left of them one step
    later.
    """
    net = Net()
    optimizer = momentum(net.parameters())
    model, handle = put(net, where, route(where), optimizer=optimizer)
    train(model, optimizer, rank, range(saved_at))
    state = through_a_file(handle.state_dict())
    owed = {name: residual.clone() for name, residual in handle.residuals().items()}
    handle.detach()
    optimizer.zero_grad()

    model, handle = put(model, where, Route({2: lossy(4)}), optimizer=optimizer)
    handle.load_state_dict(state)
    loaded = handle.residuals()
    train(model, optimizer, rank, [saved_at])
    left = sum(float(residual.abs().sum()) for residual in handle.residuals().values())
    train(model, optimizer, rank, range(saved_at + 1, saved_at + 4))
    step = handle.step
    handle.detach()
    return owed, loaded, left, step


@pytest.mark.parametrize(
    ("where", "saved_at"), [("plain", 12), ("ddp", 4), ("hosts", 5)]
)
def test_a_state_is_loaded_under_another_plan(
    where: str, saved_at: int, two: Ranks, four: Ranks
) -> None:
    """While residuals are being delivered, in the midst of a plan, and right after a
    switch.

    On hosts the new run cuts other shares: what a host's ranks have kept is the same
        together.
    """
    ranks, per_host = (four, 2) if where == "hosts" else (two, 1)
    found = ranks.run(resumed, where, saved_at)
    for first in range(0, len(found), per_host):
        host = found[first : first + per_host]
        for name in host[0][0]:
            owed, loaded = (
                torch.stack([one[k][name] for one in host]).sum(0) for k in (0, 1)
            )
            assert torch.equal(owed, loaded)
    for _, loaded_by, left, step in found:
        assert sum(float(residual.abs().sum()) for residual in loaded_by.values()) > 0.1
        assert left == 0.0, "the first dense step delivers all residuals"
        assert step == saved_at + 4


def of_two_kinds(rank: int, world: int) -> str:
    """Rank 0 loads a state that is put together for its host, the others their own
    shares.
    """
    net = Net()
    _, handle = put(net, "hosts", Route({1: lossy(1)}))
    train(net, momentum(net.parameters()), rank, range(3))
    own = handle.state_dict()
    states: list[Any] = [None] * world
    dist.all_gather_object(states, own)
    with pytest.raises(RanksDiffer) as caught:
        handle.load_state_dict(gw.redistribute(states, 4, 2)[0] if rank == 0 else own)
    handle.detach()
    return str(caught.value)


def test_states_of_shares_and_of_hosts_are_not_loaded_together(four: Ranks) -> None:
    for reported in four.run(of_two_kinds):
        assert "is of a share is False against True" in reported


def uneven(rank: int, world: int) -> tuple[str, list[bool]]:
    """Rank 0 runs out of data first, and has joined when the plan is switched."""
    net = Net()
    model, handle = put(net, "ddp", Route({2: plans.drawn(1), 4: lossy(2), 6: None}))
    optimizer, seen = momentum(net.parameters()), []
    with model.join():
        for step in range(3 + 5 * rank):
            train(model, optimizer, rank, [step])
            seen.append(handle.plan is not None)
    seen.append(handle.plan is not None)
    handle.detach()
    return digest(net), seen


def test_a_rank_that_has_joined_switches_with_the_others(two: Ranks) -> None:
    (one, short), (other, long) = two.run(uneven)
    assert one == other
    assert short == [False, True, True, False]
    assert long == [False, True, True, True, True, False, False, False, False]


def unused(rank: int, world: int) -> list[bool]:
    """A parameter that nobody uses keeps its gradient None through all switches."""
    net = Net()
    net.spare = nn.Linear(3, 3)
    ways = {
        2: plans.through(plans.drawn(1, model=net), "onebit", ONEBIT),
        5: plans.drawn(2, model=net),
    }
    optimizer = momentum(net.parameters())
    handle = gw.attach(net, Route(ways), optimizer=optimizer)
    seen = []
    for step in range(8):
        train(net, optimizer, rank, [step])
        handle.synchronize()
        seen.append(net.spare.weight.grad is None)
    handle.detach()
    return seen


def test_a_gradient_that_is_none_stays_none(two: Ranks) -> None:
    assert two.run(unused) == [[True] * 8] * 2


@each("given", [{"fidelity": "best"}, {"review_steps": 0}])
def test_wrong_settings_of_a_pilot_are_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=f"{next(iter(given))}.*; "):
        gw.pilot.auto(**given)


def averaged_by(rank: int, world: int) -> list[str]:
    """Who averaged each step under DDP: plans come and go, and residuals are
    delivered.
    """
    net = Net()
    optimizer = momentum(net.parameters())
    ways = {2: lossy(1), 4: None, 7: lossy(2), 9: None}
    model, handle = put(net, "ddp", Route(ways))
    assert isinstance(model, DistributedDataParallel)
    found = []

    def note(*_: Any) -> None:
        hook = model._get_ddp_logging_data().get("comm_hook")
        who = handle.stats()["averaged_by"]
        found.append(f"{who}, by a hook" if hook else who)

    net.register_forward_hook(note)
    train(model, optimizer, rank, range(12))
    assert handle.step == 12
    handle.detach()
    return [*found, digest(net)]


def test_under_ddp_what_is_dense_is_left_to_a_reducer_without_a_hook(
    two: Ranks,
) -> None:
    """The step that delivers residuals, after a plan, is still averaged by gradwire."""
    (*found, bits), other = two.run(averaged_by)
    planned = ["gradwire, by a hook"] * 3
    assert found == ["DDP"] * 2 + planned + ["DDP"] * 2 + planned + ["DDP"] * 2
    assert other[-1] == bits


def left_again(rank: int, world: int) -> list[list[str]]:
    """Steps by a plan that loses nothing, by DDP before and after it, and by DDP alone;
    the bits.

    The plan's steps are followed by another reducer of DDP, with the settings of the
    first.
    """
    found = []
    for setting in (
        "gradient_as_bucket_view",
        "find_unused_parameters",
        "static_graph",
    ):
        models = []
        for route in (Route({2: plans.drawn(1), 4: None}), None):
            torch.manual_seed(0)
            model = DistributedDataParallel(Net(), **{setting: True})
            optimizer = momentum(model.parameters())
            handle = None if route is None else gw.attach(model, route)
            train(model, optimizer, rank, range(8))
            if handle is not None:
                assert handle.step == 8
                handle.detach()
            train(model, optimizer, rank, range(8, 10))
            models.append(digest(model))
        found.append(models)
    return found


def test_a_new_reducer_trains_as_the_one_before(two: Ranks) -> None:
    one, other = two.run(left_again)
    assert one == other
    assert all(planned == plain for planned, plain in one)


def attached_again(rank: int, world: int) -> list[str]:
    """Who averages once a run has ended between a plan's last step and the next forward
    pass.
    """
    model = ddp(Net())
    optimizer = momentum(model.parameters())
    handle = gw.attach(model, Route({1: plans.drawn(1), 2: None}))
    train(model, optimizer, rank, range(2))
    handle.detach()
    optimizer.zero_grad()
    handle = gw.attach(model, "onebit")
    train(model, optimizer, rank, range(2, 5))
    assert handle.step == 3
    hook: str = model._get_ddp_logging_data().get("comm_hook", "")
    return [hook, handle.stats()["averaged_by"], digest(model)]


def test_who_attaches_behind_a_plan_keeps_his_hook(two: Ranks) -> None:
    one, other = two.run(attached_again)
    assert one == other
    assert "gradwire" in one[0]
    assert one[1] == "gradwire"
