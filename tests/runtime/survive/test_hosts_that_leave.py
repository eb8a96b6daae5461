"""Hosts of several ranks: a host that has lost a rank leaves, and the others go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.errors import ExitCode
from tests.runtime.given import keywords
from tests.runtime.meshes import device_mesh
from tests.runtime.ranks import Ranks
from tests.runtime.training import (
    ONEBIT,
    SMALL_MB,
    TOPK,
    Net,
    ddp,
    digest,
    loss_of,
    momentum,
)

pytestmark = [pytest.mark.multi, pytest.mark.timeout(180)]
LIMIT = timedelta(seconds=60)
STEPS = 6
LAST = 3
"""The step in which a rank is lost."""
SHARES = gw.pair(gw.compress.none(), gw.collective.ring())


class Report(NamedTuple):
    """What a rank has seen, and its whole state before the step that was repeated."""

    bits: list[str]
    lost: list[tuple[tuple[int, ...], int]]
    left: list[tuple[int, ...]]
    world: int
    state: dict[str, Any]


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def attached(
    model: torch.nn.Module, exchange: Exchange, num_hosts: int, per_host: int
) -> gw.Handle:
    return gw.attach(
        model,
        exchange,
        mesh=device_mesh((num_hosts, per_host), ("hosts", "local")),
        **keywords(
            bucket_cap_mb=SMALL_MB, timeout=LIMIT, on_failure="shrink", check_every=2
        ),
    )


def loses_a_host(
    rank: int, world: int, exchange: Exchange, victim: int, is_ddp: bool
) -> Report | str:
    """Trains on hosts of two ranks; the victim dies in a backward pass."""
    net = Net()
    model = ddp(net, broadcast_buffers=False) if is_ddp else net
    handle = attached(model, exchange, world // 2, 2)
    optimizer = momentum(net.parameters())
    bits, lost, state = [], [], dict[str, Any]()
    for step in range(STEPS):
        if rank == victim and step == LAST:
            net.middle.weight.register_hook(die)
        while True:
            try:
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                break
            except gw.RanksLost as error:
                lost.append((error.ranks, step))
                parts = {"net": net, "optimizer": optimizer, "handle": handle}
                state = {
                    name: deepcopy(one.state_dict()) for name, one in parts.items()
                }
                assert all(param.grad is None for param in net.parameters())
            except gw.RankFailed as error:
                return f"{int(error.exit_code)} {error.ranks} {error}"
        optimizer.step()
        bits.append(digest(net))
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=handle.group)
    assert total.item() == handle.world_size
    left = [one["ranks"] for one in handle.stats()["left"]]
    handle.detach()
    return Report(bits, lost, left, int(total), state)


def goes_on_afresh(
    rank: int,
    world: int,
    exchange: Exchange,
    numbers: list[int],
    states: list[dict[str, Any]],
) -> list[str]:
    """Trains with the states that ranks had when they lost a host."""
    net = Net()
    handle = attached(net, exchange, world // 2, 2)
    optimizer = momentum(net.parameters())
    state = states[rank]
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    handle.load_state_dict(state["handle"])
    bits = []
    for step in range(LAST, STEPS):
        optimizer.zero_grad()
        loss_of(net, numbers[rank], step).backward()
        optimizer.step()
        bits.append(digest(net))
    handle.detach()
    return bits


def goes_on(
    ranks: Ranks, fresh: Ranks, exchange: Exchange, victim: int, is_ddp: bool = False
) -> None:
    """Fails unless the victim's host leaves and others have a fresh run's bits."""
    ranks.send(loses_a_host, exchange, victim, is_ddp)
    found = ranks.survivors({victim})
    host = victim // 2 * 2, victim // 2 * 2 + 1
    numbers = [rank for rank in range(ranks.world) if rank not in host]
    reports = [one for one in found if isinstance(one, Report)]
    (text,) = [one for one in found if isinstance(one, str)]
    assert text.startswith(f"{int(ExitCode.RANK_LOST)} ({victim},) ")
    assert "a host that has lost a rank leaves, and whole ones go on" in text
    assert len(reports) == len(numbers) == fresh.world
    for report in reports:
        assert report.lost == [(host, LAST)]
        assert report.left == [host]
        assert report.world == fresh.world
        assert report.bits == reports[0].bits
    states = [report.state for report in reports]
    again = fresh.run(goes_on_afresh, exchange, numbers, states)
    assert again == [reports[0].bits[LAST:]] * fresh.world


def test_a_lost_rank_takes_its_host_along(doomed: Ranks, two: Ranks) -> None:
    """The two ranks that are left have the bits of a fresh run of one host."""
    goes_on(doomed, two, TOPK, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "victim", "is_ddp"),
    [(ONEBIT, 2, False), (SHARES, 5, False), (TOPK, 3, True)],
    ids=["a host in the middle", "no state", "DDP"],
)
def test_two_hosts_go_on_without_a_third(
    ranks_of: Callable[[int], Ranks], exchange: Exchange, victim: int, is_ddp: bool
) -> None:
    goes_on(ranks_of(6), ranks_of(4), exchange, victim, is_ddp)
