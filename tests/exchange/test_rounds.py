"""The rules of partial rounds, their weights and merges, refusals, and the tape."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.compress.none import none
from gradwire.compress.topk import topk
from gradwire.contract.spec import TensorSpec
from gradwire.errors import IncompatiblePair, InvalidSetting, RanksDiffer
from gradwire.exchange.rounds import (
    RoundCodec,
    Rules,
    codec_for_rounds,
    merged,
    weight_of,
)
from tests.each import each
from tests.laws.rounds_laws import DILOCO, Conditions, Run
from tests.laws.tapes import replay

# ---- settings ------------------------------------------------------------------------


@each("settings", [{"quorum": 0}, {"every": 0}, {"grace_s": -1.0}, {"grace_s": "soon"}])
def test_numbers_out_of_bounds_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(settings)).removesuffix("_s")):
        Rules(**{"quorum": 1, "every": 1, **settings})


@each("settings", [{"weights": "steps"}, {"merge": "sum"}])
def test_unknown_names_are_refused_with_those_there_are(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(InvalidSetting, match=r"equal or tokens|mean or rda"):
        Rules(quorum=1, every=1, **settings)


def test_a_quorum_above_the_ranks_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="at most 3, the number of ranks, got 4"):
        Run(Conditions(world=3, rules=Rules(quorum=4, every=4)))


@each("exchange", [gw.compress.powersgd(rank=2), gw.with_clipping(topk(), 1.0)])
def test_an_exchange_of_its_own_is_refused(exchange: gw.Exchange) -> None:
    with pytest.raises(IncompatiblePair, match="cannot go in partial rounds"):
        codec_for_rounds(exchange)


def test_the_codec_of_a_pair_and_of_error_feedback_is_taken() -> None:
    assert codec_for_rounds(gw.exchange_for(topk())) == topk()
    assert codec_for_rounds(gw.pair(none(), gw.collective.ring())) == none()
    assert codec_for_rounds(topk()) == topk()


# ---- weights and merges --------------------------------------------------------------


@each("rule", ["tokens", "tokens_per_step"])
def test_weights_by_tokens_need_tokens(rule: str) -> None:
    with pytest.raises(InvalidSetting, match='take weights="equal"'):
        weight_of(rule, 4, 0)


def test_lengths_and_directions_are_averaged_by_tensor() -> None:
    """A tensor's length does not depend on how far directions agree."""
    spec = TensorSpec("", 6, shapes=((2,), (4,)))
    draw = torch.Generator().manual_seed(1)
    pushes = [torch.randn(6, generator=draw) * 10.0**place for place in range(3)]
    weights = [1.0, 2.0, 5.0]
    got_N = merged("rda", pushes, weights, spec)
    for part in (slice(2), slice(2, 6)):
        lengths = [float(push_N[part].norm()) for push_N in pushes]
        length = sum(w * size for w, size in zip(weights, lengths, strict=True)) / 8
        sides = zip(weights, pushes, lengths, strict=True)
        side_N = sum(w * push_N[part] / size for w, push_N, size in sides)
        assert isinstance(side_N, torch.Tensor)
        assert float(got_N[part].norm()) == pytest.approx(length, rel=1e-6)
        torch.testing.assert_close(got_N[part] / length, side_N / side_N.norm())


def test_pushes_of_zeros_merge_to_zeros() -> None:
    spec = TensorSpec("", 3)
    pushes = [torch.zeros(3), torch.zeros(3)]
    assert merged("rda", pushes, [1.0, 1.0], spec).tolist() == [0.0, 0.0, 0.0]


def test_opposite_directions_merge_to_zeros() -> None:
    pushes = [torch.tensor([1e-30, 0.0]), torch.tensor([-1e30, 0.0])]
    got_N = merged("rda", pushes, [1.0, 1.0], TensorSpec("", 2))
    assert got_N.tolist() == [0.0, 0.0]


def test_a_codec_whose_residual_could_grow_keeps_none() -> None:
    spec = TensorSpec("", 3)
    assert RoundCodec(gw.compress.qsgd(), spec, 0, 2).residual_N is None
    assert RoundCodec(topk(), spec, 0, 2).residual_N is not None


# ---- the tape ------------------------------------------------------------------------

SETTINGS = Conditions(world=3, rules=Rules(quorum=2, every=4, is_measured=True))


def test_a_line_of_the_tape_says_who_is_in_with_norms_and_cosines() -> None:
    run = Run(SETTINGS).play()
    assert run.tape
    for text in run.tape:
        line = json.loads(text)
        assert set(line) == {
            *("fragment", "round", "rank", "step", "bytes", "anchor", "who")
        }
        for entry in line["who"]:
            assert 0 <= entry["rank"] < 3
            assert entry["weight"] == 1.0
            assert entry["bytes"] == line["bytes"]
            assert entry["norm"] > 0
            assert -1 <= entry["cosine"] <= 1


def test_a_merge_of_one_push_points_where_the_push_does() -> None:
    run = Run(Conditions(world=2, rules=Rules(quorum=1, every=4, is_measured=True)))
    lists = [line["who"] for line in run.play().lines()]
    alone = [who[0]["cosine"] for who in lists if len(who) == 1]
    assert alone
    assert all(cosine == pytest.approx(1.0) for cosine in alone)


def test_a_replay_names_the_round_whose_line_is_missing() -> None:
    run = Run(SETTINGS).play()
    of_others = [text for text in run.tape if json.loads(text)["rank"] != 0]
    of_0 = [text for text in run.tape if json.loads(text)["rank"] == 0]
    again = Run(SETTINGS)
    with pytest.raises(RanksDiffer, match=r"round \d+ of fragment \d+ came after"):
        replay([*of_others, *of_0[3:]], again.ranks, run.num_steps)


def test_without_a_tape_nothing_is_measured() -> None:
    run = Run(Conditions(world=2, rules=Rules(quorum=1, every=4), outer=DILOCO)).play()
    entries = [c for merge in run.merges() for c in merge.contributions]
    assert {entry.norm for entry in entries} == {None}
