"""The period of local steps that is chosen by what exchanges take: the same on all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

import gradwire as gw
from gradwire.errors import InvalidSetting, RanksDiffer
from gradwire.runtime.local_steps.period import FIRST, LEAST, MOST, ChosenGap, shortest
from tests.each import each
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks
from tests.runtime.training import Net, adamw, digest, train


def by_itself(rank: int, world: int, slow_s: float, fragments: int) -> tuple[list[int], str, int]:
    """The period after each of some steps, the digest of the anchors, and the resumed period."""
    net = Net()
    optimizer = adamw(net.parameters())
    settings: dict[str, Any] = {"every": "auto", "fragments": fragments}
    handle = gw.local_steps(net, optimizer, "none", **keywords(**settings))
    launch, periods = handle._launch, []

    def slowly(names: Sequence[str]) -> None:
        time.sleep(slow_s)
        launch(names)

    handle._launch = slowly  # type: ignore[method-assign]
    for step in range(70):
        train(net, optimizer, rank, range(step, step + 1))
        time.sleep(0.002)
        periods.append(handle.stats()["every"])
    saved = handle.state_dict()
    handle.detach()
    optimizer.zero_grad()
    handle = gw.local_steps(net, optimizer, "none", **keywords(**settings))
    handle.load_state_dict(saved)
    return periods, digest(handle.anchors().values()), handle.stats()["every"]


@pytest.mark.multi
@each("fragments", [1, 2])
def test_a_period_is_chosen_by_what_exchanges_take(fragments: int, two: Ranks) -> None:
    (periods, bits, again), (others, their_bits, _) = two.run(by_itself, 0.05, fragments)
    assert periods == others
    assert bits == their_bits
    assert periods[0] == LEAST * fragments
    assert again == periods[-1]
    assert LEAST * fragments < periods[-1] <= MOST * fragments


@pytest.mark.multi
def test_a_period_stays_short_where_exchanges_take_little(two: Ranks) -> None:
    (periods, _, _), _ = two.run(by_itself, 0.0, 1)
    assert set(periods[:12]) == {LEAST}, "the first exchanges are counted, not chosen by"
    assert periods[-1] < MOST


def loaded(rank: int, world: int, gaps: Sequence[Any]) -> str:
    """What a rank says of a state of so many steps between two exchanges."""
    net = Net()
    handle = gw.local_steps(net, adamw(net.parameters()), "none", every="auto")
    saved = handle.state_dict()
    saved["outer"]["gap"] = gaps[rank]
    try:
        handle.load_state_dict(saved)
    except (InvalidSetting, RanksDiffer) as error:
        return str(error)
    finally:
        handle.detach()
    return f"loaded {handle.stats()['every']}"


@pytest.mark.multi
@each(
    "gaps, said",
    [
        ((7, 7), ("loaded 7", "loaded 7")),
        ((7, 9), ("local steps between two exchanges",) * 2),
        ((7, "many"), ("refused", "gap of the state")),
    ],
    ids=["alike", "other ones", "no number"],
)
def test_a_loaded_period_is_that_of_all_ranks(
    gaps: Sequence[Any], said: Sequence[str], two: Ranks
) -> None:
    for found, expected in zip(two.run(loaded, gaps), said, strict=True):
        assert expected in found


def test_a_choice_counts_what_no_rank_can_help() -> None:
    chosen = ChosenGap()
    for _ in range(FIRST):
        assert not chosen.is_due
        chosen.count(1.0, 1.0)
    assert chosen.is_due
    chosen._take([(0.9, 0.01), (0.18, 0.1)])  # the second rank is late, the first waits for it
    assert chosen.gap == shortest(0.18, 0.1) == 17
    chosen._num_choices = 2
    chosen._take([(0.2, 0.1)])
    assert chosen.gap == 17, "hardly another one"
    chosen._take([(0.4, 0.1)])
    assert chosen.gap == MOST
