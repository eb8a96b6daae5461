"""Shaped hosts, as ``gradwire profile`` asks for them."""

from gradwire.measure.group import Report
from gradwire.measure.links import measure_group_links
from gradwire.planning.data.cluster import Cluster

from .hosts import Testbed, open_hosts
from .ranks import Json, run_ranks
from .wide_area import NEAR, WideArea, read_wide_area

__all__ = ["measure", "measured_cluster", "read_wide_area"]


def measured_cluster(
    hosts: int,
    rate_bytes_per_s: float,
    compressors: tuple[str, ...],
    report: Report,
    *,
    timeout_s: float,
    wide_area: WideArea | None = None,
) -> Cluster:
    """The cluster of shaped hosts, or of the loopback where none can be made."""
    testbed = Testbed(
        hosts=hosts, rate_bytes_per_s=rate_bytes_per_s, wide_area=wide_area or NEAR
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
