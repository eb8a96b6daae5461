"""Arguments, data and checkpoints of the programs of ``scripts.matrix``.

    torchrun --nproc-per-node 2 examples/matrix/nanogpt.py --folder /tmp/run --resume

A line that ends in ``# gradwire`` is left out of the native program, one that ends in ``# native``
of the attached one. A program leaves its trained module in the global ``model``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Run:
    """The run that the command line asks for: ``num_steps`` steps, saved before ``save_at``.

    With ``resumes`` it goes on from what was saved.
    """

    def __init__(self) -> None:
        options = argparse.ArgumentParser()
        options.add_argument("--steps", type=int, default=6)
        options.add_argument("--save-at", type=int, default=3)
        options.add_argument("--folder", type=Path, required=True)
        options.add_argument("--resume", action="store_true")
        options.add_argument("--seed", type=int, default=0)
        asked = options.parse_args()
        self.num_steps, self.save_at, self.resumes = asked.steps, asked.save_at, asked.resume
        self.folder, self.seed = asked.folder, asked.seed
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.manual_seed(self.seed)

    def batch(self, step: int, *shape: int) -> Tensor:
        """Numbers that follow from seed, step and rank, so that ranks have different data."""
        return torch.randn(shape, generator=self._draws(step))

    def words(self, step: int, *shape: int, below: int) -> Tensor:
        """Whole numbers from 0 up to ``below``, drawn as batches are."""
        return torch.randint(below, shape, generator=self._draws(step))

    def _draws(self, step: int) -> torch.Generator:
        number = (self.seed * 1000 + step) * 100 + self.rank
        return torch.Generator().manual_seed(number)

    def steps(self, kept: dict[str, Any]) -> Iterator[int]:
        """The numbers of the steps to make; ``kept`` is saved on the way, or loaded first.

        Its values have ``state_dict`` and ``load_state_dict``.
        """
        path = self.folder / f"rank_{self.rank}.pt"
        first = 0
        if self.resumes:
            saved = torch.load(path, weights_only=False)
            torch.set_rng_state(saved.pop("draws"))
            for name, state in saved.items():
                kept[name].load_state_dict(state)
            first = self.save_at
        for step in range(first, self.num_steps):
            if step == self.save_at and not self.resumes:
                states = {name: one.state_dict() for name, one in kept.items()}
                torch.save({**states, "draws": torch.get_rng_state()}, path)
            yield step
