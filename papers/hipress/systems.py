"""The systems that HiPress compares, as data: a name, how each plans, and what its
codecs take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Chunk, ExchangeSetting, Plan, PlannedMessage
from gradwire.planning.data.profile import Profile
from gradwire.planning.planner.ddp import ddp
from gradwire.planning.simulation.clock import run_on_clock
from gradwire_lab.planner.bytescheduler import bytescheduler
from gradwire_lab.planner.secopa import secopa
from gradwire_lab.planning.sparse_fusion import arrivals

from ..frame import Row
from ..links import link_s
from .printed import (
    BYTEPS,
    BYTEPS_CPU,
    BYTEPS_ONEBIT,
    CPU_SLOWER,
    DGC_FASTER,
    HIPRESS_DGC,
    HIPRESS_POWERSGD,
    HIPRESS_TERNGRAD,
    PS_ONEBIT,
    RING,
    RING_DGC,
    RING_ONEBIT,
    TORCH_POWERSGD,
)
from .setting import DGC_DENSITY, Site

MIB = 2**20
PARTITION_BYTES = 4 * MIB
"""BytePS's default."""
FUSED_BYTES = 64 * MIB
"""Horovod's default: as much is sent together in one all-reduce."""
Make = Callable[[Profile, Cluster], Plan]


@dataclass(frozen=True)
class System:
    """One system of the comparison."""

    name: str
    plan: Make
    is_push_pull: bool = False
    """Whether it sends by BytePS."""
    slower: tuple[float, float] = (1.0, 1.0)
    """How many times as long its encodes, and its decodes, take as CompLL's."""
    is_serial: bool = False
    """Whether backward pass, compression and transfers wait for each other (section
    5.2).
    """


def horovod(profile: Profile, cluster: Cluster) -> Plan:
    """Ring-allreduce with Horovod's fusion."""
    return ddp(
        profile, cluster, first_bucket_bytes=FUSED_BYTES, bucket_bytes=FUSED_BYTES
    )


def byteps(profile: Profile, cluster: Cluster) -> Plan:
    """Partitions of a fixed size by priority, four at once."""
    return bytescheduler(profile, cluster, partition_bytes=PARTITION_BYTES, credit=4)


def exchanged(make: Make, exchange: ExchangeSetting) -> Make:
    """The plans of ``make`` with every message through another exchange."""

    def plan(profile: Profile, cluster: Cluster) -> Plan:
        made = make(profile, cluster)
        name = exchange.compressor
        messages = tuple(
            one.model_copy(update={"exchange": name}) for one in made.messages
        )
        return made.model_copy(
            update={"messages": messages, "exchanges": {name: exchange}}
        )

    return plan


def partitioned(profile: Profile, cluster: Cluster) -> Plan:
    """BytePS's partitions, as many in a message as there are hosts, in backward order.

    So each host serves one partition of a message, as its chunks are spread over them.
    """
    messages: list[PlannedMessage] = []
    held: list[Chunk] = []
    for tensor, _ in arrivals(profile):
        step = max(1, PARTITION_BYTES * tensor.numel // tensor.size_bytes)
        for start in range(0, tensor.numel, step):
            stop = min(start + step, tensor.numel)
            held.append(Chunk(tensor=tensor.name, start=start, stop=stop))
            if len(held) == cluster.num_ranks:
                messages.append(PlannedMessage(chunks=tuple(held)))
                held = []
    if held:
        messages.append(PlannedMessage(chunks=tuple(held)))
    return Plan(
        planner="byteps", model=profile.model, messages=tuple(messages), credit=4
    )


ONEBIT_PS = ExchangeSetting(
    compressor="onebit", collective="casync_ps", error_feedback=True
)
SYSTEMS = {
    one.name: one
    for one in (
        System(BYTEPS, byteps, is_push_pull=True),
        System(RING, horovod),
        System(BYTEPS_ONEBIT, exchanged(partitioned, ONEBIT_PS), is_push_pull=True),
        System(
            BYTEPS_CPU,
            exchanged(partitioned, ONEBIT_PS),
            is_push_pull=True,
            slower=(CPU_SLOWER, CPU_SLOWER),
        ),
        System(
            RING_DGC,
            exchanged(
                horovod,
                ExchangeSetting(
                    compressor="dgc",
                    settings={"density": DGC_DENSITY},
                    collective="allgather_sparse",
                    error_feedback=True,
                ),
            ),
            slower=(DGC_FASTER, DGC_FASTER),
        ),
        System(
            TORCH_POWERSGD,
            exchanged(ddp, ExchangeSetting(compressor="powersgd", error_feedback=True)),
            is_serial=True,
        ),
        System(PS_ONEBIT, secopa),
        System(RING_ONEBIT, partial(secopa, collective="casync_ring")),
        System(
            HIPRESS_DGC,
            partial(
                secopa, compressor="dgc", density=DGC_DENSITY, collective="casync_ring"
            ),
        ),
        System(HIPRESS_TERNGRAD, partial(secopa, compressor="terngrad")),
        System(
            HIPRESS_POWERSGD,
            partial(secopa, compressor="powersgd", collective="allreduce"),
        ),
    )
}
"""Every system by its name."""
TRAINED = {
    "vgg19": (BYTEPS, RING, BYTEPS_CPU, BYTEPS_ONEBIT, PS_ONEBIT, RING_ONEBIT),
    "bert_large": (BYTEPS, RING, BYTEPS_CPU, BYTEPS_ONEBIT, PS_ONEBIT, RING_ONEBIT),
    "resnet50": (BYTEPS, RING, RING_DGC, HIPRESS_DGC),
    "transformer": (BYTEPS, RING, RING_DGC, HIPRESS_DGC),
    "ugatit": (BYTEPS, RING, TORCH_POWERSGD, HIPRESS_TERNGRAD, HIPRESS_POWERSGD),
    "lstm": (BYTEPS, RING, TORCH_POWERSGD, HIPRESS_TERNGRAD, HIPRESS_POWERSGD),
}
"""Figure 9's models, and the systems that train each."""


def row_of(
    site: Site, model: str, num_hosts: int, system: System, **cluster: float
) -> Row:
    """One simulated iteration: its samples a second, and where its seconds go.

    The seconds of computation and what waits for the link or for compressors add up to
    it. The share of communication is that of the seconds in which the link works,
    hidden or not.
    """
    profile = site.profile(model)
    on = site.cluster(
        num_hosts, is_push_pull=system.is_push_pull, slower=system.slower, **cluster
    )
    plan = system.plan(profile, on)
    compute_s = profile.forward_s + profile.backward_s
    timing = run_on_clock(plan, _at_once(profile) if system.is_serial else profile, on)
    waited_s = profile.backward_s if system.is_serial else 0.0
    iteration_s = waited_s + timing.iteration_s
    return {
        "name": system.name,
        "reading": site.name,
        "model": model,
        "num_hosts": num_hosts,
        "samples_per_s": num_hosts
        * site.gpus_per_host
        * profile.batch_size
        / iteration_s,
        "iteration_s": iteration_s,
        "compute_s": compute_s,
        "exposed_s": iteration_s - compute_s,
        "efficiency": compute_s / iteration_s,
        "fraction_communication": link_s(timing) / iteration_s,
    }


def _at_once(profile: Profile) -> Profile:
    """The profile with all gradients there from the start: what waits for the backward
    pass.
    """
    layers = tuple(one.model_copy(update={"backward_s": 0.0}) for one in profile.layers)
    return profile.model_copy(update={"layers": layers})
