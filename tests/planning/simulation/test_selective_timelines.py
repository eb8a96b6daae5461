"""Golden timelines of SSFusion's figures 7, 8 and 10: seven tensors in two buffers, by hand.

G7 is the first whose gradient is there and G1 the last. Buffer 1 holds G7 to G4, buffer 2 G3 to G1.
A backward pass takes a second a layer, a transfer a few.
"""

from __future__ import annotations

import pytest

from gradwire.planning.data.cluster import Cluster, CodecFit
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.plan import Chunk, ExchangeSetting, Plan, PlannedMessage
from gradwire.planning.fusion import NOTHING
from gradwire.planning.simulation.clock import Timing, run_on_clock
from gradwire.planning.simulation.timeline import simulate
from gradwire_lab.laws.inputs import profile_of

Sizes = dict[int, int]
SORTED: Sizes = {1: 2048, 2: 4096, 3: 1024, 4: 3072, 5: 2048, 6: 4096, 7: 1024}
"""Elements of each tensor of figure 7: by size buffers are G7, G5, G4, G6 and G3, G1, G2."""
LARGE: Sizes = {1: 1024, 2: 2048, 3: 4096, 4: 1024, 5: 2048, 6: 4096, 7: 4096}
"""Elements of each tensor of figure 8, whose G7, G6 and G3 are large."""
ON_GPU = LineFit(alpha_s=0.5, per_unit_s=0.0)


def cluster(num_ranks: int = 2) -> Cluster:
    """Ranks whose GPU selects from a tensor in half a second, and whose CPU in a second and a
    quarter."""
    encode = LineFit(alpha_s=1.25, per_unit_s=0.0)
    return Cluster(
        num_ranks=num_ranks,
        rate_bytes_per_s=2.0**16,
        hop_s=0.0,
        codecs={"topk": CodecFit(encode=encode, decode=NOTHING, merge=NOTHING)},
        inline={"topk": ON_GPU},
    )


def message(
    numel: Sizes,
    *places: int,
    dense: int,
    inline: tuple[int, ...] = (),
    early: tuple[int, ...] = (),
) -> PlannedMessage:
    """A buffer of these tensors, the smallest ``dense`` of which are not selected from."""
    name = {at: f"t{at - 1}" for at in places}
    return PlannedMessage(
        chunks=tuple(Chunk(tensor=name[at], start=0, stop=numel[at]) for at in places),
        exchange=f"dense {dense}",
        inline=tuple(name[at] for at in inline),
        early=tuple(name[at] for at in early),
    )


def plan(*messages: PlannedMessage) -> Plan:
    """The buffers in order, each behind the one before it."""
    return Plan(
        planner="by hand",
        model="drawn",
        messages=messages,
        exchanges={
            f"dense {dense}": ExchangeSetting(
                compressor="selective",
                settings={"sparsifier": "topk", "density": 0.25, "num_dense": dense},
                error_feedback=True,
            )
            for dense in range(5)
        },
    )


def played(numel: Sizes, made: Plan, on: Cluster) -> Timing:
    """The plan on the clock, which all ranks by events agree with."""
    profile = profile_of(*(([numel[at]], 0.0, 1.0) for at in range(1, 8)))
    timing = run_on_clock(made, profile, on)
    every = simulate(made, profile, on, ranks="all")
    assert every.iteration_s == pytest.approx(timing.iteration_s)
    return timing


def test_figure_7_selection_of_every_tensor_delays_both_buffers() -> None:
    """(a) lengthens the backward pass by seven selections, (b) by three: its small tensors none."""
    on = cluster()
    first = message(SORTED, 7, 6, 5, 4, dense=0, inline=(7, 6, 5, 4))
    every = plan(first, message(SORTED, 3, 2, 1, dense=0, inline=(3, 2, 1)))
    timing = played(SORTED, every, on)
    assert timing.backward_end_s == [10.5, 9.0, 7.5, 6.0, 4.5, 3.0, 1.5]
    assert timing.message_start_s[0] == 6.0
    assert timing.message_start_s[1] == max(10.5, timing.message_end_s[0])
    some = plan(
        message(SORTED, 7, 6, 5, 4, dense=2, inline=(6, 4)),
        message(SORTED, 3, 2, 1, dense=2, inline=(2,)),
    )
    timing = played(SORTED, some, on)
    assert timing.backward_end_s == [8.5, 7.5, 6.0, 5.0, 3.5, 2.5, 1.0]
    assert timing.message_start_s[0] == 5.0
    assert timing.message_start_s[1] == max(8.5, timing.message_end_s[0])


def lane(timing: Timing) -> list[tuple[float, float]]:
    """The starts and ends of selections on the CPU."""
    return [(s.start_s, s.end_s) for s in timing.spans if s.lane == "compute" and s.duration_s]


def test_figure_8_offloading_every_tensor_blocks_those_behind_and_choosing_does_not() -> None:
    """(a) the CPU works on G7 to G4 until 6, and buffers wait for it; (b) on G7 and G6 until 3.5,
    within buffer 1's backward, and on G3 within buffer 2's."""
    on = cluster()
    every = plan(
        message(LARGE, 7, 6, 5, 4, dense=0, early=(7, 6, 5, 4)),
        message(LARGE, 3, 2, 1, dense=0, early=(3, 2, 1)),
    )
    timing = played(LARGE, every, on)
    assert timing.backward_end_s == [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert lane(timing) == [(1 + 1.25 * at, 2.25 + 1.25 * at) for at in range(7)]
    assert [s.start_s for s in timing.spans if s.lane == "communication"] == [6.0, 9.75]
    some = plan(
        message(LARGE, 7, 6, 5, 4, dense=2, early=(7, 6)),
        message(LARGE, 3, 2, 1, dense=2, early=(3,)),
    )
    timing = played(LARGE, some, on)
    assert lane(timing) == [(1.0, 2.25), (2.25, 3.5), (5.0, 6.25)]
    assert [s.start_s for s in timing.spans if s.lane == "communication"] == [4.0, 7.0]


def test_figure_10_an_all_reduce_of_what_is_dense_shortens_the_all_gather_behind_it() -> None:
    """Among 8 ranks a dense byte costs 7 in an all-gather and 2 * 7 / 8 in an all-reduce."""
    on = cluster(8)
    whole = plan(message(LARGE, 7, 6, 5, 4, 3, 2, 1, dense=4, early=(7, 6, 3)))
    timing = played(LARGE, whole, on)
    dense_bytes, sparse_bytes = 4 * (1024 + 2048 + 1024 + 2048), 8 * (3 * 4096) // 4
    gathered_s = 7 * (dense_bytes + sparse_bytes) / on.rate_bytes_per_s
    assert timing.iteration_s == pytest.approx(7.0 + gathered_s, rel=1e-3)
    reduced = PlannedMessage(
        chunks=tuple(Chunk(tensor=f"t{at - 1}", start=0, stop=LARGE[at]) for at in (5, 4, 2, 1))
    )
    parted = plan(reduced, message(LARGE, 7, 6, 3, dense=0, early=(7, 6, 3)))
    timing = played(LARGE, parted, on)
    reduced_s = 2 * 7 / 8 * dense_bytes / on.rate_bytes_per_s
    first_s = 7.0 + reduced_s
    assert timing.message_end_s[0] == pytest.approx(first_s)
    assert timing.iteration_s == pytest.approx(
        first_s + 7 * sparse_bytes / on.rate_bytes_per_s, rel=1e-3
    )
