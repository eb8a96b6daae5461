"""A new process comes into a run that goes on, and has the same bits from then on.

All runs train at once, as they wait for more than they compute.
"""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Timer
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.exchange.by_name import exchange_for
from gradwire.runtime.survive.rejoin import Healing, Newcomer
from gradwire.runtime.transport.wire import root_store
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks
from tests.runtime.training import SMALL_MB, TOPK, Net, digest, loss_of, momentum

pytestmark = [pytest.mark.multi, pytest.mark.timeout(240)]
LIMIT = timedelta(seconds=60)
STEPS = 12
STALL_S = 2.5


@dataclass(frozen=True)
class Plan:
    """What happens before which step of the run."""

    dies: dict[int, int] = field(default_factory=dict)
    """The rank, as it was at attach, by step."""
    meets: dict[int, int] = field(default_factory=dict)
    """The newcomer that rank 0 waits for, by step; it comes in with the next one,
    before which rank 0 can see no other.
    """
    dies_meeting: int = -1
    """The rank that dies in the midst of a newcomer's admission."""
    adds_up: int = -1
    """The step before which gradients are not dropped."""
    has_second: bool = False
    """Whether a second model is attached."""
    stalls: bool = False
    """Whether the store's process is stopped for ``STALL_S`` in the midst of the first
    admission, or of the step in which a rank dies.
    """


class Report(NamedTuple):
    """What a rank has seen, by step where it is of one."""

    bits: dict[int, str]
    """Those of parameters and of the optimizer's state."""
    worlds: dict[int, int]
    lost: list[tuple[int, ...]]
    joined: list[dict[str, Any]]
    total: float
    balance: Tensor
    """The sum over ranks of what is owed, and of all that was delivered, less all
    gradients.
    """


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stall(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    Timer(STALL_S, os.kill, (pid, signal.SIGCONT)).start()


def attached(
    net: Net, exchange: Any, **settings: Any
) -> tuple[gw.Handle, torch.optim.Optimizer]:
    optimizer = momentum(net.parameters())
    given = {
        "optimizer": optimizer,
        "bucket_cap_mb": SMALL_MB,
        "check_every": 2,
        **settings,
    }
    return gw.attach(
        net, exchange, **keywords(timeout=LIMIT, on_failure="shrink", **given)
    ), optimizer


def train_on(
    net: Net, exchange: Exchange, data: int, plan: Plan, host: int = 0, **settings: Any
) -> Report:
    """Trains from the handle's own step on; ``host`` is the process of the store."""
    second = attached(Net(), exchange)[0] if plan.has_second else None
    handle, optimizer = attached(net, exchange, **settings)
    bits, worlds, lost = {}, {}, []
    params = [*net.parameters()]
    delivered, own = torch.zeros(2, sum(p.numel() for p in params), dtype=torch.float64)
    for step in range(handle.step, STEPS):
        if plan.stalls and plan.dies.get(step) in (data, data + 1):
            stall(host)  # by a rank that lives too, for its timer
        if plan.dies.get(step) == data:
            die()
        if step in plan.meets and handle.rank == 0:
            meet(handle, plan.meets[step])
            if plan.stalls:
                Timer(0.5, stall, (host,)).start()
        if plan.dies_meeting == data:
            handle._hooks.shrinking._admit = die  # type: ignore[union-attr]
        while True:
            try:
                if step != plan.adds_up:
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
    if handle._run.joined:
        assert dist.get_world_size(handle.group) == handle.world_size
        refuse_unknown_ranks(handle)
    if handle.group is not None:
        dist.all_reduce(total, group=handle.group)
        dist.all_reduce(balance, group=handle.group)
    joined = handle.stats()["joined"]
    handle.detach()
    if second is not None:
        second.detach()
    return Report(bits, worlds, lost, joined, total.item(), balance + delivered)


def refuse_unknown_ranks(handle: gw.Handle) -> None:
    """Fails where torch does not know the ranks of a group that somebody has joined."""
    group = handle.group
    ranks = dist.get_process_group_ranks(group)
    assert ranks.index(dist.get_rank()) == dist.get_rank(group) == handle.rank
    assert len(ranks) == handle.world_size
    mesh = DeviceMesh.from_group(group, "cpu")
    assert mesh.mesh.tolist() == ranks
    assert mesh.get_local_rank() == handle.rank
    state: Any = handle.sharded_state()
    for fields in state["params"].values():
        for rows in fields.values():
            assert rows.shape[0] == handle.world_size
            assert rows.to_local().shape[0] == 1
            assert rows.full_tensor().shape == rows.shape
    handle.load_state_dict(state)


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().double().view(-1) for tensor in tensors])


def meet(handle: gw.Handle, number: int) -> None:
    """Waits until rank 0 has seen that newcomer."""
    root_store().set("the run waits for a newcomer", str(number))
    end_s = time.monotonic() + LIMIT.total_seconds()
    while handle._hooks.shrinking._lookout.number != number:  # type: ignore[union-attr]
        assert time.monotonic() < end_s
        time.sleep(0.02)


def goes_on(
    rank: int, world: int, port: int, host: int, exchange: Exchange, plan: Plan
) -> Report:
    """The store is none of the ranks', as under torchrun."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, None, False, LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return train_on(Net(), exchange, rank, plan, host)


def comes_in(
    rank: int, world: int, port: int, exchange: Exchange, number: int, how: str
) -> Report | str:
    dist.destroy_process_group()
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
        Healing.take_over = lambda *given: (time.sleep(1.0), take_over(*given))[1]  # type: ignore[method-assign]
    dies = {6: 10 + number} if how == "dies in step 6" else {}
    try:  # with other parameters than the run's
        return train_on(
            Net(seed=7), exchange, 10 + number, Plan(dies=dies), rejoin=store
        )
    except gw.RankFailed as error:
        return f"{type(error).__name__}: {error}"


def hold(rank: int, world: int) -> tuple[int, int]:
    """Holds a store from now on; returns its port, and the process."""
    held.append(dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, False))
    return held[-1].port, os.getpid()


held: list[dist.TCPStore] = []


@dataclass(frozen=True)
class Case:
    """A run with newcomers, and what becomes of it.

    ``worlds`` are the numbers of ranks in each step, and ``refused`` begins the error
    of a newcomer that stays out and lives.
    """

    world: int
    plan: Plan
    newcomers: tuple[str, ...]
    worlds: list[int]
    lost: list[tuple[int, ...]] = field(default_factory=list)
    joined: list[tuple[int, int]] = field(default_factory=list)
    refused: str = ""
    exchange: Exchange = TOPK


STAYS_OUT = "RankFailed: this process could not join: "
CASES = {
    "a newcomer comes after rank 0 was lost": Case(
        3,
        Plan(dies={2: 0}, meets={5: 1}),
        ("",),
        [3] * 2 + [2] * 4 + [3] * 6,
        lost=[(0,)],
        joined=[(3, 6)],
        exchange=gw.deep_gradient_compression(warmup_steps=20, density=0.1),
    ),
    "a lone rank is joined, and the newcomer is lost again": Case(
        2,
        Plan(dies={2: 1}, meets={4: 1, 8: 2}),
        ("dies in step 6", ""),
        [2, 2, 1, 1, 1, 2, 1, 1, 1, 2, 2, 2],
        lost=[(1,), (2,)],
        joined=[(2, 5), (3, 9)],
        exchange=exchange_for(gw.compress.powersgd()),
    ),
    "who does not come in leaves the others as they were": Case(
        2,
        Plan(meets={1: 1, 3: 2, 6: 3, 9: 4}, adds_up=7),
        ("dies when it is offered a place", "dies while it is healed", "", ""),
        [2] * 10 + [3] * 2,
        joined=[(2, 10)],
        refused=STAYS_OUT + "InvalidSetting: exchanged gradients add up",
    ),
    "nobody joins a run of several models": Case(
        2,
        Plan(meets={4: 1}, has_second=True),
        ("",),
        [2] * 12,
        refused=STAYS_OUT + "InvalidSetting: several models are attached",
    ),
    "a rank that is lost meanwhile keeps the newcomer out": Case(
        3,
        Plan(meets={3: 1}, dies_meeting=2),
        ("",),
        [3] * 4 + [2] * 8,
        lost=[(2,)],
        refused=STAYS_OUT + "the run has lost ranks [2]",
    ),
    "a store that stalls while a newcomer comes": Case(
        3,
        Plan(meets={4: 1}, stalls=True),
        ("is healed slowly",),
        [3] * 5 + [4] * 7,
        joined=[(3, 5)],
    ),
    "a store that stalls while a rank dies": Case(
        3, Plan(dies={5: 2}, stalls=True), (), [3] * 5 + [2] * 7, lost=[(2,)]
    ),
}


class Run:
    """The processes of a case: ranks, newcomers, and one that holds the store if that
    stalls.
    """

    def __init__(self, case: Case, ranks_of: Callable[[int], Ranks]) -> None:
        self.case, self.ranks, self.host = case, ranks_of(case.world), ranks_of(1)
        self.newcomers = [ranks_of(1) for _ in case.newcomers]
        ((port, pid),) = self.host.run(hold) if case.plan.stalls else [hold(0, 1)]
        for place, (newcomer, how) in enumerate(
            zip(self.newcomers, case.newcomers, strict=True)
        ):
            newcomer.send(comes_in, port, case.exchange, place + 1, how)
        self.ranks.send(goes_on, port, pid, case.exchange, case.plan)

    def reports(self) -> tuple[list[Report], list[Report | str]]:
        """What survivors, and newcomers that live, have seen."""
        dead = {*self.case.plan.dies.values(), self.case.plan.dies_meeting}
        own = self.ranks.survivors(dead & {*range(self.case.world)})
        pairs = zip(self.newcomers, self.case.newcomers, strict=True)
        return own, [
            a for one, how in pairs if "dies" not in how for a in one.survivors(())
        ]


@pytest.mark.slow
def test_newcomers_have_all_bits_or_stay_out(
    ranks_of: Callable[[int], Ranks], subtests: pytest.Subtests
) -> None:
    """No step is repeated but the ones in which a rank is lost."""
    runs = {name: Run(case, ranks_of) for name, case in CASES.items()}
    for name, run in runs.items():
        with subtests.test(name):
            case, (survivors, others) = run.case, run.reports()
            refused = [text for text in others if isinstance(text, str)]
            assert len(refused) == bool(case.refused)
            assert all(text.startswith(case.refused) for text in refused)
            assert [*survivors[0].worlds.values()] == case.worlds
            for one in survivors:
                assert one.lost == case.lost
                assert [(at["rank"], at["step"]) for at in one.joined] == case.joined
                assert all(
                    0 < at["seconds"] < LIMIT.total_seconds() for at in one.joined
                )
                if case.exchange is TOPK and not case.lost and not case.refused:
                    assert one.balance.abs().max() < 1e-5
            came = [one for one in others if isinstance(one, Report)]
            for one in came:
                assert [*one.bits] == [*range(case.joined[-1][1], STEPS)]
            for one in (*survivors, *came):
                assert one.bits == {step: survivors[0].bits[step] for step in one.bits}
                assert one.worlds == {
                    step: survivors[0].worlds[step] for step in one.bits
                }
                assert one.total == case.worlds[-1]
    held.clear()


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
    note()
    dist.destroy_process_group()
    note(group="a group")
    note(on_failure="end")
    note(optimizer=None)
    note()
    return found


def test_what_cannot_come_in_is_refused_by_name(
    ranks_of: Callable[[int], Ranks],
) -> None:
    expected = [
        "write dist.TCPStore(host, port)",
        "leave out group=, shards= and mesh=",
        "leave out group=, shards= and mesh=",
        "beside on_failure='shrink' and an optimizer, got",
        "beside on_failure='shrink' and an optimizer, got",
        "no running job was found in this store",
    ]
    for text, part in zip(ranks_of(1).run(refused)[0], expected, strict=True):
        assert part in text


def test_a_newcomer_takes_over_all_that_ranks_share() -> None:
    """The optimizer's steps and rates, the scaler's factor and buffers are those of the
    other.
    """

    def made(
        seed: int, rate: float
    ) -> tuple[Net, torch.optim.Optimizer, torch.amp.GradScaler]:
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
