r"""Local steps by rate and period: seconds as predicted and as measured, in one run.

python -m papers.local_steps.periods --rate 50mbit --rate 500mbit --rate 5gbit

Predictions are those of ``gradwire plan --local`` in lock step: once for links of the
stated rate, with 0.1 ms for each hop, and once for links as measured in the same run. A
local step is a wait of 25 ms. In it a rank steps a model of 0.9 million
parameters whose gradients stay as they are.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
from torch import nn

from gradwire.cli.report.table import Row, plain
from gradwire.contract.units import format_rate, parse_rate
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from gradwire.runtime.local_steps.local_steps import local_steps
from gradwire_bench.runs.far_predicted import SIZES_BYTES
from gradwire_bench.testbed.hosts import Testbed, open_hosts
from gradwire_bench.testbed.measured import measure_group_links
from gradwire_bench.testbed.ranks import Report, run_ranks
from gradwire_lab.planning.local_rounds import lock_step

NAME = "papers.local_steps.periods"
PERIODS = (1, 8, 32, 128)
EXCHANGE = "uniform"
STEP_S = 0.025
STEPS = 40
"""Steps of a period at least, and three rounds."""
SHAPE = (680, 1362)
PAYLOAD = 1448 / 1514
"""The share of TCP's payload in the frames that a link's rate counts."""
HOP_S = 1e-4
"""A message's own work between stated links, as on the page of the map."""


def measure(settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """The program of each rank: the cluster as measured, and seconds of rounds."""
    cluster = measure_group_links(
        report, compressors=(EXCHANGE,), sizes_bytes=SIZES_BYTES, budget_s=0.05
    )
    model = nn.Linear(*SHAPE, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seconds = {}
    for every in PERIODS:
        optimizer.zero_grad()
        handle = local_steps(model, optimizer, EXCHANGE, every=every)
        model.weight.grad = torch.randn_like(model.weight)
        rounds = max(3, STEPS // every)
        # the first round warms up
        seconds[every] = [round_s(optimizer, every) for _ in range(rounds + 1)][1:]
        handle.detach()
    return {"cluster": cluster.to_json(), "seconds": seconds}


def round_s(optimizer: torch.optim.Optimizer, every: int) -> float:
    """The seconds of one round: local steps, the last of which exchanges."""
    begin_s = time.perf_counter()
    for step in range(1, every + 1):
        time.sleep(max(0.0, begin_s + step * STEP_S - time.perf_counter()))
        optimizer.step()
    return time.perf_counter() - begin_s


def rows(found: dict[str, Any], rate: float) -> list[Row]:
    """A row for each period on links of one rate, from a rank's result."""
    measured = Cluster.parse(found["cluster"])
    world = measured.num_ranks
    stated = Cluster(num_ranks=world, rate_bytes_per_s=PAYLOAD * rate, hop_s=HOP_S)
    tensor = ProfiledTensor(name="weight", shape=SHAPE)
    layer = Layer(name="layer", tensors=(tensor,), forward_s=0.0, backward_s=0.0)
    profile = Profile(model="a wait", source="stated", batch_size=1, layers=(layer,))
    step_s = [STEP_S] * world
    made: list[Row] = []
    for every, seconds in found["seconds"].items():
        steps = [one / int(every) for one in seconds]
        row: Row = {"name": f"{format_rate(rate)}, every {every}"}
        row |= {"step_s": median(steps), "least_s": min(steps), "most_s": max(steps)}
        for name, cluster in (("stated", stated), ("measured", measured)):
            forecast = lock_step(int(every), profile, EXCHANGE, cluster, step_s)
            predicted_s = forecast.round_s / int(every)
            row[f"{name}_links_s"] = predicted_s
            row[f"fraction_{name}_off"] = predicted_s / median(steps) - 1
        made.append(row)
    return made


def main() -> None:
    """Measures, and prints a row for each rate and period."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", action="append", required=True)
    parser.add_argument("--hosts", type=int, default=4)
    chosen = parser.parse_args()
    for rate in map(parse_rate, chosen.rate):
        testbed = Testbed(hosts=chosen.hosts, rate_bytes_per_s=rate)
        with open_hosts(testbed) as hosts:
            found = run_ranks(hosts, NAME, {}, report=lambda share, note: None)
        print(plain(rows(found[0], rate)), flush=True)


if __name__ == "__main__":
    main()
