"""attach: from here on gradwire exchanges a model's gradients, under an unchanged training loop.

What only some arguments ask for (a plan, newcomers, hosts, DDP) is imported where they are given.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..contract import Compressor, Exchange
from ..errors import invalid
from ..kernels.build import backend
from ..planning.default_fusion import NamedParam, matrices
from .attachment import Attachment
from .backward import EVERY_BACKWARD
from .device.backends import AFTER_A_CHANGE, OwnNetwork, connect, network_of
from .failure.integrity import DEFAULT_CHECK_EVERY
from .failure.membership import ALONE, Membership, join
from .failure.uncaught import leave_by_cause
from .fingerprint import NETWORK, Fingerprint, agree, fingerprint, post_refusal
from .grid.dtensors import has_dtensors, refuse_other_shards, reshard, shard_of
from .grid.shards import agree_among_shards, join_shards, one_dimension, outside_of, place_in
from .handle import Handle
from .refusals import refuse_wrong_model, sole_ddp
from .settings import (
    DEFAULT_TIMEOUT,
    Choices,
    Settings,
    plan_in,
    resolve,
    sparse_weights,
    tables,
    trained,
)
from .step.engine import Engine
from .step.figures import Recorder
from .step.messages import as_reals, refuse_float16
from .step.progress import Progress
from .step.synchroniser import AnyMessage, Synchroniser
from .step.wire import Group

if TYPE_CHECKING:
    from ..planning.data.plan import Plan
    from .controls import Pilot
    from .elastic.heal import Healing
    from .elastic.rejoin import Newcomer
    from .failure.guard import Guard


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
    newcomer = _newcomer(rejoin, on_failure, optimizer, (group, shards, mesh))
    grid = grid_of(model := sole_ddp(model), group, shards, mesh, timeout)
    given = optimizer, bucket_cap_mb, num_channels, compress_if, timeout, trace_steps, scaler
    every = guard_every, check_every, checksums, on_failure, backend
    return attach_in(EVERY_BACKWARD, model, exchange, Choices(*given, *every), grid, newcomer)


def _newcomer(
    rejoin: Store | None, on_failure: str, optimizer: Optimizer | None, places: tuple[object, ...]
) -> Newcomer | None:
    """This process as a newcomer, if it is given the store of a run."""
    if rejoin is None:
        return None
    from .elastic.rejoin import Newcomer

    return Newcomer(rejoin, on_failure, optimizer, places)


class Grid(NamedTuple):
    """This rank's two groups: those that average with it, and those that hold the other parts.

    ``ranks`` are the numbers of the first among all ranks, ``group`` is its process group
    (None: that of all), and ``mesh`` tells which are on one host.
    """

    who: Membership
    shards: Membership
    mesh: DeviceMesh | str | None
    ranks: Sequence[int]
    group: Group | None = None


def grid_of(
    model: nn.Module, group: Any, shards: Any, mesh: Any, timeout: timedelta = DEFAULT_TIMEOUT
) -> Grid:
    """This rank's place, from the groups or the mesh that a user gave."""
    if not hasattr(Store, "clone"):  # since torch 2.8; ranks meet by it
        remedy = "install that: pip install 'torch>=2.8'"
        raise invalid("torch", torch.__version__, "2.8 or newer", remedy)
    if not isinstance(timeout, timedelta):
        timeout = DEFAULT_TIMEOUT  # what was given is refused later, when the others can be told
    if mesh is not None and group is not None:
        raise invalid("group", group, "None beside mesh=, whose ranks it is", "leave it out")
    found = _group_of(model, group)
    ranks: list[int] = []
    if dist.is_initialized():
        ranks = dist.get_process_group_ranks(found or dist.group.WORLD)
    if mesh is None:
        return Grid(join(found, timeout), join_shards(shards, found, timeout), None, ranks, found)
    from .grid.hosts import join_mesh

    return Grid(join_mesh(mesh, found, shards, timeout), ALONE, mesh, ranks, found)


def attach_in(
    way: Attachment,
    model: nn.Module,
    exchange: Any,
    choices: Choices,
    grid: Grid,
    newcomer: Newcomer | None = None,
) -> Handle:
    """Checks the arguments, agrees with the other ranks and connects.

    A rank that refuses tells the others, so that none waits. A ``newcomer`` agrees with a run.
    """
    who, shards, mesh, ranks, _ = grid
    leave_by_cause()
    try:
        reshard(model)
        refuse_wrong_model(model)
        refuse_other_shards(model, ranks, mesh)
        settings = Settings(resolve(exchange), _ranks_per_host(mesh, who), *choices)
        params, held = _params(model, settings)
        special = way.prepare(model, params, settings)
        _refuse_pilot_among_shards(settings, shards, params)
        own = _fingerprint(model, held, settings, shards, special)
        backend()  # Builds kernels that no run has built yet: now, not inside the first step.
        told = json.dumps(own)
        if newcomer is not None:
            who = newcomer.ask(own, settings.timeout)
        messages = way.messages(model, [one for one in held if one[1].numel()], settings, who)
        refuse_float16(messages, settings.scaler)
        own[NETWORK] = network_of(messages)
    except Exception as error:
        post_refusal(who, error)
        post_refusal(shards, error)
        raise
    try:
        networks = agree(who, own, settings.timeout) if newcomer is None else None
    except Exception as error:
        post_refusal(shards, error)
        raise
    agree_among_shards(who, shards, messages, settings.channels, settings.timeout)
    grid, healing = grid._replace(who=who), None
    if settings.on_failure == "shrink":
        from .elastic.heal import Healing

        shared = partial(_shared, model, held, settings)
        healing = Healing(shared, settings.optimizer, settings.scaler, settings.timeout, told)
    return _connect(way, grid, model, params, held, settings, messages, networks, healing, newcomer)


def _ranks_per_host(mesh: Any, who: Membership) -> int:
    """The number of ranks on each host, which a mesh tells."""
    if mesh is None:
        return 1
    from .grid.hosts import ranks_per_host

    return ranks_per_host(mesh, who)


def _group_of(model: nn.Module, group: Group | DeviceMesh | None) -> Group | None:
    """The process group that the exchanges are to run in."""
    found: Group | None = one_dimension("group", group, "data-parallel", 0)
    if isinstance(model, DistributedDataParallel):
        if found is not None:
            raise invalid("group", found, "None for a DDP model", "DDP's own group is used")
        found = model.process_group
    if dist.is_initialized() and dist.get_rank(found) < 0:
        raise outside_of("group")
    return found


def _params(model: nn.Module, settings: Settings) -> tuple[list[NamedParam], list[NamedParam]]:
    """The parameters that are exchanged, and what this rank holds of them.

    Raises where a plan cannot be carried out for these.
    """
    params = trained(model)
    held = [(name, as_reals(shard_of(param))) for name, param in params]
    if (plan := settings.plan) is not None:
        from .step.planned import check_for

        check_for(plan, held, sparse_weights(model))
    return params, held


def _connect(
    way: Attachment,
    grid: Grid,
    model: nn.Module,
    params: list[NamedParam],
    held: list[NamedParam],
    settings: Settings,
    messages: list[AnyMessage],
    networks: Sequence[OwnNetwork] | None,
    healing: Healing | None,
    newcomer: Newcomer | None,
) -> Handle:
    """Connects the ranks and hooks the model; what is begun is undone if any of it fails."""
    undo, recorder = ExitStack(), Recorder(settings.trace_steps)
    engine_of = partial(
        Engine,
        num_channels=_num_channels(model, settings, messages),
        timeout=settings.timeout,
        on_span=recorder.add,
        shards=grid.shards,
        ranks_per_host=settings.ranks_per_host,
        checksums=settings.checksums,
    )
    engine = (
        engine_of(grid.who) if newcomer is None else newcomer.enter(engine_of, healing, messages)
    )
    undo.callback(engine.close)
    try:
        serves = AFTER_A_CHANGE
        if networks is not None:
            serves = connect(engine, settings.backend, networks, messages)
        if not newcomer and engine.world > 1 and not isinstance(model, DistributedDataParallel):
            engine.broadcast(_shared(model, held, settings))
        way.caution(model, params, settings)
        check = way.check(params, settings)
        synchroniser = Synchroniser(engine, messages, dict(held), check)
        progress = Progress(synchroniser, recorder, params, settings.scaler, _guard(settings))
        progress.healing, progress.newcomer = healing, newcomer
        handle = way.hook(model, params, settings, progress, undo)
        handle.backend = serves
        of_all = dist.group.WORLD if dist.is_initialized() else None
        handle.group = newcomer.group if newcomer else grid.group or of_all
    except BaseException:
        undo.close()
        raise
    # A model that is dropped without detach takes its threads with it, once its messages are done.
    weakref.finalize(handle, engine.finish_and_close)
    return handle


def _guard(settings: Settings) -> Guard | None:
    """The comparisons of means with dense ones, if they are asked for."""
    if settings.guard_every is None:
        return None
    from .failure.guard import Guard

    return Guard(settings.guard_every)


def _num_channels(model: nn.Module, settings: Settings, messages: list[AnyMessage]) -> int:
    """The channels of this model's messages; none where DDP's own reducer averages."""
    if isinstance(model, DistributedDataParallel):
        from .ddp.reducer import is_left_to_ddp

        if is_left_to_ddp(model, settings, messages):
            return 0
    return settings.channels


def _shared(model: nn.Module, held: list[NamedParam], settings: Settings) -> list[Tensor]:
    """Every tensor that ranks must share, as they hold it."""
    return [tensor for _, tensor, _ in _tensors(model, held, settings)]


def _tensors(
    model: nn.Module, held: list[NamedParam], settings: Settings
) -> list[tuple[str, Tensor, str]]:
    """Every tensor that ranks must share, as they hold it, its name and how it is treated."""
    sparse = sparse_weights(model)

    def how(name: str, param: Tensor) -> str:
        if id(param) in sparse:
            return "sparse"
        return "compressed" if settings.compress_if(name, param) else "uncompressed"

    tensors = [(name, p, how(name, p)) for name, p in held]
    if not isinstance(model, DistributedDataParallel):
        frozen: list[NamedParam] = [
            (name, p) for name, p in model.named_parameters() if not p.requires_grad
        ]
        tensors += [(name, as_reals(shard_of(p)), "frozen") for name, p in frozen]
        buffers = model.named_buffers()
        tensors += [(name, as_reals(shard_of(b)), "buffer") for name, b in buffers]
    return tensors


def _fingerprint(
    model: nn.Module,
    held: list[NamedParam],
    settings: Settings,
    shards: Membership,
    special: Mapping[str, object],
) -> Fingerprint:
    is_ddp = isinstance(model, DistributedDataParallel)
    shared: dict[str, object] = {
        "exchange": _digest(settings.exchange),
        "bucket_cap_mb": settings.bucket_cap_mb,
        "num_channels": settings.channels,
        "backend": settings.backend,
        "may be left to DDP": not settings.asks_for_messages,
        "model": "DistributedDataParallel" if is_ddp else "nn.Module",
        "shards": place_in(shards, model),
        "ranks per host": settings.ranks_per_host,
        "scaler": None if settings.scaler is None else "given",
        "guard_every": settings.guard_every,
        "check_every": settings.check_every,
        "checksums": settings.checksums,
        "on_failure": settings.on_failure,
        "optimizer": settings.on_failure == "shrink" and type(settings.optimizer).__name__,
        **special,
    }
    if settings.plan is None:
        widths = tables(model)
        shared["embeddings' tables"] = [name for name, p in held if id(p) in widths]
    if _same_threads(settings.exchange):
        shared["torch.get_num_threads()"] = torch.get_num_threads()
    return fingerprint(_tensors(model, held, settings), shared)


def _same_threads(exchange: Exchange | Plan | Pilot) -> bool:
    if isinstance(exchange, Exchange):
        return exchange.same_threads
    if (plan := plan_in(exchange)) is None:
        return True  # as what a pilot may choose asks for
    from ..planning.exchanges import exchanges_of

    return any(one.same_threads for one in exchanges_of(plan).values())


def _digest(exchange: Exchange | Plan | Pilot) -> object:
    """The value that ranks compare for an exchange: a digest for a plan, which may be long."""
    if (plan := plan_in(exchange)) is None:
        return exchange
    text = hashlib.sha256(plan.to_json().encode()).hexdigest()
    return f"plan of {plan.planner} for {plan.model}, SHA-256 {text[:16]}"


def _refuse_pilot_among_shards(
    settings: Settings, shards: Membership, params: list[NamedParam]
) -> None:
    if settings.pilot is None:
        return
    name, remedy = repr(settings.exchange), "attach an exchange, or a plan, instead"
    if shards.world > 1:
        raise invalid("shards", shards.world, f"None beside {name}", remedy)
    if has_dtensors(params):
        raise invalid("model", "one of DTensors", f"plain parameters beside {name}", remedy)
