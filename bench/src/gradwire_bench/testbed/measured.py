"""Shaped hosts, as ``gradwire profile`` and ``gradwire doctor`` ask for them."""

from __future__ import annotations

import os
from dataclasses import asdict

from gradwire.planning.data.cluster import Cluster
from gradwire.planning.measure import links_rank
from gradwire.planning.measure.links_rank import Report

from .hosts import Testbed, open_hosts
from .hosts import available as available
from .ranks import run_ranks


def measured_cluster(
    hosts: int,
    rate_bytes_per_s: float,
    compressors: tuple[str, ...],
    report: Report,
    *,
    timeout_s: float,
) -> Cluster:
    """The cluster of shaped hosts, or of the loopback where none can be made."""
    testbed = Testbed(hosts=hosts, rate_bytes_per_s=rate_bytes_per_s)
    with open_hosts(testbed) as made:
        bench = links_rank.LinksBench(
            compressors=compressors,
            rate_bytes_per_s=testbed.rate_bytes_per_s if made.shaped else None,
            threads=max(1, len(os.sched_getaffinity(0)) // hosts),
        )
        found = run_ranks(
            made, links_rank.__name__, asdict(bench), report=report, timeout_s=timeout_s
        )
    return Cluster.parse(found[0]["cluster"])
