"""TrainingTask: a model, the batches it learns from and the score it is judged by."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, each with a row for each example."""
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """A task to train on.

    Its batches depend on step, rank and world alone, so that exchanges can be compared
    on it.
    """

    name: str
    description: str
    """Model and data in words, sizes included."""
    make_model: Callable[[], nn.Module]
    """A function that makes the model; it draws first values from torch's default
    generator.
    """
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batch: Callable[[int, int, int], Batch]
    """A function of (step, rank, world) that draws one rank's batch; no two ranks and
    no two steps draw alike.
    """
    loss: Loss
    """The loss, a mean over a batch's examples."""
    score: Callable[[nn.Module], float]
    """The score of a model on examples that are never trained on."""
    metric: str
    """The name of the score: "accuracy", "perplexity", "hit rate at 10", "loss"."""
    seed: int = 0
    """The seed of the first values; batches are drawn by it too."""
    max_norm: float | None = None
    """The norm that the mean gradient is clipped to; None where it is not clipped."""

    def examples(self, step: int, world: int) -> Batch:
        """The batches of all ranks, one behind the other, as one process would train on
        them.
        """
        parts = [self.batch(step, rank, world) for rank in range(world)]
        inputs, targets = zip(*parts, strict=True)
        return torch.cat(inputs), torch.cat(targets)


def random_of(seed: int, step: int, rank: int, world: int) -> torch.Generator:
    """The generator that draws one rank's batch of one step.

    Torch's generators begin from 32 bits: 256 seeds, each of 2^24 batches.

    >>> random_of(0, 1, 0, 4).initial_seed() == random_of(0, 0, 3, 4).initial_seed()
    False
    """
    return torch.Generator().manual_seed((seed << 24) + step * world + rank)


def class_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy (nats) of scores whose last dimension is the class."""
    scores = model(inputs)
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


@torch.no_grad()
def mean_over(model: nn.Module, measure: Loss, held_out: Batch, batch: int) -> float:
    """``measure`` in evaluation mode, averaged over all held-out examples, ``batch`` at
    a time.
    """
    was_training = model.training
    model.eval()
    total = 0.0
    for inputs, targets in zip(
        *(torch.split(part, batch) for part in held_out), strict=True
    ):
        total += float(measure(model, inputs, targets)) * len(inputs)
    model.train(was_training)
    return total / len(held_out[0])
