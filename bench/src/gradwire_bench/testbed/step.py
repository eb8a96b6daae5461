"""step_line: seconds of a core that an attached model's step takes beside its messages.

Hooks hand gradients in, tasks are made, ranks report which gradients they used, and
threads are woken up. Far away all of that comes on top of the distance. It is the
processor time of small attached models without that of the same models alone, and
without that of the all-reduce. Other work on the machine hardly changes it.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from gradwire.collective.steps.travel import bytes_sent
from gradwire.compress.none import none
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.fit import LineFit, fit_line
from gradwire.runtime.attach import attach

NUM_LAYERS = (1, 8, 32)
"""The layers of each model. A layer has two gradients."""
WIDTH = 4
NUM_STEPS = 20
ROUNDS = 5


class SmallModel:
    """A model of so many layers, whose steps are timed."""

    def __init__(self, num_layers: int) -> None:
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)]
        self.model = nn.Sequential(*layers)
        self.numels = [param.numel() for param in self.model.parameters()]
        self._batch = torch.ones(1, WIDTH)

    def busy_s(self) -> float:
        """Seconds of a core that this process takes for a step."""
        start_s = time.process_time()
        for _ in range(NUM_STEPS):
            self.model.zero_grad()
            self.model(self._batch).sum().backward()
        return (time.process_time() - start_s) / NUM_STEPS


def step_line(
    of_all: Callable[[Sequence[float]], list[list[float]]], cluster: Cluster
) -> LineFit | None:
    """The line over a step's gradients; None where ``cluster`` has no ``processors``.

    All ranks of torch's default group call this alike, and return the same: the ranks'
    mean. ``of_all`` gives every rank's figures.
    """
    carried = cluster.processors
    if carried is None:
        return None
    own_s = []
    sizes = []
    for num_layers in NUM_LAYERS:
        alone = SmallModel(num_layers)
        attached = SmallModel(num_layers)
        numels = attached.numels
        sent_bytes = bytes_sent("all_reduce", 4 * sum(numels), cluster.num_ranks)
        handle = attach(attached.model, none())
        pairs = [(attached.busy_s(), alone.busy_s()) for _ in range(1 + ROUNDS)]
        handle.detach()
        added_s = [busy_s - alone_s for busy_s, alone_s in pairs[1:]]
        own_s.append(statistics.median(added_s) - carried.measured_s(sent_bytes))
        sizes.append(len(numels))
    means_s = [statistics.fmean(column) for column in zip(*of_all(own_s), strict=True)]
    if min(means_s) <= 0:  # a clock of processors that ticks more slowly than steps go
        return None
    return fit_line(zip(sizes, means_s, strict=True))
