"""Figure 13 of HiPress: encode and decode beside other code, measured, and what that
does to VGG19.

The paper's open-source codes run on GPUs and CPUs that are not here. Beside our kernels
stands the same algorithm in eager torch, on this CPU, timed in turn in the same run.
Training with slower code is simulated with the printed factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Profile
from gradwire_bench.micro import kernel
from gradwire_bench.micro.kernel_peers import peers
from gradwire_bench.report import bars
from gradwire_lab.planner.secopa import secopa

from ..frame import Ask, Claim, Findings, Row, effect
from ..rows import number
from .printed import DGC_FASTER, FIGURE_13C, MOST_SPEEDUP, TBQ_FASTER, TERNGRAD_FASTER
from .setting import DGC_DENSITY, HOSTS, LOCAL_AS_TABLE_1
from .systems import System, row_of
from .throughput import spent, where

PEER = "eager"
NUMEL = {False: 16_000_000, True: 1_000_000}
ROUNDS = {False: 15, True: 6}
"""By ``quick``."""
THREADS = 2
NEAR = 0.1
"""How far a share of ours may lie from the paper's, and agree, where a quarter of it is
more.
"""
FACTORS = {
    "terngrad": TERNGRAD_FASTER,
    "tbq": (TBQ_FASTER, 1.0),
    "dgc": (DGC_FASTER, 1.0),
}
"""How many times as long open-source code takes to encode and decode; 1 where it is not
printed.
"""
OURS = "CompLL's code"
OTHERS = "open-source code"


def figure13(
    ask: Ask,
    numel: int | None = None,
    rounds: int | None = None,
    num_hosts: int = HOSTS,
) -> Findings:
    """Seconds of encode and decode beside torch's; then VGG19 with CompLL's and other
    code.
    """
    timed = _timed(numel or NUMEL[ask.quick], rounds or ROUNDS[ask.quick])
    ask.report(0.5, "vgg19 with slower code")
    trained = [
        row_of(LOCAL_AS_TABLE_1, "vgg19", num_hosts, system) | {"codec": name}
        for name in FACTORS
        for system in with_codec(name, num_hosts)
    ]
    claims = [faster_claim(timed)]
    claims += [_factor(timed, name, stated) for name, (stated, _) in FACTORS.items()]
    claims += [saved_claim(trained, name) for name in FACTORS] + [
        speedup_claim(trained)
    ]
    note = (
        f"measured: {NUMEL[ask.quick] if numel is None else numel} float32, {THREADS} "
        f"threads, medians of {rounds or ROUNDS[ask.quick]} rounds in turn; encode is "
        "with error feedback. Simulated: plans are made for CompLL's code and carried "
        "out with either"
    )
    return Findings((*timed, *trained), tuple(claims), (note,))


def _timed(numel: int, rounds: int) -> list[Row]:
    rows = kernel.measure(
        numel,
        THREADS,
        rounds,
        kernel.shipped(list(FACTORS)),
        peers=peers((PEER,), "cpu"),
    )
    wanted = {f"{name}/{part}" for name in FACTORS for part in ("encode", "decode")}
    return [row for row in rows if row["name"] in wanted]


def faster_claim(rows: Sequence[Row]) -> Claim:
    """Whether every encode and decode that has a peer is faster than it."""
    key = f"speedup_vs_{PEER}"
    found = {str(row["name"]): number(row, key) for row in rows if key in row}
    slow = [name for name, times in found.items() if times <= 1]
    return Claim(
        "generated code has constantly lower latency than other code",
        "section 6.4",
        ", ".join(
            f"{name} {times:.1f} x as fast as torch" for name, times in found.items()
        ),
        not slow,
        f"{', '.join(slow)}: as slow as torch's own, in this run" if slow else "",
    )


def _factor(rows: Sequence[Row], name: str, stated: float) -> Claim:
    """A printed factor beside ours over torch; they are of other code, so nothing is
    said.
    """
    (row,) = where(rows, name=f"{name}/encode")
    return Claim(
        f"{name} encodes {stated:g} x as fast as open-source code",
        "section 6.4",
        f"{number(row, f'speedup_vs_{PEER}'):.1f} x as fast as eager torch",
        None,
        "the paper's code and processors are not here; torch on this CPU is",
    )


@dataclass(frozen=True)
class Planned:
    """Plans that are made for compressors of some seconds, wherever they are carried
    out.
    """

    compressor: str
    made_for: Cluster

    def __call__(self, profile: Profile, cluster: Cluster) -> Plan:
        density = DGC_DENSITY if self.compressor == "dgc" else None
        return secopa(
            profile, self.made_for, compressor=self.compressor, density=density
        )


def with_codec(name: str, num_hosts: int = HOSTS) -> tuple[System, System]:
    """HiPress with a compressor of CompLL's speed, and of open-source code's."""
    plan = Planned(name, LOCAL_AS_TABLE_1.cluster(num_hosts))
    return System(OURS, plan), System(OTHERS, plan, slower=FACTORS[name])


def _pair(rows: Sequence[Row], name: str) -> tuple[Row, Row]:
    own, other = (where(rows, codec=name, name=one)[0] for one in (OURS, OTHERS))
    return own, other


def saved_claim(rows: Sequence[Row], name: str) -> Claim:
    """The share of the seconds that synchronisation adds which faster code saves."""
    own, other = _pair([row for row in rows if "codec" in row], name)
    found = 1 - number(own, "exposed_s") / number(other, "exposed_s")
    stated = FIGURE_13C[name]
    says = (
        f"CompLL's {name} takes {100 * stated:.1f} % off the synchronisation of VGG19"
    )
    why = f"{spent(own)}; {spent(other)}"
    return effect(says, "figure 13c", f"{100 * found:.1f} %", found, stated, why, NEAR)


def speedup_claim(rows: Sequence[Row]) -> Claim:
    """The most that training gains from faster code."""
    found = {}
    for name in FACTORS:
        own, other = _pair([row for row in rows if "codec" in row], name)
        found[name] = number(other, "iteration_s") / number(own, "iteration_s")
    best = max(found, key=found.__getitem__)
    other = _pair([row for row in rows if "codec" in row], best)[1]
    why = f"with the printed factors {best} leaves no overlap: {spent(other)}"
    says = f"CompLL's code trains VGG19 up to {MOST_SPEEDUP} x as fast"
    in_words = f"{found[best]:.1f} x, {best}"
    return effect(says, "section 6.4", in_words, found[best] - 1, MOST_SPEEDUP - 1, why)


def draw13(rows: Sequence[Row], path: Path) -> Path:
    """Draws the seconds of each encode and decode, ours and torch's."""
    timed = [row for row in rows if "kernel_s" in row]
    keys = {"kernel_s": "gradwire, seconds", f"{PEER}_s": "eager torch, seconds"}
    return bars.draw(
        timed, path, keys=list(keys), title="Encode and decode", notes=keys
    )
