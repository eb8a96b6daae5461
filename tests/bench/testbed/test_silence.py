"""A time-out bounds a peer's silence, and not the time that a long payload takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from gradwire.contract.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Communication,
    Recv,
    ReduceScatter,
    Send,
)
from gradwire.runtime.transport import direct, wire
from gradwire.runtime.transport.direct import HostChannel
from gradwire.runtime.transport.wire import carry_out
from gradwire_bench.testbed.hosts import Testbed, relayed_hosts
from gradwire_bench.testbed.ranks import run_ranks
from gradwire_bench.testbed.relay import RELAY, Client, RelayedStore, open_relay

LIMIT_S = 4.0
RATE = 40_000.0
NUMEL = int(3 * LIMIT_S * RATE / 4)
"""Elements that take three times the time-out on a relay's link."""


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (direct, wire):
        monkeypatch.setattr(module, "PIECE_BYTES", 4096)
    monkeypatch.setattr(direct, "TREE_BYTES", 4096)
    monkeypatch.setattr(direct, "AHEAD_BYTES", 8192)


def on_slow_links(work: Callable[[HostChannel], Any]) -> list[Any]:
    """What ``work`` returns on two ranks, a thread each, behind a relay."""
    store = HashStore()

    def run(rank: int) -> Any:
        relayed = RelayedStore(store, Client(rank), {})
        limit = timedelta(seconds=LIMIT_S)
        return work(HostChannel(relayed, rank, 2, limit))

    with ThreadPoolExecutor(2) as threads:
        return [one.result() for one in [threads.submit(run, r) for r in range(2)]]


def verbs(rank: int) -> dict[str, Communication]:
    """Long verbs of two ranks, each of as many bytes."""
    own = torch.full((NUMEL,), 1.0 + rank)
    both = own.repeat(2)
    sizes = (NUMEL, NUMEL)
    return {
        "send": Recv(0, own) if rank else Send(1, own),
        "broadcast": Broadcast(0, own),
        "all_reduce": AllReduce(own),
        "all_gather": AllGather(both, own),
        "all_to_all": AllToAll(both, both.clone(), sizes, sizes),
        "reduce_scatter": ReduceScatter(own, both),
    }


@pytest.mark.slow
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    "name",
    [
        "send",
        "all_reduce",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("broadcast", "all_gather", "all_to_all", "reduce_scatter")
        ),
    ],
)
def test_a_payload_may_take_longer_than_the_time_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(channel: HostChannel) -> float:
        begin_s = time.monotonic()
        carry_out([verbs(channel.rank())[name]], [channel], straight=True)
        return time.monotonic() - begin_s

    with open_relay(RATE, 0.01) as port:
        monkeypatch.setenv(RELAY, str(port))
        assert max(on_slow_links(work)) > 2 * LIMIT_S


@pytest.mark.slow
@pytest.mark.multi
def test_no_rank_is_lost_while_payloads_take_longer_than_the_time_out() -> None:
    """The first parameters and a step at 10 Mbit/s, under "shrink"."""
    rate_bytes_per_s = 1.25e6
    size_bytes = int(2.5 * LIMIT_S * rate_bytes_per_s)
    testbed = Testbed(hosts=2, rate_bytes_per_s=rate_bytes_per_s)
    with relayed_hosts(testbed) as hosts:
        ranks = run_ranks(
            hosts,
            "tests.bench.testbed.long_payload_rank",
            {"numel": size_bytes // 4, "timeout_s": LIMIT_S},
            report=lambda fraction, what: None,
            timeout_s=200.0,
        )
    for found in ranks:
        assert min(found["attached_s"], found["step_s"]) > 2 * LIMIT_S
        assert found["sent_bytes"] >= size_bytes
        assert (found["left"], found["world"]) == ([], 2)


@pytest.mark.slow
@pytest.mark.usefixtures("small_pieces")
def test_a_peer_that_falls_silent_in_a_payload_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = Event()

    def work(channel: HostChannel) -> None:
        if channel.rank():
            carry_out([Recv(0, torch.empty(16 * 1024))], [channel])
            assert ended.wait(100)
            return
        with pytest.raises(RuntimeError, match="Timed out"):
            carry_out([Send(1, torch.empty(NUMEL))], [channel])
        ended.set()

    with open_relay(RATE, 0.01) as port:
        monkeypatch.setenv(RELAY, str(port))
        on_slow_links(work)
