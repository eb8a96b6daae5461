"""The local driver: what it carries out, what it refuses, and how it interleaves
ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.contract.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Among,
    Broadcast,
    Compute,
    Recv,
    ReduceScatter,
    Send,
    Steps,
)
from gradwire.errors import Deadlock, InvalidSetting
from gradwire.exchange.local import drive
from tests.each import each


def values(rank: int, numel: int = 4) -> Tensor:
    return torch.arange(numel, dtype=torch.float32) + 10 * rank


def test_ranks_that_both_send_first_are_named() -> None:
    def steps(rank: int) -> Steps[None]:
        yield Send(1 - rank, values(rank))
        yield Recv(1 - rank, torch.empty(4))

    with pytest.raises(Deadlock) as caught:
        drive([steps(0), steps(1)])
    message = str(caught.value)
    assert "rank 0 waits in Send(4 elements to rank 1)" in message
    assert "rank 1 waits in Send(4 elements to rank 0)" in message


@each("together", [0, 1], ids=["sent at once", "received at once"])
def test_no_message_overtakes_another(together: int) -> None:
    """In the order that a rank asks for: the first that is sent is the first that is
    received.
    """

    def steps(rank: int) -> Steps[list[float]]:
        if rank:
            parts = [torch.empty(1) for _ in range(3)]
            verbs: list[Send | Recv] = [Recv(0, part) for part in parts]
        else:
            parts = [torch.full((1,), float(number)) for number in range(3)]
            verbs = [Send(1, part) for part in parts]
        if rank == together:
            yield tuple(verbs)
        else:
            yield from verbs
        return [float(part) for part in parts]

    for seed in range(3):
        assert drive([steps(0), steps(1)], seed=seed).results == [[0.0, 1.0, 2.0]] * 2


def test_a_rank_that_ends_early_is_named() -> None:
    def steps(rank: int) -> Steps[None]:
        yield AllReduce(values(rank))
        if rank != 2:
            yield AllReduce(values(rank, 7))

    with pytest.raises(Deadlock) as caught:
        drive([steps(rank) for rank in range(3)])
    message = str(caught.value)
    assert "rank 0 waits in AllReduce(7 elements)" in message
    assert "rank 1 waits in AllReduce(7 elements)" in message
    assert "already ended: rank 2" in message


def test_different_collectives_are_refused() -> None:
    def steps(rank: int) -> Steps[None]:
        yield (
            AllReduce(values(rank)) if rank else AllGather(torch.empty(8), values(rank))
        )

    with pytest.raises(InvalidSetting) as caught:
        drive([steps(0), steps(1)])
    message = str(caught.value)
    assert "different collectives" in message
    assert "rank 0 AllGather(4 elements)" in message
    assert "rank 1 AllReduce(4 elements)" in message


def test_different_sizes_are_refused() -> None:
    def steps(rank: int) -> Steps[None]:
        yield AllReduce(values(rank, 4 + rank))

    said = r"different sizes, dtypes or roots: rank 0 AllReduce\(4 elements\)"
    with pytest.raises(InvalidSetting, match=said):
        drive([steps(0), steps(1)])


@each("arrived", [torch.empty(3), torch.empty(4, dtype=torch.float64)])
def test_both_ends_of_a_message_must_agree(arrived: Tensor) -> None:
    def steps(rank: int) -> Steps[None]:
        yield Recv(0, arrived) if rank else Send(1, values(0))

    with pytest.raises(
        InvalidSetting, match=r"rank 0 sends 4 torch.float32 to rank 1, which rec"
    ):
        drive([steps(0), steps(1)])


def test_collectives_give_sums_shares_and_swaps_in_rank_order() -> None:
    def steps(rank: int) -> Steps[list[list[float]]]:
        summed, announced = values(rank), values(rank)
        gathered, share, swapped = torch.empty(12), torch.empty(2), torch.empty(3)
        yield AllReduce(summed)
        yield AllGather(gathered, values(rank))
        yield ReduceScatter(share, values(rank, 6))
        yield Broadcast(1, announced)
        yield AllToAll(swapped, values(rank, 3), (1, 1, 1), (1, 1, 1))
        return [t.tolist() for t in (summed, gathered, share, announced, swapped)]

    outcome = drive([steps(rank) for rank in range(3)])
    for rank, (summed, gathered, share, announced, swapped) in enumerate(
        outcome.results
    ):
        assert summed == [30, 33, 36, 39]
        assert gathered == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
        assert share == [30 + 6 * rank, 33 + 6 * rank]
        assert announced == [10, 11, 12, 13]
        assert swapped == [rank, 10 + rank, 20 + rank]
    # 2(W-1)/W of 16 bytes, (W-1) * 16, (W-1)/W of 24, both copies from the root, two
    # of three.
    assert outcome.sent_bytes == [
        21 + 32 + 16 + 0 + 8,
        21 + 32 + 16 + 32 + 8,
        21 + 32 + 16 + 0 + 8,
    ]


def order_of(seed: int) -> list[int]:
    """Which rank's computes ran in which order."""
    ran: list[int] = []

    def steps(note: Callable[[], None]) -> Steps[None]:
        for _ in range(3):
            yield Compute("encode", note)

    drive([steps(lambda rank=rank: ran.append(rank)) for rank in range(4)], seed=seed)
    return ran


def test_a_seed_decides_the_interleaving() -> None:
    assert order_of(5) == order_of(5)
    assert order_of(5) != order_of(6)


def test_verbs_reach_a_hosts_ranks_and_those_of_the_same_place() -> None:
    """Six ranks on three hosts: a ring among hosts, and what each host gathers of
    it.
    """

    def steps(rank: int) -> Steps[list[float]]:
        host, passed_on = rank // 2, torch.empty(1)
        yield (
            Send((host + 1) % 3, torch.tensor([float(rank)]), Among.HOSTS),
            Recv((host - 1) % 3, passed_on, Among.HOSTS),
        )
        gathered = torch.empty(2)
        yield AllGather(gathered, passed_on, Among.HOST)
        return gathered.tolist()

    outcome = drive([steps(rank) for rank in range(6)], ranks_per_host=2)
    assert outcome.results == [[4.0, 5.0]] * 2 + [[0.0, 1.0]] * 2 + [[2.0, 3.0]] * 2
    assert outcome.sent_bytes == [8] * 6


def test_ranks_that_wait_for_others_of_another_level_are_named() -> None:
    def steps(rank: int) -> Steps[None]:
        yield AllReduce(values(rank), Among.HOST if rank == 3 else Among.HOSTS)

    with pytest.raises(Deadlock) as caught:
        drive([steps(rank) for rank in range(4)], ranks_per_host=2)
    message = str(caught.value)
    assert "rank 1 waits in AllReduce(4 elements among hosts)" in message
    assert "rank 3 waits in AllReduce(4 elements among a host's ranks)" in message
    assert "rank 0" not in message.partition("already ended")[0]


def test_a_send_and_a_receive_of_other_levels_do_not_meet() -> None:
    def steps(rank: int) -> Steps[None]:
        if rank == 0:
            yield Send(1, values(0), Among.HOSTS)
        elif rank == 2:
            yield Recv(0, torch.empty(4))

    with pytest.raises(Deadlock, match="rank 2 waits in Recv"):
        drive([steps(rank) for rank in range(4)], ranks_per_host=2)
