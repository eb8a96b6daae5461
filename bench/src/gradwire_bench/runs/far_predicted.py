r"""Steps between far hosts, in seconds, as figures of near hosts predict them.

gradwire testbed run --hosts 4 --rate 50mbit -- \
    python -m gradwire_bench.runs.far_predicted measure FOLDER
python -m gradwire_bench.runs.far_predicted predict FOLDER --delay 0.5 --delay 40

The first command measures the model's layers, links and codecs. The second predicts the
steps that the run ``far`` measures, with ``--width`` and ``--layers`` as there.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gradwire.contract.registry import load
from gradwire.exchange.by_name import exchange_for
from gradwire.measure.layers import profile as profile_model
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import DENSE, Chunk, Plan, PlannedMessage
from gradwire.planning.data.profile import Profile
from gradwire.planning.default_fusion import DEFAULT_CHANNELS, default_messages
from gradwire.planning.planner.auto.judgement import setting_of
from gradwire.planning.price import iteration_s

from ..testbed.measured import measure_group_links

METHODS = ("none", "uniform", "topk")
SIZES_BYTES = tuple(2**power for power in (14, 17, 18, 20, 22))


def measure(folder: Path, width: int, layers: int) -> None:
    """Measures on all ranks; rank 0 writes the figures."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    batch = torch.randn(8, width)
    profile = profile_model(
        model, lambda: model(batch).square().mean().backward(), iterations=20
    )
    cluster = measure_group_links(
        lambda share, note: None,
        compressors=METHODS[1:],
        sizes_bytes=SIZES_BYTES,
        budget_s=0.05,
    )
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        profile.save(folder / "profile.json")
        cluster.save(folder / "cluster.json")


def predicted_s(method: str, profile: Profile, cluster: Cluster) -> float:
    """Seconds of a step whose messages are those of ``attach`` without a plan."""
    params = [
        (tensor.name, torch.empty(tensor.shape, device="meta"))
        for tensor in profile.tensors.values()
    ]
    exchange = exchange_for(load("compress", method)())
    exchanges = {} if method == "none" else {method: setting_of(method)}
    messages = []
    for members, own in default_messages(params, exchange, cluster.num_ranks):
        chunks = [Chunk(tensor=one, start=0, stop=p.numel()) for one, p in members]
        name = method if exchanges and own is exchange else DENSE
        messages.append(PlannedMessage(chunks=tuple(chunks), exchange=name))
    plan = Plan(
        planner="far",
        model=profile.model,
        messages=tuple(messages),
        credit=DEFAULT_CHANNELS,
        exchanges=exchanges,
    )
    return iteration_s(plan, profile, cluster)


def predict(folder: Path, delays_ms: list[float]) -> None:
    """Prints a line for each delay."""
    profile = Profile.load(folder / "profile.json")
    near = Cluster.load(folder / "cluster.json")
    for delay_ms in delays_ms:
        # Near hosts take a time of their own to hand a message over.
        far = near.scaled(latency_s=near.latency_s + delay_ms / 1e3)
        seconds = [f"{one} {predicted_s(one, profile, far):.4f} s" for one in METHODS]
        print(f"{delay_ms:g} ms one way: {', '.join(seconds)}")


def main() -> None:
    """Measures, or predicts by what was measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("measure", "predict"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--delay", type=float, action="append", default=[])
    chosen = parser.parse_args()
    if chosen.what == "predict":
        predict(chosen.folder, chosen.delay)
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measure(chosen.folder, chosen.width, chosen.layers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
