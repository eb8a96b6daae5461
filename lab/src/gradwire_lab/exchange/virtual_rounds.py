"""Partial rounds of all ranks in one process, on a virtual clock.

The driver runs ``rounds`` as processes of their own would. Local steps take seconds
that a function names, and so do messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.exchange.rounds import (
    Answer,
    FragmentOwner,
    Merge,
    PartialRounds,
    Push,
    Request,
)


def stepping(
    anchor_N: Tensor, make: Callable[[list[nn.Parameter]], Optimizer]
) -> Callable[[Tensor], None]:
    """A function that steps an anchor in place by an optimizer that ``make`` makes.

    >>> import torch
    >>> anchor_N = torch.ones(2)
    >>> step = stepping(anchor_N, lambda params: torch.optim.SGD(params, lr=0.5))
    >>> step(torch.ones(2))
    >>> anchor_N
    tensor([0.5000, 0.5000])
    """
    anchor = nn.Parameter(anchor_N)
    optimizer = make([anchor])

    def step(mean_N: Tensor) -> None:
        anchor.grad = mean_N
        optimizer.step()

    return step


class DelayedNesterov(Optimizer):
    """SGD whose Nesterov momentum moves parameters in each ``every``-th step alone.

    In between parameters go a share of the gradient. Merges of few ranks point to
    different places, and their mean over ``every`` merges feeds the momentum.

    Source: Liu et al. 2024, arXiv 2401.09135, algorithm 3, with c = 0.

    Args:
        params: The parameters.
        lr: The learning rate.
        momentum: The share of the momentum that remains in each ``every``-th step.
        every: Steps from one step with momentum to the next.

    >>> param = nn.Parameter(torch.zeros(1))
    >>> optimizer = DelayedNesterov([param], lr=1.0, momentum=0.5, every=2)
    >>> for _ in range(2):
    ...     param.grad = torch.ones(1)
    ...     optimizer.step()
    ...     param.item()
    -0.5
    -1.5
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float, every: int
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "every": every})
        self._number = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Makes a step; the closure is not called."""
        self._number += 1
        for group in self.param_groups:
            every = group["every"]
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                    state["sum"] = torch.zeros_like(param)
                state["sum"] += param.grad / every
                step_N = param.grad / every
                if self._number % every == 0:
                    state["momentum"].mul_(group["momentum"]).add_(state["sum"])
                    state["sum"].zero_()
                    step_N += group["momentum"] * state["momentum"]
                param.sub_(group["lr"] * step_N)


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
        """Makes a local step; returns what owners are to be sent after it."""
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
        ranks: Sequence[VirtualRank],
        step_s: Callable[[int], float],
        delay_s: Callable[[int, int, int], float],
        repeats: Callable[[int], bool] = lambda number: False,
        is_held: bool = False,
    ) -> None:
        self.ranks = ranks
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
        for rank in range(len(ranks)):
            self._after(step_s(rank), partial(self._local_step, rank))

    def run(self, until_s: float) -> None:
        """Runs all that happens until then."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, happen = heappop(self._events)
            happen()

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heappush(self._events, (self.now_s + seconds, next(self._numbers), happen))

    def _local_step(self, rank: int) -> None:
        for request in self.ranks[rank].local_step():
            self._send(rank, request.fragment % len(self.ranks), request)
        self._after(self._step_s(rank), partial(self._local_step, rank))

    def _send(self, source: int, target: int, message: Request | Answer) -> None:
        size_bytes = 0
        if isinstance(message, Push | Merge):
            size_bytes = message.payload_B.numel()
        link = (source, target)
        seconds = self._delay_s(source, target, size_bytes)
        # messages of one rank to another stay in order
        arrival = max(self.now_s + seconds, self._arrivals[link])
        self._arrivals[link] = arrival
        for _ in range(2 if self._repeats(len(self.sent)) else 1):
            self._after(arrival - self.now_s, partial(self._arrive, target, message))
        self.sent.append(message)

    def _arrive(self, rank: int, message: Request | Answer) -> None:
        self._answer(rank, self.ranks[rank].rounds.receive(message, self.now_s))

    def _close(self, rank: int) -> None:
        self._answer(rank, self.ranks[rank].rounds.due(self.now_s))

    def _answer(self, rank: int, answers: Iterable[Answer]) -> None:
        for answer in answers:
            for target in range(len(self.ranks)):
                self._send(rank, target, answer)
            if self._is_held and isinstance(answer, Merge):
                self._hold(rank, self.ranks[rank].rounds.owners[answer.fragment])
        closes_at_s = self.ranks[rank].rounds.closes_at_s
        if closes_at_s is not None:
            self._after(closes_at_s - self.now_s, partial(self._close, rank))

    def _hold(self, rank: int, owner: FragmentOwner) -> None:
        """Lets an owner close no round until all have what its rank has sent."""
        owner.is_sending = True
        last_s = max(self._arrivals[rank, target] for target in range(len(self.ranks)))

        def release() -> None:
            owner.is_sending = False
            self._answer(rank, owner.due(self.now_s))

        self._after(last_s - self.now_s, release)
