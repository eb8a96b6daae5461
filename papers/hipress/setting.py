"""HiPress's clusters as the simulated figures take them: hosts, links and seconds of
compressors.

Source: Wu et al., "HiPress", section 6.1; curves of compressors as for table 7
(``plans.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradwire.collective.steps.travel import travel
from gradwire.planning import catalogue
from gradwire.planning.data.cluster import Cluster, CodecFit, Host
from gradwire.planning.data.fit import LineFit
from gradwire.planning.data.profile import Profile

from .plans import DECODE, ENCODE, SEND
from .printed import BYTEPS, RING, TABLE_1

GBIT = 1e9 / 8
HOSTS = 16
DGC_DENSITY = 0.001
DGC_PASSES = 3
"""Passes of DGC's encode over a gradient: accumulate, find the threshold, take what
reaches it.
"""
ENTRY = 4
"""How many times as many bytes an entry moves as an element: an index and a value are
read, and a value is read and written at its place.
"""
CODECS = ("onebit", "terngrad", "uniform", "tbq", "powersgd")


@dataclass(frozen=True)
class Site:
    """Hosts whose GPUs add up before they exchange, so each host is one rank of the
    simulation.
    """

    name: str
    rate_gbit: float
    """The rate that arrives of a host's link."""
    push_pull_gbit: float
    """The same under BytePS."""
    gpu_speed: float = 1.0
    """How many times as fast a GPU computes as the V100 of the profiles."""
    memory_speed: float = 1.0
    """How many times as fast its memory is as the V100's."""
    gpus_per_host: int = 8
    within_bytes_per_s: float | None = None
    """The rate of a GPU's links to others of its host; None where adding up there takes
    nothing.
    """

    def profile(self, model: str) -> Profile:
        """A catalogued model on the site's GPU."""
        profile = catalogue.load(model)
        layers = tuple(
            one.model_copy(
                update={
                    "forward_s": one.forward_s / self.gpu_speed,
                    "backward_s": one.backward_s / self.gpu_speed,
                }
            )
            for one in profile.layers
        )
        return profile.model_copy(update={"layers": layers})

    def cluster(
        self,
        num_hosts: int,
        *,
        is_push_pull: bool = False,
        slower: tuple[float, float] = (1.0, 1.0),
        density: float = DGC_DENSITY,
    ) -> Cluster:
        """So many hosts; with ``is_push_pull`` an all-reduce is BytePS's push and pull,
        of a hop each. Encodes and decodes take ``slower`` times their seconds, and DGC
        has a ``density``.
        """
        gbit = self.push_pull_gbit if is_push_pull else self.rate_gbit
        encode = self._times(ENCODE, slower[0])
        decode = self._times(DECODE, slower[1])
        codec = CodecFit(encode=encode, decode=decode, merge=decode)
        dgc = CodecFit(
            encode=self._times(ENCODE, slower[0], DGC_PASSES),
            decode=decode,
            merge=self._times(DECODE, slower[1], ENTRY * density),
        )
        cluster = Cluster(
            num_ranks=num_hosts,
            rate_bytes_per_s=gbit * GBIT,
            hop_s=SEND.alpha_s,
            codecs={**dict.fromkeys(CODECS, codec), "dgc": dgc},
            source=f"HiPress's testbed, read as: {self.name}",
        )
        if self.within_bytes_per_s is not None:
            count = self.gpus_per_host
            host = Host(num_ranks=count, rate_bytes_per_s=self.within_bytes_per_s)
            return cluster.model_copy(
                update={"num_ranks": num_hosts * count, "host": host}
            )
        if not is_push_pull:
            return cluster
        line = LineFit(
            alpha_s=2 * SEND.alpha_s,
            per_unit_s=travel("all_reduce", num_hosts).copies / (gbit * GBIT),
        )
        return cluster.model_copy(update={"collectives": {"all_reduce": line}})

    def _times(self, line: LineFit, slower: float, passes: float = 1.0) -> LineFit:
        """A line for a V100 on the site's GPU; ``passes`` are over a gradient."""
        unit_s = passes * line.per_unit_s / self.memory_speed
        return LineFit(alpha_s=slower * line.alpha_s, per_unit_s=slower * unit_s)


def arriving_gbit(model: str, system: str) -> float:
    """Gbit/s that arrive if table 1 is right, which says how long a dense training
    communicates.

    >>> round(arriving_gbit("transformer", RING))
    30
    >>> round(arriving_gbit("bert_large", BYTEPS))
    28
    """
    efficiency, share = TABLE_1[model, system]
    profile = catalogue.load(model)
    communication_s = share * (profile.forward_s + profile.backward_s) / efficiency
    copies = travel("all_reduce", HOSTS).copies
    return copies * profile.size_bytes / communication_s / GBIT


EC2_GBIT = 100
EC2 = Site("all of 100 Gbit/s arrives", EC2_GBIT, EC2_GBIT)
EC2_AS_TABLE_1 = Site(
    "as much arrives as table 1 says",
    arriving_gbit("transformer", RING),
    arriving_gbit("bert_large", BYTEPS),
)
EC2_WITHIN = replace(
    EC2_AS_TABLE_1,
    name="hosts add up over NVLink of 150 GB/s",
    within_bytes_per_s=150e9,
)
"""NVLink 2 of a V100 in each direction, by its datasheet: six links of 25 GB/s."""
LOCAL_GBIT = 56
LOCAL = Site(
    "all of 56 Gbit/s arrives",
    LOCAL_GBIT,
    LOCAL_GBIT,
    gpu_speed=11.34 / 15.7,
    memory_speed=484 / 900,
    gpus_per_host=2,
)
"""GTX 1080 Ti: TFLOP/s in float32 and GB/s of its datasheet over those of the
V100's.
"""
LOCAL_AS_TABLE_1 = replace(
    LOCAL,
    name="the share arrives that does by table 1",
    rate_gbit=LOCAL_GBIT * EC2_AS_TABLE_1.rate_gbit / EC2_GBIT,
    push_pull_gbit=LOCAL_GBIT * EC2_AS_TABLE_1.push_pull_gbit / EC2_GBIT,
)
