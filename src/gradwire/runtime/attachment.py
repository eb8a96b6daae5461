"""Attachment: one attach of a model, from the checks of its settings to hooks that exchange."""

from __future__ import annotations

import hashlib
import json
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..compress.none import none
from ..contract import Exchange
from ..errors import invalid
from ..exchange.by_name import exchange_for
from ..kernels.libraries import backend, being_built
from ..planning.default_fusion import NamedParam
from .cautions import warn_of_versions
from .device.backends import AFTER_A_CHANGE, OwnNetwork, connect, network_of
from .failure.integrity import Check
from .failure.membership import ALONE, Membership, join
from .failure.uncaught import leave_by_cause
from .fingerprint import NETWORK, Fingerprint, agree, fingerprint, post_refusal
from .grid.dtensors import refuse_other_shards, reshard, shard_of
from .grid.shards import agree_among_shards, join_shards, one_dimension, outside_of, place_in
from .handle import Handle
from .refusals import refuse_wrong_model
from .settings import Settings, refuse_pairs, sparse_weights, tables, trained
from .step.engine import Engine
from .step.figures import Recorder
from .step.messages import Message, as_reals, refuse_float16
from .step.progress import Progress
from .step.synchroniser import AnyMessage, Synchroniser
from .step.wire import Group

if TYPE_CHECKING:
    from .elastic.heal import Healing
    from .elastic.rejoin import Newcomer
    from .failure.guard import Guard


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


def grid_of(model: nn.Module, group: Any, shards: Any, mesh: Any, settings: Settings) -> Grid:
    """This rank's place, from the groups or the mesh that a user gave."""
    if not hasattr(Store, "clone"):  # since torch 2.8; ranks meet by it
        remedy = "install that: pip install 'torch>=2.8'"
        raise invalid("torch", torch.__version__, "2.8 or newer", remedy)
    warn_of_versions()
    if mesh is not None and group is not None:
        raise invalid("group", group, "None beside mesh=, whose ranks it is", "leave it out")
    found = _group_of(model, group)
    ranks: list[int] = []
    if dist.is_initialized():
        ranks = dist.get_process_group_ranks(found or dist.group.WORLD)
    timeout = settings.patience
    if mesh is None:
        return Grid(join(found, timeout), join_shards(shards, found, timeout), None, ranks, found)
    from .grid.host_mesh import join_mesh

    return Grid(join_mesh(mesh, found, shards, timeout), ALONE, mesh, ranks, found)


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


class Attachment(ABC):
    """One attach of a model; a subclass says what of it is exchanged, and when."""

    model: nn.Module
    settings: Settings
    params: list[NamedParam]
    """The parameters that are exchanged."""
    held: list[NamedParam]
    """This rank's parts of them, as real numbers."""

    @abstractmethod
    def prepare(self) -> Mapping[str, object]:
        """Checks and makes what only this way needs; returns settings that ranks must share."""

    @abstractmethod
    def messages(self, who: Membership) -> list[AnyMessage]:
        """All messages in issue order."""

    @abstractmethod
    def check(self) -> Check:
        """The comparison of what has the same bits on all ranks whenever a step begins."""

    @abstractmethod
    def caution(self) -> None:
        """Warns of settings that can be carried out, and hardly mean what they say."""

    @abstractmethod
    def hook(self, progress: Progress, undo: ExitStack) -> Handle:
        """Hooks the model, whose parameters are the same on all ranks by now."""

    def attach(
        self, model: nn.Module, settings: Settings, grid: Grid, newcomer: Newcomer | None = None
    ) -> Handle:
        """Checks the arguments, agrees with the other ranks and connects.

        A rank that refuses tells the others, so none waits. A ``newcomer`` agrees with a run.
        """
        who, shards = grid.who, grid.shards
        leave_by_cause()
        try:
            reshard(model)
            refuse_wrong_model(model)
            refuse_other_shards(model, grid.ranks, grid.mesh)
            self.model = model
            self.settings = settings = settings.checked(grid.mesh, who)
            self.params = trained(model)
            self.held = [(name, as_reals(shard_of(param))) for name, param in self.params]
            refuse_pairs(model, self.params, settings, shards.world)
            own = self._fingerprint(shards, self.prepare())
            told = json.dumps(own)
            if newcomer is not None:
                backend()  # before others wait for this rank
                who = newcomer.ask(own, settings.timeout)
            with being_built():  # Kernels that no run has built yet: now, not in the first step.
                messages = self.messages(who)
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
        healing = None
        if settings.on_failure == "shrink":
            from .elastic.heal import Healing

            healing = Healing(
                self._shared, settings.optimizer, settings.scaler, settings.timeout, told
            )
        return self._connect(grid._replace(who=who), messages, networks, healing, newcomer)

    @property
    def carried(self) -> list[NamedParam]:
        """The parts in ``held`` that have elements."""
        return [one for one in self.held if one[1].numel()]

    def _connect(
        self,
        grid: Grid,
        messages: list[AnyMessage],
        networks: Sequence[OwnNetwork] | None,
        healing: Healing | None,
        newcomer: Newcomer | None,
    ) -> Handle:
        """Connects the ranks and hooks the model; what is begun is undone if any of it fails."""
        settings, is_ddp = self.settings, isinstance(self.model, DistributedDataParallel)
        undo, recorder = ExitStack(), Recorder(settings.trace_steps)
        engine_of = partial(
            Engine,
            num_channels=0 if self.is_left_to_ddp(messages) else settings.channels,
            timeout=settings.timeout,
            on_span=recorder.add,
            shards=grid.shards,
            ranks_per_host=settings.ranks_per_host,
            checksums=settings.checksums,
        )
        engine = newcomer.enter(engine_of, healing, messages) if newcomer else engine_of(grid.who)
        undo.callback(engine.close)
        try:
            serves = AFTER_A_CHANGE
            if networks is not None:
                serves = connect(engine, settings.backend, networks, messages)
            if not newcomer and engine.world > 1 and not is_ddp:
                engine.broadcast(self._shared())
            self.caution()
            synchroniser = Synchroniser(engine, messages, dict(self.held), self.check())
            progress = Progress(
                synchroniser, recorder, self.params, settings.scaler, _guard(settings)
            )
            progress.healing, progress.newcomer = healing, newcomer
            handle = self.hook(progress, undo)
            handle.backend = serves
            of_all = dist.group.WORLD if dist.is_initialized() else None
            handle.group = newcomer.group if newcomer else grid.group or of_all
        except BaseException:
            undo.close()
            raise
        # A model that is dropped without detach takes its threads with it, once its messages end.
        weakref.finalize(handle, engine.finish_and_close)
        return handle

    def is_left_to_ddp(self, messages: Sequence[object]) -> bool:
        """Whether DDP's own reducer averages the model's gradients; the same on all ranks.

        It does so for a DDP model of which every gradient is dense, unless the user asks for what
        only gradwire's messages have: a size, a number of channels, another time-out. A plan has
        messages of its own, and a pilot may plan some.
        """
        exchange, is_ddp = self.settings.exchange, isinstance(self.model, DistributedDataParallel)
        if not is_ddp or self.settings.asks_for_messages or not isinstance(exchange, Exchange):
            return False
        dense = exchange_for(none())
        return all(isinstance(one, Message) and one.exchange == dense for one in messages)

    def _shared(self) -> list[Tensor]:
        """Every tensor that ranks must share, as they hold it."""
        return [tensor for _, tensor, _ in self._tensors()]

    def _tensors(self) -> list[tuple[str, Tensor, str]]:
        """Every tensor that ranks must share, as they hold it, its name and how it is treated."""
        model, sparse = self.model, sparse_weights(self.model)

        def how(name: str, param: Tensor) -> str:
            if id(param) in sparse:
                return "sparse"
            return "compressed" if self.settings.compress_if(name, param) else "uncompressed"

        tensors = [(name, param, how(name, param)) for name, param in self.held]
        if not isinstance(model, DistributedDataParallel):
            frozen = [one for one in model.named_parameters() if not one[1].requires_grad]
            for kind, found in ("frozen", frozen), ("buffer", model.named_buffers()):
                tensors += [(name, as_reals(shard_of(one)), kind) for name, one in found]
        return tensors

    def _fingerprint(self, shards: Membership, special: Mapping[str, object]) -> Fingerprint:
        model, settings = self.model, self.settings
        is_ddp = isinstance(model, DistributedDataParallel)
        shared: dict[str, object] = {
            "exchange": _digest(settings),
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
            shared["embeddings' tables"] = [name for name, p in self.held if id(p) in widths]
        if _same_threads(settings):
            shared["torch.get_num_threads()"] = torch.get_num_threads()
        return fingerprint(self._tensors(), shared)


def _guard(settings: Settings) -> Guard | None:
    """The comparisons of means with dense ones, if they are asked for."""
    if settings.guard_every is None:
        return None
    from .failure.guard import Guard

    return Guard(settings.guard_every)


def _same_threads(settings: Settings) -> bool:
    if isinstance(settings.exchange, Exchange):
        return settings.exchange.same_threads
    if settings.plan is None:
        return True  # as what a pilot may choose asks for
    from ..planning.exchanges import exchanges_of

    return any(one.same_threads for one in exchanges_of(settings.plan).values())


def _digest(settings: Settings) -> object:
    """The value that ranks compare for an exchange: a digest for a plan, which may be long."""
    if (plan := settings.plan) is None:
        return settings.exchange
    text = hashlib.sha256(plan.to_json().encode()).hexdigest()
    return f"plan of {plan.planner} for {plan.model}, SHA-256 {text[:16]}"
