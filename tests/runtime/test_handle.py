"""What a user sees of an attached model: figures, timelines, and the way out."""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.contract.spec import TensorSpec
from gradwire.contract.trace.span import Trace
from gradwire.errors import InvalidSetting
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.without_data import wire_bytes
from gradwire.runtime.transport.wire import give_back, in_background
from tests.each import each, few
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


OF_USERS = {
    *("attached", "exchange", "group", "plan", "rank", "step", "world_size"),
    *("stats", "log_to", "residuals", "trace", "no_sync", "synchronize", "detach"),
    *("state_dict", "gather_state", "sharded_state", "load_state_dict"),
    *("backward_without_batch", "join_hook"),
}


def test_a_handle_shows_what_users_need_and_no_machinery() -> None:
    with gw.attach(nn.Linear(4, 2), "none") as handle:
        assert {name for name in dir(handle) if name[0] != "_"} == OF_USERS
    optimizer = torch.optim.SGD((net := nn.Linear(4, 2)).parameters(), lr=0.1)
    with gw.local_steps(net, optimizer, "none", every=2) as handle:
        shown = {name for name in dir(handle) if name[0] != "_"}
        assert shown == OF_USERS | {"anchors", "end_period", "outer"}


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
    sent = [(m.spec, m.exchange == exchange) for m in handle._synchroniser.messages]
    return handle.stats(), handle.trace(), empty, sent


@few("exchange, wrapped", [(TOPK, True), (DENSE, False)])
def test_stats_and_trace_show_what_was_sent(
    exchange: Exchange, wrapped: bool, two: Ranks
) -> None:
    for rank, (stats, trace, empty, sent) in enumerate(
        two.run(observed, exchange, wrapped)
    ):
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
        wire_bytes(exchange if is_own else DENSE, spec, 2)[rank]
        for spec, is_own in sent
    )
    # What is more are the flags that tell which parameters were used, an int32 each.
    assert (
        0
        <= stats["wire_bytes_per_step"] - expected
        <= 4 * len(list(Net().parameters()))
    )


def check_trace(trace: Trace, rank: int, specs: list[TensorSpec]) -> None:
    num_messages = len(specs)
    assert trace.steps() == [2, 3, 4]
    lanes = {lane for _, lane in trace.lanes()}
    assert lanes == {"forward", "backward", "compute", "communication", "wait"}
    assert {span.rank for span in trace.spans} == {rank}
    assert all(span.end_s >= span.start_s for span in trace.spans)
    network = [span for span in trace.spans if span.lane == "communication"]
    assert all(span.size_bytes > 0 for span in network)
    assert all(
        span.size_bytes == 0 for span in trace.spans if span.lane != "communication"
    )
    assert {span.message for span in network} >= set(range(num_messages))
    # What comes after the gradients (which parameters were used) has a channel of its
    # own.
    channel_of = {m: m % NUM_CHANNELS for m in range(num_messages)}
    channels = [
        [s for s in network if channel_of.get(s.message, NUM_CHANNELS) == channel]
        for channel in range(NUM_CHANNELS + 1)
    ]
    # Small computations of several messages may overlap.
    computed = [
        [s for s in trace.spans if s.lane == "compute" and s.message == message]
        for message in range(num_messages)
    ]
    for lane in (*channels, *computed):
        assert all(before.end_s <= after.start_s for before, after in pairwise(lane))
    for step in trace.steps():
        # Uncompressed gradients are gathered and scaled within the backward pass.
        names = {
            (s.message, s.name) for s in trace.only(step=step).spans if s.message >= 0
        }
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


def num_open() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def many_times(rank: int, world: int) -> int:
    """How many files more are open after four attaches than after one.

    Threads in the background close some of them, so the last count is taken once they
    are few.
    """
    before = 0
    for _ in range(5):
        model = Net()
        handle = gw.attach(model, DENSE)
        train(model, adamw(model.parameters()), rank, range(1))
        handle.detach()
        torch.distributed.barrier()
        before = before or num_open()
    end_s = time.monotonic() + 60
    while num_open() >= before + 4 and time.monotonic() < end_s:
        time.sleep(0.05)
    return num_open() - before


def test_detach_gives_connections_back(two: Ranks) -> None:
    assert all(more < 4 for more in two.run(many_times))


def asked_of_the_model(rank: int, world: int) -> None:
    """Loops that were written for DDP accumulate; gradients are a whole batch's, on all
    ranks.
    """
    for compiled in (False, True):
        accumulate(rank, compiled)


def accumulate(rank: int, compiled: bool) -> None:
    net = Net()
    model: Any = torch.compile(net, backend="eager") if compiled else net
    handle = gw.attach(model, DENSE)
    loss_of(model, rank, 0).backward()
    loss_of(model, rank, 1).backward()
    # exchanged twice: to the same mean
    expected = [p.grad.clone() for p in net.parameters()]
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


@each(
    "exchange",
    map(exchange_for, (gw.compress.powersgd(), gw.compress.dgc())),
    ids=named,
)
def test_the_default_device_makes_no_difference(exchange: Exchange, two: Ranks) -> None:
    for one, other in two.run(elsewhere, exchange):
        assert one == other


def test_an_interpreter_that_ends_closes_without_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Since Python 3.12 it starts none; what is attached then is closed all the
    same.
    """

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    channels = [object(), object()]
    give_back(channels)
    assert channels == []
    assert isinstance(in_background(lambda: 1).exception(0), RuntimeError)


# ---- Rows of figures go to whatever takes them, every so many steps, and agree with st


Row = tuple[int, dict[str, float]]


class Writer:
    """What TensorBoard's SummaryWriter has of it."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []

    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int | None = None
    ) -> None:
        assert global_step is not None
        self.rows.append((tag, scalar_value, global_step))


class Run:
    """What a wandb run has of it, which is called too where it is a module."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(
        self, data: dict[str, Any], step: int | None = None, commit: bool = True
    ) -> None:
        assert step is None
        self.rows.append(data)


class Logger:
    """What one of Lightning's loggers has of it."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int | None]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((metrics, step))


class Gauges:
    """What OpenTelemetry's Meter has of it, or a Gauge of Prometheus: a gauge of each
    name.
    """

    def __init__(self, verb: str) -> None:
        self.values: dict[str, float] = {}
        self.num_made = 0
        setattr(self, verb, self._gauge)

    def _gauge(self, name: str) -> Any:
        self.num_made += 1
        return SimpleNamespace(set=lambda value: self.values.update({name: value}))


def logged(rank: int, world: int) -> tuple[list[Row], dict[str, Any], float]:
    net, rows = Net(), []
    handle = gw.attach(net, TOPK, options=SMALL)
    handle.log_to(lambda step, row: rows.append((step, row)), every=3)
    train(net, adamw(net.parameters()), rank, range(6))
    found = handle.stats()
    grads = [m.norms for m in handle._progress.messages if gw.residuals(m.state)]
    norm = math.hypot(*(norm for norms in grads for norm in norms))
    handle.log_to(None)
    train(net, adamw(net.parameters()), rank, range(6, 9))
    handle.detach()
    return rows, found, norm


@pytest.mark.multi
def test_rows_add_up_to_the_stats(two: Ranks) -> None:
    for rows, found, norm in two.run(logged):
        assert [step for step, _ in rows] == [3, 6]
        (_, early), (_, late) = rows
        for key in ("wire_bytes", "compute_s", "communication_s", "wait_s"):
            mean = (
                early[f"gradwire/{key}_per_step"] + late[f"gradwire/{key}_per_step"]
            ) / 2
            assert mean == pytest.approx(found[f"{key}_per_step"])
        for kind in ("asked", "local", "actual"):
            assert 0 < late[f"gradwire/density_{kind}"] < 1
        assert late["gradwire/residual_norm"] == pytest.approx(found["residual_norm"])
        assert late["gradwire/gradient_norm"] == pytest.approx(norm)
        assert late["gradwire/step_s"] > 0


@pytest.mark.multi
def test_what_is_left_to_ddp_has_rows_too(two: Ranks) -> None:
    for row in two.run(of_ddp):
        assert row["gradwire/wire_bytes_per_step"] > 0
        assert "gradwire/residual_norm" not in row
        assert "gradwire/density_local" not in row


def of_ddp(rank: int, world: int) -> dict[str, float]:
    model, rows = ddp(Net(), broadcast_buffers=False), []
    handle = gw.attach(model, "none")
    handle.log_to(lambda step, row: rows.append(row), every=2)
    train(model, adamw(model.parameters()), rank, range(2))
    handle.detach()
    return rows[0]  # type: ignore[no-any-return]


def alone() -> tuple[nn.Module, gw.Handle]:
    model = nn.Linear(4, 4)
    return model, gw.attach(model, gw.compress.topk(density=0.5))


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def test_all_that_take_rows_get_the_same_names() -> None:
    (model, handle), writer, run = alone(), Writer(), Run()
    handle.log_to(writer, every=1)
    step(model)
    handle.log_to(None)
    handle.log_to(run, every=1)
    step(model)
    logger, meter, gauge = Logger(), Gauges("create_gauge"), Gauges("labels")
    for to in logger, meter, gauge:
        handle.log_to(None)
        handle.log_to(to, every=1)
        for _ in range(2):
            step(model)
    handle.detach()
    names = {name for name, _, _ in writer.rows}
    assert {at for _, _, at in writer.rows} == {1}
    assert {*run.rows[0]} == {*names, "gradwire/step"}
    assert run.rows[0]["gradwire/step"] == 2
    assert [({*row}, at) for row, at in logger.rows] == [(names, 3), (names, 4)]
    assert {*meter.values} == {*gauge.values} == names
    assert meter.num_made == len(names)


def test_a_further_log_is_one_more_and_the_same_one_sets_its_steps_anew() -> None:
    model, handle = alone()
    rows: dict[str, list[int]] = {"first": [], "second": []}

    def first(at: int, row: dict[str, float]) -> None:
        rows["first"].append(at)

    def second(at: int, row: dict[str, float]) -> None:
        rows["second"].append(at)
        if at == 4:
            raise OSError("no space left on device")

    handle.log_to(first, every=2)
    handle.log_to(second, every=1)
    for _ in range(4):
        step(model)
    assert rows == {"first": [2, 4], "second": [1, 2, 3, 4]}
    handle.log_to(first, every=1)
    for _ in range(2):
        step(model)
    assert rows == {"first": [2, 4, 5, 6], "second": [1, 2, 3, 4]}, (
        "one that raised ends alone"
    )
    handle.log_to(None)
    step(model)
    assert rows["first"][-1] == 6
    handle.detach()


def test_what_takes_no_rows_is_refused() -> None:
    _, handle = alone()
    for to in (logging.getLogger("x"), 7, "runs", lambda step: None):
        with pytest.raises(
            InvalidSetting, match=r"must be a SummaryWriter, a wandb run, .* or a fun"
        ):
            handle.log_to(to)
    with pytest.raises(InvalidSetting, match="every must be"):
        handle.log_to(Run(), every=0)
    handle.detach()


def test_a_log_that_fails_ends_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, handle = alone()

    def full(step: int, row: dict[str, float]) -> None:
        raise OSError("no space left on device")

    handle.log_to(full, every=1)
    for _ in range(3):
        step(model)
        model.zero_grad()
    assert handle.step == 3
    handle.detach()
    assert [
        record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING"
    ] == [
        "logging ends, because step 1 could not be logged: OSError('no space "
        "left on device')"
    ]
