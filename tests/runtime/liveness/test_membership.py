"""Ranks agree in the job's store, with all ranks in threads of this process."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from gradwire.errors import RankFailed, RanksDiffer
from gradwire.runtime.liveness import membership
from gradwire.runtime.liveness.membership import Membership
from gradwire.runtime.transport import wire

LIMIT = timedelta(seconds=20)


def test_a_rank_that_differs_waits_for_all_to_hear_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process may hold the store, in which the others have still to read why."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, False)
    monkeypatch.setattr(wire, "_given", [store])
    monkeypatch.setattr(membership, "_LINGER_S", LIMIT.total_seconds())
    name = f"{wire.REJOINED} that differ"
    lingers, order = threading.Event(), list[int]()
    place = wire.own_store(name)

    def life(rank: int) -> None:
        def decide(found: Any) -> NoReturn:
            if rank:
                assert lingers.wait(LIMIT.total_seconds())
                order.append(rank)
            raise RanksDiffer("ranks differ")

        try:
            Membership(name, rank, 2).agree(rank, decide, LIMIT)
        except RanksDiffer:
            order.append(rank)
        finally:
            lingers.set()  # also where rank 0 raises at once

    def waits() -> None:
        place.wait(["heard/0"], LIMIT)
        lingers.set()

    with ThreadPoolExecutor() as pool:
        ranks: list[Future[None]] = [pool.submit(life, rank) for rank in range(2)]
        waiting = pool.submit(waits)
        for rank in ranks:
            rank.result()
        assert order[0] == 1, "rank 0 raised before rank 1 had decided"
        waiting.result()


def test_a_meeting_of_many_ranks_ends_as_soon_after_its_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each question to a far store takes a round trip, and looks hold up no end."""
    monkeypatch.setattr(membership, "_LOOK_S", 0.0)
    monkeypatch.setattr(membership, "POLL_S", 0.0)
    world = 12
    num_looks = 0
    most = 0
    since = 0

    class Counting(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            nonlocal most, since, num_looks
            since += 1
            if len(keys) == world:
                most = max(most, since)
                since = 0
                num_looks += 1
                if num_looks == 3 * world:
                    for rank in range(1, world):
                        self.set(f"{membership.MEETING}/note/{rank}", f"{rank}")
            return bool(super().check(keys))

        def get(self, key: str) -> bytes:
            nonlocal since
            since += 1
            return bytes(super().get(key))

    store = Counting()
    monkeypatch.setattr(membership, "own_store", lambda name: store)
    who = Membership("many", 0, world)
    assert who.agree(0, len, LIMIT) == world
    assert most <= 4


@pytest.mark.timeout(60)
def test_only_a_store_that_is_connected_to_has_more_than_the_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store whose host has ended connects nobody; a far one may answer late."""
    go = threading.Event()
    monkeypatch.setattr(membership, "EXTRA_S", 3600.0)
    who = Membership("0-1", 0, 2, (0, 1))
    limit = timedelta(seconds=0.1)
    monkeypatch.setattr(membership, "own_store", lambda name: go.wait(600))
    with pytest.raises(RankFailed, match="gave no answer") as lost:
        who.ask(lambda store: "answer", limit)
    assert lost.value.ranks == (0,)
    monkeypatch.setattr(membership, "own_store", lambda name: "store")
    answering = threading.Timer(1.0, go.set)
    answering.start()
    assert who.ask(lambda store: go.wait(600) and store, limit) == "store"
