"""Every backward pass: gradients are exchanged as they come, by one plan or by a pilot's plans."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..compress.none import none
from ..errors import invalid
from ..exchange.by_name import exchange_for
from ..planning.data.plan import Plan
from ..planning.default_fusion import NamedParam
from .attachment import Attachment
from .cautions import caution, overlaps
from .controls import Controls, Pilot
from .ddp import ddp
from .ddp.ddp_in_turn import DDPInTurn
from .ddp.reducer import count_steps, is_left_to_ddp
from .elastic.join import refuse_fewer
from .failure.integrity import Check
from .failure.membership import Membership
from .failure.shrink import Shrinking, refuse_to_shrink
from .grid.dtensors import has_dtensors, shard_of, sharded_modules
from .handle import Handle
from .overlap.overlap import Overlap
from .refusals import mark_attached
from .settings import Settings, sparse_weights, trained
from .step.arrivals import Arrivals
from .step.fused import fused_messages
from .step.hooks import ModuleHooks
from .step.messages import Message
from .step.planned import check_for, messages_of
from .step.progress import Progress
from .step.synchroniser import AnyMessage
from .strangers import Strangers


class _EveryBackward(Attachment):
    """Gradients are exchanged, in every backward pass."""

    def prepare(
        self, model: nn.Module, params: list[NamedParam], settings: Settings
    ) -> Mapping[str, object]:
        _refuse_pilot(model, settings)
        refuse_to_shrink(model, params, settings)
        return {}

    def messages(
        self, model: nn.Module, params: list[NamedParam], settings: Settings, who: Membership
    ) -> list[AnyMessage]:
        if isinstance(settings.exchange, Plan):
            sparse = sparse_weights(model)
            return messages_of(settings.exchange, params, sparse, who, settings.ranks_per_host)
        if isinstance(settings.exchange, Pilot):
            return [*_flat_messages(model, params, settings, who, _num_flags(model), None)]
        num_flags = _num_flags(model)
        return fused_messages(model, params, settings, settings.exchange, who, num_flags=num_flags)

    def check(self, params: list[NamedParam], settings: Settings) -> Check:
        every = settings.check_every
        return Check(every, lambda names: [(name, shard_of(param)) for name, param in params])

    def caution(self, model: nn.Module, params: list[NamedParam], settings: Settings) -> None:
        caution(model, params, settings)

    def hook(
        self,
        model: nn.Module,
        params: list[NamedParam],
        settings: Settings,
        progress: Progress,
        undo: ExitStack,
    ) -> Handle:
        """Whoever is made here knows those made before it, and none made after."""
        undo.callback(mark_attached(model, params))
        strangers = Strangers(model, progress.give_up)
        undo.callback(strangers.remove)
        hooks = controls = cut = buckets = None
        inner: nn.Module = model
        if isinstance(model, DistributedDataParallel):
            inner = model.module
            if is_left_to_ddp(model, settings, progress.synchroniser.messages):
                undo.callback(count_steps(progress, model, params))
            else:
                buckets = _buckets(model, params, settings, progress)
                undo.callback(buckets.remove)
        else:
            arrivals, overlap, optimizer = Arrivals(progress, params), None, settings.optimizer
            if optimizer is not None and overlaps(settings) and not has_dtensors(params):
                overlap = Overlap(model, params, optimizer, arrivals)
                undo.callback(overlap.detach)
            hooks = ModuleHooks(progress, params, arrivals, overlap, strangers)
            hooks.ends_behind_others = bool(sharded_modules(model))
            undo.callback(hooks.remove)
            cut = partial(Overlap, model, params, optimizer, arrivals) if optimizer else None
        if isinstance(settings.exchange, Pilot):
            whole = [one for one in params if one[1].numel()]
            who, num_flags = progress.synchroniser.engine.who, _num_flags(model)
            made = partial(_flat_messages, model, whole, settings, who, num_flags)
            served = hooks or buckets
            assert served is not None, "a DDP model that is left to DDP has no pilot"
            controls = Controls(inner, params, progress, served, made, cut)
            controls.ddp = model if isinstance(model, DistributedDataParallel) else None
            controls.in_turn = served if isinstance(served, DDPInTurn) else None
            undo.callback(controls.end)
            controls.begin(settings.exchange)
        handle = Handle(model, settings.exchange, progress, hooks, controls, undo)
        handle.enter_model()
        if hooks is not None and settings.on_failure == "shrink":
            whole = [one for one in params if one[1].numel()]
            anew = partial(self.messages, model, whole, settings)
            hooks.shrinking = Shrinking(handle, progress, params, anew, undo)
        if buckets is not None and isinstance(model, DistributedDataParallel):
            undo.callback(refuse_fewer(model))
        return handle


EVERY_BACKWARD = _EveryBackward()


def _buckets(
    model: DistributedDataParallel,
    params: list[NamedParam],
    settings: Settings,
    progress: Progress,
) -> ddp.DDPHooks | DDPInTurn:
    """The hooks of a DDP model that has messages, or may come to have some."""
    is_flat = settings.ranks_per_host == 1 and not settings.asks_for_messages
    # A static graph gives its gradients to DDP late, and in the first step once more.
    if isinstance(settings.exchange, Pilot) and is_flat and not model.static_graph:
        return DDPInTurn(progress, model, params)
    return ddp.register(progress, model, params)


def _refuse_pilot(model: nn.Module, settings: Settings) -> None:
    """Raises ``InvalidSetting`` where a pilot cannot change the plan of a model that trains."""
    if not isinstance(settings.exchange, Pilot):
        return
    name, remedy = repr(settings.exchange), "attach an exchange, or a plan, instead"
    sparse = sparse_weights(model)
    if rows := [n for n, p in model.named_parameters() if id(p) in sparse]:
        accepted = f"sparse=False beside {name}, which plans dense gradients"
        raise invalid(f"the embedding of {rows[0]}", "sparse=True", accepted, remedy)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    halves = [n for n, p in trained if p.dtype == torch.float16]
    if settings.scaler is not None and halves:
        accepted = f"None beside {name} where gradients are float16, as those of {halves[0]} are"
        remedy = "keep parameters in float32 and compute in autocast, or attach 'none' or 'cast16'"
        raise invalid("scaler", "a GradScaler", accepted, remedy)


def _flat_messages(
    model: nn.Module,
    params: list[NamedParam],
    settings: Settings,
    who: Membership,
    num_flags: int,
    plan: Plan | None,
) -> list[Message]:
    """The messages of a plan that a pilot has chosen; none is of row-sparse gradients."""
    if plan is None:
        dense = exchange_for(none())
        made = fused_messages(model, params, settings, dense, who, num_flags=num_flags)
    else:
        check_for(plan, params, set())
        made = messages_of(plan, params, set(), who, settings.ranks_per_host)
    return [message for message in made if isinstance(message, Message)]


def _num_flags(model: nn.Module) -> int:
    """The parameters of which ranks tell whether they used them; DDP hands in zeros for others."""
    return 0 if isinstance(model, DistributedDataParallel) else len(trained(model))
