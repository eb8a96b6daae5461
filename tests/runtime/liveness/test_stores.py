"""The job's store: one that ranks do not share is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire as gw
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


def attach_error(limit: timedelta) -> str:
    try:
        gw.attach(Net(), "none", **keywords(timeout=limit))
    except (gw.InvalidSetting, gw.RankFailed) as error:
        return str(error)
    return "nothing"


def attaches(rank: int, world: int, port: int) -> tuple[list[str], str]:
    """What attach says of two stores that others do not see, and the bits with one they
    share.
    """
    shared = dist.TCPStore("127.0.0.1", port, None, False, LIMIT)
    have_own_store(rank, world, shared, dist.HashStore())
    found = [attach_error(LIMIT)]
    have_own_store(
        rank, world, shared, dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, False)
    )
    found.append(attach_error(timedelta(seconds=1)))
    net = Net(rank)
    handle = gw.attach(net, "none", **keywords(timeout=LIMIT, store=shared))
    loss_of(net, rank, 0).backward()
    bits = digest(param.grad for param in net.parameters())
    handle.detach()
    return found, bits


def test_a_store_that_no_other_rank_sees_is_named(
    ranks_of: Callable[[int], Ranks],
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, False)
    found = ranks_of(2).run(attaches, store.port)
    for rank, ((by_kind, by_absence), _) in enumerate(found):
        assert "got 'a HashStore, which no other process sees'" in by_kind
        assert "failure=gw.FailurePolicy(store=dist.TCPStore(" in by_kind
        assert f"rank {1 - rank} of 2 did not call it within 0:00:01" in by_absence
        assert "share one store, such as gw.FailurePolicy(store=)" in by_absence
    assert found[0][1] == found[1][1]


def test_what_is_no_store_is_refused_by_name() -> None:
    with pytest.raises(gw.InvalidSetting, match=r"store must be a .* store or None"):
        gw.attach(Net(), "none", failure=gw.FailurePolicy(store="tcp://host"))  # type: ignore[arg-type]
