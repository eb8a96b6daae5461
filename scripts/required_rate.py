"""The rate that a method needs for a share of useful time: table 4 of Streaming DiLoCo.

    python -m scripts.required_rate

The table (arXiv 2501.18512) has the Gbit/s between sites at which a step computes for
50 to 99 % of its time, by the paper's simulator. This script asks gradwire's simulator
for the same model: 10 billion parameters in 48 layers, 0.8 s of computation, values of
16 bits, a period of 100 steps. There are two sites without latency. A third of the
computation is the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from gradwire.planning.make_plan import plan as make_plan
from gradwire.planning.price import iteration_s

USEFUL = (0.5, 0.8, 0.9, 0.95, 0.99)
PARAMETERS = 10_000_000_000
LAYERS = 48
STEP_S = 0.8
EVERY = 100
FRAGMENTS = 16


def profile_of(layers: int, parameters: int, step_s: float) -> Profile:
    """Equal layers of values of 16 bits: half as many of 32 bits have their bytes."""
    numel = parameters // layers // 2
    every = [
        Layer(
            name=f"layer {place}",
            tensors=(ProfiledTensor(name=f"weight {place}", shape=(numel,)),),
            forward_s=step_s / 3 / layers,
            backward_s=step_s * 2 / 3 / layers,
        )
        for place in range(layers)
    ]
    return Profile(model="stated", source="stated", batch_size=1, layers=tuple(every))


def seconds(plan: Plan, profile: Profile, gbit: float) -> float:
    """The seconds of a step, or of an exchange alone, on links of a rate."""
    cluster = Cluster(num_ranks=2, rate_bytes_per_s=gbit * 1e9 / 8, hop_s=0.0)
    return iteration_s(plan, profile, cluster)


def data_parallel(gbit: float) -> float:
    """Useful time with a message for each layer, hidden behind the backward pass."""
    profile = profile_of(LAYERS, PARAMETERS, STEP_S)
    made = make_plan("wfbp", profile, Cluster(num_ranks=2, rate_bytes_per_s=1e9))
    return STEP_S / seconds(made, profile, gbit)


def local_steps(gbit: float, *, fragments: int, delay: int, share: float) -> float:
    """Useful time with an exchange in each period, which takes effect later.

    ``share`` is the part of the bytes that is sent: a quarter in 4 bits.
    """
    profile = profile_of(1, round(PARAMETERS * share / fragments), 0.0)
    made = make_plan("wfbp", profile, Cluster(num_ranks=2, rate_bytes_per_s=1e9))
    waits_s = max(0.0, seconds(made, profile, gbit) - delay * STEP_S)
    return EVERY * STEP_S / (EVERY * STEP_S + fragments * waits_s)


METHODS: dict[str, Callable[[float], float]] = {
    "data parallel": data_parallel,
    "`every=100`": partial(local_steps, fragments=1, delay=0, share=1.0),
    "`fragments=16, delay=1`": partial(
        local_steps, fragments=FRAGMENTS, delay=1, share=1.0
    ),
    "the same in 4 bits": partial(
        local_steps, fragments=FRAGMENTS, delay=1, share=0.25
    ),
}


def required_gbit(useful: Callable[[float], float], wanted: float) -> float:
    """The lowest rate with that useful time, by bisection, within 0.1 %."""
    low, high = 1e-3, 1e4
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if useful(middle) < wanted else (low, middle)
    return high


def row(method: str) -> list[str]:
    """The cells of one method, as docs/measured.md has them."""
    return [f"{required_gbit(METHODS[method], one):.3g}" for one in USEFUL]


def main() -> None:
    """Prints the table."""
    for method in METHODS:
        print(f"| {method} | {' | '.join(row(method))} |")


if __name__ == "__main__":
    main()
