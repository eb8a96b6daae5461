"""What steps compute, by name and count, and what of it overlaps: HiPress, table 3.

The steps' own Computes are counted by the local driver, and the spans of the
simulator's trace.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.collective.casync_ps import casync_ps
from gradwire.collective.zen import zen
from gradwire.compress.onebit import onebit
from gradwire.compress.powersgd import powersgd
from gradwire.compress.topk import topk
from gradwire.contract import Exchange, Member
from gradwire.contract.collective import Collective
from gradwire.contract.spec import TensorSpec, squarest
from gradwire.contract.verbs import Compute, Steps
from gradwire.exchange.by_name import clone_state
from gradwire.exchange.local import drive
from gradwire.exchange.pair import pair
from gradwire.planning.data.cluster import PRIMITIVES, CodecFit
from gradwire.planning.data.fit import LineFit
from gradwire.planning.simulation.supersteps import NOT_MEASURED
from gradwire_lab.collective.casync_ring import casync_ring
from gradwire_lab.collective.sparcml import sparcml
from gradwire_lab.exchange.momentum import with_momentum_correction
from papers.one_exchange import simulate_exchange
from tests.each import each
from tests.laws.cases import kind_of, name_of, own_exchanges, pairs
from tests.planning.profiles import exact_cluster

CHUNK = 64
LINE = LineFit(alpha_s=2**-12, per_unit_s=2**-24)


class Done(NamedTuple):
    """One computation of a rank: its name, its elements, and whether something
    travelled beside it.
    """

    name: str
    numel: int
    is_beside: bool


def _noting(steps: Steps[Any], found: list[Done]) -> Steps[Any]:
    value: Any = None
    while True:
        try:
            asked = steps.send(value)
        except StopIteration as stop:
            return stop.value
        row = asked if isinstance(asked, tuple) else (asked,)
        travels = not all(isinstance(verb, Compute) for verb in row)
        found += [Done(v.name, v.numel, travels) for v in row if isinstance(v, Compute)]
        value = yield asked


def computes(exchange: Exchange, numel: int, world: int) -> list[list[Done]]:
    """Every rank's computations of a second step, in order."""
    spec = TensorSpec(
        "", numel, shapes=squarest(numel) if exchange.declared.whole_tensors else ()
    )
    states = [exchange.init(spec, world) for _ in range(world)]
    members = [Member(rank, world) for rank in range(world)]
    for _ in range(2):
        found: list[list[Done]] = [[] for _ in members]
        grads = [_gradient(numel, rank) for rank in range(world)]
        all_steps = [
            _noting(exchange.synchronise(me, clone_state(state), grad_N, grad_N), own)
            for me, state, grad_N, own in zip(
                members, states, grads, found, strict=True
            )
        ]
        states = drive(all_steps).results
    return found


def _gradient(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def chunks(own: list[Done], name: str, *, beside: bool = False) -> float:
    """How many chunks are encoded, merged or decoded, those beside a transfer or the
    others.
    """
    return (
        sum(one.numel for one in own if one.name == name and one.is_beside is beside)
        / CHUNK
    )


@each("world", [2, 5])
@each("codec", [onebit(), topk(density=0.1)])
def test_a_ring_computes_what_table_3_says(codec, world: int) -> None:
    """beta = gamma = N: encodes and decodes of a chunk that overlap with no transfer. A
    merge is what the paper calls decode and aggregate; the other N - 1 decodes
    overlap.
    """
    for own in computes(pair(codec, casync_ring()), world * CHUNK, world):
        assert chunks(own, "encode") == world
        assert chunks(own, "merge") + chunks(own, "decode") == world
        assert chunks(own, "decode", beside=True) == world - 1
        assert {one.numel for one in own} == {CHUNK}


@each("world", [2, 5])
@each("codec", [onebit(), topk(density=0.1)])
def test_a_small_parameter_server_computes_what_table_3_says(codec, world: int) -> None:
    """beta = K = N chunks, as section 6 has it where aggregators are workers: N - 1 are
    pushed and one mean is pulled. Of N chunks that are merged the own one is not
    decoded. Those pulled come all at once, so that only the own mean is decoded beside
    them, where the paper overlaps all but the last: of a small message to decode them
    takes no longer than another latency.
    """
    for own in computes(pair(codec, casync_ps()), world * CHUNK, world):
        assert chunks(own, "encode") == world
        assert chunks(own, "merge") == world
        assert chunks(own, "decode") == world - 1
        assert chunks(own, "decode", beside=True) == 1
        assert [one.name for one in own] == [
            "encode",
            "merge",
            "encode",
            "decode",
            "decode",
        ]


@each("world", [2, 5])
def test_low_rank_factors_are_computed_as_table_3_says(world: int) -> None:
    """beta = gamma = 1, however many ranks: factors are summed on the way. Finding the
    two factors is one encode, in two computations with a sum between them.
    """
    for own in computes(powersgd(rank=1), 1024, world):
        assert [one.name for one in own] == ["encode", "encode", "decode"]


EVERY = (
    *{
        kind_of(made)[at]: made
        for at in (0, -1)
        for made in (*pairs(), *own_exchanges())
    }.values(),
    with_momentum_correction(pair(topk(), casync_ring())),
)
"""One with each algorithm, and one with each collective."""


@each("exchange", EVERY, ids=name_of)
def test_the_simulators_trace_has_the_texts_computations(exchange: Exchange) -> None:
    """As many of each name on every rank, with their measured seconds or the mark of
    none.
    """
    world, numel = 3, 3 * CHUNK
    names = {
        type(made).__name__ for made in (exchange, getattr(exchange, "codec", None))
    }
    codec = CodecFit(encode=LINE, merge=LINE, decode=LINE)
    cluster = exact_cluster(num_ranks=world).model_copy(
        update={"codecs": dict.fromkeys(names, codec)}
    )
    shapes = squarest(numel) if exchange.declared.whole_tensors else ()
    trace = simulate_exchange(exchange, numel, cluster, shapes=shapes)
    for rank, own in enumerate(computes(exchange, numel, world)):
        spans = [s for s in trace.spans if s.rank == rank and s.lane == "compute"]
        shown = Counter(span.name.removesuffix(f" ({NOT_MEASURED})") for span in spans)
        done = Counter(one.name for one in own)
        if any(name in PRIMITIVES for name in done - shown):
            assert _is_plain(exchange), f"{done} in the steps and {shown} in the trace"
            done = shown
        assert shown == done
        for span in spans:
            is_priced = NOT_MEASURED not in span.name
            assert is_priced == (span.name in PRIMITIVES)


def _is_plain(exchange: Exchange) -> bool:
    """Whether payloads are the gradient itself: then encode and decode move nothing."""
    traits = getattr(exchange, "codec", exchange).traits
    return traits is not None and traits.lossless and traits.layout.value == "dense"


@each(
    "collective, names",
    [
        (sparcml(), ["encode", "pack", "merge", "pack", "decode"]),
        (zen(), ["encode", "partition", "clear", "merge", "pack", "decode", "decode"]),
    ],
)
def test_what_is_written_in_a_sparse_format_is_no_codecs_encode(
    collective: Collective, names: list[str]
) -> None:
    """A selection over all elements is; it is done once. Merging and writing are
    apart.
    """
    for own in computes(pair(topk(density=0.1), collective), 256, 2):
        assert [one.name for one in own] == names
