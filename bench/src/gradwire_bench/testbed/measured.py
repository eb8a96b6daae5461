"""Clusters that are measured: of the ranks of a group, and of shaped hosts."""

from collections.abc import Sequence
from functools import partial

from gradwire.measure.codecs import SIZES as CODEC_SIZES
from gradwire.measure.codecs import measure_codecs
from gradwire.measure.links import BUDGET_S, LIMIT, SIZES_BYTES, measure_cluster
from gradwire.planning.data.cluster import VERBS, Cluster
from gradwire.runtime.engine.engine import Engine, figures_of_all
from gradwire.runtime.liveness.membership import join

from .hosts import Testbed, open_hosts
from .ranks import Json, Report, run_ranks
from .step import step_line
from .wide_area import NEAR, WideArea


def measure_group_links(
    report: Report,
    *,
    compressors: Sequence[str] = (),
    rate_bytes_per_s: float | None = None,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    budget_s: float = BUDGET_S,
) -> Cluster:
    """Measures verbs, then codecs, of the default group's ranks, which all call this.

    ``rate_bytes_per_s`` is the links' rate where it is known. Codecs are measured on
    all ranks at once: in a step all of them encode at the same time.
    """
    total = len(VERBS) * len(sizes_bytes) + len(compressors) * len(CODEC_SIZES)
    done = 0.0

    def advance(amount: float, note: str) -> None:
        nonlocal done
        done += amount
        report(min(done / total, 1.0), note)

    who = join(None)
    codecs = measure_codecs(compressors, world=who.world, advance=advance)
    engine = Engine(who, num_channels=2, timeout=LIMIT, on_span=lambda span: None)
    try:
        cluster = measure_cluster(
            engine,
            rate_bytes_per_s=rate_bytes_per_s,
            sizes_bytes=sizes_bytes,
            budget_s=budget_s,
            codecs=codecs,
            advance=advance,
        )
        step = step_line(partial(figures_of_all, engine), cluster)
        return cluster.model_copy(update={"step": step})
    finally:
        engine.close()


def measured_cluster(
    hosts: int,
    rate_bytes_per_s: float,
    compressors: tuple[str, ...],
    report: Report,
    *,
    timeout_s: float,
    wide_area: WideArea = NEAR,
) -> Cluster:
    """The cluster of shaped hosts, or of the loopback where none can be made."""
    testbed = Testbed(
        hosts=hosts, rate_bytes_per_s=rate_bytes_per_s, wide_area=wide_area
    )
    with open_hosts(testbed) as made:
        settings = {
            "compressors": compressors,
            "rate_bytes_per_s": testbed.rate_bytes_per_s if made.shaped else None,
        }
        found = run_ranks(made, __name__, settings, report=report, timeout_s=timeout_s)
    return Cluster.parse(found[0]["cluster"])


def measure(settings: Json, report: Report) -> Json:
    """The program of each rank: the cluster, as its file's text.

    ``settings`` are those of ``measure_group_links``.
    """
    return {"cluster": measure_group_links(report, **settings).to_json()}
