"""One rank of ``bench exchange``: takes the same gradient through each exchange, in
turn.

The runtime's own engine carries the exchanges; encode and decode are inside the
measured time, and torch's all_reduce of the same buffer is measured in the same turns.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.collective.ring import ring
from gradwire.compress.none import none
from gradwire.contract import Exchange, Member
from gradwire.contract.registry import load, names
from gradwire.contract.spec import TensorSpec, squarest
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.error_feedback import residuals, with_error_feedback
from gradwire.exchange.pair import pair
from gradwire.exchange.two_level import on_hosts
from gradwire.kernels.libraries import backend
from gradwire.runtime.engine.engine import Engine
from gradwire.runtime.liveness.membership import join
from gradwire_lab.collective.casync_ring import casync_ring

from ..testbed.ranks import Json, Report, in_turn

TORCH = "torch-all_reduce"
_ALONE = {name: exchange_for(load("compress", name)()) for name in names("compress")}
EXCHANGES: dict[str, Exchange] = {
    "dense": _ALONE.pop("none"),
    "ring": pair(none(), ring()),
    **_ALONE,
    **{
        f"{name}-casync_ring": with_error_feedback(
            pair(load("compress", name)(), casync_ring())
        )
        for name in ("onebit", "topk", "dgc")
    },
}
"""Every compressor with its defaults, in the exchange it gets when given alone, and a
few pairs.
"""


ON_HOSTS = "-on_hosts"
"""The end of the name of an exchange whose hosts' ranks add up their gradients
first.
"""


def exchange_for_row(name: str, ranks_per_host: int) -> Exchange:
    """The exchange of a row, on hosts of so many ranks."""
    flat = EXCHANGES[name.removesuffix(ON_HOSTS)]
    return on_hosts(flat, ranks_per_host) if name.endswith(ON_HOSTS) else flat


def message_spec(numel: int, ranks_per_host: int = 1, rank: int = 0) -> TensorSpec:
    """One message's spec: a square matrix for each rank of a host, and the rest as a
    vector.

    Some exchanges act on matrices, and each rank of a host takes some whole.
    """
    return TensorSpec("grad", numel, shapes=squarest(numel, ranks_per_host), rank=rank)


def open_engine(ranks_per_host: int = 1) -> Engine:
    """The runtime's engine for this rank."""
    return Engine(
        join(None),
        num_channels=4,
        timeout=timedelta(minutes=2),
        on_span=lambda span: None,
        ranks_per_host=ranks_per_host,
    )


class TimedExchange:
    """One exchange with its own state; a call averages ``work_N`` in place."""

    def __init__(
        self,
        name: str,
        exchange: Exchange,
        work_N: Tensor,
        engine: Engine,
        spec: TensorSpec | None = None,
    ) -> None:
        self.name = name
        self.exchange = exchange
        self.engine = engine
        self.work_N = work_N
        self.member = Member(engine.rank, engine.world)
        own = spec or TensorSpec("grad", work_N.numel())
        self.state = exchange.init(own, engine.world)

    def __call__(self) -> None:
        steps = self.exchange.synchronise(
            self.member, self.state, self.work_N, self.work_N
        )
        end = self.engine.launch(0, self.name, steps)
        self.engine.wait([end])
        self.state = end.result

    def forget(self) -> None:
        """Drops what was kept, so that all turns are alike."""
        for residual_N in residuals(self.state).values():
            residual_N.zero_()

    def kept(self, like_N: Tensor) -> Tensor:
        """The mean over ranks of what they keep, which arrives later; zeros where
        nothing does.
        """
        kept_N = torch.zeros_like(like_N)
        for residual_N in residuals(self.state).values():
            kept_N += residual_N
        if residuals(self.state):
            dist.all_reduce(kept_N)
        return kept_N.div_(self.engine.world)


def measure(settings: Json, report: Report) -> Json:
    """Seconds of every repeat, and bytes on the wire of each exchange."""
    per_host = settings["ranks_per_host"]
    backend()
    engine = open_engine(per_host)
    torch.manual_seed(dist.get_rank())
    source_N = torch.randn(settings["numel"]) * 1e-3
    work_N = torch.empty_like(source_N)
    spec = message_spec(work_N.numel(), per_host, engine.rank)
    sides: dict[str, Callable[[], Any]] = {TORCH: lambda: dist.all_reduce(work_N)}
    for name in settings["names"]:
        sides[name] = TimedExchange(
            name, exchange_for_row(name, per_host), work_N, engine, spec
        )
    figures = in_turn(
        sides, settings["repeats"], report, lambda name: work_N.copy_(source_N)
    )
    engine.close()
    return figures
