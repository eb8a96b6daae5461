"""Any valid plan trains exactly what the same exchange trains without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import gradwire as gw
from gradwire.errors import InvalidSetting, RankFailed
from gradwire.planning.data.plan import ExchangeSetting, Plan
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from tests.each import each
from tests.runtime import plans
from tests.runtime.ranks import Ranks
from tests.runtime.training import DENSE, Net, ddp, digest, train

pytestmark = pytest.mark.multi

NUM_STEPS = 4


def _grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups of other settings: matrices decay, vectors learn faster."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0, "lr": 0.02},
    ]


Made = Callable[[nn.Module], Optimizer]
OPTIMIZERS: dict[str, Made] = {
    "momentum": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda model: Adam(model.parameters(), lr=3e-3),
    "adamw, groups": lambda model: AdamW(_grouped(model), lr=3e-3),
}


def trained_by(rank: int, made: str, chosen: Any, *, wrapped: bool = False) -> str:
    """The bits of a model after a few steps through ``chosen``."""
    net = Net()
    model = ddp(net) if wrapped else net
    optimizer = OPTIMIZERS[made](net)
    handle = gw.attach(model, chosen, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for step in range(NUM_STEPS):
        train(model, optimizer, rank, [step])
        scheduler.step()
    stats = handle.stats()
    handle.detach()
    overlaps = isinstance(chosen, Plan) and chosen.overlap_forward and not wrapped
    # The last step is overlapped by nothing; detach settles it.
    assert stats["overlapped_steps"] == (NUM_STEPS - 1 if overlaps else 0), stats
    assert stats["fallbacks"] == {}
    assert stats["averaged_by"] == "gradwire" or not isinstance(chosen, Plan)
    return digest(net)


def with_and_without(rank: int, world: int, made: str) -> tuple[str, dict[str, str]]:
    """Two ranks: a sum of two numbers is the same in any order, so any exchange will do."""
    without = trained_by(rank, made, DENSE)
    return without, {p.planner + str(p.settings): trained_by(rank, made, p) for p in plans.every()}


@pytest.mark.slow
def test_any_plan_trains_the_same_bits(two: Ranks) -> None:
    for without, by_plan in two.run(with_and_without, "adamw, groups", timeout_s=100):
        assert len(by_plan) > 10
        assert {name: bits == without for name, bits in by_plan.items()} == dict.fromkeys(
            by_plan, True
        )


def under_ddp(rank: int, world: int) -> tuple[str, list[str], str]:
    without = trained_by(rank, "momentum", DENSE, wrapped=True)
    chosen = plans.drawn(0), plans.drawn(1)
    by_plan = [trained_by(rank, "momentum", plan, wrapped=True) for plan in chosen]
    first = chosen[0].messages[0].model_copy(update={"exchange": "lossy"})
    lossy = ExchangeSetting(compressor="cast16", collective="allreduce")
    update = {"messages": (first, *chosen[0].messages[1:]), "exchanges": {"lossy": lossy}}
    broken = trained_by(rank, "momentum", chosen[0].model_copy(update=update), wrapped=True)
    return without, by_plan, broken


def test_plans_under_ddp(two: Ranks) -> None:
    """A plan that sends one message through a lossy exchange does not train the same bits."""
    for without, by_plan, broken in two.run(under_ddp):
        assert by_plan == [without] * len(by_plan)
        assert broken != without


LOSSY = ExchangeSetting(
    compressor="topk",
    settings={"density": 0.2},
    collective="allgather_sparse",
    error_feedback=True,
)


ONEBIT = ExchangeSetting(compressor="onebit", collective="casync_ps", error_feedback=True)


def resumed(rank: int, world: int, plan: Plan) -> tuple[str, str, str]:
    """A run that is interrupted, saved and resumed under another order of the same blocks."""

    def run(steps: Iterable[int], net: Net, state: Any = None) -> Any:
        optimizer = OPTIMIZERS["momentum"](net)
        handle = gw.attach(net, plan)
        if state is not None:
            optimizer.load_state_dict(state["optimizer"])
            handle.load_state_dict(state["handle"])
        train(net, optimizer, rank, steps)
        residuals = handle.residuals()
        assert sum(float(one.abs().sum()) for one in residuals.values()) > 0
        found = {"optimizer": optimizer.state_dict(), "handle": handle.state_dict()}
        handle.detach()
        optimizer.zero_grad()
        params = dict(net.named_parameters())
        assert all(one.numel() == params[name].numel() for name, one in residuals.items())
        return found

    whole, parts = Net(), Net()
    run(range(4), whole)
    state = run(range(2), parts)
    names = dict(parts.named_parameters())
    for name, fields in state["handle"]["params"].items():
        assert all(one.numel() == names[name].numel() for one in fields.values())
    run(range(2, 4), parts, state)
    return digest(whole), digest(parts), str(state["handle"]["algorithm"])


def test_state_of_cut_parameters_is_saved_by_name(two: Ranks) -> None:
    plan = plans.in_turn(plans.drawn(2), {"topk": LOSSY, "onebit": ONEBIT})
    for whole, parts, algorithm in two.run(resumed, plan):
        assert parts == whole
        assert "topk" in algorithm


def refused(plan: Plan, model: nn.Module) -> str:
    with pytest.raises(InvalidSetting) as caught:
        gw.attach(model, plan)
    return str(caught.value)


def test_plans_that_cannot_be_carried_out() -> None:
    plan = plans.drawn(0)
    other = nn.Linear(3, 3)
    assert "'weight' elements 0:9 are in no message" in refused(
        plan.model_copy(update={"messages": ()}), other
    )
    assert "unknown tensor" in refused(plan, other)


def test_a_plan_from_its_file(tmp_path: Path) -> None:
    plan = plans.drawn(3)
    plan.save(tmp_path / "plan.json")
    for given in (tmp_path / "plan.json", str(tmp_path / "plan.json")):
        handle = gw.attach(Net(), given)
        assert handle.exchange == plan
        assert len(handle.synchroniser.messages) == len(plan.messages)
        handle.detach()


def channels_last(rank: int, world: int, wrapped: bool) -> bool:
    """A cut parameter with strides of its own."""
    conv, whole = (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2))
    whole.load_state_dict(conv.state_dict())
    profile = plans.profile_of_model(nn.Sequential(conv))
    layer = profile.layers[0].model_copy(
        update={
            "tensors": tuple(
                t.model_copy(update={"name": t.name.partition(".")[2]})
                for t in profile.layers[0].tensors
            )
        }
    )
    profile = profile.model_copy(update={"layers": (layer,)})
    plan = gw.planner.bytescheduler(profile, plans.CLUSTER, partition_bytes=64)
    cut = ddp(conv) if wrapped else conv
    gw.attach(cut, plan)
    gw.attach(whole, DENSE)
    torch.manual_seed(rank)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    for model in (cut, whole):
        model(x).square().sum().backward()
    return all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(conv.parameters(), whole.parameters(), strict=True)
        if a.grad is not None and b.grad is not None
    )


@each("wrapped", [False, True])
def test_gradients_with_strides_of_their_own(wrapped: bool, two: Ranks) -> None:
    assert two.run(channels_last, wrapped) == [True, True]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.one, self.other = (nn.Linear(4, 4) for _ in range(3))


def another_head(rank: int, world: int) -> str:
    """A backward pass that raised is followed by one that begins with other parameters."""
    model = TwoHeads()
    gw.attach(model, DENSE)

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    hidden = model.body(torch.ones(2, 4))
    hidden.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model.one(hidden).sum().backward()
    with pytest.raises(RankFailed) as caught:
        model.other(model.body(torch.ones(2, 4))).sum().backward()
    return str(caught.value)


def test_a_broken_backward_is_noticed_wherever_the_next_one_begins(doomed_two: Ranks) -> None:
    for text in doomed_two.run(another_head):
        assert "an earlier backward pass that raised before its end" in text


def two_models(rank: int, world: int, overlap: bool) -> str:
    """Two attached models share an optimizer, which one of them must not let run ahead."""
    torch.manual_seed(0)
    first, second = nn.Linear(30, 30), nn.Linear(30, 30)
    optimizer = SGD([*first.parameters(), *second.parameters()], lr=0.1)
    handles = []
    for model in (first, second):
        profile = plans.profile_of_model(nn.ModuleList([model]))
        plan = gw.planner.bytescheduler(_unprefixed(profile), plans.CLUSTER, partition_bytes=400)
        given = optimizer if overlap else None
        handles.append(
            gw.attach(model, plan.model_copy(update={"overlap_forward": overlap}), optimizer=given)
        )
    torch.manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        second(first(torch.randn(2, 30))).square().sum().backward()
        optimizer.step()
    for handle in handles:
        handle.detach()
    return digest([*first.parameters(), *second.parameters()])


def _unprefixed(profile: Profile) -> Profile:
    """Layers of a lone module, whose tensors have no prefix."""
    text = profile.to_json().replace('"0.', '"')
    return Profile.parse(text)


def test_two_models_of_one_optimizer(two: Ranks) -> None:
    plain, overlapped = two.run(two_models, False), two.run(two_models, True)
    assert len({*plain, *overlapped}) == 1


def test_many_channels_and_long_chains() -> None:
    """A thousand messages that all wait for one: neither threads nor stack are as many."""
    layer = Layer(
        name="all",
        tensors=(
            ProfiledTensor(name="weight", shape=(40, 50)),
            ProfiledTensor(name="bias", shape=(40,)),
        ),
        forward_s=0.0,
        backward_s=0.0,
    )
    profile = Profile(model="Linear", source="by hand", batch_size=1, layers=(layer,))
    plan = gw.planner.bytescheduler(profile, plans.CLUSTER, partition_bytes=8, credit=3)
    assert len(plan.messages) > 1000
    waiting = [m.model_copy(update={"after": (0,)}) for m in plan.messages[1:]]
    plan = plan.model_copy(update={"messages": (plan.messages[0], *waiting)})
    model = nn.Linear(50, 40)
    handle = gw.attach(model, plan)
    x = torch.randn(3, 50)
    model(x).sum().backward()
    assert model.weight.grad is not None
    assert torch.allclose(model.weight.grad, x.sum(0).expand(40, 50))
    handle.detach()
