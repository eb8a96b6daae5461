"""Peers: what other people's packages make of a trainer, where they can be imported.

None of them comes with gradwire, and none is fetched. Accelerate is one of the
frameworks that gradwire's extra installs; torchft is installed as torchft-nightly. The
others are read from folders that ``bench train --peers`` names: ``demo.py`` of
bloc97/DeMo (which needs einops), ``dion`` of microsoft/dion.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from importlib.machinery import PathFinder
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.errors import invalid
from gradwire.runtime.local_steps.recipes import TIMES_RATE, hidden

from .trainer import Trainer, rate_of_adamw

RANK_FRACTION = 0.25
"""Dion's rank as a share of a matrix's smaller extent, at which it sends less than all
of it.
"""

Join = Callable[[Trainer, Any, int], Trainer]
"""A function that makes a peer's trainer of one that averages nothing, for a period of
so many steps; it is given the peer's module.
"""


class Peer(NamedTuple):
    """The module that a peer is imported from, and what it makes of a trainer."""

    module: str
    join: Join


def _demo(made: Trainer, demo: Any, period: int) -> Trainer:
    """DeMo is the optimizer, of signs; it begins with the task's learning rate."""
    extents = max(param.dim() for param in made.plain.parameters())
    if extents > 2:
        accepted = "one of matrices and vectors, which are all that peer-demo takes"
        raise invalid(
            "task", made.task.name, accepted, "leave one of them out, by --only"
        )
    rate = made.optimizer.param_groups[0]["lr"]
    return replace(made, optimizer=demo.DeMo(made.plain.parameters(), lr=rate))


def _dion(made: Trainer, dion: Any, period: int) -> Trainer:
    """Dion is the optimizer of matrices, and its own AdamW that of all else."""
    rate = rate_of_adamw(made.optimizer)
    matrices = [
        param for param in hidden(made.plain, nn.Identity()) if param.dim() == 2
    ]
    others = [param for param in made.plain.parameters() if param not in set(matrices)]
    groups = [
        {"params": matrices, "lr": TIMES_RATE * rate},
        {"params": others, "algorithm": "adamw"},
    ]
    # It compiles itself, which takes a minute, more than the trainings here.
    torch.compiler.set_stance("force_eager")
    optimizer = dion.Dion(
        groups, replicate_mesh=dist.group.WORLD, lr=rate, rank_fraction=RANK_FRACTION
    )
    return replace(made, optimizer=optimizer)


def _accelerate(made: Trainer, local_sgd: Any, period: int) -> Trainer:
    """LocalSGD of Accelerate: parameters are averaged every ``period`` steps."""
    accelerator = import_module("accelerate").Accelerator(cpu=True)
    model = accelerator.prepare_model(made.plain)
    local = local_sgd.LocalSGD(
        accelerator=accelerator, model=model, local_sgd_steps=period
    )
    local.__enter__()
    return replace(made, model=model, after_step=local.step)


class _Unfailing:
    """Stands in for torchft's ``Manager`` among ranks of which none is lost.

    Its own asks a server for leave at each exchange, so this favours the peer.
    """

    _use_async_quorum = False

    def __init__(self) -> None:
        self._commits = 0

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> dist.Work:
        """Averages over ranks, in place; the peer waits for what is returned."""
        tensor.div_(dist.get_world_size())
        work: dist.Work = dist.all_reduce(tensor, async_op=True)
        return work

    def should_commit(self) -> bool:
        self._commits += 1
        return True

    def current_step(self) -> int:
        return self._commits

    def start_quorum(self) -> None:
        """All ranks are there."""

    def allow_state_dict_read(self) -> None:
        """Nobody reads it."""

    disallow_state_dict_read = allow_state_dict_read

    def register_state_dict_fn(self, key: str, load: object, save: object) -> None:
        """Nobody calls them."""


def _torchft_local_sgd(made: Trainer, torchft: Any, period: int) -> Trainer:
    torchft.LocalSGD(_Unfailing(), made.plain, made.optimizer, period).__enter__()
    return made


def _torchft_diloco(made: Trainer, torchft: Any, period: int) -> Trainer:
    """DiLoCo's outer optimizer; parameters one by one, as its buckets drop some."""
    outer = torch.optim.SGD(
        made.plain.parameters(), lr=0.7, momentum=0.9, nesterov=True
    )
    torchft.DiLoCo(
        _Unfailing(), [made.plain], made.optimizer, outer, period
    ).__enter__()
    return made


PEERS: dict[str, Peer] = {
    "peer-demo": Peer("demo", _demo),
    "peer-dion": Peer("dion", _dion),
    "peer-accelerate": Peer("accelerate.local_sgd", _accelerate),
    "peer-torchft-local_sgd": Peer("torchft.local_sgd", _torchft_local_sgd),
    "peer-torchft-diloco": Peer("torchft.local_sgd", _torchft_diloco),
}
"""Trainers by name that need a package of others."""


def is_there(name: str, folders: Iterable[str]) -> bool:
    """Whether a peer's package is in one of these folders, or is installed."""
    package = PEERS[name].module.partition(".")[0]
    return PathFinder.find_spec(package, [*folders, *sys.path]) is not None


def joined(name: str, made: Trainer, period: int) -> Trainer:
    """The trainer of a peer, made of one that averages nothing."""
    peer = PEERS[name]
    return peer.join(made, import_module(peer.module), period)
