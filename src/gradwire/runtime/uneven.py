"""Uneven: a handle as torch's ``Join`` sees it, and a step for which a rank has no batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from ..errors import invalid
from .grid.dtensors import is_dtensor
from .step.hooks import ModuleHooks
from .step.progress import Progress
from .step.wire import Group

if TYPE_CHECKING:
    from .controls import Controls


class UnevenInputs(Joinable):
    """A handle as torch's ``Join`` sees it."""

    _model: nn.Module
    _hooks: ModuleHooks | None
    _controls: Controls | None
    _progress: Progress
    group: Group | None

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The part of this model in ``Join([handle], **kwargs)``, for data of uneven length.

        ``divide_by_initial_world_size`` is torch's (True): means divide by all ranks, or if False
        by those that still have data. ``optimizer``, if given, ends in the state of a rank that
        trained to the last step, as parameters and buffers do; else its state stays behind.
        Torch's waits are in the user's group and have its time-out. For a DDP model there is DDP's
        own ``model.join()``. Raises ``InvalidSetting`` for that, for ``auto``, local steps,
        sharded layers and plans that overlap the next forward pass.

        >>> import gradwire as gw
        >>> from torch import nn
        >>> handle = gw.attach(nn.Linear(2, 1), "topk")
        >>> # with Join([handle]):
        >>> #     for inputs, targets in own_batches: ...
        >>> handle.join_device.type
        'cpu'
        """
        from .elastic.join import ZeroGradients

        hooks, engine = self._answering("Join"), self._progress.synchroniser.engine
        if hooks.shrinking is not None:
            remedy = "call backward_without_batch() where a rank has none"
            raise invalid("Join", "on_failure='shrink'", "on_failure='end' beside it", remedy)
        ranks = dist.get_process_group_ranks(self.join_process_group)
        if len(ranks) != engine.world:
            raise invalid("Join", ranks, f"the {engine.world} ranks that exchange", "pass group=")
        divides = kwargs.get("divide_by_initial_world_size", True)
        return ZeroGradients(self, self._model, hooks, engine, divides, kwargs.get("optimizer"))

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter, on which torch counts ranks."""
        return next(self._model.parameters()).device

    @property
    def join_process_group(self) -> Group:
        """The group in which torch counts ranks; raises ``InvalidSetting`` without one."""
        if not dist.is_initialized():
            remedy = "call torch.distributed.init_process_group() first, or leave Join out"
            raise invalid("Join", "a process that is alone", "ranks in a process group", remedy)
        return self.group or dist.group.WORLD

    def backward_without_batch(self) -> None:
        """Takes part in a step for which this rank has no batch, in the place of its backward pass.

        Its gradient counts as zero in the mean over all ranks. Every ``.grad`` is the mean
        afterwards, as on the other ranks, so the optimizer's step is to follow. What ``.grad`` held
        before is dropped. Raises as ``backward()`` does, and ``InvalidSetting`` as ``join_hook``.
        """
        self._answering("backward_without_batch").backward_without_batch()

    def _answering(self, what: str) -> ModuleHooks:
        """The hooks that can answer for a rank without data; raises ``InvalidSetting``."""
        hooks, engine, reason = self._hooks, self._progress.synchroniser.engine, ""
        if isinstance(self._model, DistributedDataParallel):
            remedy = "write `with model.join():`, which is DDP's own"
            raise invalid(what, "the handle of a DDP model", "a plain module's", remedy)
        if self._controls is not None:
            reason = "'auto'"
        elif hooks is not None and hooks.overlap is not None:
            reason = "a plan that overlaps the next forward pass"
        elif engine.shards.world > 1 or any(map(is_dtensor, self._model.parameters())):
            reason = "sharded layers"
        if hooks is None or reason:
            accepted = "one that exchanges whole gradients in each backward pass, by a set plan"
            remedy = "give every rank as many batches, or call gw.attach without it"
            raise invalid(what, f"the handle of {reason or 'local_steps'}", accepted, remedy)
        return hooks
