"""The laws of partial rounds, and the runs of ranks that they are asked of.

A run is of all ranks on a virtual clock, with speeds, delays, quorum and grace drawn
from a seed. Each law takes a run, so that it can be shown a wrong one.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from gradwire.compress.none import none
from gradwire.contract import Compressor
from gradwire.contract.spec import TensorSpec, working_dtype
from gradwire.exchange.rounds import (
    Answer,
    FragmentLearner,
    FragmentOwner,
    Merge,
    Opening,
    PartialRounds,
    Push,
    Request,
    RoundCodec,
    Rules,
)
from gradwire.runtime.state.table import copied
from gradwire_lab.exchange.virtual_rounds import (
    SteppedAnchor,
    VirtualClock,
    VirtualRank,
)
from gradwire_lab.laws.inputs import make_gradient
from gradwire_lab.laws.tolerance import must, same_bits
from tests.laws.tapes import replay

SHAPES = (((9, 13), (20,)), ((150,),), ((3, 5), (64,), (31,)))
"""The shapes of the tensors of each fragment."""
PLAIN = partial(SGD, lr=1.0)
DILOCO = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How a run of ranks goes; what is not named is drawn from the seed."""

    world: int = 3
    codec: Compressor = field(default_factory=none)
    kind: str = "normal"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    rules: Rules | None = None
    outer: Any = PLAIN
    until_s: float = 9.0
    pauses: bool = False
    """Whether all ranks but the last pause after two periods."""
    learner: type[FragmentLearner] = FragmentLearner
    owner: type[FragmentOwner] = FragmentOwner
    rounds: type[PartialRounds] = PartialRounds

    @property
    def draw(self) -> random.Random:
        return random.Random(1000 * self.world + self.seed)

    def drawn_rules(self) -> Rules:
        if self.rules is not None:
            return replace(self.rules, fragments=len(NUMELS))
        draw = self.draw
        return Rules(
            quorum=draw.randint(1, self.world),
            every=4,
            fragments=len(NUMELS),
            grace_s=draw.choice((0.0, 0.3, 2.0)),
            most_age=draw.choice((None, 0, 1)),
            is_measured=True,
        )


class Run:
    """One run: its ranks, the messages, the tape, and what each rank has learnt."""

    def __init__(self, conditions: Conditions) -> None:
        self.conditions = conditions
        self.rules = conditions.drawn_rules()
        self.saves = False
        """Whether ranks go on from saved states halfway."""
        self.tape: list[str] = []
        self.learnt = [
            [torch.zeros(numel, dtype=torch.float64) for numel in NUMELS]
            for _ in range(conditions.world)
        ]
        self.magnitude = [torch.zeros(numel, dtype=torch.float64) for numel in NUMELS]
        self.ranks = [self._rank(rank) for rank in range(conditions.world)]
        self.firsts = [
            learner.anchor_N.clone() for learner in self.ranks[0].rounds.learners
        ]

    def play(self) -> Run:
        """Runs the ranks on a virtual clock, then lets all merges arrive."""
        draw = self.conditions.draw
        world = self.conditions.world
        speeds = [draw.uniform(0.15, 0.6) for _ in range(world)]
        delays = [[draw.uniform(0.0, 0.7) for _ in range(world)] for _ in range(world)]
        clock = VirtualClock(
            self.ranks,
            step_s=lambda rank: (
                math.inf if self.pauses(rank) else speeds[rank] * draw.uniform(0.5, 1.5)
            ),
            delay_s=lambda source, target, size: (
                0.0 if source == target else delays[source][target] + 1e-5 * size
            ),
            repeats=lambda number: number % 5 == 0,
        )
        if self.saves:
            clock.run(self.conditions.until_s / 2)
            for own in self.ranks:
                self._go_on_from_a_state(own)
        clock.run(self.conditions.until_s)
        self.messages = clock.sent
        self.num_steps = [own.rounds.step for own in self.ranks]
        self.ends = [[param.clone() for param in own.params] for own in self.ranks]
        for own in self.ranks:
            for merge in self.merges():
                own.rounds.learners[merge.fragment].take(
                    merge, own.params[merge.fragment]
                )
        return self

    def pauses(self, rank: int) -> bool:
        """Whether a rank makes no further step."""
        is_last = rank == self.conditions.world - 1
        is_early = self.ranks[rank].rounds.step < 2 * self.rules.every
        return self.conditions.pauses and not is_last and not is_early

    def _go_on_from_a_state(self, own: VirtualRank) -> None:
        """Replaces a rank's rounds by new ones, which load the old ones' state."""
        old = own.rounds
        saved = copied(old.state())
        own.rounds = self._rank(old.rank).rounds
        own.rounds.load(saved)
        own.rounds.inbox = old.inbox
        for new, before in zip(own.rounds.learners, old.learners, strict=True):
            new.anchor_N.copy_(before.anchor_N)
        # A state is for ranks between messages: it leaves the end of a grace out, and
        # who has taken which round in.
        for owner in own.rounds.owners.values():
            owner.closes_at_s = old.owners[owner.fragment].closes_at_s
            owner._taken = old.owners[owner.fragment]._taken

    def deliver(self, requests: Iterable[Request]) -> list[Answer]:
        """Brings requests to their owners and the answers to all; returns these."""
        answers = []
        for request in requests:
            owner = self.ranks[request.fragment % len(self.ranks)]
            answers += owner.rounds.receive(request, 0.0)
        for own in self.ranks:
            for answer in answers:
                own.rounds.receive(answer, 0.0)
            own.rounds.settle(own.params)
        return answers

    def merges(self) -> list[Merge]:
        """All merges, each once, in the order in which they were sent."""
        found = {id(m): m for m in self.messages if isinstance(m, Merge)}
        return list(found.values())

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.tape]

    def sent(self) -> dict[tuple[int, int, int], Tensor]:
        """Every decoded push, in float64, by fragment, rank and number."""
        found = {}
        for push in self.messages:
            if isinstance(push, Push):
                codec = self.ranks[push.rank].rounds.learners[push.fragment].codec
                key = (push.fragment, push.rank, push.number)
                found[key] = codec.decode(push.payload_B).double()
        return found

    def _rank(self, rank: int) -> VirtualRank:
        own = self.conditions
        work = working_dtype(own.dtype)
        params = []
        learners = []

        def codec_of(fragment: int) -> RoundCodec:
            numel = NUMELS[fragment]
            spec = TensorSpec("fragment", numel, work, shapes=SHAPES[fragment])
            return RoundCodec(own.codec, spec, rank, own.world)

        def make_owner(fragment: int) -> FragmentOwner:
            return own.owner(fragment, codec_of(fragment), self.rules, own.world)

        for fragment, numel in enumerate(NUMELS):
            first_N = make_gradient("normal", numel, own.dtype, fragment)
            anchor_N = first_N.to(work, copy=True)
            learners.append(
                own.learner(
                    rank,
                    fragment,
                    codec_of(fragment),
                    self.rules,
                    anchor_N,
                    SteppedAnchor(anchor_N, own.outer),
                )
            )
            params.append(first_N)
        rounds = own.rounds(rank, own.world, learners, make_owner, self.tape.append)
        return VirtualRank(rounds, params, partial(self._train, rank, params))

    def _train(self, rank: int, params: list[Tensor], step: int) -> int:
        """Moves parameters at random, and notes how far they have really gone."""
        for fragment, param in enumerate(params):
            seed = hash((rank, step, fragment)) % 2**31
            way = _way(self.conditions.kind, param.numel(), seed)
            before = param.double()
            param.copy_(before - 0.1 * way)
            self.learnt[rank][fragment] += before - param.double()
            self.magnitude[fragment] += before.abs() + way.abs()
        return 1 + (rank + step) % 3


NUMELS = tuple(sum(map(math.prod, shapes)) for shapes in SHAPES)


@cache
def _way(kind: str, numel: int, seed: int) -> Tensor:
    """A step's way; many runs take the same ones."""
    return make_gradient(kind, numel, torch.float64, seed)


@lru_cache(maxsize=2)
def played(conditions: Conditions) -> Run:
    """A run under these conditions, which laws only look at."""
    return Run(conditions).play()


# ---- laws ----------------------------------------------------------------------------


def law_nothing_learnt_is_lost(conditions: Conditions) -> None:
    """What ranks have learnt is in merges, in parameters or in residuals.

    What is in merges is in anchors, or in the residual of the owner. What a push on its
    way holds is in its rank's parameters still, and its loss in the residual already.
    """
    run = played(conditions)
    must(len(run.merges()) > 3, "few rounds closed")
    sent = run.sent()
    for fragment in range(len(NUMELS)):
        learnt_N = torch.stack([own[fragment] for own in run.learnt]).sum(0)
        kept_N = torch.zeros_like(learnt_N)
        size_N = run.magnitude[fragment].clone()
        for own in run.ranks:
            learner = own.rounds.learners[fragment]
            kept_N += learner.learnt(own.params[fragment]).double()
            assert learner.codec.residual_N is not None
            kept_N += learner.codec.residual_N.double()
            if (pushed := learner.pushed) is not None:
                kept_N += sent[fragment, own.rounds.rank, pushed.number]
                kept_N -= learner.pushed_N.double()
        means_N = torch.zeros_like(learnt_N)
        for merge in run.merges():
            entries = [
                c
                for c in merge.contributions
                if c.weight and merge.fragment == fragment
            ]
            total = sum(entry.weight for entry in entries)
            for entry in entries:
                push_N = sent[fragment, entry.rank, entry.number]
                kept_N += push_N
                size_N += push_N.abs()
                means_N += entry.weight / total * push_N
        near(kept_N, learnt_N, size_N, "what was learnt is not what ranks and merges")
        near(*_anchors_way(run, fragment, means_N), size_N, "merges are not in anchors")


def _anchors_way(run: Run, fragment: int, means_N: Tensor) -> tuple[Tensor, Tensor]:
    """How far the anchor has gone and has to go still, and how far it should."""
    world = run.conditions.world
    owner = run.ranks[fragment % world].rounds.owners[fragment]
    anchor_N = run.ranks[0].rounds.learners[fragment].anchor_N
    assert owner.codec.residual_N is not None
    way_N = run.firsts[fragment].double() - anchor_N.double()
    return way_N + owner.codec.residual_N.double(), means_N


def near(got_N: Tensor, want_N: Tensor, size_N: Tensor, what: str) -> None:
    """Element by element, to the roundings of float32 among all that was added up."""
    off_N = (got_N - want_N).abs()
    allowed_N = 4 * torch.finfo(torch.float32).eps * size_N + 1e-37
    worst = float((off_N / allowed_N).max())
    must(worst <= 1, f"{what}: off by {worst:.3g} times what roundings may be")


def law_anchors_have_the_same_bits(conditions: Conditions) -> None:
    """All ranks that have taken a round in have the same anchor, momentum and all."""
    run = played(replace(conditions, outer=DILOCO))
    anchors = defaultdict(set)
    for line in run.lines():
        anchors[line["fragment"], line["round"]].add(line["anchor"])
    must(len(anchors) > 3, "few rounds closed")
    wrong = [key for key, found in anchors.items() if len(found) > 1]
    must(not wrong, f"anchors differ after (fragment, round) {wrong[:3]}")
    for fragment in range(len(NUMELS)):
        first, *others = [own.rounds.learners[fragment].anchor_N for own in run.ranks]
        same = all(same_bits(first, other) for other in others)
        must(same, f"in the end anchors of fragment {fragment} differ")


def law_all_have_the_same_list(conditions: Conditions) -> None:
    """All ranks know the same of who is in a round."""
    run = played(conditions)
    lists = defaultdict(set)
    for line in run.lines():
        lists[line["fragment"], line["round"]].add(json.dumps(line["who"]))
    wrong = [key for key, found in lists.items() if len(found) > 1]
    must(not wrong, f"lists differ of (fragment, round) {wrong[:3]}")


def law_no_round_closes_twice(conditions: Conditions) -> None:
    """Rounds of a fragment have the numbers 1, 2, 3 and on, each once."""
    run = played(conditions)
    for fragment in range(len(NUMELS)):
        rounds = [m.version for m in run.merges() if m.fragment == fragment]
        want = list(range(1, len(rounds) + 1))
        must(rounds == want, f"rounds of fragment {fragment} closed as {rounds[:9]}")


def law_no_push_counts_twice(conditions: Conditions) -> None:
    """A push is in one merge at most."""
    run = played(conditions)
    counts = Counter(
        (merge.fragment, entry.rank, entry.number)
        for merge in run.merges()
        for entry in merge.contributions
        if entry.weight
    )
    wrong = [key for key, num in counts.items() if num > 1]
    must(not wrong, f"(fragment, rank, number) {wrong[:3]} counts twice")


def law_a_round_takes_its_steps(conditions: Conditions) -> None:
    """Some rank has made ``every`` steps in each round, whatever the link."""
    run = played(conditions)
    later = (merge for merge in run.merges() if merge.version > 1)
    for merge in later:
        steps = [c.steps for c in merge.contributions if not c.age]
        before = (merge.fragment, merge.version - 1)
        steps += [
            message.steps
            for message in run.messages
            if isinstance(message, Opening) and message[:2] == before
        ]
        most = max(steps, default=0)
        where = f"round {merge.version} of fragment {merge.fragment}"
        must(most >= run.rules.every, f"{where} came after {most} steps")


def law_every_rank_is_in(conditions: Conditions) -> None:
    """A slow or far rank is in later rounds too, with all its steps."""
    run = played(conditions)
    for own in run.ranks:
        if run.pauses(own.rounds.rank):
            continue
        for fragment in range(len(NUMELS)):
            entries = [
                entry
                for merge in run.merges()
                for entry in merge.contributions
                if (merge.fragment, entry.rank) == (fragment, own.rounds.rank)
            ]
            last = max((entry.step for entry in entries), default=0)
            must(
                last >= own.rounds.step / 4,
                f"rank {own.rounds.rank} is in no round of fragment {fragment} after "
                f"step {last} of {own.rounds.step}",
            )


def law_few_merges_wait_for_a_rank(conditions: Conditions) -> None:
    """A rank that makes no step holds a bounded number of merges."""
    run = played(conditions)
    for own in run.ranks:
        waiting = {m[:2] for m in own.rounds.inbox if isinstance(m, Merge)}
        counts = Counter(fragment for fragment, _ in waiting)
        most = max(counts.values(), default=0)
        where = f"{most} merges of a fragment wait for rank {own.rounds.rank}"
        must(most <= run.rules.most_waiting + 1, where)


def law_a_tape_gives_the_same_bits(conditions: Conditions) -> None:
    """A replay ends with the same anchors and parameters, and writes the same tape."""
    run = played(replace(conditions, outer=DILOCO))
    again = Run(run.conditions)
    replay(run.tape, again.ranks, run.num_steps)
    for own, other, ends in zip(run.ranks, again.ranks, run.ends, strict=True):
        lines = [
            [line for line in found.lines() if line["rank"] == own.rounds.rank]
            for found in (run, again)
        ]
        must(len(lines[0]) > 0, "the tape is empty")
        must(lines[0] == lines[1], "the replay's tape differs")
        for end, param in zip(ends, other.params, strict=True):
            must(same_bits(end, param), "parameters end elsewhere")


def law_a_last_round_takes_all_in(conditions: Conditions) -> None:
    """After a last round of each fragment all ranks have its anchor for parameters."""
    run = Run(conditions).play()
    run.deliver(message for message in run.messages if isinstance(message, Push))
    run.deliver([m for own in run.ranks for m in own.rounds.push_early(own.params)])
    asked = [own.rounds.begin_last(own.params) for own in run.ranks]
    merges = run.deliver([request for of_rank in asked for request in of_rank])
    must(len(merges) == len(NUMELS), f"{len(merges)} last rounds closed")
    for own in run.ranks:
        for learner, param in zip(own.rounds.learners, own.params, strict=True):
            anchor_N = learner.anchor_N.to(param.dtype)
            must(same_bits(anchor_N, param), "parameters are not their anchor")
            must(learner.pushed is None, "a push is on its way")


def law_a_saved_state_goes_on(conditions: Conditions) -> None:
    """Ranks that go on from saved states end as without a save."""
    run = played(conditions)
    again = Run(conditions)
    again.saves = True
    again.play()
    for own, other in zip(run.ends, again.ends, strict=True):
        same = all(map(same_bits, own, other))
        must(same, "ranks that went on from saved states end elsewhere")


LAWS: tuple[Callable[[Conditions], None], ...] = tuple(
    found for name, found in sorted(globals().items()) if name.startswith("law_")
)
