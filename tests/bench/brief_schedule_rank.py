"""A rank of ``bench schedule`` that measures links by few and short messages."""

from __future__ import annotations

from functools import partial

from gradwire.measure.links import measure_cluster
from gradwire_bench.schedule import schedule_rank

schedule_rank.SIZES_BYTES = (2**10, 2**12, 2**14)
schedule_rank.measure_cluster = partial(  # type: ignore[assignment]
    measure_cluster, budget_s=0.001, rounds=1
)
measure = schedule_rank.measure
