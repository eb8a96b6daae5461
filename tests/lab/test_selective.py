"""selective: its choice, its message by the laws of exchanges, and its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.contract.registry import load
from gradwire.exchange.by_name import exchange_for, run_local
from gradwire.exchange.without_data import wire_bytes
from gradwire_lab.compress.selective import SMALL, Choice, choose, selective
from gradwire_lab.laws import collectives, exchanges, many_steps
from gradwire_lab.laws.cases import Case
from gradwire_lab.laws.tolerance import same_bits
from tests.each import each
from tests.run import Run
from tests.strategies import bounded

SPARSIFIERS = ("topk", "dgc", "graddrop", "gaussiank", "redsync", "sidco")
SHAPES = ((7,), (40, 30), (0,), (1,), (25, 20), (30,), (), (9, 8))
"""A model's message: large tensors, small ones, one of one element, a scalar and an
empty one.
"""


@dataclass(frozen=True, kw_only=True)
class Fused(Case):
    """A case whose gradient is a message of these shapes."""

    numel: int = sum(map(prod, SHAPES))
    shapes: tuple[tuple[int, ...], ...] = SHAPES

    @property
    def spec(self) -> gw.TensorSpec:
        return gw.TensorSpec("message", self.numel, self.dtype, self.shapes)


Chooser = Callable[[tuple[int, ...], float, float], Choice]

# ---- the choice ----------------------------------------------------------------------


MODELS = st.lists(
    st.sampled_from([0, 1, 2, 9, 64, 1000, 1000, SMALL, SMALL + 1, 10**6]), max_size=12
).map(tuple)


def law_of_choice(choose: Chooser, sizes: tuple[int, ...], density: float) -> None:
    """The smallest tensors are dense, and the others make up for the elements of
    these.
    """
    found = choose(sizes, density, 0.001)
    assert sorted(found.dense + found.sparse) == [
        i for i, size in enumerate(sizes) if size
    ]
    assert [*found.dense] == sorted(found.dense)
    assert [*found.sparse] == sorted(found.sparse)
    order = [(sizes[place], place) for place in found.dense + found.sparse]
    assert sorted(order)[: len(found.dense)] == sorted(order[: len(found.dense)])
    assert found.sparse or not any(sizes), "all of the message is dense"
    assert min(density, 0.001) <= found.density <= density
    sent = sum(sizes[place] for place in found.dense)
    sent += sum(found.density * sizes[place] for place in found.sparse)
    assert sent == pytest.approx(density * sum(sizes), abs=1e-6 * max(1, sum(sizes)))


@bounded(100)
@given(sizes=MODELS, density=st.floats(0.0001, 1.0))
def test_the_choice_of_dense_tensors_keeps_its_law(
    sizes: tuple[int, ...], density: float
) -> None:
    law_of_choice(choose, sizes, density)


def forgets_the_last(sizes: tuple[int, ...], density: float, floor: float) -> Choice:
    found = choose(sizes, density, floor)
    return found._replace(sparse=found.sparse[:-1])


def leaves_the_first_dense(
    sizes: tuple[int, ...], density: float, floor: float
) -> Choice:
    return Choice((0,), tuple(range(1, len(sizes))), density)


def leaves_all_dense(sizes: tuple[int, ...], density: float, floor: float) -> Choice:
    return Choice(tuple(range(len(sizes))), (), density)


def does_not_compensate(sizes: tuple[int, ...], density: float, floor: float) -> Choice:
    return choose(sizes, density, floor)._replace(density=density)


WRONG = (
    forgets_the_last,
    leaves_the_first_dense,
    leaves_all_dense,
    does_not_compensate,
)


@each("wrong", WRONG)
def test_the_law_of_choice_bites(wrong: Chooser) -> None:
    with pytest.raises(AssertionError):
        law_of_choice(wrong, (1000, 10, 20), 0.05)


def test_a_plan_may_choose_itself() -> None:
    """Then the density is that of the sparse tensors as it stands."""
    assert choose((5, 7, 0, 5), 0.1, 0.05, 2) == Choice((0, 3), (1,), 0.1)
    assert choose((5, 7), 0.1, 0.05, 0) == Choice((), (0, 1), 0.1)
    assert choose((5, 7), 0.1, 0.05, 3) == Choice((0, 1), (), 0.1)


# ---- laws on messages of many tensors ------------------------------------------------

LAWS = [
    law for law in (*exchanges.LAWS, *collectives.OF_ANY) if law not in many_steps.LAWS
]


@each("sparsifier, num_dense", zip(SPARSIFIERS, (3, None, 0, 8, 3, 0), strict=True))
def test_fused_messages_keep_the_laws_of_exchanges(
    sparsifier: str, num_dense: int | None
) -> None:
    """3 of 7 tensors with elements are dense, or as many as chosen, none or all."""
    exchange = selective(sparsifier=sparsifier, density=0.1, num_dense=num_dense)
    case = Fused(world=3) if num_dense else Fused(world=2, dtype=torch.bfloat16)
    for law in LAWS[SPARSIFIERS.index(sparsifier) % 3 :: 3]:
        law(exchange, case)


# ---- what it is made of --------------------------------------------------------------


@each(
    "sparsifier, dtype",
    zip(SPARSIFIERS, (torch.float32, torch.bfloat16) * 3, strict=True),
)
def test_all_sparse_is_the_codec_tensor_by_tensor(
    sparsifier: str, dtype: torch.dtype
) -> None:
    """Bit for bit, over two steps with error feedback."""
    case = Fused(world=3, dtype=dtype)
    whole = gw.with_error_feedback(
        selective(sparsifier=sparsifier, density=0.1, num_dense=0)
    )
    alone = exchange_for(load("compress", sparsifier)(density=0.1))
    states, sizes = case.states(whole), [prod(shape) for shape in SHAPES]
    stops = [*accumulate(sizes)]
    specs = [case.spec.chunk(b - size, b) for size, b in zip(sizes, stops, strict=True)]
    own = [[alone.init(spec, 3) for _ in range(3)] for spec in specs]
    for step in range(2):
        grads = case.grads(step)
        results = run_local(whole, grads, states)
        states = [state for _, _, state in results]
        for number, stop in enumerate(stops):
            cut = slice(stop - sizes[number], stop)
            parts = run_local(alone, [grad_N[cut] for grad_N in grads], own[number])
            own[number] = [state for _, _, state in parts]
            for (mean_N, _, state), (part_N, _, kept) in zip(
                results, parts, strict=True
            ):
                assert same_bits(mean_N[cut], part_N)
                assert same_bits(state.residual_N[cut], kept.residual_N)


# ---- bytes ---------------------------------------------------------------------------


@each("dtype", [torch.float32, torch.float64, torch.float16])
def test_bytes_are_the_formulas(dtype: torch.dtype) -> None:
    """4 D + 8 K, or 8 D for float64, to each other rank; topk's K is known, so no size
    is told.
    """
    case, exchange = (
        Fused(world=3, dtype=dtype),
        selective(sparsifier="topk", density=0.1),
    )
    choice = choose(tuple(map(prod, SHAPES)), 0.1, 0.001, dense_cost=0.5)
    sizes = [prod(shape) for shape in SHAPES]
    dense = sum(sizes[place] for place in choice.dense)
    entries = sum(
        max(1, round(choice.density * sizes[place])) for place in choice.sparse
    )
    assert choice.dense, "nothing is dense here"
    size_bytes = max(4, dtype.itemsize) * dense + 8 * entries
    want = [2 * (-(-size_bytes // 8) * 8)] * 3
    assert wire_bytes(exchange, case.spec, 3) == want
    run = Run(exchange, case.spec, 3)
    run.step(case.grads())
    assert run.sent_bytes == want


def test_selection_is_noted() -> None:
    """What was asked for, taken and averaged, dense tensors included."""
    case, exchange = (
        Fused(world=2),
        selective(sparsifier="topk", density=0.1, count="elements"),
    )
    mixed = exchange.mixed(case.spec)
    run = Run(exchange, case.spec, 2)
    run.step([case.grads()[0]] * 2)
    found = run.members[0].selection
    assert found is not None
    taken = mixed.num_dense + mixed.largest.fields[1].numel
    assert found.asked == pytest.approx(0.1 * case.numel)
    assert (found.selected, found.arrived) == (taken, taken)


# ---- settings ------------------------------------------------------------------------


def test_the_state_is_kept_by_tensor_whatever_is_dense() -> None:
    """So a run that is resumed under another choice, or fused otherwise, finds it."""
    spec = Fused(world=2).spec
    kept = [selective(num_dense=n).init(spec, 2) for n in (0, 3)]
    assert [len(state.codec_T) for state in kept] == [len(SHAPES)] * 2
    assert all(
        same_bits(a, b) for a, b in zip(kept[0].codec_T, kept[1].codec_T, strict=True)
    )
    assert selective(sparsifier="topk").init(spec, 2).codec_T == ()
