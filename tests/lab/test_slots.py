"""A coordinator's slots end each transfer once, whatever fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradwire.contract.verbs import Send
from gradwire.exchange.sends import THREADS
from gradwire.planning.data.plan import Bulk
from gradwire_lab.exchange.slots import Slots

pytestmark = pytest.mark.smoke


class Channel:
    """A channel of rank 1 of 2, whose waits are all the same."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2

    def send(self, *_: Any) -> Channel:
        return self

    recv = send


def threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == THREADS}


def test_a_transfer_is_over_once_where_several_threads_fail() -> None:
    """The thread that reports fails, and so does the one that hears plans."""
    both = threading.Barrier(2)
    before = threads()
    overs: list[BaseException | None] = []

    def fail() -> None:
        both.wait()
        raise RuntimeError("the coordinator's rank is lost")

    slots = Slots(Bulk(rank=0), Channel(fail), Channel(fail))
    slots.offer(slots.launch(), Send(0, torch.ones(4)), overs.append)
    for thread in threads() - before:
        thread.join()
    assert [str(error) for error in overs] == ["the coordinator's rank is lost"]


def test_a_failure_elsewhere_ends_transfers_under_way() -> None:
    never = threading.Event()
    before = threads()
    overs: list[BaseException | None] = []

    def fail() -> None:
        never.wait()
        raise RuntimeError("the channel is closed")

    slots = Slots(Bulk(rank=0), Channel(fail), Channel(fail))
    slots.offer(slots.launch(), Send(0, torch.ones(4)), overs.append)
    failure = RuntimeError("a rank is lost")
    slots.stop(failure)
    assert overs == [failure]
    slots.stop(failure)
    assert overs == [failure]
    never.set()
    for thread in threads() - before:
        thread.join()
    assert overs == [failure]
