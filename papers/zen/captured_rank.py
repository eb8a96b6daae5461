"""A rank of ``captured``: it exchanges one gradient by every scheme of sparse
synchronisation.

The indices of the non-zero elements are read from a file, and their values are drawn.
Schemes take turns, dense all-reduce among them; the runtime's engine carries them,
encode and decode included.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.compress.nonzero import nonzero
from gradwire.contract import Exchange
from gradwire.contract.registry import load
from gradwire.exchange.pair import pair
from gradwire.kernels.libraries import backend
from gradwire.runtime.engine.engine import Engine
from gradwire.runtime.liveness.membership import join
from gradwire_bench.micro import sparse_rank
from gradwire_bench.micro.exchange_rank import TimedExchange
from gradwire_bench.micro.sparse_rank import DENSE, compare
from gradwire_bench.schedule.sharing import share_cores
from gradwire_bench.testbed.ranks import Report, counted

_zen = load("collective", "zen")
IN_COO = "zen_in_coo"
ROWS = "zen_rows"
SCHEMES = (*sparse_rank.SCHEMES, IN_COO, ROWS)
"""``zen_in_coo`` is Balanced Parallelism without the hash bitmap; ``zen_rows`` sends
whole units (rows of an embedding), the others single elements.
"""


class Units(NamedTuple):
    """One rank's non-zero units, as a file holds them."""

    name: str
    num_units: int
    width: int
    units_K: Tensor

    @classmethod
    def read(cls, path: str, rank: int) -> Units:
        """The units in an ``.npz`` with ``name``, ``num_units``, ``width`` and
        ``units_<rank>``.
        """
        with np.load(path) as held:
            units_K = torch.from_numpy(held[f"units_{rank}"])
            return cls(
                str(held["name"]), int(held["num_units"]), int(held["width"]), units_K
            )

    def gradient(self, seed: int) -> Tensor:
        """A gradient with values in [0.5, 1) at the elements of the units, and zeros
        elsewhere.
        """
        random = torch.Generator().manual_seed(seed)
        grad_Uw = torch.zeros(self.num_units, self.width)
        shape = (self.units_K.numel(), self.width)
        grad_Uw[self.units_K.long()] = 0.5 + torch.rand(shape, generator=random) / 2
        return grad_Uw.flatten()


def exchange_of(scheme: str, width: int) -> Exchange:
    """The exchange of a scheme of ``SCHEMES``, or of the dense one."""
    if scheme == ROWS:
        return pair(nonzero(width=width), _zen(formats="paper"))
    if scheme == IN_COO:
        return pair(nonzero(), _zen(formats="coo"))
    return sparse_rank.exchange_of(scheme)


def measure(settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """The seconds of every repeat by tensor and scheme, and the bytes in each
    direction.
    """
    torch.set_num_threads(settings["threads"])
    backend()
    share_cores(dist.get_rank(), dist.get_world_size())
    engine = Engine(
        join(None),
        num_channels=1,
        timeout=timedelta(minutes=5),
        on_span=lambda span: None,
    )
    found: dict[str, Any] = {}
    paths = settings["paths"]
    for place, path in enumerate(paths):

        def part(fraction: float, what: str, place: int = place) -> None:
            report((place + fraction) / len(paths), what)

        units = Units.read(path, engine.rank)
        found[units.name] = _measure_one(units, engine, settings, part)
    engine.close()
    return found


def _measure_one(
    units: Units, engine: Engine, settings: dict[str, Any], report: Report
) -> dict[str, Any]:
    source_N = units.gradient(engine.rank)
    work_N = torch.empty_like(source_N)
    dense_N = torch.empty_like(source_N)
    sides = [
        TimedExchange(name, exchange_of(name, units.width), work_N, engine)
        for name in (DENSE, *settings["schemes"])
        if name != ROWS or units.width > 1
    ]
    found: dict[str, Any] = {
        side.name: {"seconds": [], "sent_bytes": [], "received_bytes": []}
        for side in sides
    }
    turns = settings["repeats"] + 1
    for turn in range(turns):
        for place, side in enumerate(sides):
            report((turn + place / len(sides)) / turns, f"{units.name}, {side.name}")
            work_N.copy_(source_N)
            seconds, moved = counted(side)
            if not turn:  # warms up
                compare(side.name, work_N, dense_N)
                continue
            found[side.name]["seconds"].append(seconds)
            found[side.name]["sent_bytes"].append(moved.tx_bytes)
            found[side.name]["received_bytes"].append(moved.rx_bytes)
    density = units.units_K.numel() / max(1, units.num_units)
    return {"numel": work_N.numel(), "density": density, "schemes": found}
