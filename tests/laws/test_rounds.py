"""Partial rounds keep their laws with every compressor; wrong ones are rejected."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from gradwire.compress.none import none
from gradwire.compress.onebit import onebit
from gradwire.compress.topk import topk
from gradwire.contract import Compressor
from gradwire.errors import Deadlock, InvalidSetting, RanksDiffer
from gradwire.exchange.error_feedback import feedback_refusal
from gradwire.exchange.rounds import Rules
from gradwire_lab.errors import LawBroken
from gradwire_lab.laws.inputs import WIDE_KINDS
from tests.each import each
from tests.laws.broken_rounds import BITES, NEAR, QUICK
from tests.laws.cases import MARKS, Share, compressors, draw_of, of_library, share_of
from tests.laws.rounds_laws import (
    DILOCO,
    LAWS,
    Conditions,
    Run,
    law_anchors_have_the_same_bits,
    law_every_rank_is_in,
    law_nothing_learnt_is_lost,
    played,
)
from tests.laws.tapes import replay

WORLDS = (2, 3, 5, 6, 7)


FIRST = {type(codec): codec for codec in reversed(compressors())}.values()
"""The first example of each compressor."""
Law = Callable[[Conditions], None]


def laws_of(codec: Compressor) -> dict[Share, list[Law]]:
    """The laws that each share asks of a compressor.

    The sample asks each algorithm whether something is lost, and a third of the other
    laws, as names draw them.
    """
    found: dict[Share, list[Law]] = {share: [] for share in Share}
    for law in LAWS:
        is_of_losses = law is law_nothing_learnt_is_lost
        if is_of_losses and feedback_refusal(codec) is not None:
            continue
        is_drawn = draw_of("sample", law.__name__, repr(codec)) % 3 == 0
        is_sample = codec in FIRST and (is_of_losses or is_drawn)
        found[share_of(law, codec, is_sample)].append(law)
    return found


@pytest.mark.parametrize(
    ("codec", "share"),
    [
        pytest.param(codec, share, marks=MARKS[share], id=f"{codec!r}-{share.value}")
        for codec in compressors()
        for share, laws in laws_of(codec).items()
        if laws
    ],
)
def test_partial_rounds_keep_their_laws(
    codec: Compressor, share: Share, subtests: pytest.Subtests
) -> None:
    draw = draw_of("rounds", repr(codec))
    conditions = Conditions(world=WORLDS[draw % len(WORLDS)], codec=codec, seed=draw)
    for law in laws_of(codec)[share]:
        with subtests.test(law.__name__):
            law(conditions)


def test_the_sample_asks_each_law_and_each_algorithm() -> None:
    """Each law is asked of three algorithms or more, whatever the draw."""
    share = {True: Share.SAMPLE, False: Share.DAY}
    asked = {type(codec): laws_of(codec)[share[of_library(codec)]] for codec in FIRST}
    assert all(asked.values())
    counts = Counter(law for laws in asked.values() for law in laws)
    assert counts.keys() == {*LAWS}
    assert min(counts.values()) >= 3


@pytest.mark.parametrize("world", WORLDS)
@each("law", LAWS, ids=lambda law: law.__name__)
def test_laws_hold_for_every_number_of_ranks(
    law: Callable[[Conditions], None], world: int
) -> None:
    law(Conditions(world=world, codec=topk(density=0.1), seed=1))


@each("law", LAWS, ids=lambda law: law.__name__)
def test_laws_hold_while_all_ranks_but_one_make_no_step(
    law: Callable[[Conditions], None],
) -> None:
    law(Conditions(codec=topk(density=0.1), rules=QUICK, pauses=True, seed=2))


@each("pauses", (False, True))
@each("law", LAWS, ids=lambda law: law.__name__)
def test_laws_hold_where_owners_wait_for_silent_ranks(
    law: Callable[[Conditions], None], pauses: bool
) -> None:
    if not (pauses and law is law_every_rank_is_in):
        law(Conditions(codec=topk(density=0.1), rules=NEAR, pauses=pauses))


CODECS = (none(), topk(density=0.1), onebit(block=64))


@each("codec, kind", product(CODECS, ("minute", "spike", *WIDE_KINDS)), ids=str)
def test_nothing_is_lost_of_what_lies_decades_apart(
    codec: Compressor, kind: str
) -> None:
    law_nothing_learnt_is_lost(Conditions(world=3, codec=codec, kind=kind))


@each("codec", CODECS, ids=repr)
def test_16_bit_parameters_lose_nothing(codec: Compressor) -> None:
    conditions = Conditions(world=3, codec=codec, dtype=torch.bfloat16)
    law_nothing_learnt_is_lost(conditions)
    law_anchors_have_the_same_bits(conditions)


@each("weights", ("tokens", "tokens_per_step"))
def test_weighted_means_lose_nothing(weights: str) -> None:
    rules = Rules(quorum=2, every=4, grace_s=0.5, weights=weights)
    law_nothing_learnt_is_lost(Conditions(codec=topk(density=0.1), rules=rules))


@each("law", LAWS, ids=lambda law: law.__name__)
def test_lengths_and_directions_keep_the_other_laws(
    law: Callable[[Conditions], None],
) -> None:
    if law is not law_nothing_learnt_is_lost:
        rules = Rules(quorum=2, every=4, grace_s=0.5, merge="rda")
        law(Conditions(world=5, rules=rules))


@each("law, wrong", BITES, ids=str)
def test_wrong_ones_are_rejected(
    law: Callable[[Conditions], None], wrong: Conditions
) -> None:
    with pytest.raises(AssertionError) as caught:
        law(wrong)
    assert str(caught.value)


def replayed(run: Run, lines: list[str]) -> None:
    replay(lines, Run(run.conditions).ranks, run.num_steps)


def test_a_tape_that_is_not_whole_or_of_another_run_is_refused() -> None:
    run = played(Conditions(outer=DILOCO))
    lines = [json.loads(line) for line in run.tape]
    first = next(line for line in lines if line["rank"] == 1 and line["round"] == 1)
    replayed(run, run.tape)
    without = [json.dumps(line) for line in lines if line is not first]
    with pytest.raises((RanksDiffer, Deadlock)):
        replayed(run, without)
    closed = (first["fragment"], first["round"])
    without = [
        json.dumps(line)
        for line in lines
        if (line["fragment"], line["round"]) != closed
    ]
    with pytest.raises((RanksDiffer, Deadlock)):
        replayed(run, without)
    other = [json.dumps({**line, "anchor": line["anchor"] ^ 1}) for line in lines]
    with pytest.raises(LawBroken, match="is not the tape's"):
        replayed(run, other)


@each(
    "setting",
    [
        {"most_age": -1},
        {"most_age": "x"},
        {"most_waiting": 0},
        {"fragments": 0},
        {"quorum": 0},
    ],
)
def test_rules_that_make_no_sense_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(setting))):
        Rules(**{"quorum": 2, "every": 4, **setting})


def test_every_law_has_a_specimen_it_must_reject() -> None:
    assert {law for law, _ in BITES} == set(LAWS)
