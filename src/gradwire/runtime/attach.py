"""attach: from here on gradwire exchanges a model's gradients, under an unchanged training loop.

They are exchanged in every backward pass, as they come, by one plan or by a pilot's plans. What
only some arguments ask for (a plan, newcomers, hosts, DDP) is imported where they are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..compress.none import none
from ..contract import Compressor, Exchange
from ..exchange.by_name import exchange_for
from .failure.integrity import Check
from .failure.membership import Membership
from .grid.dtensors import has_dtensors, shard_of, sharded_modules
from .handle import Handle
from .setup.attachment import Attachment, grid_of
from .setup.options import FailurePolicy, Options, takes_options
from .setup.refusals import mark_attached, sole_ddp
from .setup.settings import Settings, sparse_weights
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


@takes_options
def attach(
    model: nn.Module,
    exchange: Exchange | Compressor | Plan | Pilot | str | Path,
    *,
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
    group: Group | DeviceMesh | None = None,
    mesh: DeviceMesh | str | None = None,
    options: Options | None = None,
    failure: FailurePolicy | None = None,
) -> Handle:
    """Exchanges a model's gradients in every backward pass from now on.

    After ``loss.backward()`` every ``.grad`` is the mean over ranks. The training loop stays as it
    is. All ranks attach alike, and each backward pass reaches an attached parameter.

    Args:
        model: An ``nn.Module``, whose parameters and buffers come from rank 0, or a
            ``DistributedDataParallel`` module, maybe wrapped.
        exchange: One of these:

            * a compressor of ``gw.compress``, or its name. It gets the collective that suits its
              traits, and error feedback if it needs that.
            * an exchange that ``gw.pair`` has made.
            * a plan (``gw.plan``), or its file. It decides messages, order and exchanges.
            * ``"auto"`` (``gw.pilot.auto``), which chooses a plan while the model trains.
        optimizer: The optimizer of ``model``. With a plan that overlaps the next forward pass,
            each layer's forward then waits for its own means. Newcomers need it too.
        scaler: The loss's scaler. Gradients are exchanged without its scale.
        group: The process group, or the data-parallel dimension of a ``DeviceMesh``. Its ranks
            hold the same shards of DTensors. Default: all ranks, or the DDP model's group.
        mesh: Hosts of several ranks, which add up gradients and exchange shares: a
            ``DeviceMesh`` of ("hosts", "local"), or ``"torchrun"``. Default: flat.
        options: How gradients travel, as ``gw.Options``. Default: ``gw.Options()``.
        failure: What becomes of lost ranks, as ``gw.FailurePolicy``. Default: the run ends.

    Returns:
        A ``gw.Handle`` with figures, checkpoints and ``detach()``.

    Raises:
        InvalidSetting: An argument cannot be used; the message says what to do.
        RanksDiffer: Another rank refused, or has another model, setting or version.
        RankFailed: A rank did not come within the time-out.

    >>> import gradwire as gw
    >>> model = nn.Linear(4, 2)
    >>> handle = gw.attach(model, "topk", options=gw.Options(num_channels=2))
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> handle.step
    1
    """
    given = options or Options(), failure or FailurePolicy()
    settings = Settings(exchange, optimizer, scaler, *given)
    newcomer = None
    if (store := getattr(settings.failure, "rejoin", None)) is not None:
        from .elastic.rejoin import Newcomer

        places = group, mesh, getattr(settings.options, "shards", None)
        newcomer = Newcomer(store, settings.failure.on_failure, optimizer, places)
    grid = grid_of(model := sole_ddp(model), group, mesh, settings)
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
        params, every = self.params, self.settings.failure.check_every
        return Check(every, lambda names: [(n, shard_of(param)) for n, param in params])

    @property
    def optimizer(self) -> Optimizer | None:
        return self.settings.optimizer

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
        if hooks is not None and settings.failure.on_failure == "shrink":
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
