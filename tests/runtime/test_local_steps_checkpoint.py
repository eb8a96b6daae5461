"""Local steps: saved and resumed is uninterrupted, bit for bit, on as many ranks or on others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.errors import InvalidSetting, RanksDiffer
from gradwire.runtime.local_steps.local_handle import Rhythm
from tests.runtime.ranks import Ranks
from tests.runtime.test_checkpoint import through_a_file
from tests.runtime.test_local_steps import FOUR_BITS, SPARSE, prepared
from tests.runtime.training import digest, train

NUM_STEPS = 17
STREAMING = Rhythm(6, fragments=2, delay=2, mixing=0.5)
CASES = (
    (Rhythm(4), FOUR_BITS, 6),
    (Rhythm(5), SPARSE, 5),
    (STREAMING, SPARSE, 8),
    (STREAMING, SPARSE, 10),  # while a fragment is on its way
)


def bits(net: Any, handle: Any) -> str:
    held = [*net.parameters(), *handle.anchors().values(), *handle.residuals().values()]
    momenta = [own["momentum_buffer"] for own in handle.outer.state.values()]
    return digest([*held, *momenta])


def resumed(
    rank: int, world: int, rhythm: Rhythm, exchange: Exchange, at: int
) -> tuple[str, str, int, int]:
    net, optimizer, handle = prepared(rhythm, exchange)
    train(net, optimizer, rank, range(at))
    states = through_a_file([net.state_dict(), optimizer.state_dict(), handle.state_dict()])
    on_its_way = len(states[2]["outer"]["arriving"])
    train(net, optimizer, rank, range(at, NUM_STEPS))
    whole = bits(net, handle)

    net, optimizer, handle = prepared(rhythm, exchange, seed=1)
    train(net, optimizer, rank, range(3))  # a state of its own, to be replaced
    for part, state in zip((net, optimizer, handle), states, strict=True):
        part.load_state_dict(state)
    train(net, optimizer, rank, range(at, NUM_STEPS))
    assert handle.stats()["steps"] == NUM_STEPS - at
    return whole, bits(net, handle), handle.step, on_its_way


@pytest.mark.multi
@pytest.mark.parametrize(("rhythm", "exchange", "at"), CASES, ids=["mid", "end", "turn", "way"])
def test_a_resumed_run_is_the_uninterrupted_one(
    rhythm: Rhythm, exchange: Exchange, at: int, two: Ranks
) -> None:
    for whole, again, step, on_its_way in two.run(resumed, rhythm, exchange, at):
        assert (again, step) == (whole, NUM_STEPS)
        assert bool(on_its_way) == (at == 10)


def saved(rank: int, world: int) -> dict[str, Any]:
    net, optimizer, handle = prepared(STREAMING, SPARSE)
    train(net, optimizer, rank, range(10))
    return copy.deepcopy(handle.state_dict())


def mean_pseudo_gradient(states: list[dict[str, Any]], name: str) -> Tensor:
    outers = [state["outer"] for state in states]
    deltas = [(one["anchors"][name] - one["parameters"][name]).double() for one in outers]
    return torch.stack(deltas).mean(0)


def loaded(rank: int, world: int, states: list[dict[str, Any]]) -> tuple[str, str, int]:
    net, optimizer, handle = prepared(STREAMING, SPARSE, seed=2)
    handle.load_state_dict(states[rank])
    assert all(
        torch.equal(p, states[rank]["outer"]["parameters"][name])
        for name, p in net.named_parameters()
    )
    train(net, optimizer, rank, range(10, 14))
    return digest(net), digest(handle.anchors().values()), handle.step


@pytest.mark.multi
@pytest.mark.parametrize(("before", "after"), [("two", "four"), ("four", "two")])
def test_another_number_of_ranks_goes_on_from_the_mean(
    before: str, after: str, request: pytest.FixtureRequest
) -> None:
    olds = request.getfixturevalue(before).run(saved)
    pool = request.getfixturevalue(after)
    news = gw.redistribute(olds, pool.world)
    for name in olds[0]["outer"]["anchors"]:
        torch.testing.assert_close(
            mean_pseudo_gradient(news, name), mean_pseudo_gradient(olds, name), rtol=0, atol=1e-7
        )
        assert bool(mean_pseudo_gradient(olds, name).any())
    ends = pool.run(loaded, news)
    assert len({anchors for _, anchors, _ in ends}) == 1
    assert len({own for own, _, _ in ends}) == pool.world
    assert {step for _, _, step in ends} == {14}


def moments_apart(rank: int, world: int) -> tuple[str, str, str]:
    net, optimizer, handle = prepared(Rhythm(9))
    train(net, optimizer, rank, range(2))
    early = through_a_file(handle.state_dict())
    train(net, optimizer, rank, range(2, 4))
    late = through_a_file(handle.state_dict())
    before = bits(net, handle) if handle.outer.state else digest(net)
    with pytest.raises(RanksDiffer) as caught:
        handle.load_state_dict(late if rank else early)
    after = bits(net, handle) if handle.outer.state else digest(net)
    return str(caught.value), before, after


@pytest.mark.multi
def test_states_of_two_moments_of_a_period_are_refused(two: Ranks) -> None:
    for text, before, after in two.run(moments_apart):
        assert "local_step is 2 against 4" in text
        assert before == after


def alone() -> tuple[Any, dict[str, Any]]:
    net, optimizer, handle = prepared(Rhythm(2), SPARSE)
    train(net, optimizer, 0, range(3))
    return handle, handle.state_dict()


def broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    _, state = alone()
    change(state)
    return state


WEIGHT = "last.weight"
DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no outer": (lambda s: s.pop("outer"), "not one of local steps: its anchors is missing"),
    "no step": (lambda s: s.pop("local_step"), "local_step of the state must be a whole number"),
    "a list": (lambda s: s["outer"].update(anchors=[]), "its anchors is missing or no dict"),
    "place": (lambda s: s["outer"].update(position=-1), "position in the period"),
    "name": (lambda s: s["outer"]["anchors"].pop(WEIGHT), f"has {WEIGHT} among its anchors"),
    "shape": (lambda s: s["outer"]["anchors"].update({WEIGHT: torch.ones(3)}), "must be .5, 29."),
    "nan": (lambda s: s["outer"]["parameters"][WEIGHT].fill_(torch.nan), "must be finite"),
    "arriving": (lambda s: s["outer"]["arriving"].update(x=torch.ones(1)), "x among the arriving"),
    "momentum": (
        lambda s: s["outer"]["optimizer"]["state"][0]["momentum_buffer"].fill_(torch.inf),
        "momentum_buffer of the outer optimizer must be finite",
    ),
    "groups": (lambda s: s["outer"]["optimizer"].pop("param_groups"), "cannot be loaded"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused_and_nothing_is_loaded(damage: str) -> None:
    change, said = DAMAGES[damage]
    handle, _ = alone()
    before = digest([*handle.anchors().values(), *handle._model.parameters()])
    with pytest.raises(InvalidSetting, match=said):
        handle.load_state_dict(broken(change))
    assert digest([*handle.anchors().values(), *handle._model.parameters()]) == before


def test_a_state_of_attach_is_none_of_local_steps() -> None:
    net, _, handle = prepared(Rhythm(2), SPARSE)
    state = handle.state_dict()
    handle.detach()
    attached = gw.attach(net, SPARSE)
    with pytest.raises(InvalidSetting, match="this state belongs to local steps with outer SGD"):
        attached.load_state_dict(state)


def test_anchors_that_differ_are_not_redistributed() -> None:
    _, state = alone()
    olds = [{**copy.deepcopy(state), "rank": rank, "world_size": 2} for rank in range(2)]
    for old in olds:
        old["saved_by"] = 2
    olds[1]["outer"]["anchors"][WEIGHT] += 1
    with pytest.raises(InvalidSetting, match=f"anchors of {WEIGHT} of rank 0 and rank 1 differ"):
        gw.redistribute(olds, 3)
