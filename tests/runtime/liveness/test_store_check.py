"""The check of the job's store: one that ranks do not share is named at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.runtime.liveness import store_check
from gradwire.runtime.liveness.store_check import StoreCheck
from gradwire.runtime.transport import wire
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks
from tests.runtime.training import Net, digest, loss_of

pytestmark = [pytest.mark.multi, pytest.mark.timeout(180)]
LIMIT = timedelta(seconds=60)


def have_own_store(rank: int, world: int, shared: dist.Store, own: dist.Store) -> None:
    """Gives this process a default group that works and has a store of its own.

    ``torchcomms.init_device_mesh`` leaves such a group.
    """
    dist.destroy_process_group()
    c10d: Any = dist.distributed_c10d
    # Another place for each group: old keys hold addresses that are closed.
    meeting = dist.PrefixStore(f"beside {type(own).__name__}", shared)
    gloo = dist.ProcessGroupGloo(meeting, rank, world, LIMIT)
    group = dist.ProcessGroup(own, rank, world)
    group._register_backend(
        torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo
    )
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._set_group_name("main")
    tables = c10d._world
    tables.pg_map[group] = ("gloo", own)
    tables.pg_names[group] = "main"
    tables.pg_backend_config[group] = "cpu:gloo"
    tables.pg_group_ranks[group] = {place: place for place in range(world)}
    tables.tags_to_pg.setdefault("ptd:main", []).append(group)
    tables.pg_to_tag[group] = "ptd:main"
    c10d._register_process_group("main", group)
    c10d._update_default_pg(group)


def attach_error() -> str:
    try:
        gw.attach(Net(), "none", **keywords(timeout=LIMIT))
    except gw.InvalidSetting as error:
        return str(error)
    return "nothing"


def attaches(rank: int, world: int, port: int) -> tuple[list[str], str]:
    """What attach says of two stores that others do not see, and the bits with one they
    share.
    """
    shared = dist.TCPStore("127.0.0.1", port, None, False, LIMIT)
    have_own_store(rank, world, shared, dist.HashStore())
    found = [attach_error()]
    have_own_store(
        rank, world, shared, dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, False)
    )
    found.append(attach_error())
    net = Net(rank)
    handle = gw.attach(net, "none", **keywords(timeout=LIMIT, store=shared))
    loss_of(net, rank, 0).backward()
    bits = digest(param.grad for param in net.parameters())
    handle.detach()
    return found, bits


def test_a_store_that_no_other_rank_sees_is_named_at_once(
    ranks_of: Callable[[int], Ranks],
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, False)
    found = ranks_of(2).run(attaches, store.port)
    for rank, ((by_kind, by_check), _) in enumerate(found):
        assert "got 'a HashStore, which no other process sees'" in by_kind
        assert f"rank {1 - rank} of 2 has met this rank" in by_check
        assert "this rank's TCPStore" in by_check
        for text in (by_kind, by_check):
            assert "failure=gw.FailurePolicy(store=dist.TCPStore(" in text
    assert found[0][1] == found[1][1]


class Met:
    """An all-reduce whose other ranks come when they are told to."""

    def __init__(self) -> None:
        self.others = threading.Event()
        self.waits = threading.Event()

    def wait(self) -> None:
        self.waits.set()
        self.others.wait(60)


def until(is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.005)


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Met:
    """A meeting of two ranks, of which this process is one."""
    found = Met()
    store = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, False)
    monkeypatch.setattr(wire, "_given", [store])
    monkeypatch.setattr(store_check, "CHECK_S", 0.0)
    monkeypatch.setattr(store_check, "_meeting", lambda group, timeout: found)
    monkeypatch.setattr(store_check.dist, "get_world_size", lambda group: 2)
    return found


def test_time_counts_from_the_meeting_on(met: Met) -> None:
    """A rank may come minutes after the others: its note cannot be there before."""
    check = StoreCheck("0-1/check", 0, None, LIMIT)
    assert met.waits.wait(60)
    check.refuse()
    met.others.set()
    until(lambda: check.absent)
    with pytest.raises(gw.InvalidSetting, match="rank 1 of 2 has met this rank"):
        check.refuse()


def test_who_shares_the_store_leaves_nothing_there(met: Met) -> None:
    checks = [StoreCheck("0-1/check", rank, None, LIMIT) for rank in range(2)]
    keys = [f"gradwire/0-1/check/note/{rank}" for rank in range(2)]
    until(lambda: wire.default_store().check(keys))
    met.others.set()
    until(
        lambda: not [one for one in wire.default_store().list_keys() if "check" in one]
    )
    for check in checks:
        check.refuse()


def test_a_broken_group_leaves_it_to_the_agreement(
    met: Met, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agreement in the store names the rank that does not come."""
    ended = threading.Event()

    def fail() -> None:
        ended.set()
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(met, "wait", fail)
    check = StoreCheck("0-1/check", 0, None, LIMIT)
    assert ended.wait(60)
    check.refuse()


def test_what_is_no_store_is_refused_by_name() -> None:
    with pytest.raises(gw.InvalidSetting, match=r"store must be a .* store or None"):
        gw.attach(Net(), "none", failure=gw.FailurePolicy(store="tcp://host"))  # type: ignore[arg-type]
