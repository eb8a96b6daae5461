"""A rank of ``bench train --rate`` with a small network: Muon takes most of a large
one's step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from gradwire_bench.training import training_links_rank
from gradwire_bench.training.tasks import make_task
from gradwire_bench.workloads.convnet import ConvNet


def _small(*given: Any, **settings: Any) -> Any:
    made = make_task(*given, **settings)
    return replace(made, make_model=partial(ConvNet, width=8, hidden=64))


training_links_rank.make_task = _small
measure = training_links_rank.measure
