"""Texts on the virtual clock: who waits for whom, and who waits for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.contract import Exchange, Member, State
from gradwire.contract.spec import TensorSpec
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
    Verb,
)
from gradwire.errors import Deadlock, InvalidSetting
from gradwire.planning.simulation.events import Traffic, play
from gradwire.planning.simulation.supersteps import Joint, Price, Superstep, Work
from papers.one_exchange import simulate_exchange
from tests.each import each
from tests.planning.profiles import exact_cluster

Row = Verb | tuple[Verb, ...]
Rows = Callable[[int, int, Tensor], list[Row]]


class Says(Exchange):
    """Yields what ``rows(rank, world, grad_N)`` lists, one behind the other; averages
    nothing.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def init(self, spec: TensorSpec, world: int) -> State:
        return None

    def synchronise(
        self,
        me: Member,
        state: State,
        grad_N: Tensor,
        out_N: Tensor,
        residual_N: Tensor | None = None,
    ) -> Steps[State]:
        for row in self.rows(me.rank, me.world, grad_N):
            _ = yield row  # a list takes no results, so no `yield from`
        return state


THREE = exact_cluster(num_ranks=3)
HOP_S, BYTE_S = 2**-9, 2**-20
NUMEL = 2**16
SEND_S = HOP_S + 4 * NUMEL * BYTE_S


def _joint(latency_s: float, work_s: float) -> Joint:
    return Joint("AllReduce", (), 1, Price(latency_s, work_s))


def test_a_send_waits_for_its_receiver() -> None:
    """Rank 0 receives from 1, then from 2; so 2's send begins when 1's has ended."""

    def rows(rank, world, grad_N):
        return [Send(0, grad_N)] if rank else [Recv(1, grad_N), Recv(2, grad_N)]

    trace = simulate_exchange(Says(rows), NUMEL, THREE)
    ends_s = {(s.rank, s.name): s.end_s for s in trace.spans if s.rank}
    assert ends_s == {(1, "Send"): SEND_S, (2, "Send"): 2 * SEND_S}


def test_sends_between_two_ranks_meet_their_receives_in_order() -> None:
    def rows(rank, world, grad_N):
        short_N = grad_N[:16]
        match rank:
            case 0:
                return [(Send(1, grad_N), Send(1, short_N))]
            case 1:
                return [Recv(0, grad_N), Recv(0, short_N)]
            case _:
                return []

    ends_s = [
        s.end_s
        for s in simulate_exchange(Says(rows), NUMEL, THREE).spans
        if s.rank == 1
    ]
    assert ends_s == [SEND_S, SEND_S + HOP_S + 64 * BYTE_S]


@each(
    "verb, hops, copies",
    [
        (lambda buf: AllReduce(buf), 4, 4 / 3),
        (lambda buf: AllGather(buf.repeat(3), buf), 2, 2),
        (lambda buf: ReduceScatter(buf[: len(buf) // 3], buf), 2, 2 / 3),
        (
            lambda buf: AllToAll(buf, buf, (len(buf) // 3,) * 3, (len(buf) // 3,) * 3),
            2,
            2 / 3,
        ),
        (lambda buf: Broadcast(0, buf), 2, 2),
    ],
    ids=["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast"],
)
def test_collectives_take_their_closed_forms(verb, hops, copies) -> None:
    numel = 3 * 2**14
    trace = simulate_exchange(
        Says(lambda rank, world, grad_N: [verb(grad_N)]), numel, THREE
    )
    expected_s = hops * HOP_S + copies * 4 * numel * BYTE_S
    assert [s.end_s for s in trace.spans] == pytest.approx([expected_s] * 3, rel=1e-14)


def test_an_all_to_all_of_unequal_parts_takes_what_the_busiest_link_takes() -> None:
    """Rank 0 gets two parts of 2**14 elements and sends next to nothing."""
    sizes = (2**14, 8, 8)

    def rows(rank, world, grad_N):
        own = sizes[rank]
        return [AllToAll(grad_N.new_empty(3 * own), grad_N, (own,) * 3, sizes)]

    (end_s,) = {s.end_s for s in simulate_exchange(Says(rows), sum(sizes), THREE).spans}
    assert end_s == pytest.approx(2 * HOP_S + 2 * 2**14 * 4 * BYTE_S)


def _by_rank(*verbs: Callable[[Tensor], Row]) -> Rows:
    """The verb of each rank; the ranks behind them have none."""
    return lambda rank, world, grad_N: [verb(grad_N) for verb in verbs[rank : rank + 1]]


def _sends_first(rank: int, world: int, grad_N: Tensor) -> list[Row]:
    """Everybody sends first and nobody receives: buffering may hide it, the model does
    not.
    """
    return [Send((rank + 1) % 3, grad_N), Recv((rank - 1) % 3, grad_N)]


def _looks(grad_N: Tensor) -> Row:
    return Compute("encode", lambda: int(torch.count_nonzero(grad_N)), grad_N.numel())


@each(
    "rows, error, words",
    [
        (
            _sends_first,
            Deadlock,
            r"rank 0 waits in Send\(32 B to rank 1\) of message 0;",
        ),
        (
            lambda rank, world, grad_N: [AllReduce(grad_N)] if rank else [],
            Deadlock,
            r"rank 2 waits in AllReduce\(32 B\).*already ended: rank 0",
        ),
        (
            _by_rank(
                lambda grad_N: Send(1, grad_N), lambda grad_N: Recv(0, grad_N[:3])
            ),
            InvalidSetting,
            "rank 0 sends 32 bytes to rank 1, which receives 12",
        ),
        *(
            (
                _by_rank(AllReduce, other, AllReduce),
                InvalidSetting,
                "ranks call different collectives",
            )
            for other in (
                lambda grad_N: Broadcast(0, grad_N),
                lambda grad_N: AllReduce(grad_N[:4]),
                lambda grad_N: AllReduce(grad_N.double()[:4]),
            )
        ),
        (_by_rank(_looks), InvalidSetting, "looks at values, and there are none"),
        (
            _by_rank(lambda grad_N: AllGather(grad_N, grad_N, Among.SHARDS)),
            InvalidSetting,
            "no tensor-parallel links",
        ),
    ],
)
def test_texts_that_cannot_be_played_are_refused(
    rows: Rows, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        simulate_exchange(Says(rows), 8, THREE)


def test_what_is_computed_first_does_not_wait_for_the_lane() -> None:
    """Message 1 encodes while message 0 is on the wire, and takes the lane when that
    has ended.
    """
    supersteps = (
        Superstep((Work("encode", 1.0),), (), 0),
        Superstep((), (_joint(0.0, 2.0),), 1),
    )
    played = play(Traffic([[supersteps, supersteps]], [[0.0, 0.0]], ["a", "b"]))
    times = {(s.lane, s.message): (s.start_s, s.end_s) for s in played.spans}
    assert times == {
        ("compute", 0): (0.0, 1.0),
        ("compute", 1): (1.0, 2.0),
        ("communication", 0): (1.0, 3.0),
        ("communication", 1): (3.0, 5.0),
    }


def test_the_compute_lane_takes_what_is_ready_in_issue_order() -> None:
    first = (
        Superstep((), (_joint(0.0, 1.5),), 1),
        Superstep((Work("decode", 1.0),), (), 0),
    )
    other = (Superstep((Work("encode", 1.0),), (), 0),)
    played = play(
        Traffic([[first, other, other]], [[0.0] * 3], ["a", "b", "c"], credit=3)
    )
    order = [(s.message, s.start_s) for s in played.spans if s.lane == "compute"]
    # Message 2 is ready at once, before message 0's decode; when 2 s are over there is
    # only that.
    assert order == [(1, 0.0), (2, 1.0), (0, 2.0)]


def test_what_a_computation_makes_ready_competes_for_the_lane() -> None:
    """As in the runtime: message 0's second computation goes before message 1's
    first.
    """
    twice = (
        Superstep((Work("encode", 1.0),), (), 0),
        Superstep((Work("decode", 1.0),), (), 0),
    )
    played = play(Traffic([[twice, twice]], [[0.0, 0.0]], ["a", "b"], credit=2))
    assert [s.message for s in played.spans] == [0, 0, 1, 1]


def test_what_comes_at_one_instant_is_computed_in_the_order_of_messages() -> None:
    """Message 1's early encode comes when message 0 is launched, which stands before
    it.
    """
    encode, send = Work("encode", 1.0), Superstep((), (_joint(0.0, 1.0),), 1)
    own = [(Superstep((encode,), (), 0), send), (send,)]
    early = [[[], [(2.0, Work("encode early", 4.0))]]]
    played = play(Traffic([own], [[2.0, 2.0]], ["", ""], early=early))
    begun = {s.name: s.start_s for s in played.spans if s.lane == "compute"}
    assert begun == {"encode": 2.0, "encode early": 3.0}


def test_a_slow_rank_computes_slowly_and_the_others_wait_for_it() -> None:
    ranks = [
        [
            (
                Superstep((Work("encode", own_s),), (), 0),
                Superstep((), (_joint(0.5, 1.0),), 1),
            )
        ]
        for own_s in (1.0, 3.0)
    ]
    played = play(Traffic(ranks, [[0.0]] * 2, [""]))
    assert played.end_s == [[4.5], [4.5]]
