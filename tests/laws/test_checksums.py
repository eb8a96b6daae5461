"""A bit that flips in what any exchange sends is refused by name."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from gradwire.collective.steps.travel import members
from gradwire.compress.powersgd import powersgd
from gradwire.contract import Exchange
from gradwire.contract.verbs import (
    AllToAll,
    Broadcast,
    Communication,
    Compute,
    Recv,
    ReduceScatter,
    Send,
    Steps,
)
from gradwire.errors import GradwireError, RankFailed
from gradwire.exchange.by_name import steps_of_all
from gradwire.exchange.local import drive
from gradwire.exchange.two_level import on_hosts
from gradwire.runtime.transport import checksums
from gradwire.runtime.transport.checksums import Seals, pairwise
from gradwire.runtime.transport.wire import RankGroup
from gradwire_bench.faults.striking import flip
from gradwire_lab.compress.selective import selective
from gradwire_lab.errors import LawBroken
from gradwire_lab.laws.cases import Case
from gradwire_lab.laws.tolerance import must, same_bits
from tests.each import each
from tests.laws.cases import name_of, own_exchanges, pairs, places_of_each_path

CASE = Case(world=4, numel=301, seed=11)
WHOLE = powersgd(rank=1), selective(sparsifier="topk", density=0.3)
"""Exchanges that take tensors whole."""
ON_HOSTS = [on_hosts(exchange, 2) for exchange in (*pairs()[:1], *WHOLE)]
ALL = (*pairs(), *own_exchanges())
EXCHANGES = [*(ALL[place] for place in places_of_each_path(ALL)), *ON_HOSTS]


class Blind(Seals):
    """A specimen that trusts a rank."""

    def check(self, verbs: Any) -> None:
        try:
            super().check(verbs)
        except RankFailed as error:
            if error.ranks != (0,):
                raise


class Flip:
    """Flips the bit of a number, of all that one rank sends, once."""

    def __init__(self, at: int | None = None) -> None:
        self.num_bits, self._at = 0, at

    def __call__(self, verb: Any, circle: RankGroup) -> Any:
        if not isinstance(verb, Send | AllToAll):
            return verb
        first, num_bits = self.num_bits, verb.buf.nbytes * 8
        self.num_bits += num_bits
        if self._at is None or not first <= self._at < self.num_bits:
            return verb
        spoilt = verb.buf.clone()
        flip(spoilt, (self._at - first) / num_bits)
        return replace(verb, buf=spoilt)


def sealed(
    steps: Steps[Any], rank: int, exchange: Exchange, kind: type[Seals], strike: Flip
) -> Steps[Any]:
    """Steps whose verbs have checksums, as the engine's driver gives them."""

    def circle_of(verb: Communication) -> RankGroup:
        found = members(rank, CASE.world, exchange.ranks_per_host, verb.among)
        return RankGroup("", found.index(rank), len(found), [], ranks=found)

    steps, value = pairwise(steps, circle_of), None
    while True:
        try:
            asked = steps.send(value)
        except StopIteration as stop:
            return stop.value
        verbs = asked if isinstance(asked, tuple) else (asked,)
        network = [verb for verb in verbs if not isinstance(verb, Compute)]
        seals = kind(network, [circle_of(verb) for verb in network], 5)
        beside = [one for _, one in seals.written(network)]
        sent = [v if isinstance(v, Compute) else strike(v, circle_of(v)) for v in verbs]
        found = yield (*sent, *beside)
        seals.check(network)
        value = found[: len(verbs)] if isinstance(asked, tuple) else found[0]


def means(
    exchange: Exchange, victim: int, strike: Flip, kind: type[Seals] = Seals
) -> list[torch.Tensor]:
    made = steps_of_all(exchange, CASE.grads(), CASE.states(exchange))
    calm = [strike if rank == victim else Flip() for rank in range(CASE.world)]
    watched = [
        sealed(steps, r, exchange, kind, calm[r]) for r, steps in enumerate(made)
    ]
    outcome = drive(watched, seed=CASE.seed, ranks_per_host=exchange.ranks_per_host)
    return [mean_N for mean_N, _, _ in outcome.results]


def law_a_flip_is_refused_by_name(
    exchange: Exchange, kind: type[Seals] = Seals
) -> bool:
    """Checksums change no bit, and wherever one flips on the way its sender is
    named.
    """
    plain = drive(
        steps_of_all(exchange, CASE.grads(), CASE.states(exchange)),
        ranks_per_host=exchange.ranks_per_host,
    )
    count = Flip()
    for mean_N, (want_N, _, _) in zip(
        means(exchange, 0, count, kind), plain.results, strict=True
    ):
        must(same_bits(mean_N, want_N), "checksums change the mean")
    draw = random.Random(name_of(exchange))
    for at in (
        [draw.randrange(count.num_bits) for _ in range(2)] if count.num_bits else ()
    ):
        try:
            means(exchange, 0, Flip(at), kind)
        except RankFailed as error:
            must((error.ranks, error.step) == ((0,), 5), f"{error.ranks} were named")
            continue
        except GradwireError as error:
            raise LawBroken(f"bit {at} came to a decoder") from error
        raise LawBroken(f"bit {at} of {count.num_bits} was taken")
    return count.num_bits > 0


@each("exchange", EXCHANGES, ids=name_of)
def test_a_flip_is_refused_by_name(exchange: Exchange) -> None:
    torch.manual_seed(0)
    assert law_a_flip_is_refused_by_name(exchange)


def test_what_no_exchange_here_asks_for_is_sent_from_rank_to_rank() -> None:
    def steps(rank: int) -> Steps[Any]:
        all_N, part_N = torch.arange(6.0) + rank, torch.zeros(2)
        announced_N = torch.full((3,), float(rank))
        yield ReduceScatter(part_N, all_N), Broadcast(1, announced_N)
        return part_N.tolist(), announced_N.tolist()

    def straight(rank: int) -> Steps[Any]:
        circle = RankGroup("", rank, 3, [], ranks=range(3))
        return pairwise(steps(rank), lambda verb: circle)

    want = drive([steps(rank) for rank in range(3)])
    made = drive([straight(rank) for rank in range(3)])
    assert made.results == want.results


def test_a_payload_of_another_version_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent, got = torch.arange(4.0), torch.zeros(4)
    groups = [RankGroup("", rank, 2, [], ranks=(0, 1)) for rank in (0, 1)]
    monkeypatch.setattr(checksums, "WIRE", 2)
    sender, taker = (
        Seals([Send(1, sent)], groups[:1]),
        Seals([Recv(0, got)], groups[1:]),
    )
    [(_, beside)] = sender.written([Send(1, sent)])
    got.copy_(sent)
    taker.beside[0].buf.copy_(beside.buf)
    taker.check([Recv(0, got)])
    monkeypatch.setattr(checksums, "WIRE", 1)
    with pytest.raises(RankFailed, match="wire version 2, and rank 1 takes 1"):
        taker.check([Recv(0, got)])
    for bit in (33, 35, 5):  # a flip in the frame itself is damage, wherever it is
        taker.beside[0].buf.copy_(beside.buf ^ (1 << bit))
        with pytest.raises(RankFailed, match="arrived damaged at rank 1"):
            taker.check([Recv(0, got)])


def test_the_law_bites() -> None:
    with pytest.raises(LawBroken):
        law_a_flip_is_refused_by_name(EXCHANGES[0], Blind)
