"""Section 6.5's pipeline validation of HiPress: a step of DDP that compresses in its
hook, beside CaSync-PS, on real ranks.

VGG19 is replayed on two shaped hosts: gradients, codecs, links and both runtimes are
real, and computation is waiting. In DDP's hook a bucket is encoded, gathered and
decoded before the backward pass goes on, so a step is the sum of its parts. The
runtime's trace says how much of compression CaSync-PS hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from gradwire.planning import catalogue
from gradwire_bench.schedule.schedule import ScheduleBench
from gradwire_bench.testbed.hosts import open_hosts
from gradwire_bench.testbed.ranks import run_ranks

from ..frame import Ask, Claim, Findings, Row, effect
from ..rows import number

MODEL = "vgg19"
NUM_HOSTS = 2
RATE_BYTES_PER_S = 1.25e8
"""1 Gbit/s: onebit's bytes then take about the paper's 299 ms."""
COMPRESSOR = "onebit"
DDP = "DDP, compression in its hook"
HIPRESS = "HiPress, CaSync-PS"
PRINTED_S = {
    "step_s": 0.904,
    "compute_s": 0.168,
    "communication_s": 0.299,
    "compression_s": 0.148,
    "bubbles_s": 0.266,
}
"""The step of TorchDDP and its parts, which add up to 881 ms."""
FASTER = 0.62
"""By how much less time HiPress synchronises."""
PARTS = ("compute_s", "communication_s", "compression_s", "bubbles_s")
PLACE = "section 6.5, pipeline validation"
ALMOST_ALL = 0.8
"""The share of compression from which on it counts as almost all."""
ALIKE = 0.1
"""How far a sum of parts may be from the step, and one computation from the other."""


def pipeline(ask: Ask, model: str = MODEL, compute_s: float = 0.8) -> Findings:
    """The seconds of a step's parts by both, on the rank whose step takes longest."""
    profile = catalogue.load(model)
    slowdown = round(compute_s / (profile.forward_s + profile.backward_s), 1)
    bench = ScheduleBench(
        profiles=(model,),
        hosts=NUM_HOSTS,
        rate_bytes_per_s=RATE_BYTES_PER_S,
        slowdown=slowdown,
    )
    settings = {
        "model": model,
        "compressor": COMPRESSOR,
        "scale": bench.scale,
        "slowdown": slowdown,
        "rate_bytes_per_s": bench.link_bytes_per_s,
        "steps": 3 if ask.quick else 10,
    }
    with open_hosts(bench.testbed) as hosts:
        ranks = run_ranks(
            hosts,
            f"{__name__}_rank",
            settings,
            report=ask.report,
            timeout_s=1800.0,
        )
    rows = [_row(name, [rank[name] for rank in ranks]) for name in (DDP, HIPRESS)]
    note = (
        f"{NUM_HOSTS} hosts, {COMPRESSOR} instead of the paper's Compliance; 1/"
        f"{bench.scale:g} of the bytes, {slowdown:g} times the seconds. Communication "
        "and compression are the seconds in which any of it runs; hidden is what runs "
        "beside computation or communication"
    )
    printed: Row = {"name": "TorchDDP, as printed", **PRINTED_S}
    return Findings((*rows, printed), claims(rows), (note,))


def _row(name: str, ranks: Sequence[Sequence[dict[str, Any]]]) -> Row:
    """Means over the steps, each of its slowest rank."""
    slowest = [
        max(parts, key=lambda one: float(one["step_s"]))
        for parts in zip(*ranks, strict=True)
    ]
    row: Row = {"name": name}
    return row | {key: mean(step[key] for step in slowest) for key in slowest[0]}


def claims(rows: Sequence[Row]) -> tuple[Claim, ...]:
    """The section's statements about both."""
    ddp, ours = rows
    return (
        sum_claim(ddp),
        compute_claim(ddp, ours),
        faster_claim(ddp, ours),
        hidden_claim(ours),
    )


def sum_claim(ddp: Row) -> Claim:
    """Whether compression in the hook makes the parts of a step serial."""
    parts = {part: number(ddp, part) for part in PARTS}
    lost = abs(number(ddp, "step_s") - sum(parts.values())) / number(ddp, "step_s")
    hidden = number(ddp, "fraction_compression_hidden")
    serial = lost <= ALIKE and hidden <= ALIKE
    in_words = ", ".join(
        f"{part.removesuffix('_s')} {1e3 * taken:.0f} ms"
        for part, taken in parts.items()
    )
    return Claim(
        "compression in DDP's hook is serial: 904 ms are about 168 of computation, 299 "
        "of communication, 148 of compression and 266 of bubbles",
        PLACE,
        f"{1e3 * number(ddp, 'step_s'):.0f} ms: {in_words}; {100 * hidden:.0f} % of "
        "compression is hidden",
        serial,
        "" if serial else "parts of the step overlap here",
        f"the sum is within {100 * ALIKE:g} %, and at most so much is hidden",
    )


def compute_claim(ddp: Row, ours: Row) -> Claim:
    """Whether computation takes as long under both."""
    ratio = number(ours, "compute_s") / number(ddp, "compute_s")
    return Claim(
        "computation takes the same time within HiPress",
        PLACE,
        f"{ratio:.2f} times as long",
        None,
        "computation is waiting here, as long by construction",
    )


def faster_claim(ddp: Row, ours: Row) -> Claim:
    """Whether synchronisation takes as much less time as the paper says.

    Synchronisation is what a step takes beyond its computation.
    """
    took_s = [number(row, "step_s") - number(row, "compute_s") for row in (ddp, ours)]
    less = 1 - took_s[1] / took_s[0] if took_s[0] else 0.0
    in_words = " and ".join(f"{1e3 * one:.0f}" for one in took_s)
    return effect(
        "gradient synchronisation is 62 % faster within HiPress",
        PLACE,
        f"{100 * less:.0f} %: a step takes {in_words} ms beyond its computation",
        less,
        FASTER,
        "encodes run on this machine's cores, which the links' bytes pass through too",
    )


def hidden_claim(ours: Row) -> Claim:
    """Whether computation and communication hide compression."""
    hidden = number(ours, "fraction_compression_hidden")
    agrees = hidden >= ALMOST_ALL
    return Claim(
        "compression is almost all overlapped with computation and communication",
        PLACE,
        f"{100 * hidden:.0f} % of {1e3 * number(ours, 'compression_s'):.0f} ms",
        agrees,
        "" if agrees else "the last messages' encodes have nothing to run beside",
        f"at least {100 * ALMOST_ALL:g} %",
    )
