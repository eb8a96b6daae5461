"""A grid of ranks in one process: layers are cut among shards, each averaged by its own
ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

import gradwire as gw
from gradwire.contract import Member, Selection, Shards
from gradwire.exchange.error_feedback import with_error_feedback
from gradwire.exchange.local import drive


class Grid:
    """One message of every rank, with error feedback; lists are by shard, then by rank.

    ``numels`` are the shards' lengths. Where they are not ``announced``, no shard knows
    of another.
    """

    def __init__(
        self,
        exchange: gw.Exchange,
        numels: tuple[int, ...],
        world: int = 2,
        *,
        announced: bool = True,
        name: str = "gradient",
    ) -> None:
        self.exchange, self.numels, self.world = (
            with_error_feedback(exchange),
            numels,
            world,
        )
        self.members = [[Member(rank, world) for rank in range(world)] for _ in numels]
        self.states = [
            [
                self.exchange.init(gw.TensorSpec(name, numel), world)
                for _ in range(world)
            ]
            for numel in numels
        ]
        for place, shard in enumerate(self.members):
            for me in shard:
                me.shards = Shards(place, numels) if announced else None

    def step(self, grads: list[list[Tensor]], *, seed: int = 0) -> list[list[Tensor]]:
        """Exchanges; returns the means."""
        means = [[torch.full_like(grad_N, 3.0) for grad_N in shard] for shard in grads]
        places = [(s, r) for s in range(len(self.numels)) for r in range(self.world)]
        steps = [
            self.exchange.synchronise(
                self.members[s][r], self.states[s][r], grads[s][r], means[s][r]
            )
            for s, r in places
        ]
        outcome = drive(steps, seed=seed, num_shards=len(self.numels))
        for (s, r), state in zip(places, outcome.results, strict=True):
            self.states[s][r] = state
        self.sent_bytes = outcome.sent_bytes
        return means

    def residual(self, shard: int, rank: int) -> Tensor:
        """What a rank has not sent yet."""
        kept_N: Tensor = self.states[shard][rank].residual_N
        return kept_N

    def taken(self, rank: int) -> list[int]:
        """How many elements were selected of every shard's part, in one rank's
        place.
        """
        found = [shard[rank].selection for shard in self.members]
        return [one.selected for one in found if isinstance(one, Selection)]
