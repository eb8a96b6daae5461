"""attach: gradwire exchanges a model's gradients under an unchanged training loop.

An attach checks its settings, agrees with the other ranks, connects, and hooks the
model. Modules for a plan, newcomers, hosts or DDP are imported only if the arguments
need them.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
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

from ..compress.none import none
from ..contract import Compressor, Exchange
from ..contract.registry import extension
from ..contract.spec import NamedParam
from ..errors import InvalidSetting, invalid
from ..exchange.by_name import exchange_for
from ..exchange.error_feedback import chooses_scheme
from ..kernels.libraries import being_built
from .agreement.fingerprint import (
    NETWORK,
    SETTINGS,
    Fingerprint,
    agree,
    fingerprint,
    refusing,
)
from .agreement.versions import warn_of_versions
from .engine.backends import AFTER_A_CHANGE, OwnNetwork, choose, connect, network_of
from .engine.engine import Engine
from .fused import fused_messages
from .grid.dtensors import (
    has_dtensors,
    island_of,
    refuse_other_shards,
    reshard,
    shard_of,
    sharded_modules,
)
from .grid.reals import as_reals
from .grid.shards import (
    join_mesh,
    join_shards,
    one_dimension,
    outside_of,
    place_in,
)
from .handle import Handle
from .liveness.blame import leave_by_cause
from .liveness.membership import (
    ALONE,
    MEETING,
    Membership,
    Run,
    join,
    join_ranks,
    run_of,
)
from .pairs import Facts, Feature, refusal_of, refuse_pairs, warn_of_pairs
from .settings import (
    FailurePolicy,
    Options,
    Settings,
    exchanges_in,
    or_defaults,
    sparse_weights,
    tables,
    takes_options,
    trained,
)
from .step.figures import Recorder
from .step.hooks import ModuleHooks, UnattachedParameters
from .step.integrity import digests_of
from .step.local_gradients import LocalGradients
from .step.messages import Message
from .step.progress import Progress
from .step.refusals import refuse_own_writes, refuse_wrong_model, sole_ddp
from .step.report import Check
from .step.scaling import observe, refuse_float16, scale_of, travels_scaled
from .step.shard_lengths import agree_among_shards
from .step.synchroniser import Synchroniser
from .transport.wire import Group

if TYPE_CHECKING:
    from ..exchange.sends import SchedulerOf
    from ..planning.data.plan import Plan
    from .controls import Pilot
    from .ddp.comm_hook import DDPHooks, DDPInTurn
    from .overlap.overlap import Overlap
    from .survive.rejoin import Healing, Newcomer


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

    After ``loss.backward()`` every ``.grad`` is the mean over ranks. The training loop
    stays as it is. All ranks must call this with the same arguments. Each backward pass
    must reach at least one parameter of the model that requires a gradient.

    Args:
        model: An ``nn.Module``, or a ``DistributedDataParallel`` module, which another
            module may wrap. A plain module gets rank 0's parameters and buffers.
        exchange: One of these:

            * a compressor of ``gw.compress``, or its name. The collective that suits
              the compressor is chosen, and error feedback is added where it is needed.
            * an exchange, as ``gw.pair`` makes it.
            * a plan (``gw.plan``), or its file. It decides which gradients share a
              message, the order of messages, and the exchange of each.
            * ``"auto"`` (``gw.pilot.auto``), which chooses a plan while the model
              trains.
            * a planner's name (``gw.pilot.by_planner``). The first steps are measured,
              and then this planner makes one plan.
        optimizer: The optimizer of ``model``. A plan that overlaps the next forward
            pass needs it: each layer's forward then waits for its own means. So does
            a job that new processes may join (``FailurePolicy(rejoin=)``). Default:
            none.
        scaler: The ``GradScaler`` of the loss. Gradients are exchanged without its
            scale. Default: none.
        group: The process group that averages, or the data-parallel dimension of a
            ``DeviceMesh``. All of its ranks hold the same shards of DTensors. Default:
            all ranks, or the DDP model's group.
        mesh: Hosts of several ranks: a ``DeviceMesh`` of ("hosts", "local"), or
            ``"torchrun"``. The ranks of a host first add up their gradients, then each
            exchanges a share of the sum. Default: each rank exchanges all gradients.
        options: How gradients travel, as ``gw.Options``. Default: ``gw.Options()``.
        failure: The treatment of lost ranks, as ``gw.FailurePolicy``. Default: the run
            ends.

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
    settings = Settings(exchange, optimizer, scaler, *or_defaults(options, failure))
    newcomer = newcomer_of(settings, optimizer, (group, mesh))
    model = sole_ddp(model)
    grid = grid_of(model, group, mesh, settings)
    return Attachment().attach(model, settings, grid, newcomer)


def newcomer_of(
    settings: Settings,
    optimizer: Optimizer | None,
    places: tuple[object, ...],
    *,
    asks_again: bool = False,
) -> Newcomer | None:
    """The way of this process into a running job; None if it starts with the others.

    ``places`` are the user's ``group`` and ``mesh``, which a newcomer must leave out.
    """
    if (store := getattr(settings.failure, "rejoin", None)) is None:
        return None
    from .survive.rejoin import Newcomer

    shards = getattr(settings.options, "shards", None)
    on_failure = settings.failure.on_failure
    newcomer = Newcomer(store, on_failure, optimizer, (*places, shards))
    newcomer.asks_again = asks_again
    return newcomer


def _scheduler_of(plan: Plan | None, world: int | None) -> SchedulerOf | None:
    """Makes the scheduler of a plan's sends; None if they travel in order.

    ``world`` is None for a newcomer, as others have checked the plan.
    """
    if plan is None or plan.bulk is None:
        return None
    rank = plan.bulk.rank
    if world is not None and rank >= world:
        accepted = f"one of {world} ranks"
        raise invalid("plan.bulk.rank", rank, accepted, "name another")
    return partial(extension("coordinator", "a plan's bulk"), plan.bulk)


_COMPARED_ELSEWHERE = (
    "compress_if",
    "shards",
    "trace_steps",
    "timeout",
    "store",
    "rejoin",
)
"""Fields of options and failure policy that ranks compare in another form, or never."""


class Grid(NamedTuple):
    """This rank's two groups of ranks.

    ``who`` are the ranks that average with it, and ``shards`` the ranks with the other
    shards of its layers. ``group`` is the process group of ``who`` (None: of all
    ranks). ``mesh`` says which of its ranks are on one host.
    """

    who: Membership
    shards: Membership
    mesh: DeviceMesh | str | None
    group: Group | None


def grid_of(model: nn.Module, group: Any, mesh: Any, settings: Settings) -> Grid:
    """This rank's place, from the groups or the mesh that a user gave."""
    if not hasattr(Store, "clone"):  # each waiting thread needs a connection of its own
        raise invalid(
            "torch",
            torch.__version__,
            "2.9 or newer",
            "install that: pip install 'torch>=2.9'",
        )
    warn_of_versions()
    settings.choose_store()
    is_module = isinstance(model, nn.Module)
    if mesh is not None and is_module and has_dtensors(model.named_parameters()):
        raise refusal_of(Feature.MESH, Feature.DTENSORS).error(mesh)
    if mesh is not None and group is not None:
        raise invalid(
            "group", group, "None beside mesh=, which names the ranks", "leave it out"
        )
    chosen = _group_of(model, group)
    timeout = settings.patience
    shards = getattr(settings.options, "shards", None)
    if mesh is None:
        who = join(chosen, timeout)
        return Grid(who, join_shards(shards, chosen, timeout), None, chosen)
    if shards is not None:
        raise refusal_of(Feature.SHARDS, Feature.MESH).error(shards)
    return Grid(join_mesh(mesh, chosen, timeout), ALONE, mesh, chosen)


def _group_of(model: nn.Module, group: Group | DeviceMesh | None) -> Group | None:
    """The process group in which the exchanges run."""
    chosen: Group | None = one_dimension("group", group, "data-parallel", 0)
    if isinstance(model, DistributedDataParallel):
        if chosen is not None:
            raise invalid(
                "group", chosen, "None for a DDP model", "DDP's own group is used"
            )
        chosen = model.process_group
    if dist.is_initialized() and dist.get_rank(chosen) < 0:
        raise outside_of("group")
    return chosen


class Attachment:
    """One attach of a model, whose gradients are exchanged in every backward pass.

    A subclass may exchange something else, at other times.
    """

    way = "attach"
    """The function that a user has called, as `pairs` names it."""
    quorum: int | None = None
    """The quorum of local steps in partial rounds, if it is such a call."""
    serves = False
    """Whether this rank only aggregates."""
    model: nn.Module
    settings: Settings
    params: list[NamedParam]
    """The parameters that are exchanged."""
    held: list[NamedParam]
    """This rank's parts of them, as real numbers."""
    newcomer: Newcomer | None
    """The way of this process into a running job; None if it starts with the others."""
    run: Run
    """The ranks that train together."""
    engine_of: Callable[[Membership], Engine]
    """A function that connects ranks as this attach does."""
    backend: dict[str, Any]
    """The back ends that carry messages, for ``stats()``."""
    by_replica: bool
    """Whether ranks that hold DTensors together go on or leave together."""
    everyone: Membership
    """The ranks that notice together that one of them is lost."""

    def prepare(self) -> Mapping[str, object]:
        """A subclass's own checks and parts; returns settings that ranks must share."""
        return {}

    def attach(
        self,
        model: nn.Module,
        settings: Settings,
        grid: Grid,
        newcomer: Newcomer | None = None,
    ) -> Handle:
        """Checks the arguments, builds messages, agrees with other ranks and connects.

        A rank that refuses announces this, so that no rank waits for it. ``listeners``
        are the groups of ranks that hear it. A ``newcomer`` agrees with the ranks of a
        running job.
        """
        leave_by_cause()
        self.newcomer = newcomer
        island = island_of(model)
        self.by_replica = settings.survives and bool(island)
        if self.by_replica or (island and self.way != "attach"):
            grid = grid._replace(shards=join_ranks(island, settings.patience))
        with refusing(grid.who, grid.shards) as listeners:
            self._check(model, settings, grid)
            fingerprint = self._fingerprint(grid.shards, self.prepare())
            announced = json.dumps(fingerprint)
            if newcomer is not None:
                # Kernels are built now, as the other ranks wait once it has asked.
                with being_built():
                    pass
                who = newcomer.ask(fingerprint, self.settings.failure.timeout)
                grid = grid._replace(who=who)
                listeners[0] = who
            messages = self._build(grid.who, fingerprint)
            networks = self._agree(grid, messages, fingerprint, listeners)
        return self._connect(grid, messages, networks, self._healing(announced))

    def _check(self, model: nn.Module, settings: Settings, grid: Grid) -> None:
        """Refuses a model and settings that cannot be used, and keeps both."""
        reshard(model)
        refuse_wrong_model(model)
        self.model = model
        self.settings = settings.checked(grid.mesh, grid.who)
        self.params = trained(model)
        facts = Facts(model, self.params, self.settings, self.way)
        refuse_pairs(facts._replace(quorum=self.quorum))
        who = grid.who
        first = who.world - self.settings.servers
        if (who.rank >= first) != self.serves:
            raise InvalidSetting(
                f"this is rank {who.rank} of {who.world}: call gw.attach on ranks "
                f"below {first}, and gw.serve on all others"
            )
        refuse_other_shards(model, grid.who.ranks)
        is_compared = self.settings.failure.check_every is not None
        if grid.who.world > 1 and self.way == "attach" and is_compared:
            refuse_own_writes(model)
        self.held = [(name, as_reals(shard_of(param))) for name, param in self.params]

    def _build(self, who: Membership, fingerprint: Fingerprint) -> list[Message]:
        """Makes the messages; adds facts of them to the fingerprint."""
        # Kernels that no run has built yet are built now, not in the first step.
        with being_built():
            messages = self.messages(who)
        scaler = self.settings.scaler
        refuse_float16(messages, scaler)
        fingerprint[NETWORK] = network_of(messages)
        if any(travels_scaled(message.exchange) for message in messages):
            fingerprint[SETTINGS]["scale of the scaler"] = repr(scale_of(scaler))
        return messages

    def _agree(
        self,
        grid: Grid,
        messages: list[Message],
        fingerprint: Fingerprint,
        listeners: list[Membership],
    ) -> list[OwnNetwork] | None:
        """Compares settings and messages with other ranks; all raise if they differ.

        Returns the ranks' networks. They are None for a newcomer, as the run compared
        its own when the newcomer asked.
        """
        timeout = self.settings.failure.timeout
        networks = None
        fingerprint["replica"] = grid.shards.ranks
        # ``agree`` itself has this rank's group hear a refusal.
        listeners.remove(grid.who)
        if self.newcomer is None:
            announced = agree(grid.who, fingerprint, timeout)
            networks = [one[NETWORK] for one in announced]
        listeners.clear()
        # Shards of other lengths may travel in other messages.
        alike = messages if self.way == "attach" else []
        settings = fingerprint[SETTINGS]
        self.everyone = grid.who
        if self.by_replica:
            alike = []
            ranks = tuple(rank for one in announced for rank in one["replica"])
            # plans may differ, as shards may be of other lengths
            settings = {"ranks of all replicas": ranks}
            self.everyone = join_ranks(ranks, timeout)
        agree_among_shards(grid.who, grid.shards, settings, alike, timeout)
        return networks

    def _healing(self, announced: str) -> Healing | None:
        """The state that a newcomer takes over; None if no newcomer may come."""
        failure = self.settings.failure
        if not self.settings.survives:
            return None
        from .survive.rejoin import Healing

        optimizer = self.settings.optimizer
        scaler = self.settings.scaler
        return Healing(self._shared, optimizer, scaler, failure.timeout, announced)

    def heal(
        self, healing: Healing | None, messages: Sequence[Message], engine: Engine
    ) -> Any:
        """Takes over, as a newcomer, the state that all ranks share.

        Returns a value that this rank announces to them; None for none.
        """
        assert healing is not None, "refused without on_failure='shrink'"
        healing.receive(messages, engine)

    @property
    def carried(self) -> list[NamedParam]:
        """The parts in ``held`` that have elements."""
        return [param for param in self.held if param[1].numel()]

    def _connect(
        self,
        grid: Grid,
        messages: list[Message],
        networks: Sequence[OwnNetwork] | None,
        healing: Healing | None,
    ) -> Handle:
        """Connects the ranks and hooks the model; if a part fails, all is undone."""
        settings = self.settings
        newcomer = self.newcomer
        backend = settings.options.backend
        if networks is not None:
            # All ranks refuse alike here, before any connects. A connected rank would
            # report instead that the others close.
            choose(backend, networks, settings.ranks_per_host)
        recorder = Recorder(settings.options.trace_steps)
        world = None if newcomer is not None else grid.who.world
        is_idle = self.quorum is not None or self.is_left_to_ddp(messages)
        self.engine_of = engine_of = partial(
            Engine,
            num_channels=0 if is_idle else settings.channels,
            timeout=settings.failure.timeout,
            on_span=recorder.add,
            shards=ALONE if self.by_replica else grid.shards,
            ranks_per_host=settings.ranks_per_host,
            ranks_per_replica=grid.shards.world if self.by_replica else 1,
            checksums=settings.failure.checksums,
            scheduler_of=_scheduler_of(settings.plan, world),
        )
        if newcomer is not None:
            heal = partial(self.heal, healing, messages)
            engine = newcomer.enter(engine_of, heal, settings.failure.timeout)
            group = newcomer.admitted.group
        else:
            engine = engine_of(self.everyone)
            if engine.num_channels and engine.rank == 0:
                engine.sweep(MEETING)  # all have read their notes of it by now
            group = grid.group or (dist.group.WORLD if dist.is_initialized() else None)
        undo = ExitStack()
        undo.callback(engine.close)
        try:
            self.backend = AFTER_A_CHANGE
            if networks is not None:
                self.backend = connect(engine, backend, networks, messages)
            if newcomer is None and engine.world > 1 and not self.is_ddp:
                if is_idle:
                    engine.open_beside("attach", engine.timeout)
                engine.broadcast(_unequal(self._shared(), engine))
            warn_of_pairs(
                Facts(self.model, self.params, settings, self.way, self.optimizer)
            )
            if settings.servers:
                engine.open_to_servers(settings.servers)
            synchroniser = Synchroniser(engine, messages, dict(self.held), self.check())
            progress = Progress(synchroniser, recorder, self.params, settings.scaler)
            undo.callback(observe(settings.scaler, progress))
            if (every := settings.options.guard_every) is not None:
                progress.compare(every)
            self.healing = healing
            # the store may fall silent, which the engine notices meanwhile
            name = engine.meanwhile("attach", partial(run_of, engine.who))
            self.run = Run(name, group)
            handle = self.hook(progress, undo)
        except BaseException:
            undo.close()
            raise
        # A model that is dropped without detach takes its threads with it, once its
        # messages end.
        weakref.finalize(handle, engine.finish_and_close)
        return handle

    @property
    def is_ddp(self) -> bool:
        """Whether the model is a DDP model."""
        return isinstance(self.model, DistributedDataParallel)

    def is_left_to_ddp(self, messages: Sequence[Message]) -> bool:
        """Whether DDP's own reducer averages the model's gradients, on all ranks alike.

        It does if all gradients of a DDP model are dense. It does not if a setting asks
        for gradwire's messages (``Settings.asks_for_messages``). Nor does it with a
        plan, which has messages of its own, or a pilot, which may plan some.
        """
        exchange = self.settings.exchange
        if (
            not self.is_ddp
            or self.settings.asks_for_messages
            or not isinstance(exchange, Exchange)
        ):
            return False
        dense = exchange_for(none())
        return all(message.exchange == dense for message in messages)

    def _shared(self) -> list[Tensor]:
        """Every tensor that ranks must share, as they hold it."""
        return [tensor for _, tensor, _ in self._tensors()]

    def _tensors(self) -> list[tuple[str, Tensor, str]]:
        """Every tensor that ranks must share, with its name and how it is treated."""
        model = self.model
        sparse = sparse_weights(model)
        asks = self.settings.options.compress_if

        def how(name: str, param: Tensor) -> str:
            if id(param) in sparse:
                return "sparse"
            return "compressed" if asks(name, param) else "uncompressed"

        tensors = [(name, param, how(name, param)) for name, param in self.held]
        if self.is_ddp:
            return tensors
        for name, param in model.named_parameters():
            if not param.requires_grad:
                tensors.append((name, as_reals(shard_of(param)), "frozen"))
        for name, buffer in model.named_buffers():
            tensors.append((name, as_reals(shard_of(buffer)), "buffer"))
        return tensors

    def _fingerprint(
        self, shards: Membership, special: Mapping[str, object]
    ) -> Fingerprint:
        model = self.model
        settings = self.settings
        shared: dict[str, object] = {
            "call": f"gw.{self.way}",
            "exchange": _digest(settings),
            **{
                key: settings.fields[key]
                for key in settings.fields
                if key not in _COMPARED_ELSEWHERE
            },
            "num_channels": settings.channels,
            "may be left to DDP": not settings.asks_for_messages,
            "model": "DistributedDataParallel" if self.is_ddp else "nn.Module",
            "shards": place_in(shards, model),
            "ranks per host": settings.ranks_per_host,
            "scaler": settings.scaler
            and ("given" if settings.scaler.is_enabled() else "disabled"),
            "compressors that are measured": settings.pilot
            and [*settings.pilot.compressors],
            "optimizer": settings.survives and type(settings.optimizer).__name__,
            **special,
        }
        used = exchanges_in(settings.exchange)
        chooses = any(map(chooses_scheme, used))
        if settings.plan is None:  # a plan names the scheme of rows
            widths = tables(model)
            shared["embeddings' tables"] = [
                name for name, p in self.held if id(p) in widths
            ]
            chooses = chooses or bool(widths or sparse_weights(model))
        if chooses:
            # a step may choose among them
            from ..exchange.sparse_schemes import schemes

            shared["sparse schemes installed"] = [*schemes()]
        # a pilot may choose an exchange that needs this
        if any(exchange.declared.same_threads for exchange in used) or not used:
            shared["torch.get_num_threads()"] = torch.get_num_threads()
        return fingerprint(self._tensors(), shared)

    def messages(self, who: Membership) -> list[Message]:
        """All messages in issue order."""
        exchange = self.settings.exchange
        cluster = self.settings.options.cluster
        if isinstance(exchange, Exchange):
            made = self._fused(exchange, who)
        else:
            made = self._planned(self.settings.plan, who)
        if cluster is not None:
            for message in made:
                message.know(cluster)
        return made

    def _fused(self, exchange: Exchange, who: Membership) -> list[Message]:
        # DDP hands in zeros for parameters that this rank has not used. Without DDP,
        # ranks report which parameters they used.
        num_flags = 0 if self.is_ddp else len(self.params)
        return fused_messages(
            self.model, self.carried, self.settings, exchange, who, num_flags=num_flags
        )

    def _planned(self, plan: Plan | None, who: Membership) -> list[Message]:
        """The messages of a plan; without one, as a pilot begins, all are dense."""
        if plan is None:
            return self._fused(exchange_for(none()), who)
        from .planned import check_for, messages_of

        sparse = sparse_weights(self.model)
        check_for(plan, self.carried, sparse)
        return messages_of(
            plan, self.carried, sparse, who, self.settings.ranks_per_host
        )

    def check(self) -> Check:
        """The comparison, in some steps, of parameters that all ranks must share."""
        params = self.params
        every = self.settings.failure.check_every
        return Check(every, lambda names: [(n, shard_of(param)) for n, param in params])

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that takes the means, if it is known."""
        return self.settings.optimizer

    def hook(self, progress: Progress, undo: ExitStack) -> Handle:
        """Hooks the model, once its parameters are the same on all ranks."""
        model = self.model
        params = self.params
        settings = self.settings
        unattached = UnattachedParameters(model, params, progress.give_up)
        undo.callback(unattached.remove)
        local = LocalGradients(progress, params)
        undo.callback(local.remove)
        hooks = None
        buckets = None
        overlapping = None
        if isinstance(model, DistributedDataParallel):
            from .ddp.bypass import BypassWatch

            buckets = self._buckets(model, progress, undo)
            undo.callback(BypassWatch(progress, model, params, local).remove)
        else:
            overlapping = self._overlapping(progress)
            overlap = None
            if overlapping and settings.overlaps and not has_dtensors(params):
                overlap = overlapping()
                undo.callback(overlap.detach)
            kind = ModuleHooks
            if self.by_replica:
                from .step.replicas import ReplicaHooks

                kind = ReplicaHooks
            hooks = kind(progress, params, overlap, unattached, local)
            hooks.ends_behind_others = bool(sharded_modules(model))
            undo.callback(hooks.remove)
        controls = None
        if (pilot := settings.pilot) is not None:
            from .controls import Controls

            served = hooks or buckets
            assert served is not None, "a DDP model that is left to DDP has no pilot"
            who = progress.synchroniser.engine.who
            made = partial(self._planned, who=who)
            controls = Controls(model, params, progress, served, made, overlapping)
            undo.callback(controls.end)
            controls.begin(pilot)
        handle = Handle(
            model,
            settings.exchange,
            progress,
            hooks,
            controls,
            undo,
            self.run,
            self.backend,
        )
        if settings.survives:
            self._survive(handle, progress, hooks or buckets, undo)
        if buckets is not None and isinstance(model, DistributedDataParallel):
            from .ddp.comm_hook import refuse_fewer

            undo.callback(refuse_fewer(model, survives=settings.survives))
        return handle

    def _survive(
        self, handle: Handle, progress: Progress, hooks: Any, undo: ExitStack
    ) -> None:
        """Has ranks go on without lost ranks."""
        from .survive.groups import open_group
        from .survive.shrink import Shrinking

        assert self.healing is not None, "made under on_failure='shrink'"
        hooks.shrinking = Shrinking(
            handle,
            self.run,
            progress,
            self.engine_of,
            self.messages,
            undo,
            self.healing,
            self.newcomer,
        )
        if isinstance(model := self.model, DistributedDataParallel):
            hooks.shrinking.on_drop = hooks.drop
            name = f"{progress.synchroniser.engine.who.name}/ddp {handle.rank}"
            backends = dist.get_backend_config(model.process_group)
            alone = open_group(name, 0, 1, self.settings.failure.timeout, backends)
            undo.callback(lambda: hooks.rejoin(self.run.group))
            hooks.stand_alone(alone)
        elif self.by_replica:
            hooks.shrinking.finish = hooks.finish
            hooks.join(undo)

    def _overlapping(self, progress: Progress) -> Callable[[], Overlap] | None:
        """Makes the overlap with the next forward pass; None if no plan can ask it."""
        optimizer = self.settings.optimizer
        if optimizer is None or isinstance(self.settings.exchange, Exchange):
            return None
        from .overlap.overlap import Overlap

        return partial(Overlap, self.model, self.params, optimizer, progress)

    def _buckets(
        self, model: DistributedDataParallel, progress: Progress, undo: ExitStack
    ) -> DDPHooks | DDPInTurn | None:
        """The hooks of a DDP model; None if DDP's own reducer averages for good."""
        from .ddp.comm_hook import DDPHooks, DDPInTurn, StepCounter

        settings = self.settings
        params = self.params
        if self.is_left_to_ddp(progress.synchroniser.messages):
            undo.callback(StepCounter(progress, model, params).remove)
            return None
        is_flat = settings.ranks_per_host == 1 and not settings.asks_for_messages
        # A static graph gives its gradients to DDP late, and twice in the first step.
        takes_turns = settings.pilot is not None and is_flat and not model.static_graph
        hooks: DDPHooks | DDPInTurn
        if takes_turns:
            hooks = DDPInTurn(progress, model, params)
        else:
            kind = DDPHooks
            if settings.survives:
                from .ddp.surviving import SurvivingHooks

                kind = SurvivingHooks
            hooks = kind(progress, params, model)
        undo.callback(hooks.remove)
        return hooks


def _unequal(tensors: Sequence[Tensor], engine: Engine) -> list[Tensor]:
    """The tensors that do not have the same bits on all ranks.

    Ranks that have loaded the same checkpoint, or drawn from the same seed, need not
    broadcast it. Each half of a tensor has a digest of 32 bits. So tensors that differ
    hardly ever have the same two digests.
    """
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    halves = [half for values_N in flat for half in _halves(values_N)]
    digests_N = torch.tensor(digests_of(halves), dtype=torch.int64, device="cpu")
    rows_WN = engine.rows(digests_N)
    unequal = (rows_WN != rows_WN[0]).any(0).view(-1, 2).any(1).tolist()
    return [tensor for tensor, differs in zip(tensors, unequal, strict=True) if differs]


def _halves(values_N: Tensor) -> tuple[Tensor, Tensor]:
    middle = values_N.numel() // 2
    return values_N[:middle], values_N[middle:]


def _digest(settings: Settings) -> object:
    """The exchange, as ranks compare it; of a plan, which may be long, a digest."""
    if (plan := settings.plan) is None:
        return settings.exchange
    text = hashlib.sha256(plan.to_json().encode()).hexdigest()
    return f"plan of {plan.planner} for {plan.model}, SHA-256 {text[:16]}"
