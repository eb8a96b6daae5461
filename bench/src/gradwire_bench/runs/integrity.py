"""The cost of comparing parameters and payloads among ranks.

``FailurePolicy(check_every=)`` compares parameters, ``checksums=`` payloads.

gradwire testbed run --hosts 2 --rate 1gbit -- \\
  python -m gradwire_bench.runs.integrity --exchange ring

The same model, 20 layers of 40 MB together and 100 ms of computation a step (waits),
takes steps without checks, with one in 64, with one in each step and with checksums, in
turn and in the same processes. A turn is 64 steps, of which one is checked where one in
64 is, so its mean has the whole cost.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch.distributed as dist
import typer

from gradwire.cli.report.table import Row
from gradwire.collective.ring import ring
from gradwire.compress.none import none
from gradwire.compress.onebit import onebit
from gradwire.compress.topk import topk
from gradwire.exchange.pair import pair
from gradwire.planning.data.profile import Profile
from gradwire.runtime.attach import attach
from gradwire.runtime.settings import FailurePolicy
from gradwire.runtime.step.integrity import DEFAULT_CHECK_EVERY
from gradwire_bench.checks import check_names
from gradwire_bench.runs.turns import detach, print_rows, seconds_in_turn
from gradwire_bench.schedule.replay import Replay, VirtualDevice
from gradwire_lab.laws.inputs import profile_of

SIDES = {
    "no checks": FailurePolicy(check_every=None),
    f"one step in {DEFAULT_CHECK_EVERY}": FailurePolicy(
        check_every=DEFAULT_CHECK_EVERY
    ),
    "every step": FailurePolicy(check_every=1),
    "checksums": FailurePolicy(check_every=None, checksums=True),
}
EXCHANGES: dict[str, Callable[[], Any]] = {
    "ring": lambda: pair(none(), ring()),
    "onebit": onebit,
    "topk": topk,
}
"""The exchanges to choose from."""
NUM_LAYERS = 20
NUMEL = 500_000
STEP_S = 0.1
WARM_UP = 3
"""Steps at the start of each turn that are not measured. Any 64 steps behind them have
one that is checked, where one in 64 is.
"""


def profile() -> Profile:
    """20 layers of 2 MB each, a third of 100 ms of them forward, the rest backward."""
    layer_s = STEP_S / NUM_LAYERS
    layer = ((NUMEL,), layer_s / 3, layer_s * 2 / 3)
    return profile_of(*[layer] * NUM_LAYERS, model="waits")


class Side:
    """One model that takes turns, attached with its own checks."""

    def __init__(self, exchange: str, policy: FailurePolicy, num_steps: int) -> None:
        self._device = VirtualDevice(dist.get_rank())
        self._model = Replay(profile(), self._device)
        self.handle = attach(self._model, EXCHANGES[exchange](), failure=policy)
        self._num_steps = num_steps

    def turn(self) -> float:
        """The mean seconds of a step."""
        for step in range(-WARM_UP, self._num_steps):
            if step == 0:
                begin_s = time.perf_counter()
            self._model().backward()
        self._device.synchronise()
        return (time.perf_counter() - begin_s) / self._num_steps


def measure(turns: int, num_steps: int, exchange: str = "ring") -> list[Row]:
    """A row a side: the median over turns of a step's mean seconds on the slowest rank.

    ``fraction_overhead`` compares turns that followed each other; it is the median of
    these.
    """
    sides = [Side(exchange, settings, num_steps) for settings in SIDES.values()]
    seconds_ST = seconds_in_turn(sides, turns)
    detach(sides)
    plain = seconds_ST[0].tolist()
    return [
        {
            "name": name,
            "step_s": median(seconds),
            "fraction_overhead": median(
                a / b - 1 for a, b in zip(seconds, plain, strict=True)
            ),
        }
        for name, seconds in zip(SIDES, seconds_ST.tolist(), strict=True)
    ]


def main(
    turns: int = 3, steps: int = DEFAULT_CHECK_EVERY, exchange: str = "ring"
) -> None:
    """Measures turns of so many steps; rank 0 prints."""
    check_names("exchange", [exchange], EXCHANGES)
    print_rows(partial(measure, turns, steps, exchange))


if __name__ == "__main__":
    typer.run(main)
