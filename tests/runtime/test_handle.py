"""What a user sees of an attached model: figures, timelines, and the way out."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.contract.spec import TensorSpec
from gradwire.contract.trace.span import Trace
from gradwire.exchange.by_name import exchange_for
from gradwire.runtime.step.wire import give_back, in_background
from tests.each import each
from tests.runtime.given import SMALL, keywords
from tests.runtime.plans import drawn
from tests.runtime.ranks import Ranks
from tests.runtime.training import (
    DENSE,
    SMALL_MB,
    TOPK,
    Net,
    adamw,
    batch,
    ddp,
    digest,
    gradients,
    loss_of,
    momentum,
    named,
    train,
)

pytestmark = pytest.mark.multi
NUM_CHANNELS = 2


def observed(
    rank: int, world: int, exchange: Exchange, wrapped: bool
) -> tuple[dict[str, Any], Trace, Trace, list[tuple[TensorSpec, bool]]]:
    net = Net()
    model = ddp(net) if wrapped else net
    handle = gw.attach(
        model,
        exchange,
        **keywords(bucket_cap_mb=SMALL_MB, num_channels=NUM_CHANNELS, trace_steps=3),
    )
    empty = handle.trace()
    train(model, adamw(model.parameters()), rank, range(5))
    sent = [(m.spec, m.exchange == exchange) for m in handle.synchroniser.messages]
    return handle.stats(), handle.trace(), empty, sent


@each("exchange, wrapped", [(DENSE, False), (TOPK, True)])
def test_stats_and_trace(exchange: Exchange, wrapped: bool, two: Ranks) -> None:
    for rank, (stats, trace, empty, sent) in enumerate(two.run(observed, exchange, wrapped)):
        assert empty == Trace()
        check_stats(stats, rank, exchange, sent)
        check_trace(trace, rank, [spec for spec, _ in sent])


def check_stats(
    stats: dict[str, Any], rank: int, exchange: Any, sent: list[tuple[TensorSpec, bool]]
) -> None:
    assert (stats["rank"], stats["world_size"], stats["steps"]) == (rank, 2, 5)
    assert stats["messages"] == len(sent) >= 3
    assert stats["step_s"] > 0
    assert stats["compute_s_per_step"] > 0
    assert stats["communication_s_per_step"] > 0
    assert stats["wait_s_per_step"] >= 0
    assert (stats["residual_norm"] > 0) == (exchange != DENSE)
    expected = sum(
        (exchange if is_own else DENSE).wire_bytes(spec, 2)[rank] for spec, is_own in sent
    )
    # What is more are the flags that tell which parameters were used, an int32 each.
    assert 0 <= stats["wire_bytes_per_step"] - expected <= 4 * len(list(Net().parameters()))


def check_trace(trace: Trace, rank: int, specs: list[TensorSpec]) -> None:
    num_messages = len(specs)
    assert trace.steps() == [2, 3, 4]
    lanes = {lane for _, lane in trace.lanes()}
    assert lanes == {"forward", "backward", "compute", "communication", "wait"}
    assert {span.rank for span in trace.spans} == {rank}
    assert all(span.end_s >= span.start_s for span in trace.spans)
    network = [span for span in trace.spans if span.lane == "communication"]
    assert all(span.size_bytes > 0 for span in network)
    assert all(span.size_bytes == 0 for span in trace.spans if span.lane != "communication")
    assert {span.message for span in network} >= set(range(num_messages))
    # What comes after the gradients (which parameters were used) has a channel of its own.
    channel_of = {m: m % NUM_CHANNELS for m in range(num_messages)}
    channels = [
        [s for s in network if channel_of.get(s.message, NUM_CHANNELS) == channel]
        for channel in range(NUM_CHANNELS + 1)
    ]
    for lane in (*channels, [s for s in trace.spans if s.lane == "compute"]):
        assert all(before.end_s <= after.start_s for before, after in pairwise(lane))
    for step in trace.steps():
        # Uncompressed gradients are gathered and scaled within the backward pass.
        names = {(s.message, s.name) for s in trace.only(step=step).spans if s.message >= 0}
        assert {(m, "gather") for m in range(num_messages)} <= names
        # A gradient that travels alone is the buffer itself: its mean is in place.
        copied = {m for m, spec in enumerate(specs) if len(spec.shapes) > 1}
        assert {m for m, name in names if name == "scatter"} == copied


def num_hooks(model: nn.Module) -> int:
    own = [model._forward_hooks, model._forward_pre_hooks]
    of_params = [p._post_accumulate_grad_hooks or {} for p in model.parameters()]
    return sum(map(len, [*own, *of_params]))


def detached(rank: int, world: int) -> None:
    for wrapped in (False, True):
        check_detached(rank, world, wrapped)


def check_detached(rank: int, world: int, wrapped: bool) -> None:
    net = Net()
    model = ddp(net, broadcast_buffers=False) if wrapped else net
    before = num_hooks(model)
    x, y = batch(rank, 0)

    def backward() -> list[Any]:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        return gradients(net)

    handle = gw.attach(model, TOPK, options=SMALL)
    means = backward()
    handle.detach()
    handle.detach()
    assert not handle.attached
    assert num_hooks(model) == before
    after = backward()

    local = Net()
    local.load_state_dict(net.state_dict())
    nn.functional.cross_entropy(local(x), y).backward()
    expected = gradients(local)
    if wrapped:
        for grad in expected:
            torch.distributed.all_reduce(grad.div_(world))  # type: ignore[union-attr]
    assert all(map(torch.allclose, after, expected))
    assert not any(map(torch.equal, means[:1], after[:1]))

    model.zero_grad()
    again = gw.attach(model, DENSE, options=SMALL)
    train(model, adamw(model.parameters()), rank, range(2))
    assert again.step == 2
    assert handle.step == 1
    parts = [torch.zeros_like(net.deep.weight) for _ in range(world)]
    torch.distributed.all_gather(parts, net.deep.weight.detach())
    assert len({digest([part]) for part in parts}) == 1


def test_detach_leaves_the_model_as_it_was_and_attach_works_again(two: Ranks) -> None:
    two.run(detached)


def test_a_handle_shows_its_model_its_exchange_its_ranks_and_its_steps() -> None:
    net, locally = Net(), Net()
    handle = gw.attach(net, DENSE)
    train(net, momentum(net.parameters()), 0, range(2))
    assert repr(handle) == f"<Handle of Net through {DENSE!r}: rank 0 of 1, step 2>"
    handle.detach()
    assert repr(handle).endswith("rank 0 of 1, step 2, detached>")
    other = gw.local_steps(locally, momentum(locally.parameters()), DENSE, every=2)
    assert repr(other) == f"<LocalSteps of Net through {DENSE!r}: rank 0 of 1, step 0>"
    other.detach()
    net.zero_grad(set_to_none=True)
    planned = gw.attach(net, drawn(0))
    assert (
        repr(planned)
        == f"<Handle of Net through a plan of {drawn(0).planner}: rank 0 of 1, step 0>"
    )
    planned.detach()


def many_times(rank: int, world: int) -> int:
    """How many files more are open after four attaches than after one."""
    counts = []
    for number in range(5):
        model = Net()
        handle = gw.attach(model, DENSE)
        train(model, adamw(model.parameters()), rank, range(1))
        handle.detach()
        torch.distributed.barrier()
        if number in (0, 4):
            counts.append(len(list(Path("/proc/self/fd").iterdir())))
    return counts[1] - counts[0]


def test_detach_gives_connections_back(two: Ranks) -> None:
    assert all(more < 4 for more in two.run(many_times))


def asked_of_the_model(rank: int, world: int) -> None:
    """Loops that were written for DDP accumulate; gradients are a whole batch's, on all ranks."""
    for compiled in (False, True):
        accumulate(rank, compiled)


def accumulate(rank: int, compiled: bool) -> None:
    net = Net()
    model: Any = torch.compile(net, backend="eager") if compiled else net
    handle = gw.attach(model, DENSE)
    loss_of(model, rank, 0).backward()
    loss_of(model, rank, 1).backward()
    expected = [p.grad.clone() for p in net.parameters()]  # exchanged twice: to the same mean
    for way in ("no_sync", "require_backward_grad_sync"):
        net.zero_grad()
        if way == "no_sync":
            with getattr(model, "no_sync", nullcontext)():  # as Accelerate asks
                loss_of(model, rank, 0).backward()
        else:
            model.require_backward_grad_sync = False
            loss_of(model, rank, 0).backward()
            model.require_backward_grad_sync = True
        assert handle.step in (2, 3)
        loss_of(model, rank, 1).backward()
        for param, grad in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, grad)
    assert handle.step == 4
    assert not hasattr(copy.deepcopy(net), "no_sync")
    handle.detach()
    assert not hasattr(model, "no_sync")


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_loops_written_for_ddp_accumulate(two: Ranks) -> None:
    two.run(asked_of_the_model)


def test_a_models_own_no_sync_stays() -> None:
    class Own(nn.Linear):
        def no_sync(self) -> str:
            return "mine"

    model = Own(2, 2)
    handle = gw.attach(model, DENSE)
    assert model.no_sync() == "mine"
    handle.detach()
    assert model.no_sync() == "mine"


def elsewhere(rank: int, world: int, exchange: Exchange) -> list[str]:
    """Trains while new tensors are made on a device, unless another one is named."""
    ends = []
    for device in ("cpu", "meta"):
        net = Net()
        optimizer = momentum(net.parameters())
        batches = [batch(rank, step) for step in range(2)]
        with torch.device(device):
            handle = gw.attach(net, exchange, options=SMALL)
            for inputs, targets in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(inputs), targets).backward()
                optimizer.step()
            handle.load_state_dict(handle.state_dict())
            assert handle.stats()["steps"] == len(batches)
        ends.append(digest([*net.parameters(), *handle.residuals().values()]))
    return ends


@each("exchange", map(exchange_for, (gw.compress.powersgd(), gw.compress.dgc())), ids=named)
def test_the_default_device_makes_no_difference(exchange: Exchange, two: Ranks) -> None:
    for one, other in two.run(elsewhere, exchange):
        assert one == other


def test_an_interpreter_that_ends_closes_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since Python 3.12 it starts none; what is attached then is closed all the same."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    channels = [object(), object()]
    give_back(channels)
    assert channels == []
    assert isinstance(in_background(lambda: 1).exception(0), RuntimeError)
