"""attach: from here on gradwire exchanges a model's gradients, under an unchanged training loop."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..collective._types import Collective
from ..compress.none import none
from ..contract import Compressor
from ..errors import InvalidSetting, invalid
from ..exchange import Exchange, exchange_for
from ..kernels._build import backend
from ..load import load
from . import ddp
from .engine import Engine
from .fingerprint import compare, fingerprint
from .fusing import default_cap_bytes, fuse
from .handle import Handle
from .hooks import ModuleHooks, time_forward
from .messages import Message
from .recorder import Recorder
from .sparse_message import SparseMessage
from .synchroniser import Synchroniser
from .wire import Group, broadcast_all

_attached: WeakKeyDictionary[nn.Module, Handle] = WeakKeyDictionary()


@dataclass(frozen=True)
class Settings:
    """What ``attach`` was asked for, checked."""

    exchange: Exchange
    bucket_cap_mb: float | None
    num_channels: int
    compress_if: Callable[[str, Tensor], bool]

    def __post_init__(self) -> None:
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise invalid(
                "bucket_cap_mb", self.bucket_cap_mb, "a positive number or None", "leave it out"
            )
        if self.num_channels < 1:
            raise invalid("num_channels", self.num_channels, "at least 1", "write 4")


def matrices(name: str, param: Tensor) -> bool:
    """The default ``compress_if``: all but vectors (biases, norms), which are small."""
    return param.dim() >= 2


def attach(
    model: nn.Module,
    exchange: Exchange | Compressor | str,
    *,
    group: Group | None = None,
    bucket_cap_mb: float | None = None,
    num_channels: int = 4,
    compress_if: Callable[[str, Tensor], bool] = matrices,
    timeout: timedelta = timedelta(minutes=5),
    trace_steps: int = 4,
) -> Handle:
    """Exchanges a model's gradients through ``exchange`` in every backward pass from now on.

    ``model`` is an ``nn.Module`` (its parameters and buffers are broadcast from rank 0 once) or a
    ``DistributedDataParallel`` module (its communication hook is taken). After ``loss.backward()``
    every ``.grad`` is the mean over ranks, the same bits on each, as under DDP.

    ``exchange`` is a compressor (the collective that suits its traits is chosen, with error
    feedback if it needs it), a compressor's name, or an exchange made by ``gw.pair``.
    ``compress_if(name, param)`` tells which gradients take it; the others travel uncompressed.
    ``bucket_cap_mb`` (MiB) is how much is fused into one message (default: see `fusing`),
    ``num_channels`` how many messages are on their way at once. ``group`` is the process group
    (default: all ranks; without ``init_process_group``: this process alone). ``timeout`` bounds
    every wait for a peer. All ranks of the group must call this, with the same arguments.

    Raises ``InvalidSetting`` (a ValueError) for a user's mistake, ``RanksDiffer`` if ranks
    disagree.
    """
    settings = Settings(_resolve(exchange), bucket_cap_mb, num_channels, compress_if)
    _refuse_wrong_moment(model)
    if isinstance(model, DistributedDataParallel):
        if group is not None:
            raise invalid("group", group, "None for a DDP model", "DDP's own group is used")
        group = model.process_group
    if dist.is_initialized() and dist.get_rank(group) < 0:
        raise invalid("group", group, "a group this rank is in", "attach on its ranks only")
    params = _trained(model)
    recorder = Recorder(trace_steps)
    engine = Engine(group, num_channels=num_channels, timeout=timeout, on_span=recorder.add)
    try:
        return _connect(model, params, settings, engine, recorder)
    except BaseException:
        engine.close()
        raise


def _connect(
    model: nn.Module,
    params: list[tuple[str, Tensor]],
    settings: Settings,
    engine: Engine,
    recorder: Recorder,
) -> Handle:
    """Makes ranks agree, then hooks the model."""
    backend()  # Builds kernels that no run has built yet: now, not inside the first step.
    if engine.world > 1:
        _agree(engine, model, params, settings)
    messages = _messages(model, params, settings, engine)
    handle = Handle(model, settings.exchange, engine, Synchroniser(engine, messages), recorder)
    if isinstance(model, DistributedDataParallel):
        ddp.register(handle, model, params)
    else:
        ModuleHooks(handle, params)
    time_forward(handle, model)
    _attached[model] = handle
    handle.on_detach(lambda: forget(model))
    return handle


def forget(model: nn.Module) -> None:
    """Lets a model be attached again."""
    _attached.pop(model, None)


def _resolve(given: Any) -> Exchange:
    if isinstance(given, str):
        given = load("compress", given)()
    if isinstance(given, Compressor):
        return exchange_for(given)
    if isinstance(given, type | Collective) or not callable(getattr(given, "run", None)):
        raise invalid(
            "exchange",
            given,
            "a compressor, an exchange, or a compressor's name",
            "write gw.attach(model, gw.compress.topk(density=0.01)), or make one by gw.pair",
        )
    chosen: Exchange = given
    return chosen


def _refuse_wrong_moment(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise invalid("model", type(model).__name__, "an nn.Module", "pass the model itself")
    if model in _attached:
        raise InvalidSetting(
            "this model is attached already; a model has one exchange: call handle.detach() on the "
            "first handle, then attach again"
        )
    if torch._C._current_graph_task_id() != -1:
        raise InvalidSetting(
            "attach was called during a backward pass; accepted is any moment between steps: call "
            "it before the training loop"
        )
    left = [name for name, p in model.named_parameters() if p.grad is not None]
    if left:
        raise InvalidSetting(
            f"attach was called after a backward pass began: {len(left)} parameters hold "
            f"gradients that were never exchanged ({left[0]}, ...); attach before the first "
            "backward, or call optimizer.zero_grad(set_to_none=True) first"
        )


def _trained(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters that require a gradient, shared ones once, in order of registration."""
    inner: nn.Module = model
    ignored: Collection[str] = ()
    if isinstance(model, DistributedDataParallel):
        # What DDP was told to ignore never comes to its hook: a step would wait for it for ever.
        inner, ignored = model.module, model.parameters_to_ignore
    params: list[tuple[str, Tensor]] = [
        (name, p) for name, p in inner.named_parameters() if p.requires_grad and name not in ignored
    ]
    if not params:
        raise InvalidSetting(
            "the model has no parameter that requires a gradient; nothing would be exchanged: "
            "attach after requires_grad is set"
        )
    for name, p in params:
        if not p.dtype.is_floating_point:
            raise invalid(
                f"dtype of parameter {name}", p.dtype, "a real floating-point dtype", "freeze it"
            )
    return params


def _agree(
    engine: Engine, model: nn.Module, params: list[tuple[str, Tensor]], settings: Settings
) -> None:
    """Compares fingerprints, then gives every rank the parameters and buffers of rank 0."""
    is_ddp = isinstance(model, DistributedDataParallel)
    shared: dict[str, object] = {
        "exchange": settings.exchange,
        "bucket_cap_mb": settings.bucket_cap_mb,
        "num_channels": settings.num_channels,
        "model": "DistributedDataParallel" if is_ddp else "nn.Module",
    }
    sparse = _sparse_weights(model)
    tensors: list[tuple[str, Tensor, str]] = [
        (name, p, "sparse" if id(p) in sparse else _how(settings, name, p)) for name, p in params
    ]
    if not is_ddp:
        frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        tensors += [(name, p, "frozen") for name, p in frozen]
        tensors += [(name, b, "buffer") for name, b in model.named_buffers()]
    compare(fingerprint(tensors, shared), engine.channels[0])
    if not is_ddp:
        broadcast_all([tensor for _, tensor, _ in tensors], engine.channels[0])


def _how(settings: Settings, name: str, param: Tensor) -> str:
    return "compressed" if settings.compress_if(name, param) else "uncompressed"


def _messages(
    model: nn.Module, params: list[tuple[str, Tensor]], settings: Settings, engine: Engine
) -> list[Message | SparseMessage]:
    """Messages in issue order. Vectors and row-sparse gradients do not take the exchange."""
    sparse = _sparse_weights(model)
    dense = exchange_for(none())

    def exchange_of(name: str, param: Tensor) -> Exchange:
        return settings.exchange if settings.compress_if(name, param) else dense

    def kind(name: str, param: Tensor) -> object:
        return name if id(param) in sparse else exchange_of(name, param) != dense

    @cache
    def cap_bytes(this_kind: object) -> int:
        if settings.bucket_cap_mb is not None:
            return int(settings.bucket_cap_mb * 2**20)
        members = [(name, p) for name, p in params if kind(name, p) == this_kind]
        return default_cap_bytes(members, exchange_of(*members[0]), engine.world)

    made: list[Message | SparseMessage] = []
    for index, members in enumerate(fuse(params, kind=kind, cap_bytes=cap_bytes)):
        name, param = members[0]
        if id(param) in sparse:
            made.append(SparseMessage(index, name, param, engine.rank, engine.world))
        else:
            used = exchange_of(name, param)
            made.append(Message(index, members, used, engine.rank, engine.world))
    return made


def _sparse_weights(model: nn.Module) -> set[int]:
    """Ids of parameters whose module announces row-sparse gradients."""
    return {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
