"""Partial rounds: ranks push what they have learnt, and no rank waits for another.

A model's parameters are cut into fragments. Each fragment has an owner, which is the
rank ``fragment`` mod W. A learner pushes its pseudo-gradient to the owner, and trains
on. The owner closes a round when pushes of ``quorum`` ranks are there and the grace
after that is over. It merges the pushes and sends the merge with its list to all ranks.
All ranks step their anchors by the same payload, so anchors have the same bits.

The parameters of a learner are its anchor minus all that it has learnt and that is in
no merge yet. So a merge overwrites nothing. A push that comes too late for its round
waits at the owner for the next one. If nobody opens that, the push's rank does, after
``every`` further steps.

When ranks are lost or come, the others begin an epoch together. Rounds that were open
begin anew: owners drop pushes, and ranks take theirs back. The next live rank that has
a fragment's last merge takes the place of a lost owner. Ranks that lack merges get the
anchor, bit for bit, a part from each rank that has it. Fewer than half of the ranks
train on and merge nothing, as the others may do so elsewhere.

Nothing here sends or waits. A driver carries messages, which arrive in order from one
rank to another, and may arrive twice. ``gradwire_lab.exchange.virtual_rounds`` has a
driver on a virtual clock.

Source: Decoupled DiLoCo, arXiv 2604.21428 (quorum, grace, tokens^2 / steps as weights,
    merges by length and direction).
Differences: ranks own fragments, so no process stands beside them. Payloads may lose a
    part, which stays in residuals. The first rank with ``every`` steps opens a round.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from math import fsum, inf
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..collective.steps.tensorwise import tensor_sizes, tensorwise
from ..contract import Compressor, Exchange
from ..contract.bounds import check_number, check_whole
from ..contract.payload import Payload
from ..contract.spec import TensorSpec, clear_not_finite
from ..contract.state import leaves, with_tensors
from ..errors import IncompatiblePair, RanksDiffer, invalid
from ..kernels.crc import crc32
from .error_feedback import ErrorFeedback, feedback_refusal
from .pair import Pair

# ---- rules ---------------------------------------------------------------------------

WEIGHTS = ("equal", "tokens", "tokens_per_step")
MERGES = ("mean", "rda")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of rounds, which all ranks share.

    Args:
        quorum: The ranks whose pushes an owner waits for.
        every: The least local steps from one push of a rank to the push that opens the
            next round.
        fragments: The number of fragments, which begin in turn. Default: 1.
        grace_s: Seconds that an owner waits for further pushes. None: it follows from
            what the owner has measured (``adaptive_grace_s``). Default: 0.
        weights: "equal" (the default), "tokens" or "tokens_per_step": ``weight_of``.
        merge: "mean" (the default), or "rda": ``merged``.
        most_age: A push that is more rounds old goes back to its rank. None (the
            default): all are merged.
        most_waiting: Rounds that an owner closes without a further push of a rank. So a
            rank that makes no step holds that many merges of a fragment at most, and
            one more. Default: 8.
        is_measured: Whether lists hold norms and cosines, as a tape shows them.
            Default: False.
    """

    quorum: int
    every: int
    fragments: int = 1
    grace_s: float | None = 0.0
    weights: str = "equal"
    merge: str = "mean"
    most_age: int | None = None
    most_waiting: int = 8
    is_measured: bool = False

    def __post_init__(self) -> None:
        check_whole("quorum", self.quorum, "count ranks")
        check_whole("every", self.every, "count local steps")
        check_whole("fragments", self.fragments, "write 1 for the whole model")
        check_whole("most_waiting", self.most_waiting, "count rounds")
        if self.most_age is not None:
            check_whole("most_age", self.most_age, "leave it out", least=0)
        accepted = "seconds, from 0"
        remedy = "write 0 to wait for the quorum alone"
        if self.grace_s is not None:
            check_number("grace", self.grace_s, accepted, remedy, 0.0, inf)
        if self.weights not in WEIGHTS:
            raise invalid("weights", self.weights, " or ".join(WEIGHTS), "choose one")
        if self.merge not in MERGES:
            raise invalid("merge", self.merge, " or ".join(MERGES), "choose one")

    def check_world(self, world: int) -> None:
        """Refuses a quorum of more ranks than there are."""
        if self.quorum > world:
            accepted = f"at most {world}, the number of ranks"
            raise invalid("quorum", self.quorum, accepted, "take fewer")


def codec_for_rounds(algorithm: Compressor | Exchange) -> Compressor:
    """The compressor by which partial rounds encode pushes and merges.

    Raises ``IncompatiblePair`` for an exchange whose payloads one rank cannot add up.

    >>> from gradwire.compress.powersgd import powersgd
    >>> try:
    ...     codec_for_rounds(powersgd(rank=2))
    ... except IncompatiblePair as error:
    ...     print(str(error).partition(": ")[2])
    ranks make its payload together; use one that one rank can add up, such as topk
    """
    inner = algorithm.inner if isinstance(algorithm, ErrorFeedback) else algorithm
    codec = inner.codec if isinstance(inner, Pair) else inner
    if not isinstance(codec, Compressor):
        raise IncompatiblePair(
            f"{algorithm!r} cannot go in partial rounds: ranks make its payload "
            "together; use one that one rank can add up, such as topk"
        )
    return codec


_LEAST_WEIGHT = 1e-9
"""The weight of a push of no steps; 0 would send it back to its rank."""
_SPARE_STEPS = 2.0
"""The steps of the fastest rank within which a round is to close, as its paper has."""
_SPARE_SHARE = 0.8
_MOST_GRACE_S = 1.0


def adaptive_grace_s(step_s: float, waited_s: float, sync_s: float) -> float:
    """Seconds that an owner waits for further pushes once it has a quorum.

    Source: Decoupled DiLoCo, with the constants of its open implementation.

    Args:
        step_s: Seconds of a local step of the fastest rank.
        waited_s: Seconds that the quorum took.
        sync_s: Seconds that the last merge took to all ranks.

    Returns:
        The seconds, from 0 to 1.

    >>> adaptive_grace_s(step_s=0.5, waited_s=0.25, sync_s=0.25)
    0.4
    """
    spare_s = _SPARE_STEPS * step_s - waited_s - sync_s
    return min(max(0.0, _SPARE_SHARE * spare_s), _MOST_GRACE_S)


def weight_of(rule: str, steps: int, tokens: int) -> float:
    """The weight of a push in a merge. It is next to none for a push of no steps.

    Args:
        rule: "equal", "tokens", or "tokens_per_step", which is tokens^2 / steps.
        steps: Local steps since the rank's push before.
        tokens: Tokens in these steps.

    Returns:
        The weight.

    Raises:
        InvalidSetting: The weight follows from tokens, and there are none.

    >>> [weight_of(rule, 4, 200) for rule in WEIGHTS]
    [1.0, 200.0, 10000.0]
    """
    if steps == 0:
        return _LEAST_WEIGHT
    if rule == "equal":
        return 1.0
    if tokens < 1:
        remedy = 'count the tokens of each step, or take weights="equal"'
        raise invalid(f"tokens under weights={rule!r}", tokens, "1 or more", remedy)
    return float(tokens) if rule == "tokens" else tokens * tokens / steps


def merged(
    rule: str, vectors: Iterable[Tensor], weights: Sequence[float], spec: TensorSpec
) -> Tensor:
    """One pseudo-gradient from those of several ranks.

    "mean" is the weighted mean. "rda" gives each tensor the weighted mean of lengths,
    and the direction of the weighted mean of directions. Sums are made in the given
    order.

    >>> pushes = [torch.tensor([6.0, 0.0]), torch.tensor([0.0, 8.0])]
    >>> merged("mean", pushes, [1.0, 1.0], TensorSpec("", 2))
    tensor([3., 4.])
    >>> merged("rda", pushes, [1.0, 1.0], TensorSpec("", 2))
    tensor([4.9497, 4.9497])
    """
    total = fsum(weights)
    sizes = list(tensor_sizes(spec)) if rule == "rda" else [spec.numel]
    lengths = [0.0] * len(sizes)
    sum_N = torch.zeros(spec.numel, dtype=spec.dtype, device=spec.device)
    sums = torch.split(sum_N, sizes)
    for vector_N, weight in zip(vectors, weights, strict=True):
        share = weight / total
        for place, part in enumerate(torch.split(vector_N, sizes)):
            length = _norm(part) if rule == "rda" else 1.0
            lengths[place] += share * length
            sums[place].add_(part / (length or 1.0), alpha=share)
    if rule == "rda":
        for part, length in zip(sums, lengths, strict=True):
            part.div_(_norm(part) or 1.0).mul_(length)
    return sum_N


def _norm(vector_N: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector_N, dtype=torch.float64))


# ---- messages ------------------------------------------------------------------------


class Push(NamedTuple):
    """A rank's pseudo-gradient of a fragment, on its way to the fragment's owner."""

    fragment: int
    rank: int
    number: int
    """The number of this push among the rank's pushes of the fragment, from 1."""
    version: int
    """The round whose anchor the rank had."""
    opens: bool
    """Whether the rank has made ``every`` steps, so that it may open a round."""
    step: int
    """The rank's local step."""
    steps: int
    tokens: int
    weight: float
    epoch: int
    missed: int
    """Rounds that the rank had missed, so that its work is older than ``version``."""
    payload_B: Tensor


class Pull(NamedTuple):
    """Asks all ranks for a push, as the round after ``version`` is open."""

    fragment: int
    version: int


class Opening(NamedTuple):
    """Asks a fragment's owner to open the round after ``version``."""

    fragment: int
    version: int
    steps: int
    """Local steps of the rank since it pushed, or took the last round in."""


class Rest(NamedTuple):
    """Says that a rank has learnt nothing that its owner's last round lacks."""

    fragment: int
    rank: int
    epoch: int


class Contribution(NamedTuple):
    """An entry of a merge's list: one push, and what became of it."""

    rank: int
    number: int
    step: int
    steps: int
    tokens: int
    weight: float
    """The weight in the merge; 0 where the push went back to its rank."""
    age: int
    """Rounds that closed between the rank's anchor and this round."""
    bytes: int
    norm: float | None = None
    cosine: float | None = None
    """The cosine between push and merge."""


class Merge(NamedTuple):
    """A closed round: the list of pushes, and their merged pseudo-gradient."""

    fragment: int
    version: int
    contributions: tuple[Contribution, ...]
    payload_B: Tensor


Answer = Pull | Merge
"""A message of an owner, which all ranks get."""


class Snapshot(NamedTuple):
    """A part of an anchor and its outer state, for a rank that lacks merges."""

    fragment: int
    rank: int
    """The rank that it is for."""
    epoch: int
    version: int
    part: int
    num_parts: int
    """The parts of this anchor, each of which another rank sends."""
    steps: int
    tokens: int
    counted: list[list[int]]
    """The number of the last push in a merge, by rank."""
    payload_B: Tensor


Request = Push | Opening | Rest | Snapshot
"""A message to one rank, which a local step ends with."""


class RoundEpoch(NamedTuple):
    """The ranks that are in, from one loss or newcomer to the next."""

    number: int
    ranks: tuple[int, ...]
    is_quorate: bool
    """Whether rounds close: fewer than half of the ranks merge nothing, nor does one
    rank that is left alone.
    """
    basis: tuple[int, int]
    """The number of ranks in the last epoch whose rounds closed, and its first rank."""

    @classmethod
    def of(
        cls, number: int, ranks: Iterable[int], basis: Sequence[int] = ()
    ) -> RoundEpoch:
        """An epoch of these ranks; without ``basis``, the first of all.

        >>> RoundEpoch.of(1, (0, 2, 3), (5, 0)).is_quorate
        True
        >>> RoundEpoch.of(1, (1, 4), (5, 0)).is_quorate
        False
        """
        ranks = tuple(sorted(ranks))
        own = (len(ranks), ranks[0])
        num_before, first = basis or own
        spare = 2 * len(ranks) - num_before
        has_half = spare == 0 and len(ranks) > 1 and ranks[0] == first
        is_quorate = spare > 0 or has_half
        basis = own if is_quorate else (num_before, first)
        return cls(number, ranks, is_quorate, basis)


class Restart(NamedTuple):
    """Begins an epoch on a rank, between two of its local steps."""

    fragment: int
    epoch: RoundEpoch
    is_behind: bool
    """Whether this rank lacks merges, or has one that does not count."""
    donors: tuple[int, ...]
    """The ranks that lack no merge, each of which sends a part of its anchor."""
    behind: tuple[int, ...]
    """The ranks that this one sends its part."""
    new: tuple[int, ...]
    """The ranks that have never had an anchor."""


class OuterStep(Protocol):
    """A fragment's outer optimizer."""

    def step(self, mean_N: Tensor) -> None:
        """Steps the anchor by a merged pseudo-gradient."""

    def packed(self, part: slice, *, is_for_newcomer: bool) -> Tensor:
        """The bytes of a part of the anchor and of the optimizer's state.

        For a newcomer they have what else its training begins with.
        """

    def take_over(self, part: slice, payload_B: Tensor) -> None:
        """Puts what another rank has ``packed`` in this one's place."""


Rows = Sequence[Tensor] | Mapping[int, Tensor]
"""The flat parameters of each fragment."""

# ---- one rank -----------------------------------------------------------------------


class RoundCodec:
    """A compressor on one rank for a row of vectors, with its state and its residual.

    A compressor whose residual could grow without bound has none.
    """

    def __init__(
        self, codec: Compressor, spec: TensorSpec, rank: int, world: int
    ) -> None:
        self.spec = spec
        self._codec = tensorwise(codec, tensor_sizes(spec)).for_world(world, rank)
        self._state = self._codec.init(spec)
        self.residual_N: Tensor | None = None
        if feedback_refusal(codec) is None:
            self.residual_N = torch.zeros(
                spec.numel, dtype=spec.dtype, device=spec.device
            )

    def encode(self, vector_N: Tensor) -> Tensor:
        """The payload of a vector and the residual."""
        payload, self._state = self._codec.encode(
            self._state, vector_N, residual_N=self.residual_N
        )
        assert payload.buffer is not None
        return payload.buffer

    def decode(self, payload_B: Tensor) -> Tensor:
        """The vector of a payload, in new memory."""
        form = self._codec.received(self.spec, payload_B.numel())
        out_N = torch.empty(
            self.spec.numel, dtype=self.spec.dtype, device=self.spec.device
        )
        return self._codec.decode(Payload(form, payload_B.to(out_N.device)), out_N)

    def state(self) -> dict[str, Any]:
        """The residual, and the compressor's state, as plain values."""
        return {
            "residual": self.residual_N,
            "kept": [t for _, t in leaves(self._state)],
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Goes on from a ``state``."""
        if self.residual_N is not None:
            self.residual_N.copy_(saved["residual"])
        kept = (tensor.to(self.spec.device, copy=True) for tensor in saved["kept"])
        self._state = with_tensors(self._state, kept)


class FragmentOwner:
    """The owner of a fragment: collects pushes, and closes one round after another."""

    def __init__(
        self, fragment: int, codec: RoundCodec, rules: Rules, world: int
    ) -> None:
        rules.check_world(world)
        self.fragment = fragment
        self.codec = codec
        self.rules = rules
        self.version = 0
        self.epoch = RoundEpoch.of(0, range(world))
        self.pushes: dict[int, Push] = {}
        """Pushes by rank that are in no merge yet."""
        self.closes_at_s: float | None = None
        self.is_sending = False
        """Whether the last merge is on its way to a rank still; no round closes then.
        """
        self.sync_s = 0.0
        """Seconds that the last merge took to all ranks."""
        self._away: set[int] = set()
        self._heard: set[int] | None = None
        """The ranks that have sent their rest for the last round; None before it."""
        self._is_open = False
        self._opened_s = 0.0
        self._numbers: Counter[int] = Counter()
        """The number of each rank's last push."""
        self._taken = dict.fromkeys(range(world), 0)
        """The last round that each rank has taken in, as far as its pushes say."""
        self._pushed_s: dict[int, float] = {}
        self._paces_s: dict[int, float] = {}
        """Seconds of a local step, by rank."""

    def take(self, push: Push, now_s: float) -> list[Answer]:
        """Takes a push; returns what all ranks are to be sent."""
        is_old = push.number <= self._numbers[push.rank]
        if is_old or push.epoch != self.epoch.number:
            return []
        self._numbers[push.rank] = push.number
        self._taken[push.rank] = push.version
        if self._heard is not None:
            self._heard.add(push.rank)
        self._measure(push, now_s)
        self.pushes[push.rank] = push
        return self.open(push.version, now_s) if push.opens else self._closing(now_s)

    def open(self, version: int, now_s: float) -> list[Answer]:
        """Opens the round after ``version``, unless it is open or closed."""
        answers: list[Answer] = []
        if not self._is_open and version == self.version:
            self._is_open = True
            self._opened_s = now_s
            answers.append(Pull(self.fragment, version))
        return answers + self._closing(now_s)

    def go_without(self, rank: int, now_s: float) -> list[Answer]:
        """Waits for no push of a rank until ``come_back``."""
        self._away.add(rank)
        return self._closing(now_s)

    def come_back(self) -> None:
        """Expects pushes of all ranks again, which have taken all rounds in."""
        self._away.clear()
        self._taken = dict.fromkeys(self.epoch.ranks, self.version)

    def begin_last(self) -> None:
        """Opens a round that takes all ranks in, once each has sent its ``rest``."""
        self._heard = set()
        self._is_open = True
        self.closes_at_s = inf

    def begin_epoch(self, epoch: RoundEpoch, version: int, *, is_last: bool) -> None:
        """Goes on after a round, with other ranks, which push anew.

        ``is_last`` says whether a round that takes all in has yet to close.
        """
        self.epoch = epoch
        self.version = version
        self.come_back()
        self._pushed_s = {}
        self._paces_s = {}
        self.pushes = {}
        self.begin_last()
        if not is_last:
            self._heard = None
            self._is_open = False
            self.closes_at_s = None

    def keep(self, rank: int, now_s: float) -> list[Answer]:
        """Leaves a rank's push of before the last round in it, if there is one."""
        assert self._heard is not None, "a rank rests in a last round"
        self._heard.add(rank)
        return self._closing(now_s)

    @property
    def is_held(self) -> bool:
        """Whether no round closes now, as too many merges wait for a rank."""
        silent = self._taken.keys() - self._present
        oldest = min((self._taken[rank] for rank in silent), default=self.version)
        return self.is_sending or self.version - oldest >= self.rules.most_waiting

    def due(self, now_s: float) -> list[Answer]:
        """The merge of the open round, if it is time to close it."""
        if self.closes_at_s is None or self.is_held:
            return []
        if now_s < self.closes_at_s and len(self._present) < len(self.epoch.ranks):
            return []
        return [self.close()]

    def _closing(self, now_s: float) -> list[Answer]:
        """Sets the end of the round if the quorum is there; the merge if it is due."""
        if self._has_quorum and self.closes_at_s is None:
            self.closes_at_s = now_s + self._grace_s(now_s)
        return self.due(now_s)

    @property
    def _has_quorum(self) -> bool:
        quorum = min(self.rules.quorum, len(self.epoch.ranks))
        may_close = self._is_open and self.epoch.is_quorate
        return may_close and len(self._present) >= quorum

    @property
    def _present(self) -> set[int]:
        """The ranks that need not be waited for."""
        return self.pushes.keys() | self._away if self._heard is None else self._heard

    def _grace_s(self, now_s: float) -> float:
        if self.rules.grace_s is not None:
            return self.rules.grace_s
        step_s = min(self._paces_s.values(), default=0.0)
        return adaptive_grace_s(step_s, now_s - self._opened_s, self.sync_s)

    def _measure(self, push: Push, now_s: float) -> None:
        before_s = self._pushed_s.get(push.rank)
        self._pushed_s[push.rank] = now_s
        if before_s is not None and push.steps:
            self._paces_s[push.rank] = (now_s - before_s) / push.steps

    def close(self) -> Merge:
        """Closes the round: merges the pushes that are there, in the order of ranks."""
        pushes = [self.pushes[rank] for rank in sorted(self.pushes)]
        entries = [self._entry(push) for push in pushes]
        fresh = [
            push for push, entry in zip(pushes, entries, strict=True) if entry.weight
        ]
        self.pushes = {}
        self._heard = None
        self.closes_at_s = None
        self._is_open = False
        self.version += 1
        mean_N = merged(
            self.rules.merge,
            (self.codec.decode(push.payload_B) for push in fresh),
            [push.weight for push in fresh],
            self.codec.spec,
        )
        if self.rules.is_measured:
            entries = [
                self._measured(entry, push, mean_N)
                for entry, push in zip(entries, pushes, strict=True)
            ]
        payload_B = self.codec.encode(mean_N)
        return Merge(self.fragment, self.version, tuple(entries), payload_B)

    def _entry(self, push: Push) -> Contribution:
        age = self.version - push.version + push.missed
        most_age = self.rules.most_age
        is_last = self.closes_at_s == inf
        is_merged = most_age is None or age <= most_age or is_last
        return Contribution(
            rank=push.rank,
            number=push.number,
            step=push.step,
            steps=push.steps,
            tokens=push.tokens,
            weight=push.weight if is_merged else 0.0,
            age=age,
            bytes=push.payload_B.numel(),
        )

    def _measured(
        self, entry: Contribution, push: Push, mean_N: Tensor
    ) -> Contribution:
        vector_N = self.codec.decode(push.payload_B)
        norm = _norm(vector_N)
        lengths = norm * _norm(mean_N)
        product = float(torch.dot(vector_N.double(), mean_N.double()))
        cosine = product / lengths if lengths else 0.0
        return entry._replace(norm=norm, cosine=cosine)

    def state(self) -> dict[str, Any]:
        """All that a checkpoint keeps, as plain values."""
        return {
            "version": self.version,
            "numbers": dict(self._numbers),
            "pushes": [list(push) for push in self.pushes.values()],
            "is_open": self._is_open,
            "codec": self.codec.state(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Goes on from a ``state``. An open round closes at the next occasion."""
        self.version = saved["version"]
        self.come_back()
        self._numbers = Counter(saved["numbers"])
        pushes = starmap(Push, saved["pushes"])
        self.pushes = {push.rank: push for push in pushes}
        self._is_open = saved["is_open"]
        if self._has_quorum:
            self.closes_at_s = self._grace_s(0.0)
        self.codec.load(saved["codec"])


_HEAD = 4
"""The numbers of a rank's row before those of fragments."""
NEVER = -1
"""The version of a rank that has never had an anchor of the run."""
_COUNTS = (
    "_number",
    "_since",
    "_steps",
    "_tokens",
    "_merged_steps",
    "_merged_tokens",
    "_missed",
)
"""A learner's counters."""


class FragmentLearner:
    """A rank's anchor of a fragment, and what of it is on its way.

    ``outer`` steps the anchor by a merged pseudo-gradient. Parameters are flat, and may
    have fewer bits than the anchor.
    """

    def __init__(
        self,
        rank: int,
        fragment: int,
        codec: RoundCodec,
        rules: Rules,
        anchor_N: Tensor,
        outer: OuterStep,
    ) -> None:
        self.rank = rank
        self.fragment = fragment
        self.codec = codec
        self.rules = rules
        self.anchor_N = anchor_N
        self.version = 0
        self.is_asked = False
        """Whether the owner has asked for a push."""
        self.pushed: Push | None = None
        """The push that is in no merge yet."""
        self.pushed_N = torch.empty(0)
        """The part of the parameters that it holds."""
        self.merged = deque[Push](maxlen=2)
        """The last pushes in merges. The others may go on without these merges, as they
        were on their way when the network parted.
        """
        self.is_behind = False
        """Whether it waits for a snapshot of merges that it lacks."""
        self._outer = outer
        self._parts: dict[int, Snapshot] = {}
        """The parts of an anchor that have come, of which others are missing."""
        self._epoch = RoundEpoch.of(0, [rank])
        self.counted: Counter[int] = Counter()
        """The number of each rank's last push in a merge."""
        self._missed = 0
        self._number = 0
        turn = (fragment + 1) * rules.every // rules.fragments
        self._since = rules.every - turn
        """Local steps that count for the next opening."""
        self._steps = 0
        self._tokens = 0
        self._merged_steps = 0
        self._merged_tokens = 0

    def count(self, tokens: int) -> None:
        """Counts a local step of so many tokens."""
        self._since += 1
        self._steps += 1
        self._tokens += tokens

    @property
    def known_steps(self) -> int:
        """Local steps of all ranks in merges, and this rank's that are in none."""
        pushed = self.pushed.steps if self.pushed else 0
        return self._merged_steps + pushed + self._steps

    @property
    def known_tokens(self) -> int:
        """Tokens of the ``known_steps``."""
        pushed = self.pushed.tokens if self.pushed else 0
        return self._merged_tokens + pushed + self._tokens

    @property
    def may_push(self) -> bool:
        """Whether there are steps to push; one push may be on its way at once."""
        return self.pushed is None and self._steps > 0 and not self.is_behind

    @property
    def is_due(self) -> bool:
        """Whether a push is to be sent now."""
        return self.may_push and (self.is_asked or self._since >= self.rules.every)

    @property
    def may_open(self) -> bool:
        """Whether the next round is to be opened for a push that came late."""
        return self.pushed is not None and self._since >= self.rules.every

    def opening(self) -> Opening:
        """Asks for the next round, once in ``every`` steps."""
        steps = self._since
        self._since = 0
        return Opening(self.fragment, self.version, steps)

    def learnt(self, param_N: Tensor) -> Tensor:
        """The way from the parameters back to the anchor, which no merge has yet."""
        anchor_N = self.anchor_N.to(param_N.dtype).to(self.anchor_N.dtype)
        return torch.sub(anchor_N, param_N)

    def ask(self, pull: Pull) -> None:
        """Takes a pull; one for a closed round, or for what is on its way, is void."""
        if self.pushed is None and pull.version == self.version:
            self.is_asked = True

    def push(self, param_N: Tensor, step: int) -> Push:
        """Encodes what this rank has learnt since its last push."""
        self.pushed_N = self.learnt(param_N)
        self._number += 1
        self.pushed = Push(
            fragment=self.fragment,
            rank=self.rank,
            number=self._number,
            version=self.version,
            opens=self._since >= self.rules.every,
            step=step,
            steps=self._steps,
            tokens=self._tokens,
            weight=weight_of(self.rules.weights, self._steps, self._tokens),
            epoch=self._epoch.number,
            missed=self._missed,
            payload_B=self.codec.encode(self.pushed_N),
        )
        self._since = 0
        self._steps = 0
        self._tokens = 0
        self._missed = 0
        self.is_asked = False
        return self.pushed

    def rest(self, param_N: Tensor, step: int) -> Request:
        """A push for the last round, in place of one on its way; or none is needed."""
        pushed_N = self.pushed_N if self.pushed else torch.zeros_like(param_N)
        is_fresh = self.pushed is None or self.pushed.version == self.version
        if is_fresh and torch.equal(self.learnt(param_N), pushed_N):
            return Rest(self.fragment, self.rank, self._epoch.number)
        self.take_back()
        return self.push(param_N, step)

    def take(self, merge: Merge, param_N: Tensor) -> bool:
        """Steps the anchor by a merge, and puts parameters where they belong then.

        Returns False for a merge that this rank has already. Raises ``RanksDiffer`` if
        merges are missing before it.
        """
        if merge.version <= self.version:
            return False
        if merge.version > self.version + 1:
            raise RanksDiffer(
                f"round {merge.version} of fragment {merge.fragment} came after round "
                f"{self.version}: messages of a rank arrive in order, and none is lost"
            )
        self.version = merge.version
        kept_N = self.learnt(param_N)
        age = self._settle(merge, kept_N)
        for entry in merge.contributions:
            if entry.weight:
                self.counted[entry.rank] = entry.number
                self._merged_steps += entry.steps
                self._merged_tokens += entry.tokens
        self._outer.step(self.codec.decode(merge.payload_B))
        self._put(kept_N, param_N)
        if age != 0:
            self._since = 0
        return True

    def _put(self, kept_N: Tensor, param_N: Tensor) -> None:
        """Puts parameters where they belong, with ``kept_N`` that no merge has."""
        param_N.copy_(self.anchor_N - kept_N)
        # Parameters of few bits cannot hold all that was kept.
        self._keep(kept_N - self.learnt(param_N))

    def restart(self, restart: Restart) -> None:
        """Begins an epoch: takes the push back, which its owner has dropped.

        It stays where a merge that others have may hold it.
        """
        self._epoch = restart.epoch
        self.is_asked = False
        self.is_behind = restart.is_behind
        self._parts = {}
        push = self.pushed
        if push is None or self.is_behind or not restart.epoch.is_quorate:
            return
        if push.opens and push.version == self.version:
            self._since = self.rules.every
        self._reclaim()

    def _reclaim(self) -> None:
        """Takes the push back, whose work stays as old as it is."""
        if (push := self.pushed) is not None:
            self._missed += self.version - push.version + push.missed
            self.take_back()

    def snapshot(self, rank: int, restart: Restart) -> Snapshot:
        """This rank's part of the anchor, for a rank that lacks merges."""
        part = restart.donors.index(self.rank)
        num_parts = len(restart.donors)
        is_new = rank in restart.new
        return Snapshot(
            fragment=self.fragment,
            rank=rank,
            epoch=self._epoch.number,
            version=self.version,
            part=part,
            num_parts=num_parts,
            counted=[[*count] for count in self.counted.items()],
            steps=self._merged_steps,
            tokens=self._merged_tokens,
            payload_B=self._outer.packed(
                slice(part, None, num_parts), is_for_newcomer=is_new
            ),
        )

    def catch_up(self, snapshot: Snapshot, param_N: Tensor) -> bool:
        """Takes over an anchor once all parts are there.

        What this rank has learnt meanwhile stays. Returns whether it has caught up. The
        next push says how many rounds it has missed.
        """
        self._parts[snapshot.part] = snapshot
        if not self.is_behind or len(self._parts) < snapshot.num_parts:
            return False
        kept_N = self.learnt(param_N)
        self.counted = Counter()
        for rank, number in snapshot.counted:
            self.counted[rank] = number
        counted = self.counted[self.rank]
        if self.pushed is not None and self.pushed.number <= counted:
            self._merge_push(kept_N)
        else:
            self._reclaim()
        for push in self.merged:
            if push.number > counted:
                kept_N += self.codec.decode(push.payload_B)
                self._missed += self.version - push.version + push.missed
                self._steps += push.steps
                self._tokens += push.tokens
        self.merged.clear()
        if self._steps:
            self._missed += max(0, snapshot.version - self.version)
        self.version = snapshot.version
        self._merged_steps = snapshot.steps
        self._merged_tokens = snapshot.tokens
        for one in self._parts.values():
            part = slice(one.part, None, one.num_parts)
            self._outer.take_over(part, one.payload_B)
        self._parts = {}
        self._put(kept_N, param_N)
        self._since = 0
        self.is_behind = False
        return True

    def _settle(self, merge: Merge, kept_N: Tensor) -> int | None:
        """Takes the own push out of ``kept_N`` if it is in the merge.

        Returns the age of the push; None where it is still on its way.
        """
        for entry in merge.contributions:
            push = self.pushed
            if push is None or (entry.rank, entry.number) != (push.rank, push.number):
                continue
            if entry.weight:
                self._merge_push(kept_N)
            else:
                self.take_back()
            return entry.age
        return None

    def _merge_push(self, kept_N: Tensor) -> None:
        """Takes the push, which a merge has, out of ``kept_N``."""
        assert self.pushed is not None, "it is in the merge"
        self.merged.append(self.pushed)
        kept_N -= self.pushed_N
        # A NaN that the merge leaves out would stay on this rank.
        clear_not_finite(kept_N)
        self._forget_push()

    def take_back(self) -> None:
        """Takes the push back that is in no merge yet, if there is one.

        Parameters have it still, and its loss is no residual.
        """
        if (push := self.pushed) is None:
            return
        self._keep(self.codec.decode(push.payload_B) - self.pushed_N)
        self._steps += push.steps
        self._tokens += push.tokens
        self._forget_push()

    def _forget_push(self) -> None:
        self.pushed = None
        self.pushed_N = torch.empty(0)

    def state(self) -> dict[str, Any]:
        """All that a checkpoint keeps beside the anchor, as plain values."""
        return {
            "version": self.version,
            "is_asked": self.is_asked,
            "pushed": None if self.pushed is None else list(self.pushed),
            "pushed_N": self.pushed_N,
            "counts": {name: vars(self)[name] for name in _COUNTS},
            "codec": self.codec.state(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Goes on from a ``state``."""
        self.version = saved["version"]
        self.is_asked = saved["is_asked"]
        self.pushed = None if saved["pushed"] is None else Push(*saved["pushed"])
        self.pushed_N = saved["pushed_N"].to(self.anchor_N.device, copy=True)
        for name in _COUNTS:
            setattr(self, name, saved["counts"][name])
        self.codec.load(saved["codec"])

    def _keep(self, lost_N: Tensor) -> None:
        if self.codec.residual_N is not None:
            self.codec.residual_N += clear_not_finite(lost_N)


def row_of_newcomer(num_fragments: int) -> list[int]:
    """The ``row`` of a rank that has never had an anchor.

    >>> row_of_newcomer(1)
    [0, -1, 0, 0, -1, -1, 0]
    """
    never = [NEVER] * num_fragments
    return [0, NEVER, 0, 0, *never, *never, *([0] * num_fragments)]


class PartialRounds:
    """One rank's part in the rounds of all fragments.

    A driver calls ``border`` after each local step, and sends what it returns: pushes
    to the owners of their fragments, and snapshots to their ranks. It calls ``receive``
    for each message that comes, and ``due`` at ``closes_at_s``. It sends the answers of
    both to all ranks, this one too. If ranks are lost or come, the others stop sending,
    exchange their ``row``, and call ``begin_epoch``. Messages sent before it are
    dropped.

    Args:
        rank: This rank.
        world: The number of ranks at first. A rank that comes later has another number.
        learners: One for each fragment, in order.
        make_owner: Makes the owner of a fragment.
        tape: Takes a JSON line for each merge that takes effect here. None (the
            default): no tape.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        learners: Sequence[FragmentLearner],
        make_owner: Callable[[int], FragmentOwner],
        tape: Callable[[str], object] | None = None,
    ) -> None:
        self.rank = rank
        self.learners = learners
        self.owner_of = [learner.fragment % world for learner in learners]
        """The rank that owns each fragment."""
        self.owners = {
            fragment: make_owner(fragment)
            for fragment, owner in enumerate(self.owner_of)
            if owner == rank
        }
        self.epoch = RoundEpoch.of(0, range(world))
        if rank >= world:
            for learner in learners:
                learner.version = NEVER
        self.inbox: deque[Answer | Snapshot | Restart] = deque()
        self.step = 0
        self._make_owner = make_owner
        self.awaited: dict[int, set[int]] = {}
        """The parts of anchors that this rank waits for, by fragment."""
        self._early: dict[int, list[Merge]] = defaultdict(list)
        """Merges of these fragments, which wait for the parts."""
        self._arrived = [learner.version for learner in learners]
        """The last round of each fragment that has arrived."""
        self._eras = [0 if rank < world else NEVER] * len(learners)
        """The last epoch with a quorum that confirmed each fragment's last round."""
        self._coming_eras = [*self._eras]
        """The eras of the snapshots that this rank waits for."""
        self._last_quorate = self._eras[0]
        self._ends = [*self._arrived]
        """The rounds that take all in."""
        self._tape = tape

    def memory(self) -> dict[str, int]:
        """Bytes beside parameters and anchors, of the kinds in ``stats()``."""
        # another thread may add to what is copied here
        waiting = [m for m in self.inbox.copy() if isinstance(m, Merge | Snapshot)]
        pushes = [p for owner in self.owners.values() for p in [*owner.pushes.values()]]
        pushes += [one.pushed for one in self.learners if one.pushed is not None]
        pushes += [push for one in self.learners for push in one.merged]
        # a push to this rank itself is one payload
        payloads = {id(m.payload_B): m.payload_B.nbytes for m in (*waiting, *pushes)}
        codecs = [one.codec for one in self.learners]
        codecs += [owner.codec for owner in self.owners.values()]
        residuals = [c.residual_N for c in codecs if c.residual_N is not None]
        return {
            "residuals": sum(residual_N.nbytes for residual_N in residuals),
            "messages": sum(one.pushed_N.nbytes for one in self.learners),
            "payloads": sum(payloads.values()),
        }

    def receive(self, message: Request | Answer, now_s: float) -> list[Answer]:
        """Takes a message; merges wait for the next ``border``."""
        fragment = message.fragment
        match message:
            case Push() | Opening() | Rest():
                return self._asked(message, now_s)
            case Snapshot():
                self._take_part(message)
            case Merge() if fragment in self.awaited:
                self._early[fragment].append(message)
            case Merge():
                self._arrived[fragment] = message.version
                self.inbox.append(message)
            case Pull():
                self.inbox.append(message)
        return []

    def _take_part(self, snapshot: Snapshot) -> None:
        """Takes a part of an anchor; after the last one, merges that came before it."""
        fragment = snapshot.fragment
        if snapshot.epoch != self.epoch.number or fragment not in self.awaited:
            return
        self.inbox.append(snapshot)
        self.awaited[fragment].discard(snapshot.part)
        if self.awaited[fragment]:
            return
        del self.awaited[fragment]
        self._eras[fragment] = self._coming_eras[fragment]
        self._arrived[fragment] = snapshot.version
        for merge in self._early.pop(fragment, ()):
            self._arrived[fragment] = merge.version
            self.inbox.append(merge)

    def _asked(self, message: Push | Opening | Rest, now_s: float) -> list[Answer]:
        """The answers of an owner; another rank may own the fragment by now."""
        if (owner := self.owners.get(message.fragment)) is None:
            return []
        match message:
            case Push():
                return owner.take(message, now_s)
            case Opening():
                return owner.open(message.version, now_s)
            case Rest():
                is_old = message.epoch != self.epoch.number
                return [] if is_old else owner.keep(message.rank, now_s)

    def num_merged(self, rank: int) -> int:
        """A number that grows as work of a rank takes effect here."""
        return sum(learner.counted[rank] for learner in self.learners)

    def row(self) -> list[int]:
        """This rank's place in all rounds before an epoch, as whole numbers."""
        head = (self.epoch.number, self._last_quorate, *self.epoch.basis)
        return [*head, *self._eras, *self._arrived, *self.owner_of]

    def begin_epoch(self, rows: Mapping[int, Sequence[int]]) -> None:
        """Goes on among ``rows``' ranks, which all call it with the same rows.

        An owner that has snapshots to make ``is_sending`` until they are made.
        """
        number = 1 + max(row[0] for row in rows.values())
        _, _, *basis = max(rows.values(), key=lambda row: row[1])[:_HEAD]
        self.epoch = RoundEpoch.of(number, rows, basis)
        if self.epoch.is_quorate:
            self._last_quorate = number
        self.awaited.clear()
        self._early.clear()
        for fragment in range(len(self.learners)):
            columns = {
                r: row[_HEAD + fragment :: len(self.learners)]
                for r, row in rows.items()
            }
            self._begin_epoch(fragment, columns)

    def _begin_epoch(self, fragment: int, rows: Mapping[int, Sequence[int]]) -> None:
        """Begins it for a fragment; a row is the era, the last round and the owner."""
        era, version, before = max(rows.values(), key=lambda row: tuple(row[:2]))
        having = [rank for rank in rows if (*rows[rank][:2],) == (era, version)]
        # the next rank in order, after the last the first
        owner = min(having, key=lambda rank: (rank < before, rank))
        self.owner_of[fragment] = owner
        behind = tuple(rank for rank in self.epoch.ranks if rank not in having)
        if owner == self.rank:
            if fragment not in self.owners:
                self.owners[fragment] = self._make_owner(fragment)
            own = self.owners[fragment]
            is_last = version < self._ends[fragment]
            own.begin_epoch(self.epoch, version, is_last=is_last)
            own.is_sending = bool(behind)
        else:
            self.owners.pop(fragment, None)
        is_behind = self.rank not in having
        if self.epoch.is_quorate:
            era = self._last_quorate
        self._coming_eras[fragment] = era
        if is_behind:
            self.awaited[fragment] = {*range(len(having))}
        else:
            self._eras[fragment] = era
        restart = Restart(
            fragment=fragment,
            epoch=self.epoch,
            is_behind=is_behind,
            donors=tuple(having),
            behind=() if is_behind else behind,
            new=tuple(rank for rank in behind if rows[rank][1] == NEVER),
        )
        self.inbox.append(restart)

    @property
    def closes_at_s(self) -> float | None:
        """When the first of the own rounds closes; None if none waits for its grace."""
        owners = self.owners.values()
        times = [owner.closes_at_s for owner in owners if not owner.is_held]
        return min((time for time in times if time is not None), default=None)

    def due(self, now_s: float) -> list[Answer]:
        """The merges of own rounds that close now."""
        return [answer for owner in self.owners.values() for answer in owner.due(now_s)]

    def border(self, params: Rows, tokens: int = 0) -> list[Request]:
        """Ends a local step of so many tokens: takes merges in, then pushes.

        ``params`` are the flat parameters of each fragment, which merges change.
        """
        self.step += 1
        for learner in self.learners:
            learner.count(tokens)
        requests = self.settle(params)
        for fragment, learner in enumerate(self.learners):
            if learner.is_due:
                requests.append(learner.push(params[fragment], self.step))
            elif learner.may_open:
                requests.append(learner.opening())
        return requests

    def settle(self, params: Rows) -> list[Request]:
        """Takes in what has come, between two local steps.

        Returns what an epoch that has begun asks for.
        """
        requests: list[Request] = []
        while self.inbox:
            message = self.inbox.popleft()
            learner = self.learners[message.fragment]
            param_N = params[message.fragment]
            match message:
                case Pull():
                    learner.ask(message)
                case Merge():
                    if learner.take(message, param_N) and self._tape:
                        self._tape(self._line(message, learner))
                case Restart():
                    learner.restart(message)
                    requests += [learner.snapshot(r, message) for r in message.behind]
                    requests += self._last_push(learner, param_N)
                case Snapshot():
                    if learner.catch_up(message, param_N):
                        requests += self._last_push(learner, param_N)
        return requests

    def _last_push(self, learner: FragmentLearner, param_N: Tensor) -> list[Request]:
        """The push of a round that takes all in, if that is to be made again."""
        if learner.is_behind or learner.version >= self._ends[learner.fragment]:
            return []
        return [learner.push(param_N, self.step)]

    @property
    def is_new(self) -> bool:
        """Whether this rank has yet to get the run's anchors, before its first step."""
        return any(learner.version == NEVER for learner in self.learners)

    def push_early(self, params: Rows) -> list[Request]:
        """Pushes what no push has yet, before this rank waits for the last rounds."""
        requests = self.settle(params)
        requests += [
            learner.push(params[fragment], self.step)
            for fragment, learner in enumerate(self.learners)
            if learner.may_push
        ]
        return requests

    def begin_last(self, params: Rows) -> list[Request]:
        """Begins a round of each fragment that takes all in; returns this rank's rest.

        All ranks call it when no message is on its way. After these rounds parameters
        are their anchors on all ranks, as there is no local step meanwhile. If an epoch
        begins before a round has closed, it is made again.
        """
        for owner in self.owners.values():
            owner.begin_last()
        self._ends = [learner.version + 1 for learner in self.learners]
        return [
            learner.rest(params[fragment], self.step)
            for fragment, learner in enumerate(self.learners)
        ]

    @property
    def last_owners(self) -> set[int]:
        """The owners of fragments whose round that takes all in is not here yet."""
        ends = zip(self.owner_of, self.learners, self._ends, strict=True)
        return {owner for owner, learner, end in ends if learner.version < end}

    def state(self) -> dict[str, Any]:
        """All that a checkpoint keeps beside anchors, as plain values.

        No message may be on its way.
        """
        return {
            "step": self.step,
            "epoch": self.epoch.number,
            "learners": [learner.state() for learner in self.learners],
            "owners": [owner.state() for owner in self.owners.values()],
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Goes on from a ``state``, of as many fragments and ranks."""
        self.step = saved["step"]
        for learner, of_learner in zip(self.learners, saved["learners"], strict=True):
            learner.load(of_learner)
        self._arrived = [learner.version for learner in self.learners]
        for owner, of_owner in zip(self.owners.values(), saved["owners"], strict=True):
            owner.load(of_owner)

    def go_on_from(self, loaded: PartialRounds) -> None:
        """Takes the place of other rounds of the same rank, in their first epoch."""
        self.learners = loaded.learners
        self.owners = loaded.owners
        self.step = loaded.step
        self._arrived = loaded._arrived
        self._ends = loaded._ends

    def _line(self, merge: Merge, learner: FragmentLearner) -> str:
        line = {
            "fragment": merge.fragment,
            "round": merge.version,
            "rank": self.rank,
            "step": self.step,
            "bytes": merge.payload_B.numel(),
            "anchor": crc32(learner.anchor_N),
            "who": [entry._asdict() for entry in merge.contributions],
        }
        return json.dumps(line)
