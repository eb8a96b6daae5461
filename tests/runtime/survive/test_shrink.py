"""Ranks go on without a lost one: in the same step on all, with the same bits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.contract.verbs import AllReduce, Among, Compute, Steps
from gradwire.exchange.by_name import exchange_for
from gradwire.runtime.engine.engine import Engine
from gradwire.runtime.liveness.membership import Membership, Run, join
from gradwire.runtime.state.table import is_residual
from gradwire.runtime.survive import shrink
from gradwire.runtime.survive.going_on import Survivors
from gradwire.runtime.survive.shrink import Counted, decided
from gradwire.runtime.transport.wire import REJOINED, default_store, own_store, start
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks
from tests.runtime.training import (
    DENSE,
    SMALL_MB,
    TOPK,
    Net,
    ddp,
    digest,
    loss_of,
    momentum,
)

pytestmark = [pytest.mark.multi, pytest.mark.timeout(180)]
WORLD = 4
LIMIT = timedelta(seconds=60)
VELOCITY = gw.with_momentum_correction(gw.compress.topk(density=0.1))
"""Velocity is no residual: a mean over fewer ranks delivers as much of it."""


class Report(NamedTuple):
    """What a survivor has seen."""

    bits: list[str]
    """Of the parameters after each step."""
    lost: list[tuple[tuple[int, ...], int, int]]
    """Of each loss: the ranks, its step, and the step of the loop that was repeated."""
    left: list[dict[str, Any]]
    world: int
    state_is_kept: bool
    total: float


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_confirming(handle: gw.Handle) -> None:
    """Dies when all ranks have all means, with nobody told."""
    store, name, others = default_store(), means_of(handle), handle.world_size - 1

    def steps(*_: Any) -> Any:
        while store.add(name, 0) < others:
            time.sleep(0.01)
        die()
        yield

    handle._synchroniser.report.confirmation = steps  # type: ignore[method-assign]


def means_of(handle: gw.Handle) -> str:
    """The key that counts the ranks which have all means of the step that comes."""
    return f"ranks with the means of step {handle.step}"


_begun: list[Any] = []


def tell_of_means(handle: gw.Handle, *, waits: bool) -> None:
    """Counts this rank when it has all means of the step that comes.

    Unless it ``waits`` for the others, it goes on at once, as a rank does that hears of
    all others before a victim dies.
    """
    report, routes = handle._synchroniser.report, handle._synchroniser.engine.routes
    confirmation, store, name = report.confirmation, default_store(), means_of(handle)

    def steps(*given: Any) -> Any:
        del report.confirmation  # of this one step
        store.add(name, 1)
        if waits:
            yield from confirmation(*given)
            return
        for verb in confirmation(*given):
            if not isinstance(verb, Compute):
                channel = routes.groups[Among.RANKS].channels[-1]
                _begun[:] = [verb, start(verb, channel, straight=True)]
                return
            verb.fn()

    report.confirmation = steps  # type: ignore[method-assign]


def kept_by_element(handle: gw.Handle) -> dict[tuple[str, str], torch.Tensor]:
    """The fields of the exchange's state with a value for each element, by parameter
    and path.
    """
    params = handle.state_dict()["params"].items()
    fields = {
        (name, path): tensor for name, own in params for path, tensor in own.items()
    }
    return {at: tensor for at, tensor in fields.items() if at[1].endswith("_N")}


def shrinking(
    rank: int,
    world: int,
    exchange: Exchange,
    accidents: dict[int, tuple[int, str]],
    num_steps: int,
    is_ddp: bool = False,
    limit: timedelta = LIMIT,
) -> Report | None:
    """Trains on; each accident is a victim in a step, and how it dies."""
    net = Net()
    model = ddp(net, broadcast_buffers=False) if is_ddp else net
    handle = gw.attach(
        model,
        exchange,
        **keywords(
            bucket_cap_mb=SMALL_MB, timeout=limit, on_failure="shrink", check_every=2
        ),
    )
    optimizer = momentum(net.parameters())
    bits, lost, kept = [], [], True
    for step in range(num_steps):
        victim, how = accidents.get(step, (-1, ""))
        if rank == victim and how == "in backward":
            net.middle.weight.register_hook(die)
        elif rank == victim and how == "connecting":
            handle._hooks.shrinking._connect = die  # type: ignore[union-attr]
        elif rank == victim and how.startswith("between steps"):
            die()
        elif how == "between steps, nobody looks":
            time.sleep(4.0)  # until all have heard of it
        elif rank == victim:
            die_confirming(handle)
        elif how == "confirming":
            tell_of_means(handle, waits=rank != 0)
        while True:
            before = kept_by_element(handle)
            try:
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                break
            except gw.RanksLost as error:
                lost.append((error.ranks, error.step, step))
                assert all(p.grad is None for p in net.parameters())
                ratio = handle.world_size / (handle.world_size + len(error.ranks))
                # else this rank had the step before whole
                if error.__cause__ is not None:
                    for at, tensor in kept_by_element(handle).items():
                        factor = ratio if is_residual(at[1]) else 1.0
                        kept &= torch.equal(tensor, before[at] * factor)
        optimizer.step()
        bits.append(digest(net))
    total = torch.ones(1)
    dist.all_reduce(total, group=handle.group)
    if handle.stats()["left"]:
        assert handle.stats()["backend"]["why"] == "a rank was lost, or came in"
    report = Report(
        bits, lost, handle.stats()["left"], handle.world_size, kept, total.item()
    )
    handle.detach()
    if is_ddp:  # by DDP itself, among those that are left
        optimizer.zero_grad()
        loss_of(model, rank, num_steps).backward()
        bits.append(digest([p.grad for p in net.parameters() if p.grad is not None]))
    return report


def test_a_ddp_model_loses_ranks_as_a_plain_one_does(doomed: Ranks) -> None:
    """In a backward pass, and where its step counts on those that are left."""
    doomed.send(shrinking, TOPK, {2: (2, "in backward"), 4: (3, "confirming")}, 7, True)
    for report in reports(doomed, {2, 3}):
        assert report.lost == [((2,), 2, 2), ((3,), 5, 5)]
        assert report.state_is_kept
        assert (report.world, report.total) == (2, 2.0)
        assert len(report.bits) == 8


def test_survivors_repeat_the_step_in_which_a_rank_was_lost(doomed: Ranks) -> None:
    doomed.send(shrinking, VELOCITY, {3: (2, "in backward")}, 6)
    for report in reports(doomed, {2}):
        assert report.lost == [((2,), 3, 3)]
        assert (report.world, report.total) == (3, 3.0)
        assert report.state_is_kept
        (left,) = report.left
        assert (left["ranks"], left["step"], left["norms_after_steps"]) == (
            (2,),
            3,
            (2,),
        )
        assert left["residual_norms"][0] > 0
        assert 0 < left["seconds"] < LIMIT.total_seconds()


def reports(ranks: Ranks, dead: set[int]) -> list[Report]:
    """The survivors' reports, once all have the same bits."""
    found: list[Report] = ranks.survivors(dead)
    assert all(one.bits == found[0].bits for one in found)
    return found


Loss = tuple[tuple[int, ...], int, int]
CASES: dict[str, tuple[Exchange, dict[int, tuple[int, str]], list[Loss]]] = {
    "who hears late does not undo a step that counted": (
        TOPK,
        {3: (2, "between steps, nobody looks")},
        [((2,), 3, 3)],
    ),
    # The second loss leaves rank 0 with a step that the others have not ended: it
    # counts.
    "ranks go on until one is left": (
        exchange_for(gw.compress.powersgd()),
        {2: (3, "between steps"), 4: (2, "confirming"), 6: (1, "in backward")},
        [((3,), 2, 2), ((2,), 5, 5), ((1,), 6, 6)],
    ),
    "an exchange without a state": (
        DENSE,
        {1: (1, "in backward"), 3: (3, "confirming")},
        [((1,), 1, 1), ((3,), 4, 4)],
    ),
}
"""The exchange, the victims by step, and the losses that survivors see."""


@pytest.mark.slow
def test_survivors_go_on_after_any_loss(
    ranks_of: Callable[[int], Ranks], subtests: pytest.Subtests
) -> None:
    """The cases go all at once, as they wait for more than they compute."""
    groups = [ranks_of(WORLD) for _ in CASES]
    for ranks, (exchange, accidents, _) in zip(groups, CASES.values(), strict=True):
        ranks.send(shrinking, exchange, accidents, 9)
    for ranks, (name, (_, accidents, lost)) in zip(groups, CASES.items(), strict=True):
        with subtests.test(name):
            found = reports(ranks, {victim for victim, _ in accidents.values()})
            for report in found:
                assert report.lost == lost
                assert report.state_is_kept
                assert (report.world, report.total) == (len(found), float(len(found)))
                assert [one["ranks"] for one in report.left] == [
                    ranks for ranks, *_ in lost
                ]


@pytest.mark.slow
def test_a_rank_that_is_lost_as_others_connect_anew_is_left_out(doomed: Ranks) -> None:
    """Rank 2 has agreed to go on without rank 3; the others wait for the time-out."""
    accidents = {1: (2, "connecting"), 3: (3, "in backward")}
    doomed.send(shrinking, TOPK, accidents, 5, False, LIMIT / 3)
    for report in reports(doomed, {2, 3}):
        assert report.lost == [((2, 3), 3, 3)]
        assert (report.world, report.total) == (2, 2.0)
        assert report.state_is_kept


def trains_two(rank: int, world: int, is_one_pass: bool) -> tuple[list[str], int]:
    """Trains two models; rank 2 dies while step 3 of the first one ends.

    Rank 0 is then in the second model's step, and the others are still in the first
    one's. Returns the bits after each step, and the number of times that the loss was
    raised.
    """
    nets, num_lost, step = [Net(seed) for seed in range(2)], 0, 0
    given = keywords(bucket_cap_mb=SMALL_MB, timeout=LIMIT / 3, on_failure="shrink")
    handles = [gw.attach(net, VELOCITY, **given) for net in nets]
    optimizers = [momentum(net.parameters()) for net in nets]
    bits: list[str] = []
    while step < 6:
        if step == 3 and not num_lost:
            if rank == 2:
                die_confirming(handles[0])
            else:
                tell_of_means(handles[0], waits=rank != 0)
        try:
            for one in optimizers:
                one.zero_grad()
            losses = [loss_of(net, rank, step) for net in nets]
            for loss in [sum(losses)] if is_one_pass else losses:
                loss.backward()
        except gw.RanksLost as error:
            num_lost += error.ranks == (2,)
            continue
        for one in optimizers:
            one.step()
        step += 1
        bits.append("".join(map(digest, nets)))
    for handle in handles:
        assert handle.world_size == world - 1
        handle.detach()
    return bits, num_lost


@pytest.mark.parametrize(
    "is_one_pass",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["two passes", "one pass"],
)
def test_two_models_lose_a_rank_together(doomed: Ranks, is_one_pass: bool) -> None:
    doomed.send(trains_two, is_one_pass)
    found = doomed.survivors({2})
    assert found == [(found[0][0], 1)] * 3


def trains_in_teams(rank: int, world: int) -> str:
    net = Net()
    exchange = gw.compress.spardl(density=0.3, teams=2)
    handle = gw.attach(net, exchange, **keywords(timeout=LIMIT, on_failure="shrink"))
    loss_of(net, rank, 0).backward()
    if rank == 2:
        net.middle.weight.register_hook(die)
    try:
        loss_of(net, rank, 1).backward()
    except gw.RankFailed as error:
        handle.detach()
        return f"{error.ranks} {error}"
    return ""


def test_survivors_that_the_exchange_refuses_end_alike(doomed: Ranks) -> None:
    doomed.send(trains_in_teams)
    said = "spardl teams must be one of 1, 3, which divide 3 ranks evenly, got 2"
    for text in doomed.survivors({2}):
        assert text.startswith("(2,) ")
        assert f"; the others cannot go on: InvalidSetting: {said}" in text


def shown(rank: int, world: int) -> list[bytes]:
    """The models that a newcomer finds while two are attached, and when the first one
    has left.
    """
    handles, found, store = [], [], own_store(REJOINED)
    for width in (2, 3):
        net = torch.nn.Linear(width, 1)
        handles.append(
            gw.attach(net, "topk", **keywords(timeout=LIMIT, on_failure="shrink"))
        )
        net(torch.ones(1, width)).sum().backward()
    for handle in handles:
        net(torch.ones(1, 3)).sum().backward()
        store.wait(["run"])
        found.append(store.get("run"))
        handle.detach()
    return found


def test_newcomers_find_the_model_that_is_left(one: Ranks) -> None:
    first, second = one.run(shown)[0]
    assert b"[1, 2]" in first
    assert b"[1, 3]" in second


def ends(rank: int, world: int) -> str:
    net = Net()
    gw.attach(
        net, "topk", **keywords(timeout=timedelta(seconds=20), on_failure="shrink")
    )
    dist.barrier()
    if rank == 0:
        die()
    try:
        for step in range(3):
            loss_of(net, rank, step).backward()
    except gw.RankFailed as error:
        return f"{type(error).__name__} {error.ranks}"
    return "nothing"


@pytest.mark.slow
def test_the_loss_of_the_stores_host_ends_the_run(doomed: Ranks) -> None:
    doomed.send(ends)
    assert doomed.survivors({0}) == ["RankFailed (0,)"] * 3


def closes_alone(rank: int, world: int) -> float:
    """Seconds that rank 0 takes to close while the other keeps a connection that it
    waits on.
    """
    engine = Engine(
        join(None), num_channels=1, timeout=LIMIT, on_span=lambda span: None
    )

    def steps() -> Steps[None]:
        yield AllReduce(torch.zeros(1000))

    dist.barrier()
    seconds = 0.0
    if rank == 0:
        engine.launch(0, "nobody answers", steps())
        engine.lose((1,), 0, "rank 1 is lost", "it was told so")
        start_s = time.monotonic()
        engine.close()
        engine.close()
        seconds = time.monotonic() - start_s
    dist.barrier()
    engine.close()
    return seconds


@pytest.mark.slow
def test_a_closed_engine_leaves_what_nobody_can_end(two: Ranks) -> None:
    """gloo has no way to end a verb, and waits for it as a group is closed."""
    assert two.run(closes_alone)[0] < LIMIT.total_seconds() / 4


def test_a_step_counts_only_where_all_survivors_have_it() -> None:
    assert decided([Counted(5, 6, True), Counted(6, 6)]) == (6, False)
    assert decided([Counted(5, 6, True), Counted(5, 5)]) == (5, True)
    assert decided([Counted(5, 5), Counted(5, 5)]) == (5, False)
    assert decided([Counted(7, 7), Counted(5, 6)]) is None


def test_another_policy_is_refused_by_name() -> None:
    with pytest.raises(gw.InvalidSetting, match="'end' or 'shrink'"):
        gw.attach(Net(), "topk", failure=gw.FailurePolicy(on_failure="go on"))


# ---- Several models ------------------------------------------------------------------


class Streams:
    """The streams of a step that keeps nobody waiting."""

    def catch_up(self) -> None: ...


class Undone:
    """A synchroniser whose step is undone by noting it."""

    def __init__(self, world: int) -> None:
        who = Membership("0-1-2", 0, world)
        self.engine = SimpleNamespace(rank=0, world=world, who=who, everyone=who)
        self.engine.close = lambda: None
        self.engine.interrupt = lambda error: None
        self.engine.break_off = lambda alarm, how, in_step: None
        self.engine.failure = None
        self.streams, self.num_undone = Streams(), 0
        self.report = SimpleNamespace(
            records=[SimpleNamespace(norm=0.0, num_steps=4)] * world
        )

    def undo(self) -> None:
        self.num_undone += 1

    open = is_whole = False


def survival(params: list[torch.nn.Parameter]) -> Any:
    """The survival of a model that has these parameters, before it has connected
    anew.
    """
    one: Any = object.__new__(shrink.Shrinking)
    named = {str(place): param for place, param in enumerate(params)}
    one._progress = SimpleNamespace(
        synchroniser=Undone(3), messages=[], step=4, params=named
    )
    one._run, one._undo, one._connect = Run("", None), ExitStack(), None
    one._name, one._due = "0-1-2/1", None
    one._undoes = one._is_torn = False
    one.on_drop = lambda: None
    one._move = lambda *_: None
    return one


@pytest.mark.parametrize("undoes", [True, False])
def test_gradients_of_a_step_that_does_not_count_are_dropped(
    undoes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each model with an open step: some are means already, and a loop may go on to
    add.
    """
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(2)
    one = survival(params)
    everyone = one._engine.everyone.going_on([0, 1])
    left = SimpleNamespace(everyone=everyone, close=lambda: None)
    values = [Counted(4, 4, undoes), Counted(4, 4)]
    successors = Survivors(left, None, values)  # type: ignore[arg-type]
    monkeypatch.setattr(shrink, "survivors_of", lambda *given: successors)
    one._progress.synchroniser.open = undoes
    one._lose(gw.RankFailed("rank 2 is lost", ranks=(2,), step=4))
    assert one._progress.synchroniser.num_undone == undoes
    assert all((param.grad is None) == undoes for param in params)


def test_models_of_other_ranks_do_not_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models that have lost a rank do, in the order of their names."""
    names = {
        "0-1-2/2": [0, 1, 2],
        "0-1-2/1": [0, 1, 2],
        "0-3/1": [0, 1],
        "0-1-2-3/1": [0, 1, 2, 3],
    }
    models, lost = set[Any](), list[str]()
    for name, ranks in names.items():
        one = survival([])
        one._name = name
        one._engine.everyone = Membership(name, 0, len(ranks), tuple(ranks))
        one._lose = lambda failure, name=name: lost.append(name)
        one._raise_due = lambda failure: None
        one._due = gw.RanksLost("rank 2 is lost", ranks=(2,), step=4)
        models.add(one)
    monkeypatch.setattr(shrink, "_shrinking", models)
    first = next(one for one in models if one._name == "0-1-2/2")
    first.failed(gw.RankFailed("rank 2 is lost", ranks=(2,), step=4))
    assert lost == ["0-1-2-3/1", "0-1-2/1", "0-1-2/2"]
