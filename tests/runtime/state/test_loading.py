"""All ranks load what belongs together, or none loads: nobody trains on with half a
checkpoint.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import gradwire as gw
from gradwire.contract import Exchange
from gradwire.errors import InvalidSetting, RankFailed, RanksDiffer
from gradwire.runtime.handle import Handle
from gradwire.runtime.liveness import membership
from gradwire.runtime.liveness.membership import Membership
from gradwire.runtime.state import joint_call
from tests.runtime.given import SMALL, keywords
from tests.runtime.meshes import device_mesh
from tests.runtime.ranks import Ranks
from tests.runtime.training import (
    SMALL_MB,
    TOPK,
    Net,
    adamw,
    ddp,
    digest,
    momentum,
    train,
)

pytestmark = pytest.mark.multi

WARMING = gw.with_density_warmup(gw.compress.topk(density=0.05), steps_per_stage=3)
"""Whose ranks send payloads of other sizes where they are at other steps."""


def attached(exchange: Exchange, **settings: Any) -> tuple[Net, Handle]:
    net = Net()
    return net, gw.attach(net, exchange, **keywords(bucket_cap_mb=SMALL_MB, **settings))


def at_steps(net: Net, handle: Handle, rank: int, *steps: int) -> list[dict[str, Any]]:
    """What is kept at each of these steps."""
    found, optimizer = [], momentum(net.parameters())
    for step in steps:
        train(net, optimizer, rank, range(handle.step, step))
        found.append(handle.state_dict())
    net.zero_grad()
    return found


def without(state: dict[str, Any], part: str, name: str) -> dict[str, Any]:
    return {
        **state,
        part: {key: value for key, value in state[part].items() if key != name},
    }


State = dict[str, Any]
DIFFERENT: dict[str, tuple[Callable[[list[State], State], State], str]] = {
    "an older step": (
        lambda own, other: own[0],
        "same checkpoint: step is 4 against 2",
    ),
    "another run": (lambda own, other: other, "same checkpoint: run is"),
    "a parameter less": (
        lambda own, other: without(own[1], "params", "last.weight"),
        "strict is True against False",
    ),
}
"""What rank 1 loads, of its own states at two steps and of one of another run, and what
both ranks are told. Rank 0 loads its own at the second step.
"""


def with_params(state: State, **params: Any) -> State:
    return {**state, "params": {**state["params"], **params}}


LAST = {"residual_N": torch.zeros(1)}
REFUSED: dict[str, tuple[Callable[[State], State], tuple[str, ...]]] = {
    "algorithm": (
        lambda own: {**own, "algorithm": "onebit"},
        ("this state belongs to onebit", "topk", "attach with the same settings"),
    ),
    "version": (
        lambda own: {**own, "version": 1},
        ("state_dict version must be 3, got 1",),
    ),
    "world size": (
        lambda own: {**own, "world_size": 3},
        ("saved by 3 ranks", "there are 2", "gw.redistribute"),
    ),
    "rank": (
        lambda own: {**own, "rank": 0},
        ("saved by rank", "each rank loads its own"),
    ),
    "shard": (
        lambda own: {**own, "shard": "part 1 of 2"},
        ("of part 1 of 2", "holds part 0 of 1", "each rank loads its own"),
    ),
    "nothing of ours": (
        lambda own: {},
        ("not a gradwire state_dict", "handle.state_dict()"),
    ),
    "missing": (
        lambda own: without(own, "params", "last.weight"),
        ("missing", "same model", "strict=False"),
    ),
    "missing field": (
        lambda own: with_params(own, **{"last.weight": {}}),
        ("lacks residual_N", "strict=False"),
    ),
    "unexpected": (
        lambda own: with_params(own, **{"new.weight": {}}),
        ("new.weight", "same mode"),
    ),
    "size": (
        lambda own: with_params(own, **{"last.weight": LAST}),
        ("residual_N of", "shape [1] and here it has [", "same model"),
    ),
}
"""What rank 1 loads in the place of its own state, and what it is told."""


def torn(rank: int, world: int) -> tuple[list[str], str]:
    """What a rank is told; and what it ends with if it then trains on with what it
    has.
    """
    torch.manual_seed(rank)
    other = at_steps(*attached(TOPK), rank, 4)[0]
    net, handle = attached(TOPK)
    own = at_steps(net, handle, rank, 2, 4)
    net, handle = attached(TOPK)
    at_steps(net, handle, rank, 1)
    before, reported = digest(handle.residuals().values()), []
    given = [make(own, other) for make, _ in DIFFERENT.values()]
    given += [make(own[1]) for make, _ in REFUSED.values()]
    for name, wrong in zip([*DIFFERENT, *REFUSED], given, strict=True):
        strict = rank == 0 or name != "a parameter less"
        with pytest.raises(InvalidSetting) as raised:
            handle.load_state_dict(wrong if rank else own[1], strict=strict)
        assert digest(handle.residuals().values()) == before
        assert handle.step == 1
        reported.append(f"{type(raised.value).__name__}: {raised.value}")
    train(net, momentum(net.parameters()), rank, range(1, 3))
    net.zero_grad()
    handle.load_state_dict(own[1])  # all of one moment
    train(net, momentum(net.parameters()), rank, range(4, 6))
    handle.detach()
    return reported, digest(net)


def test_a_torn_checkpoint_is_loaded_by_no_rank(two: Ranks) -> None:
    (first, one), (second, other) = two.run(torn)
    assert one == other
    num = len(DIFFERENT)
    for (_, said), *texts in zip(DIFFERENT.values(), first, second, strict=False):
        assert all(
            text.startswith("RanksDiffer: rank 0 and rank 1") for text in texts
        ), texts
        assert all(said in text for text in texts), texts
    for (_, parts), reported, own in zip(
        REFUSED.values(), first[num:], second[num:], strict=True
    ):
        assert own.startswith("InvalidSetting: ")
        assert all(part in own for part in parts), own
        how = (
            "RanksDiffer: rank 1 refused load_state_dict(), so nothing was loaded "
            "on any rank: "
        )
        assert reported == how + own


def some_differ(rank: int, world: int) -> list[str]:
    """Two ranks have an older step; then one rank lacks a parameter, where nobody is
    strict.
    """
    net, handle = attached(WARMING)
    older, newer = at_steps(net, handle, rank, 1, 2)
    lacking = without(newer, "params", "last.weight")
    reported = []
    for given in (older if rank % 2 else newer, lacking if rank == 1 else newer):
        with pytest.raises(RanksDiffer) as raised:
            handle.load_state_dict(given, strict=False)
        reported.append(str(raised.value))
    handle.load_state_dict(lacking, strict=False)
    assert handle.step == 2
    handle.detach()
    return reported


def test_all_ranks_that_differ_are_named(four: Ranks) -> None:
    for older, lacking in four.run(some_differ):
        assert (
            "rank 0 and rank 1, 3 do not have the same checkpoint: step is 2 against 1"
            in older
        )
        assert (
            "rank 0 and rank 1 do not have the same checkpoint: only one of both has "
            in lacking
        )


def some_begin_without(
    rank: int, world: int, steps: int
) -> tuple[tuple[int, ...], int, str]:
    """Ranks 1 and 3 do not load, and train; ``steps`` were made before."""
    net, handle = attached(TOPK)
    [state] = at_steps(net, handle, rank, 2)
    if not steps:
        net, handle = attached(TOPK)
    else:
        handle.load_state_dict(state)  # that once was no mistake
        handle.load_state_dict(state)
    with pytest.raises(RankFailed) as raised:
        load_if(rank % 2 == 0, handle, state, net)
    return raised.value.ranks, raised.value.step, str(raised.value)


def load_if(loads: bool, handle: Handle, state: dict[str, Any], net: Net) -> None:
    if loads:
        handle.load_state_dict(state)
    train(net, momentum(net.parameters()), handle.rank, range(2))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 2], ids=["at once", "later"])
def test_ranks_that_do_not_load_are_named_on_all(steps: int, doomed: Ranks) -> None:
    """Long before the timeout of five minutes, by those who wait for them."""
    for ranks, step, text in doomed.run(some_begin_without, steps):
        assert set(ranks) <= {1, 3}
        assert ranks
        assert step == steps
        assert f"began step {steps} without load_state_dict(), which rank" in text
        assert f"step {steps} cannot be finished" in text


def back_by_a_step(rank: int, world: int) -> list[tuple[int, int]]:
    """What ranks show after they went back to the step that they had begun last."""
    net, handle = attached(TOPK)
    older, _ = at_steps(net, handle, rank, 1, 2)
    handle.load_state_dict(older)
    while min(sign.place.num_calls for sign in handle._engine.signs()) < 1:
        pass  # each look is at what was read anew
    dist.barrier()
    found = [sign.place for sign in handle._engine.signs()]
    handle.load_state_dict(older)
    handle.detach()
    return [(place.launched, place.num_calls) for place in found]


def test_a_step_begun_before_a_load_is_not_taken_for_one_begun_without(
    two: Ranks,
) -> None:
    for places in two.run(back_by_a_step):
        assert places == [(0, 1), (0, 1)]


def one_never_comes(rank: int, world: int) -> str:
    """Rank 0 loads last, and its patience ends first; rank 3 is in the call, and slow
    in it.
    """
    net, handle = attached(TOPK)
    [state] = at_steps(net, handle, rank, 1)
    membership._LOOK_S = 0.5  # as in a job: rank 0 tells the others before they look
    if rank == 2:
        dist.monitored_barrier(timeout=timedelta(seconds=50))
        return ""
    if rank == 3:
        handle._between_steps = lambda what: time.sleep(5)  # type: ignore[method-assign]
    if rank == 0:
        handle._engine.timeout = timedelta(seconds=3)
        while not all(
            handle._engine.signs()[other].place.num_calls for other in (1, 3)
        ):
            pass  # each look is at what was read anew
    with pytest.raises(RankFailed) as raised:
        handle.load_state_dict(state)
    dist.monitored_barrier(timeout=timedelta(seconds=50))
    assert raised.value.ranks == (2,)
    return str(raised.value)


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named(doomed: Ranks) -> None:
    for rank, text in enumerate(doomed.run(one_never_comes)):
        assert (
            rank == 2
            # a rank that hears of it may say so first, with a time-out of its own
            or "rank 2 of 4 did not call load_state_dict() within 0:0" in text
        )


def one_dies(rank: int, world: int, victim: int) -> tuple[tuple[int, ...], str]:
    """A rank that ends before it loads, as where its file cannot be read."""
    joint_call.SILENCE_S = 3.0  # of 30
    net, handle = attached(TOPK)
    [state] = at_steps(net, handle, rank, 1)
    if rank == victim:
        os._exit(3)
    with pytest.raises(RankFailed) as raised:
        handle.load_state_dict(state)
    return raised.value.ranks, str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [2, 0], ids=["rank 2", "rank 0, with the store"])
def test_a_rank_that_dies_instead_is_noticed(victim: int, doomed: Ranks) -> None:
    doomed.send(one_dies, victim)
    for ranks, text in doomed.survivors({victim}):
        if victim:
            assert ranks == (victim,)
            assert "rank 2 of 4 stopped answering before load_state_dict()" in text
        else:
            assert "rank 0" in text


def on_a_grid(rank: int, world: int) -> list[str]:
    """The ranks of one shard load an older step than those of the other, then one has
    none.
    """
    grid = device_mesh((2, 2), ("dp", "tp"))
    shard = rank % 2
    model = nn.Linear(8, 40 + 20 * shard, bias=False)
    exchange = gw.with_density_warmup(
        gw.compress.sharded_dgc(density=0.1, sample_share=1.0), steps_per_stage=1
    )
    handle = gw.attach(
        model, exchange, group=grid["dp"], options=gw.Options(shards=grid["tp"])
    )
    states = []
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        states.append(handle.state_dict())
    model.zero_grad()
    reported = []
    for given in (states[shard], states[2] if rank != 3 else None):
        with pytest.raises(InvalidSetting) as raised:
            handle.load_state_dict(given)  # type: ignore[arg-type]
        reported.append(str(raised.value))
    handle.load_state_dict(states[1])
    model(torch.ones(2, 8)).sum().backward()
    assert handle.step == 3
    handle.detach()
    return reported


@pytest.mark.slow
def test_shards_of_a_layer_load_the_same_step(four: Ranks) -> None:
    for rank, (steps, none) in enumerate(four.run(on_a_grid)):
        assert (
            "shard 0 and the rank of shard 1 do not have the same checkpoint: step is 1"
            in steps
        )
        if rank != 3:
            assert "refused load_state_dict()" in none
            assert "state_dict must be a dict, got 'NoneType'" in none


class Told:
    """An engine that is alone with the store, in which ranks would meet."""

    num_calls = 1
    who = shards = Membership("nobody", 0, 2)

    def begin_call(self) -> None:
        pass

    def refuse_copy(self) -> None:
        pass


def test_a_run_that_has_ended_asks_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may be gone, and to find out takes many seconds."""
    reported: list[Exception] = []
    refuses = sys.modules[joint_call.refusals.__module__]
    monkeypatch.setattr(
        refuses, "post_refusal", lambda who, error: reported.append(error)
    )
    one = joint_call.JointCall(Told(), "load_state_dict()", "loaded")  # type: ignore[arg-type]
    wrong = InvalidSetting("a state of another model")
    for error in RankFailed("rank 1 of 2 stopped answering", ranks=(1,)), wrong:
        with pytest.raises(type(error)), one.refusing():
            raise error
    assert reported == [wrong, wrong]


# ---- One file holds the state of all ranks -------------------------------------------


def attached_small() -> tuple[Net, Handle]:
    net = Net()
    return net, gw.attach(net, TOPK, options=SMALL)


def trained(rank: int) -> tuple[Net, Handle, Any]:
    net, handle = attached_small()
    optimizer = adamw(net.parameters())
    train(net, optimizer, rank, range(3))
    return net, handle, optimizer


def saved_on_rank_0(rank: int, world: int, path: str) -> str:
    """As a loop that saves on rank 0 alone does; returns what training on ends in."""
    net, handle, optimizer = trained(rank)
    state = {"gradwire": handle.gather_state()}
    if rank == 0:
        parts = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**parts, **state}, path)
    else:
        assert state == {"gradwire": {}}
    train(net, optimizer, rank, range(3, 6))
    return digest([*net.parameters(), *handle.residuals().values()])


def resumed(
    rank: int, world: int, path: str
) -> tuple[str, dict[str, torch.Tensor], int]:
    found = torch.load(path, weights_only=True)
    net, handle = attached_small()
    optimizer = adamw(net.parameters())
    net.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    handle.load_state_dict(found["gradwire"])
    owed = handle.residuals()
    train(net, optimizer, rank, range(3, 6))
    return digest([*net.parameters(), *handle.residuals().values()]), owed, handle.step


def test_one_file_serves_any_number_of_ranks(
    two: Ranks, four: Ranks, tmp_path: Path
) -> None:
    """Among as many ranks as before a resumed run is the uninterrupted one."""
    path = str(tmp_path / "all.pt")
    whole = two.run(saved_on_rank_0, path)
    for own, (again, _, step) in zip(whole, two.run(resumed, path), strict=True):
        assert (again, step) == (own, 6)
    state = torch.load(path, weights_only=True)["gradwire"]
    assert [*state] == ["rank 0 of 2", "rank 1 of 2"]
    owed = [old["params"] for old in state.values()]
    of_four = [owed for _, owed, _ in four.run(resumed, path)]
    for name in of_four[0]:
        pending = sum(old[name]["residual_N"] for old in owed) / 2
        assert bool(pending.any())
        torch.testing.assert_close(sum(new[name] for new in of_four) / 4, pending)


def through_dcp(rank: int, world: int, folder: str) -> None:
    net, handle, _ = trained(rank)
    state = {"model": net, f"gradwire {rank}": handle}
    dcp.save(state, checkpoint_id=folder)
    before, owed = digest(net), handle.residuals()
    handle.detach()
    net, handle = attached_small()
    dcp.load({"model": net, f"gradwire {rank}": handle}, checkpoint_id=folder)
    assert (digest(net), handle.step) == (before, 3)
    found = handle.residuals()
    assert all(torch.equal(owed[name], found[name]) for name in owed)


def test_a_distributed_checkpoint_keeps_each_ranks_own(
    two: Ranks, tmp_path: Path
) -> None:
    two.run(through_dcp, str(tmp_path / "dcp"))


def crossed(rank: int, world: int) -> tuple[str, list[str]]:
    """Rank 1 loads while rank 0 gathers; then all is as it was. What DDP averages
    itself has no channels, and a state all the same.
    """
    net, handle, optimizer = trained(rank)
    state = handle.state_dict()
    with pytest.raises(RanksDiffer) as raised:
        handle.load_state_dict(state) if rank else handle.gather_state()
    train(net, optimizer, rank, range(3, 4))
    handle.detach()
    handle = gw.attach(ddp(Net(), broadcast_buffers=False), "none")
    state = handle.gather_state()
    handle.load_state_dict(state or handle.state_dict())
    handle.detach()
    return str(raised.value), list(state)


def test_two_calls_at_once_are_refused_by_name(two: Ranks) -> None:
    found = two.run(crossed)
    for reported, _ in found:
        assert "call is gather_state() against load_state_dict()" in reported
    assert [names for _, names in found] == [["rank 0 of 2", "rank 1 of 2"], []]


def one_dies_sending(rank: int, world: int) -> tuple[tuple[int, ...], str]:
    _, handle, _ = trained(rank)
    if rank == 2:
        joint_call.send = lambda *_: os._exit(3)
    with pytest.raises(RankFailed) as raised:
        handle.gather_state()
    return raised.value.ranks, str(raised.value)


@pytest.mark.slow
def test_a_rank_that_dies_while_states_travel_is_named(doomed: Ranks) -> None:
    doomed.send(one_dies_sending)
    for ranks, text in doomed.survivors({2}):
        assert ranks == (2,)
        assert "step 3 cannot be finished: rank 2 of 4 stopped answering" in text


# ---- What decides the bytes of a step is the same on all ranks -----------------------


def is_count(path: str, held: torch.Tensor) -> bool:
    return not path.endswith("_N") and not held.is_floating_point()


def one_more(
    state: State, wanted: Callable[[str, torch.Tensor], bool]
) -> tuple[State, str]:
    """The state with 1 more in the last of the fields that are wanted, and the field's
    path.
    """
    for key in ("params", "messages"):
        for name, fields in state[key].items():
            for path, held in fields.items():
                if wanted(path, held):
                    found = key, name, path
    key, name, path = found
    changed = {**state[key][name], path: state[key][name][path] + 1}
    return {**state, key: {**state[key], name: changed}}, f"{path} of "


DECIDING: dict[str, tuple[Exchange, Callable[[str, torch.Tensor], bool]]] = {
    "stage of a warm-up": (WARMING, lambda path, _: path.endswith("step_T")),
    "stage of the first steps": (
        gw.with_warmup(TOPK, 3),
        lambda path, _: path == "step_T",
    ),
    "draws": (gw.exchange_for(gw.compress.randomk(density=0.5)), is_count),
    "who leads": (gw.exchange_for(gw.compress.deft(density=0.1)), is_count),
    "rows or all": (
        gw.with_natural_sparsity(gw.compress.none(), 4),
        lambda path, _: path.endswith("growth_1"),
    ),
}


def with_other_counters(rank: int, world: int) -> list[tuple[str, str]]:
    """What a rank is told where rank 1 of two loads one step more than rank 0."""
    reported = []
    for exchange, wanted in DECIDING.values():
        net, handle = attached(exchange)
        [state] = at_steps(net, handle, rank, 2)
        other, what = one_more(state, wanted)
        with pytest.raises(RanksDiffer) as raised:
            handle.load_state_dict(other if rank else state)
        reported.append((what, str(raised.value)))
        handle.load_state_dict(other)  # the same on all
        train(net, momentum(net.parameters()), rank, range(2, 3))
        handle.detach()
    return reported


def test_counters_that_decide_what_is_sent_are_the_same_on_all_ranks(
    two: Ranks,
) -> None:
    of_ranks = two.run(with_other_counters)
    assert len(of_ranks[0]) == len(DECIDING)
    for reported in of_ranks:
        for what, text in reported:
            how = "rank 0 and rank 1 do not have the same checkpoint: " + what
            assert text.startswith(how), text
            assert " against " in text
            assert "; nothing was loaded: " in text


def with_another_period(rank: int, world: int) -> list[str]:
    """Rank 1 of two loads another place in the period, then means that others do not
    await.
    """
    net = Net()
    optimizer = momentum(net.parameters())
    handle = gw.local_steps(net, optimizer, "none", every=4, delay=2)
    train(net, optimizer, rank, range(5))
    state = handle.state_dict()
    reported = []
    for key, value in ("position", 2), ("left", 3), ("arriving", {}):
        other = {**state, "outer": {**state["outer"], key: value}}
        with pytest.raises(RanksDiffer) as raised:
            handle.load_state_dict(other if rank else state)
        reported.append(str(raised.value))
    handle.load_state_dict(state)
    train(net, optimizer, rank, range(5, 9))
    handle.detach()
    return reported


def test_the_place_in_a_period_is_the_same_on_all_ranks(two: Ranks) -> None:
    for position, left, arriving in two.run(with_another_period):
        assert "the same checkpoint: position in the period is 1 against 2" in position
        assert (
            "the same checkpoint: steps until means take effect is 1 against 3" in left
        )
        assert "the same checkpoint: pending means is " in arriving
