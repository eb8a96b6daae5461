"""Partial rounds of all ranks in one process, on a virtual clock.

The driver runs ``rounds`` as processes of their own would. Local steps take seconds
that a function names, and so do messages.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.exchange.rounds import (
    Answer,
    FragmentOwner,
    Merge,
    PartialRounds,
    Push,
    Request,
    RoundEpoch,
    Snapshot,
)
from gradwire.runtime.engine.plain import packed, unpacked


class SteppedAnchor:
    """An anchor that an optimizer steps in place, which ``make`` makes.

    >>> import torch
    >>> anchor_N = torch.ones(2)
    >>> outer = SteppedAnchor(anchor_N, lambda params: torch.optim.SGD(params, lr=0.5))
    >>> outer.step(torch.ones(2))
    >>> anchor_N
    tensor([0.5000, 0.5000])
    """

    def __init__(
        self, anchor_N: Tensor, make: Callable[[list[nn.Parameter]], Optimizer]
    ) -> None:
        self._anchor = nn.Parameter(anchor_N)
        self._optimizer = make([self._anchor])

    def step(self, mean_N: Tensor) -> None:
        """Steps the anchor by a merged pseudo-gradient."""
        self._anchor.grad = mean_N
        self._optimizer.step()

    def packed(self, part: slice, *, is_for_newcomer: bool) -> Tensor:
        """The bytes of a part of the anchor; the first has the optimizer's state."""
        state = {} if part.start else self._optimizer.state_dict()
        return packed([self._anchor.detach()[part], state])

    def take_over(self, part: slice, payload_B: Tensor) -> None:
        """Puts what another rank has ``packed`` in this one's place."""
        anchor_N, state = unpacked(payload_B)
        self._anchor.detach()[part] = anchor_N
        if state:
            self._optimizer.load_state_dict(state)


@dataclass
class VirtualRank:
    """One rank of this process.

    Args:
        rounds: Its part in the rounds.
        params: Its flat parameters, a tensor for each fragment.
        train: Makes local step number ``step`` in ``params``; returns its tokens.
    """

    rounds: PartialRounds
    params: list[Tensor]
    train: Callable[[int], int]

    def local_step(self) -> list[Request]:
        """Makes a local step; returns what is to be sent after it."""
        if self.rounds.is_new:
            return self.rounds.settle(self.params)
        tokens = self.train(self.rounds.step + 1)
        return self.rounds.border(self.params, tokens)


class VirtualClock:
    """Runs ranks for some virtual seconds.

    Args:
        ranks: All ranks, in order.
        step_s: Seconds of a rank's local step, by rank.
        delay_s: Seconds of a message, by sender, receiver and bytes of its payload.
        repeats: Whether a message arrives twice, by the number of the message. Default:
            no message does.
        is_held: Whether an owner closes no round while its last merge is on its way to
            a rank, as among real ranks. Default: False.
    """

    def __init__(
        self,
        ranks: Iterable[VirtualRank],
        step_s: Callable[[int], float],
        delay_s: Callable[[int, int, int], float],
        repeats: Callable[[int], bool] = lambda number: False,
        is_held: bool = False,
    ) -> None:
        self.ranks: list[VirtualRank] = []
        self.live: set[int] = set()
        self.now_s = 0.0
        self.sent: list[Request | Answer] = []
        """All messages, in the order in which they were sent."""
        self._step_s = step_s
        self._delay_s = delay_s
        self._repeats = repeats
        self._is_held = is_held
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._arrivals: dict[tuple[int, int], float] = defaultdict(float)
        self._reaches_until_s: dict[int, float] = defaultdict(lambda: inf)
        for virtual in ranks:
            self.add(virtual)

    def add(self, virtual: VirtualRank) -> None:
        """Has a rank train from now on, whose number is the next one."""
        rank = len(self.ranks)
        self.ranks.append(virtual)
        self.live.add(rank)
        self._after(self._step_s(rank), partial(self._local_step, rank))

    def lose(self, rank: int, reach_s: float = 0.0) -> None:
        """Ends a rank; its messages that arrive within ``reach_s`` still do."""
        self.live.discard(rank)
        self._reaches_until_s[rank] = self.now_s + reach_s

    def begin_epoch(self, ranks: Iterable[int]) -> None:
        """Has these ranks go on without the others; messages under way are dropped."""
        rows = {rank: self.ranks[rank].rounds.row() for rank in ranks}
        for rank in rows:
            self.ranks[rank].rounds.begin_epoch(rows)

    def run(self, until_s: float) -> None:
        """Runs all that happens until then."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, happen = heappop(self._events)
            happen()

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heappush(self._events, (self.now_s + seconds, next(self._numbers), happen))

    def _local_step(self, rank: int) -> None:
        if rank in self.live:
            self.send(rank, self.ranks[rank].local_step())
            self._after(self._step_s(rank), partial(self._local_step, rank))

    def send(self, rank: int, requests: Sequence[Request]) -> None:
        """Sends what a local step has ended with."""
        rounds = self.ranks[rank].rounds
        for request in requests:
            target = rounds.owner_of[request.fragment]
            if isinstance(request, Snapshot):
                target = request.rank
            self._send(rank, target, request)
        for request in requests:
            if isinstance(request, Snapshot):
                if owner := rounds.owners.get(request.fragment):
                    owner.is_sending = False
                self._close(rank)

    def _send(self, source: int, target: int, message: Request | Answer) -> None:
        size_bytes = 0
        if isinstance(message, Push | Merge | Snapshot):
            size_bytes = message.payload_B.numel()
        link = (source, target)
        seconds = self._delay_s(source, target, size_bytes)
        # messages of one rank to another stay in order
        arrival = max(self.now_s + seconds, self._arrivals[link])
        self._arrivals[link] = arrival
        epoch = self.ranks[source].rounds.epoch
        arrive = partial(self._arrive, source, target, message, epoch)
        for _ in range(2 if self._repeats(len(self.sent)) else 1):
            self._after(arrival - self.now_s, arrive)
        self.sent.append(message)

    def _arrive(
        self, source: int, target: int, message: Request | Answer, epoch: RoundEpoch
    ) -> None:
        rounds = self.ranks[target].rounds
        is_cut = self.now_s > self._reaches_until_s[source]
        if target in self.live and rounds.epoch == epoch and not is_cut:
            self._answer(target, rounds.receive(message, self.now_s))

    def _close(self, rank: int) -> None:
        if rank in self.live:
            self._answer(rank, self.ranks[rank].rounds.due(self.now_s))

    def _answer(self, rank: int, answers: Iterable[Answer]) -> None:
        rounds = self.ranks[rank].rounds
        for answer in answers:
            for target in rounds.epoch.ranks:
                self._send(rank, target, answer)
            if self._is_held and isinstance(answer, Merge):
                self._hold(rank, rounds.owners[answer.fragment])
        closes_at_s = rounds.closes_at_s
        if closes_at_s is not None:
            self._after(max(0.0, closes_at_s - self.now_s), partial(self._close, rank))

    def _hold(self, rank: int, owner: FragmentOwner) -> None:
        """Lets an owner close no round until all have what its rank has sent."""
        owner.is_sending = True
        last_s = max(self._arrivals[rank, target] for target in range(len(self.ranks)))
        epoch = owner.epoch

        def release() -> None:
            if owner.epoch == epoch:
                owner.is_sending = False
                self._close(rank)

        self._after(last_s - self.now_s, release)
