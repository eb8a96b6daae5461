"""Bypass: gradients of a DDP model that its reducer does not see are named.

``DistributedDataParallel`` averages in the first backward pass after its own forward
pass. It is silent where its module or a layer is called instead, where a second
backward pass follows, and where ``model.double()`` has taken its hooks from the
parameters. Every rank then trains alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from ...contract.spec import NamedParam
from ...errors import log
from ..step.hooked import Hooked
from ..step.hooks import on_gradient
from ..step.local_gradients import LocalGradients
from ..step.progress import Progress

_UNSEEN = (
    "{name} has a gradient that DistributedDataParallel did not average; "
    "optimizer.step() would take other gradients on each rank. DDP averages once after "
    "each forward pass of the DDP model itself: call that, and neither its module nor "
    "a layer, before each backward pass. Or attach the plain module, whose layers "
    "anybody may call. no_sync() keeps gradients on this rank"
)
_CONVERTED = (
    "{name} was converted (.double(), .to() or the like) after DistributedDataParallel "
    "was made, which averages its gradients no longer; convert the model first, then "
    "make the DDP model and attach it"
)
_STATIC = (
    "the first pass of a DistributedDataParallel with static_graph=True is under "
    "no_sync, where torch fails; let the first pass of all be outside of no_sync, or "
    "leave static_graph out"
)


class BypassWatch:
    """Tells ``local`` of gradients that DDP does not average.

    The first and the last parameter stand for all. Where a pass may leave some out, all
    are looked at. In a static graph a parameter may get several gradients in one pass;
    so only models whose forward pass never runs are noticed.
    """

    def __init__(
        self,
        progress: Progress,
        ddp: DistributedDataParallel,
        params: Sequence[NamedParam],
        local: LocalGradients,
    ) -> None:
        self._progress = progress
        self._ddp = ddp
        self._local = local
        self._ends = [params[0], params[-1]]
        self._nodes = [get_gradient_edge(param).node for _, param in self._ends]
        self._places = self._looked_at()
        watched = dict(params if ddp.find_unused_parameters else self._ends)
        self._watched = frozenset(watched)
        self._due: set[str] = set()
        """The parameters whose next gradient DDP averages."""
        self._is_first = False
        self._was_called = False
        self._unseen: set[str] = set()
        """The parameters that had a gradient before the first forward pass."""
        self._has_warned = False
        self._is_kept = False
        """Whether the last forward pass was one under no_sync."""
        self._hooks = [
            Hooked(ddp.register_forward_hook, self._called),
            *(
                on_gradient(param, self._accept, name)
                for name, param in watched.items()
            ),
        ]

    def remove(self) -> None:
        """Watches no longer."""
        for hook in self._hooks:
            hook.remove()

    def _called(self, ddp: DistributedDataParallel, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._is_kept = not ddp.require_backward_grad_sync
        if self._is_kept:
            if ddp.static_graph and not self._was_called:
                raise self._progress.give_up(_STATIC)
            return
        if (places := self._looked_at()) != self._places:
            self._places = places
            self._refuse_converted()
        self._due = set(self._watched)
        self._is_first = self._was_called = True

    def _looked_at(self) -> list[tuple[int, torch.dtype]]:
        """The places and dtypes of the first and last parameter, cheap to look at."""
        return [(param.data_ptr(), param.dtype) for _, param in self._ends]

    def _refuse_converted(self) -> None:
        """Raises where autograd's nodes for parameters are not the ones DDP hooked."""
        for (name, param), node in zip(self._ends, self._nodes, strict=True):
            if get_gradient_edge(param).node is not node:
                raise self._progress.give_up(_CONVERTED.format(name=name))

    def _accept(self, name: str, param: Tensor) -> None:
        if name in self._due:
            self._due.discard(name)
            if self._is_first:
                self._is_first = False
                self._local.exchange()
        elif self._is_kept or not self._ddp.require_backward_grad_sync:
            self._local.keep(name, param)
        elif not (self._ddp.static_graph and self._was_called):
            self._local.miss(param, _UNSEEN.format(name=name))
            if not self._was_called:
                self._warn(name)

    def _warn(self, name: str) -> None:
        """Warns once, in the second backward pass.

        A loop may step without an optimizer.
        """
        if name in self._unseen and not self._has_warned:
            self._has_warned = True
            log.warning("%s", _UNSEEN.format(name=name))
        self._unseen.add(name)
