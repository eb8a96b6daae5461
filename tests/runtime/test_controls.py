"""A pilot changes the plan of a model that trains: nothing is lost, and replicas stay equal."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.data.plan import ExchangeSetting, Plan
from gradwire.errors import InvalidSetting
from gradwire.runtime.controls import Controls, Flight, Pilot
from tests.runtime import plans
from tests.runtime.meshes import mesh
from tests.runtime.ranks import Ranks
from tests.runtime.training import DENSE, Net, ddp, digest, loss_of, momentum, train

pytestmark = pytest.mark.multi
ONEBIT = ExchangeSetting(
    compressor="onebit", settings={"block": 64}, collective="casync_ps", error_feedback=True
)
TOPK = ExchangeSetting(
    compressor="topk",
    settings={"density": 0.1},
    collective="allgather_sparse",
    error_feedback=True,
)


def lossy(seed: int, exchange: ExchangeSetting = ONEBIT) -> Plan:
    return plans.through(plans.drawn(seed), exchange.compressor, exchange)


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


LOSSLESS = {2: plans.drawn(1), 5: plans.drawn(2), 6: plans.drawn(3), 8: None, 9: plans.drawn(4)}
"""Cut anywhere, some with the next forward pass overlapped; 1 to 3 channels."""
THERE_AND_BACK = {2: lossy(1), 6: lossy(2), 9: lossy(3, TOPK), 12: plans.drawn(5), 14: None}
NUM_STEPS = 16


def with_and_without(rank: int, world: int) -> list[tuple[str, Any]]:
    found = []
    for chosen in (DENSE, Route(LOSSLESS)):
        net = Net()
        optimizer = momentum(net.parameters())
        handle = gw.attach(net, chosen, optimizer=optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        for step in range(NUM_STEPS):
            if step % 3 == 0:  # gradients accumulate on this rank first
                with handle.no_sync():
                    loss_of(net, rank, 100 + step).backward()
                loss_of(net, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                train(net, optimizer, rank, [step])
            scheduler.step()
        handle.synchronize()
        stats = handle.stats()
        assert handle.step == NUM_STEPS
        handle.detach()
        found.append((digest(net), (stats["overlapped_steps"], stats["fallbacks"])))
    return found


def test_training_through_switches_has_the_bits_of_training_without(two: Ranks) -> None:
    """Two ranks: a sum of two numbers is the same in any order."""
    (without, _), (through, (num_overlapped, fallbacks)) = two.run(with_and_without)[0]
    assert without == through
    assert num_overlapped > 0, "no plan of these overlaps: the test shows less than it says"
    assert fallbacks == {}


def adder(total: Tensor) -> Callable[[Tensor], None]:
    def add(grad: Tensor) -> None:
        total.add_(grad)

    return add


def account(
    rank: int, world: int, skipped: int = NUM_STEPS
) -> tuple[str, dict[str, Tensor], dict[str, Tensor], float]:
    """What this rank's gradients and the means add up to; no residual is left at the end.

    In step ``skipped`` all ranks use the first layer only.
    """
    net = Net()
    given = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in net.named_parameters()}
    means = {name: torch.zeros_like(total) for name, total in given.items()}
    for name, param in net.named_parameters():
        param.register_hook(adder(given[name]))
    optimizer = momentum(net.parameters())
    handle = gw.attach(net, Route(THERE_AND_BACK), optimizer=optimizer)
    owed = 0.0
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = net.first.weight.square().sum() if step == skipped else loss_of(net, rank, step)
        loss.backward()
        handle.synchronize()
        for name, param in net.named_parameters():
            assert param.grad is not None or step == skipped
            means[name] += 0 if param.grad is None else param.grad
        optimizer.step()
        owed = max(owed, handle.stats()["residual_norm"])
    assert handle.residuals() == {}
    handle.detach()
    return digest(net), given, {name: world * mean for name, mean in means.items()}, owed


@pytest.mark.parametrize("skipped", [NUM_STEPS, 12], ids=["none skipped", "while delivering"])
def test_no_gradient_and_no_residual_is_lost_at_a_switch(two: Ranks, skipped: int) -> None:
    found = two.run(account, skipped)
    (one, given, means, owed), (other, given_too, _, _) = found
    assert one == other, "replicas differ"
    assert owed > 0.1, "nothing was owed: the test shows less than it says"
    for name, total in given.items():
        torch.testing.assert_close(means[name], total + given_too[name], rtol=1e-5, atol=1e-5)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(rank: int, world: int, saved_at: int) -> tuple[float, float, float, int]:
    """A run saved at some step of a route, and gone on with by a new one that begins dense."""
    net = Net()
    optimizer = momentum(net.parameters())
    handle = gw.attach(net, Route(THERE_AND_BACK), optimizer=optimizer)
    train(net, optimizer, rank, range(saved_at))
    state = through_a_file(handle.state_dict())
    owed = {name: residual.clone() for name, residual in handle.residuals().items()}
    handle.detach()
    optimizer.zero_grad()

    handle = gw.attach(net, Route({2: lossy(4)}), optimizer=optimizer)
    handle.load_state_dict(state)
    loaded = handle.residuals()
    gap = max((float((loaded[n] - r).abs().max()) for n, r in owed.items()), default=0.0)
    before = sum(float(residual.abs().sum()) for residual in loaded.values())
    train(net, optimizer, rank, [saved_at])
    after = sum(float(residual.abs().sum()) for residual in handle.residuals().values())
    train(net, optimizer, rank, range(saved_at + 1, saved_at + 4))
    step = handle.step
    handle.detach()
    return gap, before, after, step


@pytest.mark.parametrize("saved_at", [4, 6, 12])
def test_a_state_is_loaded_under_another_plan(saved_at: int, two: Ranks) -> None:
    """In the midst of a plan, right after a switch, and while residuals are being delivered."""
    for gap, before, after, step in two.run(resumed, saved_at):
        assert gap == 0.0
        assert before > 0.1
        assert after == 0.0, "the first dense step delivers all residuals"
        assert step == saved_at + 4


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


def refusals(rank: int, world: int) -> list[str]:
    rows = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 2))
    cases: list[Callable[[], Any]] = [
        lambda: gw.attach(ddp(Net()), "auto"),
        lambda: gw.attach(rows, "auto"),
        lambda: gw.attach(Net(), "auto", bucket_cap_mb=1.0),
        lambda: gw.attach(Net(), "auto", compress_if=lambda name, param: True),
        lambda: gw.pilot.auto(fidelity="best"),
        lambda: gw.pilot.auto(review_steps=0),
    ]
    told = []
    for case in cases:
        with pytest.raises(InvalidSetting) as caught:
            case()
        told.append(str(caught.value))
    return told


def test_what_a_pilot_cannot_fly_is_refused_by_name(one: Ranks) -> None:
    told = one.run(refusals)[0]
    words = ("DistributedDataParallel", "sparse=True", "bucket_cap_mb", "compress_if", "fidelity")
    for word, text in zip(words, told[:5], strict=True):
        assert word in text
        assert ";" in text, "it says what to do"
    assert "review_steps" in told[5]


def refused_on_hosts(rank: int, world: int) -> str:
    with pytest.raises(InvalidSetting) as caught:
        gw.attach(Net(), "auto", mesh=mesh())
    return str(caught.value)


def test_hosts_of_several_ranks_are_refused_by_name(four: Ranks) -> None:
    for told in four.run(refused_on_hosts):
        assert "2 ranks a host" in told
