"""Schemes for sparse gradients lose nothing, say what they send, and are as balanced as
told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from math import log, sqrt
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradwire.collective.zen import zen
from gradwire.compress.nonzero import nonzero
from gradwire.compress.topk import topk
from gradwire.contract import Imbalance, Member
from gradwire.contract.collective import Collective
from gradwire.contract.registry import examples
from gradwire.contract.spec import TensorSpec
from gradwire.contract.verbs import AllGather, Steps
from gradwire.errors import InvalidSetting
from gradwire.exchange.by_name import run_local
from gradwire.exchange.local import drive
from gradwire.exchange.pair import Pair, pair
from gradwire.kernels.sparse.entries import Entries, part_length, parts_of
from gradwire.kernels.sparse.permutation import Permutation
from gradwire_lab.collective.omnireduce import omnireduce
from gradwire_lab.collective.sparse_ps import sparse_ps
from gradwire_lab.collective.sparse_ps_broadcast import sparse_ps_broadcast
from gradwire_lab.exchange.bytes_of_sets import bytes_of
from gradwire_lab.kernels import hashing
from gradwire_lab.kernels.hashing import HashMemory, hash_partition
from gradwire_lab.laws.tolerance import assert_near, largest, same_bits
from tests.each import each
from tests.laws.broken_collectives import starts_with_itself
from tests.laws.cases import name_of
from tests.strategies import bounded

# ---- laws ----------------------------------------------------------------------------

KINDS = (
    "none",
    "one",
    "ends",
    "all",
    "alike",
    "apart",
    "any",
    "dense start",
    "one range",
    "one hashed part",
)
"""How a rank takes elements: nothing, a single one, the first and the last, every one,
those that all others take, every W-th, at random, mostly in front, in one range alone,
and in nothing but what one rank serves in ``zen()``: an adversary who knows the
hash.
"""


@dataclass(frozen=True)
class Held:
    """What W ranks hold: N elements each, ``kinds`` in turn, values drawn by
    ``seed``.
    """

    world: int
    numel: int
    kinds: tuple[str, ...]
    seed: int = 0

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec("gradient", self.numel)

    def sets(self) -> list[Tensor]:
        """The indices that each rank takes, int32, ascending."""
        draw = torch.Generator().manual_seed(self.seed)
        common_N = torch.rand(self.numel, generator=draw) < 0.2
        kinds = (self.kinds[rank % len(self.kinds)] for rank in range(self.world))
        return [
            self._taken(kind, rank, common_N, draw).nonzero()[:, 0].int()
            for rank, kind in enumerate(kinds)
        ]

    def grads(self, sets: list[Tensor]) -> list[Tensor]:
        """Positive, so that no sum is zero, and of magnitudes whose sums depend on the
        order.
        """
        draw = torch.Generator().manual_seed(self.seed + 1)
        grads = []
        for indices_K in sets:
            grad_N = torch.zeros(self.numel)
            exponents = torch.randint(-12, 12, (len(indices_K),), generator=draw)
            grad_N[indices_K.long()] = (
                1 + torch.rand(len(indices_K), generator=draw)
            ) * (2.0**exponents)
            grads.append(grad_N)
        return grads

    def _taken(
        self, kind: str, rank: int, common_N: Tensor, draw: torch.Generator
    ) -> Tensor:
        random_N = torch.rand(self.numel, generator=draw)
        at_N = torch.arange(self.numel)
        match kind:
            case "none":
                return at_N < 0
            case "one":
                return at_N == self.numel // 2
            case "ends":
                return (at_N == 0) | (at_N == self.numel - 1)
            case "all":
                return at_N >= 0
            case "alike":
                return common_N
            case "apart":
                return at_N % self.world == rank
            case "dense start":
                return random_N < torch.exp(-8.0 * at_N / self.numel)
            case "one range":
                return at_N < self.numel // self.world
            case "one hashed part":
                hashed = zen().permutation(self.numel)
                own = parts_of(self.numel, self.world, hashed)[self.world // 2]
                taken_N = torch.zeros(self.numel, dtype=torch.bool)
                taken_N[
                    own.indices(torch.arange(own.length, dtype=torch.int32)).long()
                ] = True
                return taken_N
            case _:
                return random_N < 0.1


holdings = st.builds(
    Held,
    st.integers(1, 17),
    st.sampled_from((1, 2, 7, 16, 61, 257, 700)),
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=4).map(tuple),
    st.integers(0, 2**16),
)
EACH_KIND = tuple(
    Held(world, numel, (kind,), seed=world)
    for kind, world, numel in zip(
        KINDS,
        (2, 3, 4, 5, 6, 7, 8, 9, 13, 17),
        (61, 7, 257, 61, 257, 257, 700, 700, 257, 700),
        strict=True,
    )
)
"""Every kind on all ranks, with several worlds."""


@dataclass(frozen=True)
class Ran:
    """One step: what was held, what came out, what the members noted."""

    held: Held
    sets: list[Tensor]
    grads: list[Tensor]
    means: list[Tensor]
    members: list[Member]
    sent_bytes: list[int]


@lru_cache(maxsize=1)
def ran(exchange: Pair, held: Held) -> Ran:
    """The step, run once for all laws."""
    sets = held.sets()
    grads, members = (
        held.grads(sets),
        [Member(r, held.world) for r in range(held.world)],
    )
    means = [torch.full_like(grad_N, 9.0) for grad_N in grads]
    given: list[Any] = [
        exchange.synchronise(me, exchange.init(held.spec, held.world), grad_N, mean_N)
        for me, grad_N, mean_N in zip(members, grads, means, strict=True)
    ]
    return Ran(
        held, sets, grads, means, members, drive(given, seed=held.seed).sent_bytes
    )


def law_the_mean_is_that_of_dense_gradients(exchange: Pair, held: Held) -> None:
    """In which elements are not zero exactly, in their values to rounding."""
    one = ran(exchange, held)
    want_N = torch.stack([grad_N.double() for grad_N in one.grads]).mean(0)
    for rank, mean_N in enumerate(one.means):
        wrong_N = ((mean_N != 0) != (want_N != 0)).nonzero()[:, 0]
        assert not len(wrong_N), (
            f"rank {rank}: element {int(wrong_N[0])} is there or lost"
        )
        assert_near(
            mean_N,
            want_N,
            torch.float32,
            magnitude=largest(*one.grads),
            terms=held.world,
            what=f"the mean of rank {rank}",
        )


def law_every_rank_has_the_same_bits(exchange: Pair, held: Held) -> None:
    one = ran(exchange, held)
    for rank, mean_N in enumerate(one.means):
        assert same_bits(mean_N, one.means[0]), (
            f"rank {rank} has other bits than rank 0"
        )


def law_bytes_are_the_formulas(exchange: Pair, held: Held) -> None:
    """Of the very sets."""
    if held.world == 1:
        return
    one = ran(exchange, held)
    stated = bytes_of(exchange.collective, exchange.codec, held.spec, one.sets)
    assert one.sent_bytes == stated, f"sent {one.sent_bytes}, by the formula {stated}"


def law_what_was_selected_is_counted(exchange: Pair, held: Held) -> None:
    if held.world == 1:
        return
    one = ran(exchange, held)
    union = len(torch.cat(one.sets).unique())
    for me, own in zip(one.members, one.sets, strict=True):
        assert me.selection is not None, f"rank {me.rank} notes nothing"
        got = me.selection[1:]
        assert got == (len(own), union), (
            f"rank {me.rank} notes {got} of {len(own)}, {union}"
        )


def law_imbalance_is_definition_8(exchange: Pair, held: Held) -> None:
    """Where units are elements; the same on every rank."""
    noted = {me.imbalance for me in ran(exchange, held).members}
    assert len(noted) == 1, f"ranks note different things: {noted}"
    want = imbalance(exchange, held)
    if want is None:
        return
    (got,) = noted
    assert got is not None, "nothing was noted"
    assert all(abs(a - b) < 1e-9 for a, b in zip(got, want, strict=True)), (
        f"{got}, not {want}"
    )


def imbalance(exchange: Pair, held: Held) -> tuple[float, float] | None:
    """Definition 8 from the sets, for zen and for ranges; None for others."""
    scheme, world = exchange.collective, held.world
    if world == 1 or not isinstance(scheme, zen | sparse_ps | sparse_ps_broadcast):
        return None
    parts = parts_of(held.numel, world, scheme.permutation(held.numel))
    owner_N = torch.empty(held.numel, dtype=torch.int64)
    for part in parts:
        owner_N[part.indices(torch.arange(part.length, dtype=torch.int32)).long()] = (
            part.rank
        )

    def busiest(indices: Tensor) -> float:
        counts_W = owner_N[indices.long()].bincount(minlength=world)
        return world * int(counts_W.max()) / max(1, len(indices))

    sets = ran(exchange, held).sets
    return max(map(busiest, sets)), busiest(torch.cat(sets).unique())


def imbalance_bound(world: int, num_taken: int) -> float:
    """Theorem 2 with its constant: imbalance stays below this with probability 1 - 1 /
    W.

    Of sets of ``num_taken`` units, or a union of so many, that were chosen without
    knowledge of the seed. By Chernoff's bound a part gets (1 + d) of its share with
    probability at most exp(-d^2 K / 3 W) for d <= 1, and the W^2 pairs of a worker and
    a part all stay below with d = 3 sqrt(W ln W / K). The theorem's Theta hides the 3.
    Needs K >= 9 W ln W, where d is 1.
    """
    return 1 + 3 * sqrt(world * log(world) / num_taken)


def law_parts_are_balanced(exchange: Pair, held: Held) -> None:
    """Theorem 2, of schemes that say so and sets that do not follow the hash."""
    dimensions = exchange.collective.dimensions
    if (
        dimensions is None
        or dimensions.balance != "balanced"
        or "one hashed part" in held.kinds
    ):
        return
    one, world = ran(exchange, held), held.world
    fewest = min(map(len, one.sets))
    if world == 1 or fewest < 9 * world * log(world):
        return
    got = one.members[0].imbalance
    assert got is not None, "nothing was noted"
    for name, found, taken in (
        ("push", got.push, fewest),
        ("pull", got.pull, len(torch.cat(one.sets).unique())),
    ):
        bound = imbalance_bound(world, taken)
        assert found <= bound, f"{name} imbalance {found:.3f}, at most {bound:.3f}"


LAWS = tuple(
    found for name, found in sorted(globals().items()) if name.startswith("law_")
)


# ---- deliberately wrong ones ---------------------------------------------------------


class loses_element_0(zen):
    """Takes index 0 for an empty place of its table."""

    def units(self, me: Member, entries: Entries, numel: int) -> Entries:
        return _kept(entries, entries.indices_K != 0)


class drops_overflow(zen):
    """Has room for a quarter more than an equal share in each part, and loses the
    rest.
    """

    def units(self, me: Member, entries: Entries, numel: int) -> Entries:
        places_K = Permutation(numel, self.seed).places(entries.indices_K)
        part_K = places_K // max(1, part_length(numel, me.world))
        room = 1 + entries.num * 5 // (4 * me.world)
        before_K = (part_K[:, None] == part_K[None, :]).tril(-1).sum(1)
        return _kept(entries, before_K < room)


class says_more_than_it_states(zen):
    """Ranks announce one number more."""

    def merge(self, me: Member, *given: Any) -> Steps[Any]:
        yield AllGather(me.announced("more", me.world), me.announced("own", 1))
        return (yield from super().merge(me, *given))


class counts_one_more(zen):
    """Counts an element that nobody took in every part."""

    def arrived(self, merged: Entries) -> int:
        return super().arrived(merged) + 1


class claims_balance(zen):
    """Notes that all parts are equal, without looking."""

    def run(self, codec, me, state, grad_N, out_N, residual_N):
        state = yield from super().run(codec, me, state, grad_N, out_N, residual_N)
        me.imbalance = Imbalance(1.0, 1.0)
        return state


class hashes_nothing(zen):
    """Leaves every index where it is."""

    def permutation(self, num_units: int) -> Permutation | None:
        return None


def _kept(entries: Entries, kept_K: Tensor) -> Entries:
    chosen = kept_K.nonzero()[:, 0]
    units = entries.values.view(-1, entries.width)[chosen]
    return Entries(
        entries.indices_K[chosen].to(torch.int32), units.flatten(), entries.width
    )


def _with(scheme: zen) -> Pair:
    return Pair(nonzero(), scheme)


class loses_what_overflows(zen):
    """Algorithm 1 without a fallback: entries beyond serial memory are lost."""

    def units(self, me: Member, entries: Entries, numel: int) -> Entries:
        memory = HashMemory(parallel=0.5, serial=0.0)
        permutation = Permutation(numel, self.seed)
        hashed = hash_partition(entries, numel, me.world, permutation, memory=memory)
        return _kept(entries, torch.arange(entries.num) >= hashed.fallback)


BITES = (
    (
        law_the_mean_is_that_of_dense_gradients,
        _with(loses_what_overflows(partition="hash")),
    ),
    (law_the_mean_is_that_of_dense_gradients, _with(loses_element_0())),
    (law_the_mean_is_that_of_dense_gradients, _with(drops_overflow())),
    (law_every_rank_has_the_same_bits, Pair(topk(density=1.0), starts_with_itself())),
    (law_bytes_are_the_formulas, _with(says_more_than_it_states())),
    (law_what_was_selected_is_counted, _with(counts_one_more())),
    (law_imbalance_is_definition_8, _with(claims_balance())),
    (law_parts_are_balanced, _with(hashes_nothing())),
)
"""Which law must reject which."""


# ---- tests ---------------------------------------------------------------------------

SCHEMES = (
    *(
        pair(nonzero(), one)
        for one in examples("collective")
        if one.dimensions is not None
    ),
    pair(nonzero(), omnireduce(block=3)),
    pair(nonzero(), zen(partition="hash")),
)


@pytest.mark.parametrize("exchange", SCHEMES, ids=name_of)
def test_sparse_collectives_keep_every_law(exchange: Pair) -> None:
    @bounded(4)
    @given(held=holdings)
    def hold(held: Held) -> None:
        for law in LAWS:
            law(exchange, held)

    for held in EACH_KIND:
        for law in LAWS:
            law(exchange, held)
    hold()


@each("law, exchange", BITES, ids=lambda p: getattr(p, "__name__", ""))
def test_law_bites(law: Callable[..., None], exchange: Pair) -> None:
    def all_kinds() -> None:
        for held in (*EACH_KIND, LOPSIDED):
            law(exchange, held)

    with pytest.raises(AssertionError):
        all_kinds()


def test_every_law_has_a_specimen() -> None:
    assert {law for law, _ in BITES} == set(LAWS)


LOPSIDED = Held(world=8, numel=20_000, kinds=("dense start",))


@each("kinds", [("dense start",), ("one range",), ("one range", "any")])
def test_a_hash_balances_what_ranges_do_not(kinds: tuple[str, ...]) -> None:
    """Theorem 2's bound holds on skewed and adversarial sets, and no range keeps it."""
    held = Held(world=8, numel=20_000, kinds=kinds)
    for seed in range(3):
        law_parts_are_balanced(pair(nonzero(), zen(seed=seed)), held)
    fewest = min(map(len, held.sets()))
    ranged = imbalance(pair(nonzero(), sparse_ps()), held)
    assert ranged is not None
    assert ranged[0] > 2 * imbalance_bound(8, fewest), f"{ranged} is nearly balanced"


def test_a_hash_table_gives_the_bits_of_the_permutation() -> None:
    for held in EACH_KIND:
        hashed = ran(pair(nonzero(), zen(partition="hash")), held)
        sorted_ = ran(pair(nonzero(), zen(formats="paper")), held)
        for mean_N, want_N in zip(hashed.means, sorted_.means, strict=True):
            assert same_bits(mean_N, want_N)
        for me, other in zip(hashed.members, sorted_.members, strict=True):
            assert me.imbalance == other.imbalance


def test_full_serial_memory_is_said_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tight = partial(hash_partition, memory=HashMemory(parallel=0.5, serial=0.0))
    monkeypatch.setattr(hashing, "hash_partition", tight)
    held = Held(world=4, numel=1009, kinds=("any",), seed=3)
    hashed = ran(pair(nonzero(), zen(partition="hash", seed=8)), held)
    assert "serial memory was full" in caplog.text
    for mean_N, want_N in zip(
        hashed.means, ran(pair(nonzero(), zen(seed=8)), held).means, strict=True
    ):
        assert same_bits(mean_N, want_N)


def test_another_partition_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="zen partition must be permutation or"):
        zen(partition="sorted")


def test_collectives_have_the_dimensions_of_the_papers_table_3() -> None:
    """Balanced Parallelism alone is point-to-point, incremental, parallel and
    balanced.
    """
    announced: dict[str, tuple[object, ...]] = {
        type(one).__name__: one.dimensions
        for one in examples("collective")
        if one.dimensions is not None
    }
    assert announced == {
        "allgather_sparse": ("ring", "one-shot", "centralization", None),
        "sparcml": ("hierarchy", "incremental", "centralization", None),
        "omnireduce": ("point-to-point", "one-shot", "parallelism", "imbalanced"),
        "sparse_ps": ("point-to-point", "incremental", "parallelism", "imbalanced"),
        "sparse_ps_broadcast": (
            "point-to-point",
            "incremental",
            "parallelism",
            "imbalanced",
        ),
        "zen": ("point-to-point", "incremental", "parallelism", "balanced"),
    }


@each("scheme", [one.collective for one in SCHEMES])
def test_rows_travel_whole(scheme: Collective) -> None:
    """Rows of 5 that are shared by nobody, some or all; 33 rows and 3 elements more."""
    draw = torch.Generator().manual_seed(3)
    exchange = pair(nonzero(width=5), scheme)
    rows_WR = torch.rand(4, 34, generator=draw) < 0.3
    grads = [
        (rows_R.repeat_interleave(5)[:168] * torch.randn(168, generator=draw)).double()
        for rows_R in rows_WR
    ]
    want_N = torch.stack(grads).mean(0)
    for mean_N, _, _ in run_local(exchange, grads):
        assert torch.allclose(mean_N, want_N, rtol=0, atol=1e-15)
