"""Every backward pass: gradients are exchanged as they come, by one plan or by a pilot's plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..contract import Exchange
from ..errors import invalid
from ..planning.default_fusion import NamedParam
from .attachment import Attachment
from .cautions import caution, overlaps
from .failure.integrity import Check
from .failure.membership import Membership
from .grid.dtensors import has_dtensors, shard_of, sharded_modules
from .handle import Handle
from .refusals import mark_attached
from .settings import Settings, sparse_weights, trained
from .step.fused import fused_messages
from .step.hooks import ModuleHooks
from .step.messages import Message
from .step.progress import Progress
from .step.synchroniser import AnyMessage
from .strangers import Strangers

if TYPE_CHECKING:
    from ..planning.data.plan import Plan
    from .controls import Controls
    from .ddp.comm_hook import DDPHooks, DDPInTurn
    from .overlap.overlap import Overlap


class _EveryBackward(Attachment):
    """Gradients are exchanged, in every backward pass."""

    def prepare(
        self, model: nn.Module, params: list[NamedParam], settings: Settings
    ) -> Mapping[str, object]:
        _refuse_pilot(model, settings)
        if settings.on_failure == "shrink":
            from .failure.shrink import refuse_to_shrink

            refuse_to_shrink(model, params, settings)
        return {}

    def messages(
        self, model: nn.Module, params: list[NamedParam], settings: Settings, who: Membership
    ) -> list[AnyMessage]:
        exchange, num_flags = settings.exchange, _num_flags(model)
        if isinstance(exchange, Exchange):
            return fused_messages(model, params, settings, exchange, who, num_flags=num_flags)
        if (plan := settings.plan) is None:
            return [*_flat_messages(model, params, settings, who, num_flags, None)]
        from .step.planned import messages_of

        return messages_of(plan, params, sparse_weights(model), who, settings.ranks_per_host)

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
        if isinstance(model, DistributedDataParallel):
            buckets = _buckets(model, params, settings, progress, undo)
        else:
            overlap, optimizer = None, settings.optimizer
            if optimizer is not None and not isinstance(settings.exchange, Exchange):
                from .overlap.overlap import Overlap  # a plan may overlap the next forward pass

                cut = partial(Overlap, model, params, optimizer, progress)
                if overlaps(settings) and not has_dtensors(params):
                    overlap = cut()
                    undo.callback(overlap.detach)
            hooks = ModuleHooks(progress, params, overlap, strangers)
            hooks.ends_behind_others = bool(sharded_modules(model))
            undo.callback(hooks.remove)
        if (pilot := settings.pilot) is not None:
            served = hooks or buckets
            assert served is not None, "a DDP model that is left to DDP has no pilot"
            controls = _controls(model, params, settings, progress, served, cut)
            undo.callback(controls.end)
            controls.begin(pilot)
        handle = Handle(model, settings.exchange, progress, hooks, controls, undo)
        handle.enter_model()
        if hooks is not None and settings.on_failure == "shrink":
            from .failure.shrink import Shrinking

            whole = [one for one in params if one[1].numel()]
            anew = partial(self.messages, model, whole, settings)
            hooks.shrinking = Shrinking(handle, progress, params, anew, undo)
        if buckets is not None and isinstance(model, DistributedDataParallel):
            from .elastic.join import refuse_fewer

            undo.callback(refuse_fewer(model))
        return handle


EVERY_BACKWARD = _EveryBackward()


def _buckets(
    model: DistributedDataParallel,
    params: list[NamedParam],
    settings: Settings,
    progress: Progress,
    undo: ExitStack,
) -> DDPHooks | DDPInTurn | None:
    """The hooks of a DDP model that has messages, or may come to have some; else None."""
    from .ddp.comm_hook import DDPInTurn, serve_hook
    from .ddp.reducer import count_steps, is_left_to_ddp

    if is_left_to_ddp(model, settings, progress.synchroniser.messages):
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


def _controls(
    model: nn.Module,
    params: list[NamedParam],
    settings: Settings,
    progress: Progress,
    served: ModuleHooks | DDPHooks | DDPInTurn,
    cut: Callable[[], Overlap] | None,
) -> Controls:
    """The controls by which a pilot reaches a model that is hooked."""
    from .controls import Controls
    from .ddp.comm_hook import DDPInTurn

    whole = [one for one in params if one[1].numel()]
    who, num_flags = progress.synchroniser.engine.who, _num_flags(model)
    made = partial(_flat_messages, model, whole, settings, who, num_flags)
    ddp = model if isinstance(model, DistributedDataParallel) else None
    inner: nn.Module = model if ddp is None else ddp.module
    controls = Controls(inner, params, progress, served, made, cut)
    controls.ddp = ddp
    controls.in_turn = served if isinstance(served, DDPInTurn) else None
    return controls


def _refuse_pilot(model: nn.Module, settings: Settings) -> None:
    """Raises ``InvalidSetting`` where a pilot cannot change the plan of a model that trains."""
    if settings.pilot is None:
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
        from ..compress.none import none
        from ..exchange.by_name import exchange_for

        dense = exchange_for(none())
        made = fused_messages(model, params, settings, dense, who, num_flags=num_flags)
    else:
        from .step.planned import check_for, messages_of

        check_for(plan, params, set())
        made = messages_of(plan, params, set(), who, settings.ranks_per_host)
    return [message for message in made if isinstance(message, Message)]


def _num_flags(model: nn.Module) -> int:
    """The parameters of which ranks tell whether they used them; DDP hands in zeros for others."""
    return 0 if isinstance(model, DistributedDataParallel) else len(trained(model))
