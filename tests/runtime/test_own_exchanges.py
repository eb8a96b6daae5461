"""Exchanges of their own under training: real ranks, several messages, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from tests.each import each
from tests.runtime.given import SMALL, keywords
from tests.runtime.ranks import Ranks
from tests.runtime.test_checkpoint import load_and_go_on, pending, resumed, train_and_save
from tests.runtime.training import Net, ddp, digest, loss_of, swift, train

pytestmark = pytest.mark.multi
NAMES = ("randomk", "cltk", "deft", "oktopk", "spardl")
POWER = gw.compress.powersgd(rank=2)
CHOSEN = (*(getattr(gw.compress, name)(density=0.3) for name in NAMES), POWER)


def many_messages(rank: int, world: int, chosen: gw.Exchange, wrapped: bool) -> tuple[Any, ...]:
    net = Net()
    model = ddp(net, broadcast_buffers=False) if wrapped else net
    handle = gw.attach(model, chosen, options=SMALL)
    losses = train(model, swift(model.parameters()), rank, range(20))
    arrived = [message.member.selection for message in handle._progress.messages]
    return digest(net.parameters()), losses, arrived


@each("place, chosen", enumerate(CHOSEN))
def test_several_messages_train_the_same_model_everywhere(
    place: int, chosen: gw.Exchange, pools: dict[int, Ranks]
) -> None:
    """Two ranks under DDP and four of a module alone, by turns."""
    results = pools[4 if place % 2 else 2].run(many_messages, chosen, place % 2 == 0)
    assert len({bits for bits, _, _ in results}) == 1
    for _, losses, selections in results:
        assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
        sparse = [one for one in selections if one is not None]
        assert chosen == POWER or len(sparse) >= 3
        assert all(0 < one.arrived < 2 * one.asked for one in sparse)


def against_the_local_driver(rank: int, world: int, chosen: gw.Exchange) -> None:
    """The means of one message over steps are what one process computes."""
    net, others = Net(), [Net() for _ in range(world)]
    gw.attach(net, chosen, **keywords(bucket_cap_mb=1, compress_if=lambda name, param: True))
    exchange = gw.exchange_for(chosen)
    # One message takes parameters in the order in which backward gives them.
    shapes = tuple(tuple(p.shape) for p in reversed(list(net.parameters())))
    numel = sum(p.numel() for p in net.parameters())
    spec = gw.TensorSpec("message 0", numel, shapes=shapes)
    states: list[Any] = [exchange.init(spec, world) for _ in others]
    for step in range(3):
        net.zero_grad()
        loss_of(net, rank, step).backward()
        flat = []
        for peer, other in enumerate(others):
            other.zero_grad()
            loss_of(other, peer, step).backward()
            grads = [p.grad for p in reversed(list(other.parameters()))]
            flat.append(torch.cat([g.flatten() for g in grads if g is not None]))
        results = gw.run_local(exchange, flat, states)
        states = [state for _, _, state in results]
        ours = [p.grad for p in reversed(list(net.parameters()))]
        mean_N = torch.cat([g.flatten() for g in ours if g is not None])
        near = {"rtol": 1e-3, "atol": 1e-5} if chosen == POWER else {"rtol": 1e-5, "atol": 1e-7}
        torch.testing.assert_close(mean_N, results[0][0], **near)


@each("chosen", CHOSEN)
def test_real_ranks_compute_what_local_ranks_do(chosen: gw.Exchange, four: Ranks) -> None:
    four.run(against_the_local_driver, chosen)


@each("chosen, wrapped", [*((one, False) for one in CHOSEN), (CHOSEN[2], True), (POWER, True)])
def test_a_resumed_run_is_the_uninterrupted_one(
    chosen: gw.Exchange, wrapped: bool, two: Ranks
) -> None:
    for whole, again, _ in two.run(resumed, chosen, wrapped):
        assert again == whole


@each("chosen", [*CHOSEN[2:4], POWER], ids=["deft", "oktopk", "powersgd"])
def test_another_number_of_ranks_goes_on_with_other_layers(
    chosen: gw.Exchange, two: Ranks, four: Ranks
) -> None:
    """Layers and regions are cut by the number of ranks; what is pending and the step are kept."""
    states = two.run(train_and_save, chosen)
    shared = gw.redistribute(states, 4)
    if chosen == POWER:  # it starts as warm
        warm = [s["params"]["middle.weight"]["inner.basis_T"] for s in (states[0], *shared)]
        assert all(torch.equal(one, warm[0]) for one in warm)
    else:
        steps = [int(m["inner.step"]) for state in shared for m in state["messages"].values()]
        assert {*steps} == {3}
    torch.testing.assert_close(pending(shared, "middle.weight"), pending(states, "middle.weight"))
    assert len(set(four.run(load_and_go_on, chosen, shared))) == 1
