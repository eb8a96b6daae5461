"""Parameters that take no part in a step: on some ranks, on all of them, today or
ever.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.local import drive
from gradwire.runtime.step.layout import ParamRange
from gradwire.runtime.step.messages import Message
from tests.runtime.given import SMALL, keywords
from tests.runtime.models import Branches
from tests.runtime.ranks import Ranks
from tests.runtime.training import (
    DENSE,
    ONEBIT,
    TOPK,
    adamw,
    ddp,
    digest,
    everything,
    loss_of,
    train,
)

pytestmark = pytest.mark.multi
DGC = gw.deep_gradient_compression(warmup_steps=10, density=0.05, sample_share=1.0)


def pending(rank: int, world: int) -> None:
    """Left takes part in steps 0 and 3; what step 0 did not deliver waits, whole, for
    step 3.
    """
    model = Branches(lambda step: (step in (0, 3), True))
    net = ddp(model, find_unused_parameters=True)
    handle = gw.attach(
        net,
        exchange_for(gw.compress.topk(density=0.25)),
        **keywords(bucket_cap_mb=0.001),
    )
    weight = model.left.weight
    arrivals, waiting, delivered = [], [], []
    for step in range(4):
        net.zero_grad()
        loss_of(net, rank, step).backward()
        arrivals.append(weight.grad is not None)
        waiting.append(handle.residuals()["left.weight"].clone())
        if weight.grad is not None:
            delivered.append(int(weight.grad.count_nonzero()))
    assert arrivals == [True, False, False, True]
    assert waiting[0].any()
    assert torch.equal(waiting[0], waiting[1])
    assert torch.equal(waiting[1], waiting[2])
    assert not torch.equal(waiting[2], waiting[3])
    assert delivered[1] > 0


def test_a_residual_of_an_unused_parameter_waits_for_its_next_use(two: Ranks) -> None:
    two.run(pending)


def test_a_parameter_that_no_rank_used_keeps_velocity_and_place_in_warm_up() -> None:
    weights = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    parts = [ParamRange.whole(name, p) for name, p in zip("ab", weights, strict=True)]
    message = Message(0, parts, DGC, 0, 1)
    drive([message.steps({"a": torch.ones(4, 4), "b": torch.ones(4, 4)})])
    before = [message.own_state(slot) for slot in message.slots]
    drive([message.steps({"a": torch.ones(4, 4), "b": None})])
    message.take_back("b")
    used, unused = (message.own_state(slot) for slot in message.slots)
    assert not torch.equal(used["inner.velocity_N"], before[0]["inner.velocity_N"])
    assert [int(fields["step_T"]) for fields in (used, unused)] == [2, 1]
    assert all(torch.equal(unused[path], tensor) for path, tensor in before[1].items())
    drive([message.steps({"a": torch.ones(4, 4), "b": torch.ones(4, 4)})])
    assert [int(step) for step in message.state.step_T] == [3, 3]


def kept_of_left(model: Branches, handle: gw.Handle) -> str:
    params = handle.state_dict()["params"]
    states = [
        t for name in sorted(params) if "left" in name for t in params[name].values()
    ]
    return digest([*model.left.parameters(), *states])


def never_used(rank: int, world: int) -> list[str]:
    ends = []
    for exchange in (TOPK, ONEBIT, exchange_for(gw.compress.powersgd(rank=2))):
        model = Branches(lambda step: (False, True))
        # One message for all: onebit decodes the zeros of unused parameters to its
        #     blocks' means.
        options = gw.Options(bucket_cap_mb=1, compress_if=everything)
        handle = gw.attach(model, exchange, options=options)
        before = kept_of_left(model, handle)
        train(model, adamw(model.parameters()), rank, range(3))
        assert all(p.grad is None for p in model.left.parameters())
        assert kept_of_left(model, handle) == before
        handle.detach()
        ends.append(digest(model))
    return ends


def test_what_no_rank_ever_uses_is_never_touched(two: Ranks) -> None:
    one, other = two.run(never_used)
    assert one == other


def one_sided(rank: int, world: int) -> str:
    model = Branches(lambda step: (step % world == rank, step % 3 != rank))
    model.left.weight = nn.Parameter(model.left.weight.detach().t().contiguous().t())
    gw.attach(model, TOPK, options=SMALL)
    # A fused step reads memory in order, so a mean must have the strides of its
    # parameter.
    train(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True),
        rank,
        range(6),
    )
    return digest(model)


def test_a_parameter_that_some_ranks_use_is_the_same_on_all(four: Ranks) -> None:
    assert len(set(four.run(one_sided))) == 1


def earlier(rank: int, world: int) -> None:
    """Left takes part under no_sync only: no hook brings its gradient in the step that
    counts.
    """
    model, local = (Branches(lambda step: (step == 0, True)) for _ in range(2))
    handle = gw.attach(model, DENSE, options=SMALL)
    with handle.no_sync():
        loss_of(model, rank, 0).backward()
    loss_of(model, rank, 1).backward()
    for step in range(2):
        loss_of(local, rank, step).backward()
    for ours, alone in zip(model.parameters(), local.parameters(), strict=True):
        mean = alone.grad / world  # type: ignore[operator]
        dist.all_reduce(mean)
        torch.testing.assert_close(ours.grad, mean)


def test_what_accumulated_under_no_sync_counts_though_it_is_unused_later(
    two: Ranks,
) -> None:
    two.run(earlier)


class BesideNothing(Branches):
    """Branches, and behind them an unused parameter without elements, which is in no
    message.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(lambda step: (step == 1 and rank == 0, True))
        self.behind = nn.ParameterList([nn.Parameter(torch.empty(0))])


def beside_nothing(rank: int, world: int) -> list[bool]:
    model, found = BesideNothing(rank), []
    handle = gw.attach(model, DENSE)
    for step in range(3):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        found.append(model.left.weight.grad is not None)
    handle.detach()
    return found


def test_who_used_what_travels_with_the_last_message(two: Ranks) -> None:
    """One rank's use is enough for a gradient on all; flags are those of all
    parameters.
    """
    assert two.run(beside_nothing) == [[False, True, False]] * 2


class Empty(nn.Module):
    """A model without elements, as a rank holds where layers have fewer rows than
    shards.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = (nn.Parameter(torch.zeros(0, 2)) for _ in range(2))


def without_elements(rank: int, world: int) -> None:
    handle = gw.attach(model := Empty(), "topk")
    model.used.sum().backward()
    assert handle.step == 1
    assert model.used.grad is not None
    assert model.unused.grad is None


def test_a_model_without_elements_has_an_unused_parameter(two: Ranks) -> None:
    two.run(without_elements)


class Heads(nn.Module):
    """Two heads, of which a pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.heads[0](self.trunk(x))
        return found


def in_another_order(rank: int, world: int) -> list[bool]:
    models, failure = (
        [Heads(), Heads()],
        gw.FailurePolicy(timeout=timedelta(seconds=60)),
    )
    handles = [gw.attach(model, "none", failure=failure) for model in models]
    losses = [
        model(torch.ones(2, 4)).sum()
        for model in (models if rank == 0 else models[::-1])
    ]
    (losses[0] + losses[1]).backward()
    for handle in handles:
        handle.detach()
    return [param.grad is not None for model in models for param in model.parameters()]


def test_ranks_may_reach_two_attached_models_in_another_order(two: Ranks) -> None:
    """A pass is not complete while one of them waits for what the other has still to
    hand in.
    """
    assert (
        two.run(in_another_order)
        == [[True] * 4 + [False] * 2 + [True] * 4 + [False] * 2] * 2
    )
