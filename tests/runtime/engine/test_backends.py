"""Device memory travels by the device's own process groups within a host, and between
if asked.

The device is `late`, with groups of its own: gloo on its memory stands for NCCL, and
ranks for hosts. What is staged is counted where it is staged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.contract.verbs import AllGather, AllReduce, AllToAll, Among
from gradwire.errors import InvalidSetting, RankFailed, RanksDiffer
from gradwire.runtime.device.devices import Accelerator
from gradwire.runtime.device.streams import SideStream, Staging, StreamEvent
from gradwire.runtime.engine import backends, engine
from gradwire.runtime.handle import Handle
from gradwire.runtime.transport.wire import carry_out
from tests.runtime.device import late
from tests.runtime.device.test_devices import (
    EVERY,
    FEW,
    QUICK,
    STEPS,
    Run,
    agrees,
    backward,
    layers,
    run,
)
from tests.runtime.given import keywords
from tests.runtime.meshes import mesh
from tests.runtime.ranks import Ranks
from tests.runtime.training import DENSE, ONEBIT, TOPK

pytestmark = pytest.mark.multi

ENDS = {Among.HOST: " among a host's ranks", Among.HOSTS: " among hosts"}


@contextmanager
def staged() -> Iterator[set[Among]]:
    """The ranks that verbs are among which are staged in the block."""
    found: set[Among] = set()
    real = Staging.out

    def out(self: Staging, message: int, verbs: Sequence[Any], *args: Any) -> Any:
        made = real(self, message, verbs, *args)
        found.update(verb.among for verb in verbs if made is not None)
        return made

    with mock.patch.object(Staging, "out", out):
        yield found


class Sent:
    """The bytes a step that verbs among some ranks have sent, as the trace counts
    them.
    """

    def __init__(self) -> None:
        self.by_end: dict[str, float] = {}

    def __call__(self, handle: Handle) -> None:
        spans = [one for one in handle.trace().spans if one.lane == "communication"]
        steps = len({one.step for one in spans})
        for end in ENDS.values():
            total = sum(one.size_bytes for one in spans if one.name.endswith(end))
            self.by_end[end] = total / steps


def directly(rank: int, exchange: Any, **how: Any) -> Run:
    return run(rank, exchange, "late", has_network=True, **how)


def on_two_levels(
    rank: int, world: int, exchanges: Sequence[Exchange]
) -> list[tuple[Any, ...]]:
    """What is staged of each exchange on two hosts, and what it sent."""
    found = []
    for exchange in exchanges:
        sent, host = Sent(), run(rank, exchange, "cpu", mesh=mesh())
        with staged() as among:
            device = run(
                rank,
                exchange,
                "late",
                sent,
                has_network=True,
                mesh=mesh(),
                backend="gloo",
            )
        agrees(device, host, exchange)
        assert (
            host.stats["backend"]["why"]
            == "on rank 0 gradients are encoded on the host"
        )
        found.append(
            (among, sent.by_end, device.stats, device.waits, device.num_pinned)
        )
    return found


@pytest.fixture(scope="module")
def late_four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def test_a_hosts_sums_stay_on_the_device_and_a_shares_payload_is_staged(
    late_four: Ranks,
) -> None:
    for rank in late_four.run(on_two_levels, [QUICK]):
        for among, sent, stats, waits, num_pinned in rank:
            assert among == {Among.HOSTS}, "only what goes to other hosts is staged"
            assert sent[ENDS[Among.HOST]] > 3.9 * sent[ENDS[Among.HOSTS]] > 0
            assert stats["to_host_bytes_per_step"] == sent[ENDS[Among.HOSTS]]
            assert stats["backend"]["within_hosts"] == "nccl"
            assert stats["backend"]["between_hosts"] == "gloo"
            assert waits == [], "the host waited for a stream"
            assert len(set(num_pinned)) == 1, "memory is pinned again"


@pytest.mark.slow
def test_every_exchange_on_two_levels_makes_the_hosts_bits(late_four: Ranks) -> None:
    for rank in late_four.run(on_two_levels, [DENSE, TOPK]):
        assert all(among <= {Among.HOSTS} for among, *_ in rank)


def between_hosts(
    rank: int, world: int, exchanges: Sequence[Exchange], num_steps: int
) -> None:
    steps = range(num_steps)
    for exchange in exchanges:
        host = run(rank, exchange, "cpu", steps=steps)
        device = directly(rank, exchange, backend="nccl", steps=steps)
        agrees(device, host, exchange)
        if exchange.declared.host_only:
            continue
        assert device.stats["backend"] == {
            "within_hosts": None,
            "between_hosts": "nccl",
            "why": "",
        }
        assert (
            device.stats["to_host_bytes_per_step"] == device.stats["pinned_bytes"] == 0
        )
        assert device.stats["wire_bytes_per_step"] == host.stats["wire_bytes_per_step"]


def test_nothing_is_staged_where_the_device_sends_to_other_hosts(
    late_two: Ranks,
) -> None:
    late_two.run(between_hosts, FEW, STEPS)


def way(exchange: Exchange) -> type:
    """Its collective, or its own class: what yields the verbs."""
    inner = getattr(exchange, "inner", exchange)
    return type(getattr(inner, "collective", inner))


@pytest.mark.slow
def test_every_way_of_verbs_by_the_device_makes_the_hosts_bits(late_two: Ranks) -> None:
    on_device = [one for one in reversed(EVERY) if not one.declared.host_only]
    late_two.run(between_hosts, [*{way(one): one for one in on_device}.values()], 2)


@contextmanager
def _at_once(self: SideStream, ready: StreamEvent) -> Iterator[None]:
    """A group's work that waits for no kernel, and that no kernel waits for."""
    with self.kind.use(self.wire):
        yield


def unordered(rank: int, world: int) -> None:
    assert not directly(rank, QUICK, backend="nccl").wrong
    with mock.patch.object(SideStream, "wired", _at_once):
        assert directly(rank, QUICK, backend="nccl").wrong, "nothing was found"


def test_a_wait_left_out_is_found(late_two: Ranks) -> None:
    late_two.run(unordered)


def losing(rank: int, world: int) -> tuple[int, ...]:
    """The ranks that a survivor names, long before the time-out of five minutes."""
    late.install().has_network = True
    model = layers("late")
    handle = gw.attach(
        model, ONEBIT, **keywords(compress_if=lambda name, param: True, backend="nccl")
    )
    backward(model, rank, 0)
    if rank == 1:
        os._exit(1)
    with pytest.raises(RankFailed) as raised:
        backward(model, rank, 1)
    handle.detach()
    return raised.value.ranks


def test_a_lost_rank_is_named_where_devices_send(doomed_two: Ranks) -> None:
    doomed_two.send(losing)
    assert doomed_two.survivors({1}) == [(1,)]


def by_link(rank: int, world: int) -> list[dict[str, Any]]:
    """The back ends where the device's link counts as no faster than gloo's, and as far
    faster.
    """
    found = []
    for faster in (1e15, 0.0):
        with mock.patch.object(backends, "FASTER", faster):
            found.append(directly(rank, QUICK).stats["backend"])
    return found


def test_auto_follows_the_measured_link(late_two: Ranks) -> None:
    one, other = late_two.run(by_link)
    assert one == other, "ranks measured other links"
    assert [by["between_hosts"] for by in one] == ["gloo", "nccl"]
    for by in one:
        assert all(1e5 < rate < 1e11 for rate in by["link_bytes_per_s"].values())
        assert [*by["link_bytes_per_s"]] == ["gloo", "nccl"]


REFUSED = [
    ("cpu", False, "on rank 0 gradients are encoded on the host"),
    ("late", False, "on rank 0 this torch has no NCCL for late:0"),
    ("late", True, "ranks 0 and 1 share a device"),
]


def reported(rank: int, world: int) -> tuple[list[str], dict[str, Any], str]:
    """What ranks hear that ask for NCCL in vain, that leave the choice, and that
    differ.
    """
    refused = []
    for device, is_shared, _ in REFUSED:
        noted = late.install()
        noted.has_network = noted.is_shared = is_shared
        # A rank that was still connecting would see a connection close, and say that
        # instead.
        with (
            mock.patch.object(
                engine, "open_channels", side_effect=AssertionError("it connects")
            ),
            pytest.raises(InvalidSetting) as raised,
        ):
            gw.attach(layers(device), ONEBIT, options=gw.Options(backend="nccl"))
        refused.append(str(raised.value))
    handle = gw.attach(layers("late"), ONEBIT)
    fallback = handle.stats()["backend"]
    handle.detach()
    with pytest.raises(RanksDiffer) as differ:
        gw.attach(
            layers("cpu"),
            ONEBIT,
            options=gw.Options(backend="gloo" if rank else "auto"),
        )
    return refused, fallback, str(differ.value)


def test_a_refusal_a_fallback_and_a_difference_are_told(late_two: Ranks) -> None:
    for refused, fallback, differ in late_two.run(reported):
        for text, (*_, why) in zip(refused, REFUSED, strict=True):
            assert text.startswith(
                f"backend must be 'auto' or 'gloo' where {why}, got 'nccl'; "
            )
        assert fallback["between_hosts"] == "gloo"
        assert fallback["why"] == "ranks 0 and 1 share a device"
        assert "setting backend is 'auto' against 'gloo'" in differ


def test_a_backend_that_is_none_is_refused() -> None:
    with pytest.raises(
        InvalidSetting, match="backend must be 'auto', 'gloo' or 'nccl', got 'mpi'"
    ):
        gw.attach(layers("cpu"), ONEBIT, options=gw.Options(backend="mpi"))


class AsNccl(ProcessGroupGloo):
    """Gloo by the arguments that NCCL's back end takes."""

    class Options:
        _timeout = timedelta(0)

    def __init__(self, store: Any, rank: int, world: int, options: Any) -> None:
        super().__init__(store, rank, world, options._timeout)
        assert options.global_ranks_in_group == [0]


def test_a_group_carries_out_the_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of NCCL's own back end alone the name stays untried without a GPU."""
    monkeypatch.setattr(
        torch._C._distributed_c10d, "ProcessGroupNCCL", AsNccl, raising=False
    )
    how = torch.device("cpu"), HashStore(), 0, 1, timedelta(seconds=30)
    group = Accelerator(torch.cuda).connect(*how)
    given_N, out_N = torch.arange(3.0), torch.zeros(3)
    makes: list[Callable[[], Any]] = [
        lambda: AllReduce(given_N),
        lambda: AllGather(out_N, given_N),
        lambda: AllToAll(out_N, given_N, (3,), (3,)),
    ]
    for make in makes:
        carry_out([make()], [group])
    assert torch.equal(out_N, torch.arange(3.0))
    group.shutdown()


def test_nccl_serves_cuda_alone() -> None:
    assert Accelerator(torch.cuda).network_name(torch.device("xpu:0")) is None
