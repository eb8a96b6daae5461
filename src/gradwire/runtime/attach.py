"""attach: from here on gradwire exchanges a model's gradients, under an unchanged training loop.

They are exchanged in every backward pass, as they come, by one plan or by a pilot's plans. What
only some arguments ask for (a plan, newcomers, hosts, DDP) is imported where they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..compress.none import none
from ..contract import Compressor, Exchange
from ..exchange.by_name import exchange_for
from ..planning.default_fusion import matrices
from .cautions import caution
from .failure.integrity import DEFAULT_CHECK_EVERY, Check
from .failure.membership import Membership
from .grid.dtensors import has_dtensors, shard_of, sharded_modules
from .handle import Handle
from .setup.attachment import Attachment, grid_of
from .setup.refusals import mark_attached, sole_ddp
from .setup.settings import DEFAULT_TIMEOUT, Settings, sparse_weights
from .setup.strangers import Strangers
from .step.fused import fused_messages
from .step.hooks import ModuleHooks
from .step.progress import Progress
from .step.synchroniser import AnyMessage
from .step.wire import Group

if TYPE_CHECKING:
    from ..planning.data.plan import Plan
    from .controls import Pilot
    from .ddp.comm_hook import DDPHooks, DDPInTurn


def attach(
    model: nn.Module,
    exchange: Exchange | Compressor | Plan | Pilot | str | Path,
    *,
    optimizer: Optimizer | None = None,
    group: Group | DeviceMesh | None = None,
    shards: Group | DeviceMesh | None = None,
    mesh: DeviceMesh | str | None = None,
    bucket_cap_mb: float | None = None,
    num_channels: int | None = None,
    compress_if: Callable[[str, Tensor], bool] = matrices,
    timeout: timedelta = DEFAULT_TIMEOUT,
    trace_steps: int = 4,
    scaler: GradScaler | None = None,
    guard_every: int | None = None,
    check_every: int | None = DEFAULT_CHECK_EVERY,
    checksums: bool = False,
    on_failure: str = "end",
    backend: str = "auto",
    rejoin: Store | None = None,
) -> Handle:
    """Exchanges a model's gradients in every backward pass from now on.

    ``model`` is an ``nn.Module`` (parameters and buffers come from rank 0) or a
    ``DistributedDataParallel`` module (its hook is taken, or none, see `reducer`), maybe wrapped.
    After a backward pass every ``.grad`` is the mean. ``exchange`` is an algorithm of
    ``gw.compress``, its name, or an exchange made by ``gw.pair``. A compressor gets the collective
    that suits its traits, and error feedback if it needs that. ``compress_if(name, param)`` tells
    which gradients take it; others travel uncompressed. Messages have ``bucket_cap_mb`` MiB;
    ``num_channels`` (4) travel at once. Or it is a plan (``gw.plan``, or its file), which decides
    all of that, or ``"auto"`` (``gw.pilot.auto``), which chooses one while the model trains. If a
    plan overlaps the next forward pass and ``optimizer`` is given, each layer's forward waits for
    its means (`overlap`). ``group`` is the process group, or the data-parallel dimension of a
    ``DeviceMesh``; its ranks hold the same shards where parameters are DTensors (``fully_shard``).
    The default is all ranks. ``shards`` is the tensor-parallel group or dimension, for exchanges
    that ask other shards. ``mesh`` is for hosts of several ranks, which add up gradients and
    exchange shares: one of ("hosts", "local"), or "torchrun"; ``backend``, "gloo" or "nccl", serves
    between hosts. All ranks must attach alike, and each backward pass must reach an attached
    parameter. ``timeout`` bounds a wait for a peer. By ``on_failure="shrink"`` ranks go on without
    a lost one; ``rejoin``, the job's store, lets a new process in. Every ``guard_every`` steps some
    means are compared with dense ones, every ``check_every`` parameters among ranks. ``checksums``
    refuse what arrives damaged. ``trace()`` has ``trace_steps`` steps; give the ``scaler`` too.

    Raises ``InvalidSetting`` for a mistake, ``RanksDiffer`` if ranks disagree.
    """
    newcomer = None
    if rejoin is not None:
        from .elastic.rejoin import Newcomer

        newcomer = Newcomer(rejoin, on_failure, optimizer, (group, shards, mesh))
    given = exchange, optimizer, bucket_cap_mb, num_channels, compress_if, timeout, trace_steps
    every = scaler, guard_every, check_every, checksums, on_failure, backend
    settings = Settings(*given, *every)
    grid = grid_of(model := sole_ddp(model), group, shards, mesh, settings)
    return EveryBackward().attach(model, settings, grid, newcomer)


class EveryBackward(Attachment):
    """Gradients are exchanged, in every backward pass."""

    def prepare(self) -> Mapping[str, object]:
        return {}

    def messages(self, who: Membership) -> list[AnyMessage]:
        if isinstance(self.settings.exchange, Exchange):
            return self._fused(self.settings.exchange, who)
        return self._planned(self.settings.plan, who, sparse_weights(self.model))

    def _fused(self, exchange: Exchange, who: Membership) -> list[AnyMessage]:
        # DDP hands in zeros for parameters that this rank has not used; else ranks tell which.
        is_ddp = isinstance(self.model, DistributedDataParallel)
        num_flags = 0 if is_ddp else len(self.params)
        given = self.model, self.carried, self.settings, exchange, who
        return fused_messages(*given, num_flags=num_flags)

    def _planned(self, plan: Plan | None, who: Membership, sparse: set[int]) -> list[AnyMessage]:
        """The messages of a plan; those of None, by which a pilot begins, are dense."""
        if plan is None:
            return self._fused(exchange_for(none()), who)
        from .step.planned import check_for, messages_of

        check_for(plan, self.carried, sparse)
        return messages_of(plan, self.carried, sparse, who, self.settings.ranks_per_host)

    def check(self) -> Check:
        params = self.params
        return Check(
            self.settings.check_every, lambda names: [(n, shard_of(param)) for n, param in params]
        )

    def caution(self) -> None:
        caution(self.model, self.params, self.settings)

    def hook(self, progress: Progress, undo: ExitStack) -> Handle:
        """Whoever is made here knows those made before it, and none made after."""
        model, params, settings = self.model, self.params, self.settings
        undo.callback(mark_attached(model, params))
        strangers = Strangers(model, progress.give_up)
        undo.callback(strangers.remove)
        hooks = controls = cut = buckets = None
        if isinstance(model, DistributedDataParallel):
            buckets = self._buckets(model, progress, undo)
        else:
            overlap, optimizer = None, settings.optimizer
            if optimizer is not None and not isinstance(settings.exchange, Exchange):
                from .overlap.overlap import Overlap  # a plan may overlap the next forward pass

                cut = partial(Overlap, model, params, optimizer, progress)
                if settings.overlaps and not has_dtensors(params):
                    overlap = cut()
                    undo.callback(overlap.detach)
            hooks = ModuleHooks(progress, params, overlap, strangers)
            hooks.ends_behind_others = bool(sharded_modules(model))
            undo.callback(hooks.remove)
        if (pilot := settings.pilot) is not None:
            from .controls import Controls

            served = hooks or buckets
            assert served is not None, "a DDP model that is left to DDP has no pilot"
            made = partial(self._planned, who=progress.synchroniser.engine.who, sparse=set())
            controls = Controls(model, params, progress, served, made, cut)
            undo.callback(controls.end)
            controls.begin(pilot)
        handle = Handle(model, settings.exchange, progress, hooks, controls, undo)
        handle.enter_model()
        if hooks is not None and settings.on_failure == "shrink":
            from .failure.shrink import Shrinking

            hooks.shrinking = Shrinking(handle, progress, params, self.messages, undo)
        if buckets is not None and isinstance(model, DistributedDataParallel):
            from .elastic.join import refuse_fewer

            undo.callback(refuse_fewer(model))
        return handle

    def _buckets(
        self, model: DistributedDataParallel, progress: Progress, undo: ExitStack
    ) -> DDPHooks | DDPInTurn | None:
        """The hooks of a DDP model that has messages, or may come to have some; else None."""
        from .ddp.comm_hook import DDPInTurn, serve_hook
        from .ddp.reducer import count_steps

        settings, params = self.settings, self.params
        if self.is_left_to_ddp(progress.synchroniser.messages):
            undo.callback(count_steps(progress, model, params))
            return None
        is_flat = settings.ranks_per_host == 1 and not settings.asks_for_messages
        # A static graph gives its gradients to DDP late, and in the first step once more.
        takes_turns = settings.pilot is not None and is_flat and not model.static_graph
        hooks: DDPHooks | DDPInTurn
        if takes_turns:
            count = partial(count_steps, progress, model, params)
            hooks = DDPInTurn(progress, model, params, count)
        else:
            hooks = serve_hook(progress, model, params)
        undo.callback(hooks.remove)
        return hooks
