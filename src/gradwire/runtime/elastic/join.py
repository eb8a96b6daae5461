"""Join: ranks whose data end before those of others, and ranks that have no batch in a step.

Torch's ``Join([handle])`` tells ranks in each step how many of them still have data. A rank that
has none takes part all the same, with a gradient of zeros: it answers the verbs of the others, and
what its residual holds goes on arriving. It does not train meanwhile. When all have ended it takes
the parameters and buffers of a rank that trained to the last step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...errors import invalid
from ..state.plain import told_by
from ..step.engine import Engine
from ..step.hooked import Lent
from ..step.hooks import ModuleHooks


class ZeroGradients(JoinHook):
    """The answers of a rank whose data have ended, until those of all have.

    Where ``divides`` is False, ranks with data multiply means by the number of ranks over that of
    ranks with data.
    """

    def __init__(
        self,
        handle: Joinable,
        model: nn.Module,
        hooks: ModuleHooks,
        engine: Engine,
        divides: bool,
        optimizer: Optimizer | None,
    ) -> None:
        self._handle, self._model, self._hooks, self._engine = handle, model, hooks, engine
        self._optimizer, self._factor = optimizer, 1.0
        self._divides = divides
        hooks.on_begin = self._notify
        hooks.on_end = None if divides else self._divide_by_fewer

    def main_hook(self) -> None:
        self._hooks.on_begin, self._factor = None, 1.0
        self._hooks.trains(False)
        self._hooks.backward_without_batch()
        for param in self._hooks.params.values():
            param.grad = None  # it does not train: the others' mean must not be stepped with later

    def post_hook(self, is_last_joiner: bool) -> None:
        handle, hooks, engine = self._handle, self._hooks, self._engine
        hooks.on_begin = hooks.on_end = None
        hooks.trains(True)
        handle._join_config = handle._join_config.construct_disabled_join_config()
        device = handle.join_device
        last = torch.tensor([engine.rank if is_last_joiner else -1], device=device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group=handle.join_process_group)
        source, model = int(last), self._model
        if engine.world == 1:
            return
        engine.broadcast([*model.parameters(), *model.buffers()], source)
        if (optimizer := self._optimizer) is not None:
            own = optimizer.state_dict() if engine.rank == source else None
            state = told_by(engine, source, own, "optimizer's state")
            if engine.rank != source:
                optimizer.load_state_dict(state)

    def _notify(self) -> None:
        """Tells ranks without data that a step begins, and learns how many have data."""
        work = Join.notify_join_context(self._handle)
        if work is not None:
            work.wait()
            count = float(work.get_future().value()[0])
            self._factor = self._engine.world / count
        elif not self._divides and self._handle._join_config.enable:
            remedy = "put it first in Join([...]): torch counts ranks by the first one"
            raise invalid("the handle's place in Join", "behind others", "first", remedy)

    def _divide_by_fewer(self) -> None:
        if self._factor != 1:
            for param in self._hooks.params.values():
                if param.grad is not None:
                    param.grad.mul_(self._factor)


def refuse_fewer(ddp: DistributedDataParallel) -> Callable[[], None]:
    """Has a DDP's ``join()`` refuse what it could not do; returns a function to undo it.

    DDP divides by fewer ranks only where no communication hook averages.
    """
    own: Callable[..., Any] = ddp.join_hook

    def join_hook(**kwargs: Any) -> Any:
        if not kwargs.get("divide_by_initial_world_size", True):
            accepted = "True for a DDP model whose gradients gradwire averages"
            remedy = "leave it out, or attach the plain module and write Join([handle])"
            raise invalid("divide_by_initial_world_size", False, accepted, remedy)
        return own(**kwargs)

    return Lent(ddp, "join_hook", join_hook).remove
