"""A rank of ``bench schedule --idle``: it takes steps with gradwire and without, in turn."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist

from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire.runtime.attach import attach
from gradwire_bench.schedule.replay import Replay, VirtualDevice
from gradwire_bench.testbed.ranks import Report

PLAIN = "plain"
"""The name of the row without gradwire."""
WARM_UP = 3
"""The steps at the start of each turn that are not measured."""


class _Side:
    """One model that takes turns; attached if there is a plan."""

    def __init__(self, profile: Profile, plan: Plan | None) -> None:
        self.device = VirtualDevice(dist.get_rank())
        self.model = Replay(profile, self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, fused=True)
        if plan is not None:
            self.handle = attach(self.model, plan, optimizer=self.optimizer)

    def turn(self, num_steps: int) -> tuple[list[float], float]:
        """The seconds of each step, and the processor time of one in seconds."""
        ends_s, began_s = [], 0.0
        loss = self.model()
        for step in range(WARM_UP + num_steps + 1):
            if step == WARM_UP:
                began_s = time.process_time()
            ends_s.append(self.device.free_s)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            loss = self.model()
        processor_s = (time.process_time() - began_s) / (num_steps + 1)
        self.device.synchronise()
        measured = ends_s[WARM_UP:]
        return [b - a for a, b in itertools.pairwise(measured)], processor_s


def measure(settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """This rank's step seconds, a list for each turn, and the processor seconds of each side."""
    torch.set_num_threads(1)
    profile = Profile.parse(settings["profile"])
    plans = {name: Plan.parse(text) for name, text in settings["plans"].items()}
    sides = {PLAIN: _Side(profile, None)}
    sides |= {name: _Side(profile, plan) for name, plan in plans.items()}
    found: dict[str, Any] = {name: {"seconds": [], "processor_s": []} for name in sides}
    for turn in range(settings["turns"]):
        report(turn / settings["turns"], f"turn {turn + 1}")
        for name, side in sides.items():
            dist.barrier()
            seconds, processor_s = side.turn(settings["iterations"])
            found[name]["seconds"].append(seconds)
            found[name]["processor_s"].append(processor_s)
    for name in plans:
        sides[name].handle.detach()
    return found
