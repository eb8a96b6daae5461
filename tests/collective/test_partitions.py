"""CaSync in rounds and in fewer partitions than ranks; its laws are held in
tests/laws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.collective.casync_ps import casync_ps
from gradwire.compress.cast16 import cast16
from gradwire.compress.none import none
from gradwire.compress.onebit import onebit
from gradwire.contract import Compressor, State
from gradwire.contract.collective import Collective
from gradwire.contract.spec import TensorSpec
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.error_feedback import with_error_feedback
from gradwire.exchange.pair import pair
from gradwire.exchange.two_level import on_hosts
from gradwire.exchange.without_data import wire_bytes
from gradwire.planning.data.plan import ExchangeSetting
from gradwire.planning.planner.wfbp import wfbp
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.collective.casync_ring import casync_ring
from gradwire_lab.compress.hardthreshold import hardthreshold
from gradwire_lab.compress.qsgd import qsgd
from gradwire_lab.laws.inputs import profile_of
from tests.each import each
from tests.planning.profiles import exact_cluster
from tests.planning.simulation.test_computes import CHUNK, Done, computes
from tests.run import Run

# ---- rounds: computations beside what travels ----------------------------------------

IN_ROUNDS = casync_ps(room_bytes=0)


def _alone(own: list[Done], name: str) -> float:
    """Chunks beside whose encode, merge or decode nothing travels."""
    return (
        sum(one.numel for one in own if one.name == name and not one.is_beside) / CHUNK
    )


@each("world", [4, 5, 7])
@each("codec", [onebit(), qsgd()])
def test_only_the_first_round_is_encoded_and_the_last_decoded_alone(
    codec: Compressor, world: int
) -> None:
    """All else is encoded, merged and decoded beside a transfer, but for the mean."""
    for own in computes(pair(codec, IN_ROUNDS), world * CHUNK, world):
        assert sum(one.numel for one in own if one.name == "encode") == world * CHUNK
        assert sum(one.numel for one in own if one.name == "merge") == world * CHUNK
        assert sum(one.numel for one in own if one.name == "decode") == world * CHUNK
        alone = [_alone(own, name) for name in ("encode", "merge", "decode")]
        assert alone == [2, 1, 1]


def test_sizes_that_vary_are_told_before_anything_is_pushed() -> None:
    for own in computes(pair(hardthreshold(threshold=1.0), IN_ROUNDS), 8 * CHUNK, 8):
        assert _alone(own, "encode") == 8


def test_large_messages_go_in_rounds_by_themselves() -> None:
    """Seven payloads of 512 KiB / 7 are on their way to a rank at once, and not a byte
    more.
    """
    exchange = pair(none(), casync_ps())
    most = 512 * 1024 // 7 // 4 // 32 * 32 * 8  # elements, in 8 aligned chunks
    for numel, alone in ((most, 7), (most + 8 * 32, 1)):
        own = computes(exchange, numel, 8)[0]
        first = next(one for one in own if one.name == "encode")
        assert first.numel == numel // 8 * alone


# ---- partitions: fewer chunks than ranks, served in turns over messages --------------

FEWER = (
    casync_ps(partitions=1),
    casync_ps(partitions=1, room_bytes=0),
    casync_ps(partitions=2),
    casync_ps(partitions=2, room_bytes=0),
    casync_ring(partitions=1),
    casync_ring(partitions=2),
    casync_ring(partitions=2, half_bytes=0),
)


def _sent(exchange: Any, order: int, world: int, numel: int) -> list[int]:
    """The bytes that each rank sends of a message of this order; all have the same
    mean.
    """
    run = Run(exchange, TensorSpec("", numel), world, order)
    run.step([torch.randn(numel) for _ in range(world)])
    return run.sent_bytes


@each("collective", FEWER)
@each("codec", [none(), onebit(block=64)])
def test_ranks_take_turns_in_serving(
    codec: gw.Compressor, collective: Collective
) -> None:
    """The next message is served by the next ranks; after all orders all sent
    as much.
    """
    world, numel = 4, 256
    exchange = with_error_feedback(pair(codec, collective))
    stated = wire_bytes(exchange, TensorSpec("", numel), world)
    assert stated is not None
    total = [0] * world
    for order in range(world):
        sent = _sent(exchange, order, world, numel)
        ahead = order * collective.partitions % world  # type: ignore[attr-defined]
        assert sent == [stated[(rank - ahead) % world] for rank in range(world)]
        total = [a + b for a, b in zip(total, sent, strict=True)]
    assert len(set(total)) == 1
    assert len(set(stated)) > 1


@dataclass(frozen=True)
class placed(cast16):
    """Keeps where its chunk begins."""

    at: int = 0

    def chunk(self, start: int, stop: int) -> placed:
        return replace(self, at=self.at + start)

    def init(self, spec: TensorSpec) -> State:
        return torch.tensor(self.at)

    def encode(
        self, state: State, grad_N: Tensor, **to: Any
    ) -> tuple[gw.Payload, State]:
        assert int(state) == self.at, f"the state of elements from {int(state)} on"
        return super().encode(None, grad_N, **to)[0], state


@each("collective", FEWER)
def test_what_is_kept_of_a_chunk_stays_with_it_whoever_serves_it(
    collective: Collective,
) -> None:
    exchange, world = pair(placed(), collective), 4
    for order in range(world):
        run = Run(exchange, TensorSpec("", 256), world, order)
        for _ in range(3):
            run.step([torch.ones(256)] * world)


@each("collective", [casync_ps(partitions=1), casync_ring(partitions=1)])
def test_hosts_take_turns(collective: Collective) -> None:
    exchange = on_hosts(exchange_for(pair(none(), collective)), 2)
    first, second = (_sent(exchange, order, 6, 64) for order in (0, 1))
    assert first == [*second[2:], *second[:2]], "two ranks of a host further"
    assert first != second


@each("collective", FEWER)
def test_chunks_of_few_partitions_are_encoded_as_table_3_says(
    collective: Collective,
) -> None:
    """K chunks are encoded by each rank that pushes them, and once more as a mean."""
    world, count = 4, collective.partitions  # type: ignore[attr-defined]
    every = computes(pair(onebit(), collective), 64 * count, world)
    encoded = [
        sum(one.numel for one in own if one.name == "encode") // 64 for own in every
    ]
    merged = [
        sum(one.numel for one in own if one.name == "merge") // 64 for own in every
    ]
    decoded = [
        sum(one.numel for one in own if one.name == "decode") // 64 for own in every
    ]
    assert decoded == [count] * world
    if isinstance(collective, casync_ps):
        assert encoded == [count] * world
        assert merged == [world] * count + [0] * (world - count)
    else:
        assert sum(encoded) == world * count
        assert sum(merged) == (world - 1) * count


@each("collective", [casync_ps, casync_ring])
def test_more_partitions_than_ranks_are_refused(collective: Any) -> None:
    exchange = pair(none(), collective(partitions=3))
    with pytest.raises(gw.InvalidSetting, match="at most one for each of 2 ranks"):
        exchange.init(TensorSpec("", 100), 2)
    exchange.init(TensorSpec("", 100), 1)  # alone it exchanges nothing


def test_the_simulator_has_messages_of_one_partition_served_in_turn() -> None:
    """Of four alike on four ranks each serves one, and they take less than by one
    server.
    """
    profile = profile_of(*[([4096], 0.001, 0.001)] * 4)
    cluster = exact_cluster(num_ranks=4)
    plan = wfbp(profile, cluster)
    few = ExchangeSetting(
        compressor="none", collective="casync_ps", collective_settings={"partitions": 1}
    )
    messages = tuple(
        one.model_copy(update={"exchange": "few"}) for one in plan.messages
    )
    plan = plan.model_copy(
        update={"messages": messages, "exchanges": {"few": few}, "credit": 4}
    )
    trace = simulate(plan, profile, cluster, ranks="all")
    sent = {
        rank: sum(span.size_bytes for span in trace.spans if span.rank == rank)
        for rank in range(4)
    }
    assert set(sent.values()) == {3 * 4 * 4096 + 3 * 4 * 4096}
    alone = tuple(
        one.model_copy(update={"exchange": f"few {i}"})
        for i, one in enumerate(messages)
    )
    same = plan.model_copy(
        update={"messages": alone, "exchanges": {f"few {i}": few for i in range(4)}}
    )
    assert simulate(same, profile, cluster, ranks="all").iteration_s > trace.iteration_s
