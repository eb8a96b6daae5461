"""Local steps whose loop loads weights, makes a new optimizer, evaluates, or ends
alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import gradwire as gw
from gradwire.errors import LoopMistake, RankFailed
from gradwire.runtime.local_steps.loads import Loads
from gradwire.runtime.local_steps.lock_step import Rhythm
from gradwire.runtime.local_steps.moment import LoopMoment, refuse_unlike
from tests.each import each, few, sampled
from tests.runtime.local_steps.test_local_steps import RHYTHMS, SPARSE, bits, prepared
from tests.runtime.ranks import Ranks
from tests.runtime.training import Net, adamw, digest, loss_of, train


def leave(handle: Any) -> None:
    """Detaches after a failure, which that tells once more."""
    with suppress(RankFailed):
        handle.detach()


# ---- weights that are loaded ---------------------------------------------------------

Weights = dict[str, Tensor]


def weights(seed: int) -> Weights:
    return {name: tensor.clone() for name, tensor in Net(seed).state_dict().items()}


def by_state_dict(net: nn.Module, new: Weights) -> None:
    net.load_state_dict(new)


def by_parts(net: nn.Module, new: Weights) -> None:
    for part, module in net.named_children():
        own = {
            name.removeprefix(f"{part}."): t
            for name, t in new.items()
            if name.startswith(part)
        }
        module.load_state_dict(own)


@torch.no_grad()
def by_hand(net: nn.Module, new: Weights) -> None:
    for name, param in net.named_parameters():
        param.copy_(new[name])


def by_data(net: nn.Module, new: Weights) -> None:
    for name, param in net.named_parameters():
        param.data.copy_(new[name])


WAYS = (by_state_dict, by_parts, by_hand, by_data)


def frozen(rhythm: Rhythm, exchange: Any) -> tuple[Net, Any, Any]:
    """A net whose own optimizer has learning rate 0."""
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.0)
    return net, optimizer, gw.local_steps(net, optimizer, exchange, **vars(rhythm))


@torch.no_grad()
def away(net: nn.Module, new: Weights) -> float:
    """The largest distance of any parameter from these weights."""
    return max(float((p - new[name]).abs().max()) for name, p in net.named_parameters())


def law_loaded_weights_stay(
    rank: int, way: Callable[..., None], rhythm: Rhythm, exchange: Any, at: int
) -> None:
    """At learning rate 0 parameters and anchors stay at what was loaded, through any
    exchange.
    """
    net, optimizer, handle = frozen(rhythm, exchange)
    new = weights(5)
    train(net, optimizer, rank, range(at))
    way(net, new)
    train(net, optimizer, rank, range(at, at + 3 * rhythm.every))
    handle.end_period()
    assert away(net, new) == 0.0, (way, rhythm, exchange, at)
    assert digest(net) == digest(handle.anchors().values())
    handle.detach()


MOMENTS = [
    *((way, Rhythm(3), "none", 0) for way in WAYS),
    (by_state_dict, RHYTHMS[0], "none", 2),
    (by_state_dict, RHYTHMS[3], "none", 3),
    (by_state_dict, RHYTHMS[4], "none", 5),
    (by_parts, Rhythm(3), SPARSE, 4),
]


def loaded_on_all(rank: int, world: int, moments: list[Any]) -> None:
    for moment in moments:
        law_loaded_weights_stay(rank, *moment)


@pytest.mark.multi
@sampled("moments", MOMENTS)
def test_anchors_restart_where_all_ranks_load(moments: list[Any], two: Ranks) -> None:
    two.run(loaded_on_all, moments)


def test_anchors_restart_where_the_only_rank_loads() -> None:
    law_loaded_weights_stay(0, by_state_dict, Rhythm(3), SPARSE, 4)


def with_momentum(rank: int, world: int) -> None:
    """As by a run that is wrapped after it has loaded."""
    ends = []
    for loads_late in (False, True):
        net = Net(0 if loads_late else 5)
        optimizer = adamw(net.parameters())
        handle = gw.local_steps(net, optimizer, "none", every=3)
        if loads_late:
            net.load_state_dict(weights(5))
        train(net, optimizer, rank, range(8))
        handle.end_period()
        ends.append(digest(net))
        handle.detach()
    assert ends[0] == ends[1]


@pytest.mark.multi
def test_weights_may_be_loaded_before_or_after_local_steps(two: Ranks) -> None:
    two.run(with_momentum)


def part_is_loaded(rank: int, world: int) -> None:
    """What was not loaded goes on as it was: its pseudo-gradients are kept."""
    net, optimizer, handle = prepared(Rhythm(6, fragments=2, delay=2, mixing=0.5))
    train(net, optimizer, rank, range(4))
    before = {name: anchor.clone() for name, anchor in handle.anchors().items()}
    net.last.load_state_dict({"weight": torch.ones(5, 29), "bias": torch.zeros(5)})
    train(net, optimizer, rank, [4])
    for name, anchor in handle.anchors().items():
        if name.startswith("last"):
            assert torch.equal(anchor, torch.full_like(anchor, name == "last.weight"))
        elif not name.startswith("first"):  # of the fragment that has taken effect
            assert torch.equal(anchor, before[name]) == (
                name not in handle._fragments[0]
            )
    train(net, optimizer, rank, range(5, 12))
    handle.end_period()
    assert digest(net) == digest(handle.anchors().values())
    handle.detach()


@pytest.mark.multi
def test_a_part_that_is_loaded_restarts_alone(two: Ranks) -> None:
    two.run(part_is_loaded)


def some_load(
    rank: int, world: int, way: Callable[..., None], at: int, ends: bool
) -> str:
    net, optimizer, handle = prepared(Rhythm(4, fragments=2))
    train(net, optimizer, rank, range(at))
    if rank == 1:
        way(net, weights(5))

    def go_on() -> None:
        if ends:
            handle.end_period()
        train(net, optimizer, rank, range(at, at + 8))

    with pytest.raises(LoopMistake) as caught:
        go_on()
    leave(handle)
    return str(caught.value)


@pytest.mark.multi
@pytest.mark.slow
@each(
    "way, at, ends",
    [(by_state_dict, 0, False), (by_hand, 0, True), (by_state_dict, 5, False)],
)
def test_weights_that_some_ranks_load_are_refused_on_all(
    way: Callable[..., None], at: int, ends: bool, doomed_two: Ranks
) -> None:
    for text in doomed_two.run(some_load, way, at, ends):
        assert (
            "rank 1 of 2 loaded weights after gw.local_steps, and rank 0 did not"
            in text
        )


def others_load(rank: int, world: int) -> str:
    net, optimizer, handle = prepared(Rhythm(2))
    net.load_state_dict(weights(5 + rank))
    with pytest.raises(LoopMistake) as caught:
        train(net, optimizer, rank, range(4))
    leave(handle)
    return str(caught.value)


@pytest.mark.multi
@pytest.mark.slow
def test_ranks_that_load_different_weights_are_refused(doomed_two: Ranks) -> None:
    for text in doomed_two.run(others_load):
        assert "ranks loaded different weights" in text


LOADED = LoopMoment(4, False, True, 1, 77)
NOT_LOADED = LoopMoment(4, False, True, 0, 0)
ENDS = LoopMoment(3, True, True, 0, 0)
UNLIKE: list[tuple[list[LoopMoment], tuple[int, ...], str]] = [
    (
        [ENDS, NOT_LOADED, ENDS],
        (0, 2),
        "rank 0, 2 of 3 called end_period() after 3, 3 local steps, and rank 1 "
        "exchanged after 4",
    ),
    (
        [NOT_LOADED, LOADED],
        (1,),
        "rank 1 of 2 loaded weights after gw.local_steps, and rank 0 did",
    ),
    ([LOADED, LOADED._replace(loads=78)], (0, 1), "ranks loaded different weights"),
]


@each("moments, ranks, said", UNLIKE, ids=["end", "some", "others"])
def test_moments_that_do_not_belong_together_are_refused(
    moments: list[LoopMoment], ranks: tuple[int, ...], said: str
) -> None:
    with pytest.raises(RankFailed) as caught:
        refuse_unlike(moments)
    assert said in str(caught.value)
    last = max(moment.local_step for moment in moments)
    assert (caught.value.ranks, caught.value.step) == (ranks, last)


def test_ranks_may_exchange_after_different_numbers_of_steps() -> None:
    """A loss scaler may have skipped one of them."""
    refuse_unlike([ENDS, ENDS._replace(local_step=9, has_learnt=False)])
    refuse_unlike([LOADED, LOADED._replace(local_step=9)])


# ---- what is no load -----------------------------------------------------------------


def resumed_in(order: str, rank: int) -> str:
    """The bits of a run that was resumed in the middle of a period, or None of one that
    was not.
    """
    net, optimizer, handle = prepared(
        Rhythm(6, fragments=2, delay=2, mixing=0.5), SPARSE
    )
    train(net, optimizer, rank, range(10))
    if order:
        states = {
            "n": net.state_dict(),
            "o": optimizer.state_dict(),
            "h": handle.state_dict(),
        }
        states = {
            key: torch.utils._pytree.tree_map(_copied, state)
            for key, state in states.items()
        }
        handle.detach()
        net, optimizer, handle = prepared(
            Rhythm(6, fragments=2, delay=2, mixing=0.5), SPARSE, seed=rank
        )
        parts = {"n": net, "o": optimizer, "h": handle}
        for key in order:
            parts[key].load_state_dict(states[key])
    train(net, optimizer, rank, range(10, 20))
    found = bits(net, handle)
    handle.detach()
    return found


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def resumed_in_all(rank: int, world: int) -> None:
    assert len({resumed_in(order, rank) for order in ("", "noh", "hno", "nho")}) == 1


@pytest.mark.multi
def test_a_resume_may_load_in_any_order(two: Ranks) -> None:
    two.run(resumed_in_all)


@contextmanager
def swapped(net: nn.Module, way: Callable[..., None], new: Weights) -> Any:
    """As an average of parameters is put in place for an evaluation, and taken out
    again.
    """
    own = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    way(net, new)
    yield
    way(net, own)


@torch.no_grad()
def evaluated(net: nn.Module, rank: int, way: Callable[..., None]) -> None:
    """What loops do to evaluate: an average of parameters is put in place, and no rank
    is asked.
    """
    with swapped(net, way, weights(7)):
        net.eval()
        loss_of(net, rank, 0)
        net.train()


def stepped_with_evaluations(
    rank: int,
    rhythm: Rhythm,
    exchange: Any,
    way: Callable[..., None] | None,
    alone: bool,
) -> str:
    net, optimizer, handle = prepared(rhythm, exchange)
    for step in range(14):
        if way is not None and not (alone and rank):
            evaluated(net, rank, way)
            evaluated(net, rank, way)
        train(net, optimizer, rank, [step])
    found = bits(net, handle) + digest(net.buffers())
    handle.detach()
    return found


def law_evaluating_never_changes_training(rank: int, rhythm: Rhythm) -> None:
    """Bits of parameters, anchors, momenta and residuals are those of a run without
    evaluation.

    One rank may evaluate alone.
    """
    plain = stepped_with_evaluations(rank, rhythm, SPARSE, None, alone=False)
    for way, alone in (
        (by_state_dict, False),
        (by_data, True),
        (by_hand, True),
        (by_parts, True),
    ):
        assert plain == stepped_with_evaluations(rank, rhythm, SPARSE, way, alone), (
            rhythm,
            way,
        )


def evaluating(rank: int, world: int, rhythm: Rhythm) -> None:
    law_evaluating_never_changes_training(rank, rhythm)


@pytest.mark.multi
@few("rhythm", [RHYTHMS[3], RHYTHMS[0]], ids=["delayed", "plain"])
def test_evaluating_never_changes_training(rhythm: Rhythm, two: Ranks) -> None:
    two.run(evaluating, rhythm)


def test_wrong_ways_to_find_loads_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sees no load, and one that takes any for a new one."""
    with monkeypatch.context() as blind:
        blind.setattr(Loads, "pending", lambda self: {})
        with pytest.raises(AssertionError):
            law_loaded_weights_stay(0, by_state_dict, Rhythm(3), "none", 0)
    draws = count()
    monkeypatch.setattr(
        Loads, "_digests", lambda self: {name: next(draws) for name in self._params}
    )
    with pytest.raises(AssertionError):
        law_evaluating_never_changes_training(0, Rhythm(4))


def written_by_hand(rank: int, world: int) -> None:
    """What a loop writes itself between steps is learnt, as it is without local
    steps.
    """
    exact = partial(SGD, lr=1.0)
    nets = []
    for every in (1, 3):
        net = Net()
        optimizer = SGD(net.parameters(), lr=0.0)
        handle = gw.local_steps(net, optimizer, "none", every=every, outer=exact)
        noise = torch.Generator().manual_seed(0)
        for step in range(6):
            train(net, optimizer, 0, [step])
            with torch.no_grad():
                for (
                    param
                ) in net.parameters():  # the same noise in all; ranks differ by a sign
                    drawn = torch.randn(param.shape, generator=noise)
                    param += (1 if rank else 3) * drawn
        handle.end_period()
        nets.append([param.detach().clone() for param in net.parameters()])
        handle.detach()
    torch.testing.assert_close(nets[0], nets[1], rtol=1e-4, atol=1e-4)
    assert float((nets[0][0] - weights(0)["first.weight"]).abs().max()) > 1.0


@pytest.mark.multi
def test_what_a_loop_writes_itself_is_learnt(two: Ranks) -> None:
    two.run(written_by_hand)


def without_an_optimizer(rank: int, world: int) -> None:
    """A loop that steps by hand, and calls end_period() itself."""
    net = Net()
    handle = gw.local_steps(net, SGD(net.parameters(), lr=0.1), "none", every=10**6)
    for step in range(6):
        net.zero_grad()
        loss_of(net, rank, step).backward()
        with torch.no_grad():
            for param in net.parameters():
                param -= 0.1 * param.grad  # type: ignore[operator]
        if step % 3 == 2:
            handle.end_period()
    assert handle.stats()["exchanges"] == 2
    assert away(net, weights(0)) > 0.0
    assert digest(net) == digest(handle.anchors().values())
    handle.detach()


@pytest.mark.multi
def test_a_loop_without_an_optimizer_ends_its_periods(two: Ranks) -> None:
    two.run(without_an_optimizer)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.last = nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rows(x))  # type: ignore[no-any-return]


def renormed(rank: int, world: int) -> None:
    """A table whose forward pass writes into it, on each rank into other rows."""
    net = Table()
    optimizer = SGD(net.parameters(), lr=0.1)
    handle = gw.local_steps(net, optimizer, "none", every=2)
    for step in range(6):
        if step == 3:
            net.load_state_dict(Table().state_dict())
        optimizer.zero_grad()
        net(torch.tensor([rank, 2 + step])).sum().backward()
        optimizer.step()
    handle.end_period()
    assert digest(net) == digest(handle.anchors().values())
    handle.detach()


@pytest.mark.multi
def test_a_table_that_its_forward_pass_writes_is_not_loaded(two: Ranks) -> None:
    two.run(renormed)


def test_a_state_that_is_saved_behind_a_load_has_no_pseudo_gradient_of_it() -> None:
    net, _, handle = frozen(Rhythm(3), "none")
    net.load_state_dict(weights(5))
    state = handle.state_dict()
    net, optimizer, handle = frozen(Rhythm(3), "none")
    handle.load_state_dict(state)
    train(net, optimizer, 0, range(6))
    assert away(net, weights(5)) == 0.0


# ---- periods that end ----------------------------------------------------------------


def ended_again(rank: int, world: int) -> None:
    for rhythm in RHYTHMS:
        net, optimizer, handle = prepared(rhythm, SPARSE)
        counts = []
        for step in range(9):
            for _ in range(3):
                handle.end_period()
            if step == 0:
                assert handle.stats()["exchanges"] == 0
            before = bits(net, handle) if step else ""
            for _ in range(10):
                handle.end_period()
            assert step == 0 or bits(net, handle) == before
            counts.append(handle.stats()["exchanges"])
            train(net, optimizer, rank, [step])
        assert counts[-1] <= 8 * (rhythm.fragments + 1)
        handle.detach()


@pytest.mark.multi
def test_a_period_without_a_step_does_not_end(two: Ranks) -> None:
    two.run(ended_again)


def test_a_period_without_a_step_does_not_end_where_parameters_are_no_numbers() -> None:
    net = Net()
    with torch.no_grad():
        net.last.bias.fill_(torch.nan)
    handle = gw.local_steps(net, SGD(net.parameters(), lr=0.1), "none", every=4)
    handle.end_period()
    assert handle.stats()["exchanges"] == 0
    handle.detach()


def evaluated_each_five(rank: int, world: int) -> None:
    counts = []
    for ends in (False, True):
        net, optimizer, handle = prepared(Rhythm(5))
        for step in range(20):
            train(net, optimizer, rank, [step])
            if ends and step % 5 == 4:
                handle.end_period()
        counts.append((handle.stats()["exchanges"], bits(net, handle)))
        handle.detach()
    assert counts[0] == counts[1]
    assert counts[0][0] == 4


@pytest.mark.multi
def test_a_period_that_has_just_ended_does_not_end_again(two: Ranks) -> None:
    two.run(evaluated_each_five)


def unlike(rank: int, world: int, fragments: int, steps: tuple[int, int]) -> str:
    """``end_period`` after other steps, of which one rank has an exchange between."""
    net, optimizer, handle = prepared(Rhythm(4, fragments=fragments))

    def loop() -> None:
        train(net, optimizer, rank, range(steps[rank]))
        handle.end_period()
        train(net, optimizer, rank, range(12))

    with pytest.raises(LoopMistake) as caught:
        loop()
    assert caught.value.ranks == (0,)
    # the later of the two local steps, on both ranks
    assert caught.value.step == 4 // fragments
    leave(handle)
    return str(caught.value)


@pytest.mark.multi
@pytest.mark.slow
@each("fragments", [1, 2])
def test_a_period_that_ends_elsewhere_is_named_with_ranks_and_steps(
    fragments: int, doomed_two: Ranks
) -> None:
    for text in doomed_two.run(unlike, fragments, (1, 5)):
        gap = 4 // fragments
        assert "rank 0 of 2 called end_period() after 1 local steps" in text
        assert f"rank 1 exchanged after {gap}" in text
        assert text.startswith(f"step {gap} cannot be finished")
        assert "the network" not in text


def too_few(rank: int, world: int, how: str) -> str:
    """Rank 0 has data for 5 steps, rank 1 for 8, and they exchange after 4 and 8."""
    net, optimizer, handle = prepared(Rhythm(4), timeout=timedelta(seconds=6))
    try:
        train(net, optimizer, rank, range(5 + 3 * rank))
        if how == "ends":
            handle.end_period()
        if how == "leaves" and rank == 0:
            handle.detach()
            return ""
        while True:
            handle._engine.check()
    except RankFailed as error:
        return str(error)


@pytest.mark.multi
@pytest.mark.slow
@each("how", ["ends", "leaves", "stays"])
def test_ranks_with_unequal_data_say_how_many_steps_each_has_made(
    how: str, doomed_two: Ranks
) -> None:
    behind, ahead = doomed_two.run(too_few, how)
    assert ("after 5 local steps" if how == "ends" else "rank 0 after 5") in ahead
    assert ("rank 1 exchanged after 8" if how == "ends" else "rank 1 after 8") in ahead
    if how != "leaves":
        assert ahead.split("(noticed")[0] == behind.split("(noticed")[0]
    assert "preamble" not in behind


# ---- optimizers ----------------------------------------------------------------------


def replaced(rank: int, world: int) -> None:
    net, optimizer, handle = prepared(Rhythm(4))
    train(net, optimizer, rank, range(4))
    optimizer = SGD(net.parameters(), lr=0.01)  # as for another phase
    train(net, optimizer, rank, range(4, 104))
    assert handle.step == 104
    assert 25 <= handle.stats()["exchanges"] <= 26
    handle.end_period()
    assert digest(net) == digest(handle.anchors().values())
    handle.detach()


@pytest.mark.multi
def test_an_optimizer_that_replaces_the_first_counts_its_steps(two: Ranks) -> None:
    two.run(replaced)


def test_a_new_optimizer_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    net, optimizer, handle = prepared(Rhythm(4))
    train(net, optimizer, 0, range(2))
    with caplog.at_level(logging.WARNING, "gradwire"):
        train(net, SGD(net.parameters(), lr=0.01), 0, range(8))
    reported = [r.message for r in caplog.records if "counts from now on" in r.message]
    assert len(reported) == 1
    assert "SGD" in reported[0]
    handle.detach()


def test_an_optimizer_of_other_parameters_takes_over_after_a_period() -> None:
    net = Net()
    first = SGD(net.last.parameters(), lr=0.1)
    handle = gw.local_steps(net, first, "none", every=3)
    train(net, first, 0, range(3))
    train(net, SGD(net.deep.parameters(), lr=0.1), 0, range(20))
    assert handle.step == 23
    assert handle.stats()["exchanges"] >= 6
    handle.detach()


class Inside(torch.optim.Optimizer):
    """One that steps another, as SAM or Lookahead do."""

    def __init__(self, inner: torch.optim.Optimizer, times: int = 2) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self._times = inner, times

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _ in range(self._times):
            self.inner.step()


def test_an_optimizer_in_or_around_the_first_counts_once() -> None:
    for outside in (True, False):
        net = Net()
        inner = SGD(net.parameters(), lr=0.1)
        wrapper = Inside(inner, times=2 if outside else 1)
        handle = gw.local_steps(net, wrapper if outside else inner, "none", every=4)
        train(net, wrapper, 0, range(8))
        assert (handle.step, handle.stats()["exchanges"]) == (8, 2)
        handle.detach()


def test_optimizers_that_take_turns_do_not_count() -> None:
    """One for each task over the same parameters, and one that trains its own part five
    times.
    """
    for others, times in ((2, 1), (1, 5)):
        net = Net()
        own = net.last if times > 1 else net
        given = SGD((net.deep if times > 1 else net).parameters(), lr=0.1)
        more = [SGD(own.parameters(), lr=0.1) for _ in range(others)]
        handle = gw.local_steps(net, given, "none", every=6)
        for step in range(12):
            for optimizer in (given, *more * times):
                train(net, optimizer, 0, [step])
        assert (handle.step, handle.stats()["exchanges"]) == (12, 2)
        handle.detach()


def test_steps_of_an_optimizer_of_another_model_do_not_count() -> None:
    net, optimizer, handle = prepared(Rhythm(4))
    other = Net()
    train(other, adamw(other.parameters()), 0, range(20))
    assert handle.step == 0
    train(net, optimizer, 0, range(4))
    assert handle.stats()["exchanges"] == 1
    handle.detach()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_a_step_that_is_compiled_counts() -> None:
    net, optimizer, handle = prepared(Rhythm(2))
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    train(net, optimizer, 0, range(4))
    assert (handle.step, handle.stats()["exchanges"]) == (4, 2)
    handle.detach()


def unfrozen(rank: int, world: int) -> str:
    """Layers that are unfrozen, with a new optimizer: refused by name."""
    net = Net()
    net.first.requires_grad_(False)
    optimizer = SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    handle = gw.local_steps(net, optimizer, "none", every=4)
    train(net, optimizer, rank, range(4))
    net.first.requires_grad_(True)
    with pytest.raises(LoopMistake) as caught:
        train(net, SGD(net.parameters(), lr=0.1), rank, range(100))
    leave(handle)
    return str(caught.value)


@pytest.mark.multi
@pytest.mark.slow
def test_layers_that_are_unfrozen_are_named(doomed_two: Ranks) -> None:
    for text in doomed_two.run(unfrozen):
        assert "first.weight requires a gradient, which it did not" in text
