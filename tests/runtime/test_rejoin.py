"""A new process comes into a run that goes on, and has the same bits from then on."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Timer
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.exchange.by_name import exchange_for
from gradwire.runtime.elastic.heal import Healing
from gradwire.runtime.elastic.rejoin import Newcomer
from gradwire.runtime.step.wire import root_store
from tests.runtime.given import keywords
from tests.runtime.ranks import Outcome, Ranks
from tests.runtime.training import DENSE, SMALL_MB, TOPK, Net, digest, loss_of, momentum

pytestmark = [pytest.mark.multi, pytest.mark.timeout(240)]
LIMIT = timedelta(seconds=60)
STEPS = 12
STALL_S = 4.5


@dataclass(frozen=True)
class Plan:
    """What happens before which step of the run."""

    dies: dict[int, int] = field(default_factory=dict)
    """The rank, as it was at attach, by step."""
    meets: dict[int, int] = field(default_factory=dict)
    """The newcomer that rank 0 waits for, by step; it comes in with the next one."""
    dies_meeting: int = -1
    """The rank that dies in the midst of a newcomer's admission."""
    adds_up: bool = False
    """Whether gradients are never dropped."""
    num_models: int = 1
    store: int = 0
    """The process that holds the store, to be stopped for ``STALL_S`` in the midst of the first
    admission, or of the step in which a rank dies."""


class Report(NamedTuple):
    """What a rank has seen, by step where it is of one."""

    bits: dict[int, str]
    """Those of parameters and of the optimizer's state."""
    worlds: dict[int, int]
    lost: list[tuple[int, ...]]
    joined: list[dict[str, Any]]
    total: float
    balance: Tensor
    """The sum over ranks of what is owed, and of all that was delivered, less all gradients."""


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stall(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    Timer(STALL_S, os.kill, (pid, signal.SIGCONT)).start()


def attached(net: Net, exchange: Any, **settings: Any) -> tuple[gw.Handle, torch.optim.Optimizer]:
    optimizer = momentum(net.parameters())
    given = {"optimizer": optimizer, "bucket_cap_mb": SMALL_MB, "check_every": 2, **settings}
    return gw.attach(
        net, exchange, **keywords(timeout=LIMIT, on_failure="shrink", **given)
    ), optimizer


def train_on(
    handle: gw.Handle, net: Net, optimizer: torch.optim.Optimizer, data: int, plan: Plan
) -> Report:
    """Trains from the handle's own step on."""
    bits, worlds, lost = {}, {}, []
    params = [*net.parameters()]
    delivered, own = torch.zeros(2, sum(p.numel() for p in params), dtype=torch.float64)
    for step in range(handle.step, STEPS):
        if plan.store and plan.dies.get(step) in (data, data + 1):
            stall(plan.store)  # by a rank that lives too, for its timer
        if plan.dies.get(step) == data:
            die()
        if step in plan.meets and handle.rank == 0:
            meet(handle, plan.meets[step])
            if plan.store and not handle.joined:
                Timer(0.5, stall, (plan.store,)).start()
        if plan.dies_meeting == data:
            handle._hooks.shrinking._admit = die  # type: ignore[union-attr]
        while True:
            try:
                if not plan.adds_up:
                    optimizer.zero_grad()
                gradients = torch.autograd.grad(loss_of(net, data, step), params)
                loss_of(net, data, step).backward()
                break
            except gw.RanksLost as error:
                lost.append(error.ranks)
        own += flat(gradients) / handle.world_size
        delivered += flat([p.grad for p in params])
        optimizer.step()
        states = [optimizer.state[p]["momentum_buffer"] for p in params]
        bits[step], worlds[step] = digest([*params, *states]), handle.world_size
    total = torch.ones(1)
    owed = handle.residuals()
    balance = -own
    for (name, _), part in zip(
        net.named_parameters(), balance.split([p.numel() for p in params]), strict=True
    ):
        if name in owed:
            part += owed[name].double() / handle.world_size
    state = handle.gather_state()
    assert len(state) == (0 if handle.rank else handle.world_size)
    handle.load_state_dict(handle.state_dict())
    if handle.joined:
        with pytest.raises(gw.InvalidSetting, match=r"save what gather_state\(\) returns"):
            handle.sharded_state()
        assert dist.get_world_size(handle.group) == handle.world_size
    if handle.group is not None:
        dist.all_reduce(total, group=handle.group)
        dist.all_reduce(balance, group=handle.group)
    joined = handle.stats()["joined"]
    handle.detach()
    return Report(bits, worlds, lost, joined, total.item(), balance + delivered)


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().double().view(-1) for tensor in tensors])


def meet(handle: gw.Handle, number: int) -> None:
    """Waits until rank 0 has seen that newcomer."""
    root_store().set("the run waits for a newcomer", str(number))
    end_s = time.monotonic() + LIMIT.total_seconds()
    while handle._hooks.shrinking._lookout.number != number:  # type: ignore[union-attr]
        assert time.monotonic() < end_s
        time.sleep(0.02)


def goes_on(rank: int, world: int, exchange: Exchange, plan: Plan) -> Report:
    net, others = Net(), [Net() for _ in range(1, plan.num_models)]
    handles = [attached(other, exchange)[0] for other in others]
    report = train_on(*_in_order(net, *attached(net, exchange)), rank, plan)
    for handle in handles:
        handle.detach()
    return report


def _in_order(net: Net, handle: gw.Handle, optimizer: torch.optim.Optimizer) -> Any:
    return handle, net, optimizer


def comes_in(
    rank: int, world: int, port: int, exchange: Exchange, number: int, how: str
) -> Report | str:
    store = dist.TCPStore("127.0.0.1", port, None, False, LIMIT)
    while store.get("the run waits for a newcomer") != str(number).encode():
        time.sleep(0.02)
    if how == "dies when it is offered a place":
        ask = Newcomer.ask
        Newcomer.ask = lambda *given: die(ask(*given))  # type: ignore[assignment, method-assign]
    if how == "dies while it is healed":
        Healing.take_over = die  # type: ignore[method-assign]
    if how == "is healed slowly":
        take_over = Healing.take_over
        Healing.take_over = lambda *given: (time.sleep(1.5), take_over(*given))[1]  # type: ignore[method-assign]
    net = Net(seed=7)  # other parameters than the run's
    if how == "has another model":
        net.last = torch.nn.Linear(29, 6)
    try:
        handle, optimizer = attached(net, exchange, rejoin=store)
    except (gw.RankFailed, gw.RanksDiffer) as error:
        return f"{type(error).__name__}: {error}"
    dies = {handle.step + 2: 10 + number} if how == "dies after two steps" else {}
    return train_on(handle, net, optimizer, 10 + number, Plan(dies=dies))


@pytest.fixture
def newcomers() -> Iterator[list[Ranks]]:
    """Processes outside of the run's group."""
    found = [Ranks(1), Ranks(1)]
    yield found
    for one in found:
        one.close()


def send(newcomer: Ranks, ranks: Ranks, exchange: Exchange, number: int, how: str = "") -> None:
    (port,) = ranks.run(_port)[:1]
    newcomer.send(comes_in, port, exchange, number, how)


def _port(rank: int, world: int) -> int:
    return int(root_store().port)


def answers(ranks: Ranks, *, without: tuple[int, ...] = ()) -> list[Any]:
    found: list[Outcome] = ranks.collect(100.0, without=without)
    kept = [one for rank, one in enumerate(found) if rank not in without]
    for one in kept:
        assert one.error is None, one.error
    return [one.value for one in kept]


def assert_alike(reports: list[Report]) -> None:
    """All ranks have the same bits in the steps that they share."""
    for one in reports:
        assert one.bits == {step: reports[0].bits[step] for step in one.bits}
        assert one.worlds == {step: reports[0].worlds[step] for step in one.bits}
        assert one.total == len(reports)


EXCHANGES = {
    "topk": TOPK,
    "none": DENSE,
    "powersgd": exchange_for(gw.compress.powersgd()),
    "randomk": exchange_for(gw.compress.randomk(density=0.3, seed=1)),
    "dgc": gw.deep_gradient_compression(warmup_steps=20, density=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXCHANGES)
def test_a_newcomer_takes_a_lost_ranks_place(
    doomed: Ranks, newcomers: list[Ranks], name: str
) -> None:
    exchange = EXCHANGES[name]
    send(newcomers[0], doomed, exchange, 1)
    doomed.send(goes_on, exchange, Plan(dies={2: 2}, meets={5: 1}))
    survivors = answers(doomed, without=(2,))
    (came,) = answers(newcomers[0])
    assert_alike([*survivors, came])
    assert [*came.bits] == [*range(6, STEPS)]
    assert [survivors[0].worlds[step] for step in (1, 2, 5, 6)] == [4, 3, 3, 4]
    for one in [*survivors, came]:
        (joined,) = one.joined
        assert (joined["rank"], joined["step"]) == (4, 6)
        assert 0 < joined["seconds"] < LIMIT.total_seconds()


@pytest.mark.slow
def test_what_was_owed_arrives_with_its_weight(doomed_two: Ranks, newcomers: list[Ranks]) -> None:
    """All gradients of all ranks are in a mean or still owed, though there are more ranks now."""
    send(newcomers[0], doomed_two, TOPK, 1)
    doomed_two.send(goes_on, TOPK, Plan(meets={4: 1}))
    found = [*answers(doomed_two), *answers(newcomers[0])]
    assert_alike(found)
    assert [one.lost for one in found] == [[], [], []]
    for one in found[:2]:  # which have seen all that was delivered
        assert one.balance.abs().max() < 1e-5
    assert found[0].worlds[4] == 2
    assert found[0].worlds[5] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["dies when it is offered a place", "dies while it is healed", "has another model"]
)
def test_who_does_not_come_in_leaves_the_others_as_they_were(
    doomed_two: Ranks, newcomers: list[Ranks], how: str
) -> None:
    """No step is repeated, and another newcomer comes in afterwards."""
    is_refused = how == "has another model"
    send(newcomers[0], doomed_two, TOPK, 1, how)
    send(newcomers[1], doomed_two, TOPK, 1 if is_refused else 2)
    meets = {7: 1} if is_refused else {3: 1, 7: 2}
    doomed_two.send(goes_on, TOPK, Plan(meets=meets))
    found = [*answers(doomed_two), *answers(newcomers[1])]
    assert_alike(found)
    assert [one.lost for one in found] == [[], [], []]
    assert [found[0].worlds[step] for step in (3, 4, 7, 8)] == [2, 2, 2, 3]
    if is_refused:
        (text,) = answers(newcomers[0])
        assert text.startswith("RanksDiffer: the run and this newcomer do not train the same thing")
        assert "last.weight [5, 29]" in text
        assert "against last.weight [6, 29]" in text


@pytest.mark.slow
def test_a_newcomer_may_be_lost_again_and_a_lone_rank_is_joined(
    doomed_two: Ranks, newcomers: list[Ranks]
) -> None:
    send(newcomers[0], doomed_two, TOPK, 1, "dies after two steps")
    send(newcomers[1], doomed_two, TOPK, 2)
    doomed_two.send(goes_on, TOPK, Plan(dies={2: 1}, meets={4: 1, 8: 2}))
    found = [*answers(doomed_two, without=(1,)), *answers(newcomers[1])]
    assert_alike(found)
    assert [*found[0].worlds.values()] == [2, 2, 1, 1, 1, 2, 2, 1, 1, 2, 2, 2]
    assert found[0].lost == [(1,), (2,)]
    assert [one["rank"] for one in found[0].joined] == [2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (Plan(meets={4: 1}, adds_up=True), "exchanged gradients add up"),
        (Plan(meets={4: 1}, num_models=2), "several models are attached"),
    ],
    ids=["gradients add up", "several models"],
)
def test_nobody_comes_in_who_could_not_have_the_same_bits(
    doomed_two: Ranks, newcomers: list[Ranks], plan: Plan, why: str
) -> None:
    send(newcomers[0], doomed_two, TOPK, 1)
    doomed_two.send(goes_on, TOPK, plan)
    found = answers(doomed_two)
    assert_alike(found)
    assert [one.lost for one in found] == [[], []]
    (text,) = answers(newcomers[0])
    assert text.startswith(f"RankFailed: this process could not join: InvalidSetting: {why}")


def goes_on_elsewhere(rank: int, world: int, port: int, plan: Plan) -> Report:
    """As ``goes_on``, where the store is none of the ranks', as under torchrun."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, None, False, LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return goes_on(rank, world, TOPK, plan)


def hold(rank: int, world: int) -> tuple[int, int]:
    """Holds a store from now on; returns its port, and the process."""
    held.append(dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, False))
    return held[0].port, os.getpid()


held: list[dist.TCPStore] = []


@pytest.fixture
def stores_host() -> Iterator[Ranks]:
    """A process that does nothing but hold a store."""
    host = Ranks(1)
    yield host
    host.abandon(0)
    host.close()


@pytest.mark.slow
@pytest.mark.parametrize("dies", [{}, {5: 2}], ids=["a newcomer comes", "a rank dies"])
def test_a_store_that_stalls_is_no_dead_rank(
    doomed: Ranks, newcomers: list[Ranks], stores_host: Ranks, dies: dict[int, int]
) -> None:
    """Nobody that lives is refused or left out, and a rank that died is named."""
    ((port, pid),) = stores_host.run(hold)
    if not dies:
        newcomers[0].send(comes_in, port, TOPK, 1, "is healed slowly")
    plan = Plan(dies=dies, meets={} if dies else {4: 1}, store=pid)
    doomed.send(goes_on_elsewhere, port, plan)
    found = answers(doomed, without=(2,) if dies else ())
    assert [one.lost for one in found] == [[(2,)] if dies else []] * len(found)
    if not dies:
        assert all(one.balance.abs().max() < 1e-5 for one in found)
        found += answers(newcomers[0])
    assert_alike(found)
    assert [found[0].worlds[step] for step in (4, 5)] == [4, 3 if dies else 5]


@pytest.mark.slow
def test_rank_0_may_be_lost_before(doomed: Ranks, newcomers: list[Ranks]) -> None:
    """The next rank looks out for newcomers then, and heals them."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, False)
    newcomers[0].send(comes_in, store.port, TOPK, 1, "")
    doomed.send(goes_on_elsewhere, store.port, Plan(dies={2: 0}, meets={5: 1}))
    found = [*answers(doomed, without=(0,)), *answers(newcomers[0])]
    assert_alike(found)
    assert [found[0].worlds[step] for step in (1, 2, 5, 6)] == [4, 3, 3, 4]


@pytest.mark.slow
def test_a_rank_that_is_lost_meanwhile_keeps_the_newcomer_out(
    doomed: Ranks, newcomers: list[Ranks]
) -> None:
    send(newcomers[0], doomed, TOPK, 1)
    doomed.send(goes_on, TOPK, Plan(meets={3: 1}, dies_meeting=2))
    found = answers(doomed, without=(2,))
    assert_alike(found)
    assert [one.lost for one in found] == [[(2,)]] * 3
    assert found[0].worlds[4] == 3
    (text,) = answers(newcomers[0])
    assert text.startswith("RankFailed: this process could not join: the run has lost ranks [2]")


def refused(rank: int, world: int) -> list[str]:
    found = []

    def note(**settings: Any) -> None:
        net = Net()
        given = {
            "optimizer": momentum(net.parameters()),
            "on_failure": "shrink",
            "rejoin": dist.HashStore(),
            "timeout": timedelta(seconds=0.2),
            **settings,
        }
        with pytest.raises((gw.InvalidSetting, gw.RankFailed)) as caught:
            gw.attach(net, "topk", **keywords(**given))
        found.append(str(caught.value))

    note(rejoin="tcp://10.0.0.1:29500")
    note(group=dist.group.WORLD)
    note(on_failure="end")
    note(optimizer=None)
    note()
    return found


def test_what_cannot_come_in_is_refused_by_name(newcomers: list[Ranks]) -> None:
    expected = [
        "write dist.TCPStore(host, port)",
        "leave out group=, shards= and mesh=",
        "beside on_failure='shrink' and an optimizer, got",
        "beside on_failure='shrink' and an optimizer, got",
        "no running job was found in this store",
    ]
    for text, part in zip(newcomers[0].run(refused)[0], expected, strict=True):
        assert part in text


def test_a_newcomer_takes_over_all_that_ranks_share() -> None:
    """The optimizer's steps and rates, the scaler's factor and buffers are those of the other."""

    def made(seed: int, rate: float) -> tuple[Net, torch.optim.Optimizer, torch.amp.GradScaler]:
        net, scaler = Net(seed), torch.amp.GradScaler("cpu", init_scale=rate)
        optimizer = torch.optim.AdamW(net.parameters(), lr=rate)
        for step in range(2):
            scaler.scale(loss_of(net, seed, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        return net, optimizer, scaler

    one, other = made(0, 0.5), made(1, 0.25)
    tensors = [[*net.parameters(), *net.buffers()] for net, _, _ in (one, other)]
    healing = [
        Healing(lambda kept=kept: kept, optimizer, scaler, LIMIT, "")  # type: ignore[misc]
        for kept, (_, optimizer, scaler) in zip(tensors, (one, other), strict=True)
    ]
    assert digest(tensors[0]) != digest(tensors[1])
    healing[1].take_over(io.BytesIO(healing[0].packed([]).numpy().tobytes()), [])
    assert digest(tensors[0]) == digest(tensors[1])
    assert other[2].state_dict() == one[2].state_dict()
    states = [optimizer.state_dict() for _, optimizer, _ in (one, other)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for place, state in states[0]["state"].items():
        assert digest(state.values()) == digest(states[1]["state"][place].values())
