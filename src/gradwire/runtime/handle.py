"""Handle: the object that ``attach`` returns; a model's exchanges as the user sees them.

What makes and loads checkpoints is imported by the methods that do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from ..contract import Exchange
from ..contract.trace.span import Trace
from ..errors import InvalidSetting, invalid
from ..exchange.error_feedback import residuals as residuals_of
from .device.backends import AFTER_A_CHANGE
from .failure.membership import run_of
from .grid.dtensors import is_dtensor
from .grid.shards import place_in
from .setup.settings import algorithm, plan_in, trained
from .step.engine import Engine
from .step.figures import Log, adapted, memory_of, norm_over_all, spread, whereabouts
from .step.hooked import Hooked, Lent
from .step.hooks import ModuleHooks
from .step.progress import Progress
from .step.task_graph import wall_clock
from .step.wire import Group

if TYPE_CHECKING:
    from ..planning.data.plan import Plan
    from .controls import Controls, Pilot
    from .overlap.overlap import Overlap
    from .state.checkpoint import Origin
    from .state.sharded import Owners

_POLL_S = 0.005
"""Seconds between two looks whether another thread's backward pass has ended."""


class Handle(Joinable):
    """One attached model. Made by ``gw.attach``; ended by ``detach``.

    ``hooks`` are those of a plain module (under DDP there are none), ``controls`` are there where a
    pilot chooses the plan, and ``undo`` ends what ``attach`` has begun. The model's hooks keep the
    handle alive, and the handle all else.
    """

    def __init__(
        self,
        model: nn.Module,
        exchange: Exchange | Plan | Pilot,
        progress: Progress,
        hooks: ModuleHooks | None,
        controls: Controls | None,
        undo: ExitStack,
    ) -> None:
        super().__init__()
        self.exchange, self._controls = exchange, controls
        self.synchroniser = progress.synchroniser
        self._model, self._progress, self._hooks, self._undo = model, progress, hooks, undo
        self.attached = True
        self.left: list[dict[str, Any]] = []
        self.backend: dict[str, Any] = {}
        self.joined: list[dict[str, Any]] = []
        self.group: Any = None
        """The process group whose ranks average; None without one, gloo's own after a newcomer."""
        self._algorithm = algorithm(exchange)
        self._run, self._num_loads = run_of(self._engine.who), 0
        self._shard = place_in(self._engine.shards, model)

    def __repr__(self) -> str:
        given = plan_in(self.exchange)
        plan = self.exchange if given is None else f"a plan of {given.planner}"
        detached = "" if self.attached else ", detached"
        return (
            f"<{type(self).__name__} of {type(self._model).__name__} through {plan}: "
            f"rank {self.rank} of {self.world_size}, step {self.step}{detached}>"
        )

    @property
    def _engine(self) -> Engine:
        return self.synchroniser.engine

    @property
    def overlap(self) -> Overlap | None:
        """The overlap of the next forward pass; None where it waits for all means."""
        return None if self._hooks is None else self._hooks.overlap

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None where gradients travel without one."""
        if self._controls is not None:
            return self._controls.plan
        return plan_in(self.exchange)

    @property
    def rank(self) -> int:
        return self._engine.rank

    @property
    def world_size(self) -> int:
        return self._engine.world

    @property
    def step(self) -> int:
        """Number of exchanged backward passes so far."""
        return self._progress.step

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes inside accumulate on this rank and are not exchanged.

        For a DistributedDataParallel model this is its own ``no_sync``. A plain module is lent this
        one, where it has none, as Accelerate and others ask a model for it. It counts where
        ``backward()`` is called, and DDP's where the model is. Loops that set a
        model's ``require_backward_grad_sync`` are obeyed too.
        """
        if self._hooks is None:
            assert isinstance(self._model, DistributedDataParallel)
            with self._model.no_sync():
                yield
            return
        before, self._hooks.is_paused = self._hooks.is_paused, True
        try:
            yield
        finally:
            self._hooks.is_paused = before

    def synchronize(self) -> None:
        """Settles all that a plan which overlaps the next forward pass has left pending.

        It waits for all gradients and makes all updates that ``optimizer.step()`` asked for. Call
        it before parameters are read or written by hand between ``step()`` and the next forward
        pass; ``state_dict()`` of model and optimizer and evaluation do so themselves.
        """
        if self.overlap is not None:
            self.overlap.settle(None)

    def stats(self) -> dict[str, Any]:
        """Figures of the run so far on this rank.

        - ``averaged_by`` is "gradwire", or "DDP" where DDP's own reducer averages (see `reducer`);
          steps, bytes by the size of the gradients, and waits are counted then, and no messages.
        - ``wire_bytes_per_step`` counts what collectives send, also to ranks of the same host.
        - ``wait_s_per_step`` is how long backward waited for the network after its own end.
        - ``inline_s_per_step`` is how long backward took for encodes and scaling within it.
        - ``communication_s_per_step`` adds up all channels, waits for peers included.
        - ``residual_norm`` is over all parameters, ``gw.mean_residual_norm`` its mean over ranks.
        - ``density_asked`` is the density that was set, ``density_local`` the one that this rank
          selected and ``density_actual`` that of the mean, over all steps and messages that select
          elements. Each is None where no message selects, the first also where none was set.
        - ``memory`` counts what is kept beside weights and gradients, in bytes by kind; see
          `figures`. ``bytes_a_parameter`` is their sum for each parameter.
        - ``overlapped_steps`` counts steps that the next forward pass did not wait for.
        - ``fallbacks`` counts, by reason, steps of an overlapping plan that it did wait for.
        - ``guard`` is the last comparison with dense means (``guard_every``), None before:
          ``error`` is the norm of the difference over that of the dense mean, of some elements of a
          few messages in step ``step``; ``worst`` is the message of the largest, ``worst_error``.
        - ``adapted`` says which settings ``gw.adapt`` has chosen for each layer, in words.
        - ``ways`` says how each embedding's rows went last: by a scheme, or the inner exchange.
        - ``pilot`` holds what ``auto`` has decided, in words, and its figures; None without one.
          Where residuals are kept, this call waits for all that an overlapping plan left pending.
        - ``left`` tells who was lost and what with them, ``joined`` who came in; see `shrink`.
        - ``encoded_on``, ``offloaded`` and ``backend``: where, and what sends; see `figures`.
        - ``push_imbalance``, ``pull_imbalance``: the last step's largest (ZEN, definition 8).
        """
        recorder, synchroniser = self._progress.recorder, self.synchroniser
        numel = sum(param.numel() for param in synchroniser.params.values())
        messages = synchroniser.messages if self._engine.num_channels else []
        kept = 0 if synchroniser.commit is None else synchroniser.commit.kept_bytes
        return {
            **recorder.stats(),
            "inline_s_per_step": self._engine.inline_s / max(1, recorder.num_steps),
            "rank": self.rank,
            "world_size": self.world_size,
            "averaged_by": "gradwire" if self._engine.num_channels else "DDP",
            "messages": len(messages),
            "memory": memory_of(messages, numel, kept),
            "residual_norm": norm_over_all(self.residuals().values()),
            "overlapped_steps": 0 if self.overlap is None else self.overlap.num_overlapped,
            "fallbacks": {} if self.overlap is None else dict(self.overlap.fallbacks),
            "guard": None if self._progress.guard is None else self._progress.guard.reading,
            "adapted": adapted(synchroniser.flat_messages),
            **{name: [*map(dict, getattr(self, name))] for name in ("left", "joined")},
            "pilot": None,
            **({} if self._controls is None else self._controls.stats()),
            **spread(synchroniser.messages),
            **whereabouts(messages, synchroniser.streams.staging, recorder.num_steps, self.backend),
        }

    def log_to(self, to: Any, *, every: int = 100) -> None:
        """Writes figures of this rank every ``every`` steps, from now on; None writes no more.

        ``to`` is TensorBoard's ``SummaryWriter``, a wandb run, or a function of the step and a dict
        of figures by name. Where ranks share one, let rank 0 call this alone. Figures are those of
        ``stats()`` over the steps since the row before, each under "gradwire/" and its name there:
        bytes, seconds of each lane, densities. Where residuals are kept, ``residual_norm`` is over
        the tensors of that step and ``gradient_norm`` is that of their gradients on this rank; a
        warning tells once where the first runs away from the second. Under ``local_steps`` a step
        is an exchange here. Under DDP ``to`` is called in another thread, where it must not call
        this handle. What ``to`` raises ends the log, with a warning, and not the training.
        """
        progress = self._progress
        progress.log = None if to is None else Log(to, every, progress.recorder)

    def residuals(self) -> dict[str, Tensor]:
        """The residuals of this rank by parameter name: gradient that the mean does not hold yet.

        Parameters without a residual are left out. On hosts of several ranks they are those of the
        host's mean gradient, where this rank exchanges it, and 0 elsewhere. Those of a complex
        parameter are real and imaginary parts in turn.
        """
        from .state import checkpoint

        messages = self._progress.messages
        if self.overlap is not None and any(residuals_of(message.state) for message in messages):
            self.overlap.settle("stats() or residuals() read what is still being exchanged")
        return checkpoint.residuals(messages)

    def trace(self) -> Trace:
        """Spans of the last steps on this rank, and their densities where elements are selected.

        Where DDP averages, nothing is seen of the network but the wait for it.
        """
        return self._progress.recorder.trace()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's exchanges, by parameter name; save one file for each rank.

        ``gather_state`` has that of all ranks, for one file. In ``torch.distributed.checkpoint``
        give each rank's handle a name of its own, such as f"gradwire {handle.rank}": what has one
        name is saved once there, and residuals differ from rank to rank.
        """
        from .state import checkpoint

        self._between_steps("state_dict()")
        self.synchronize()
        run = f"{self._run}.{self._num_loads}"
        return checkpoint.collect(
            self._progress.messages, self._origin, step=self._progress.step, run=run
        )

    def gather_state(self) -> dict[str, Any]:
        """The state of all ranks in one dict, for whoever saves one file; empty but on rank 0.

        All ranks of the group (and of ``shards``) must call this, between the same two steps. It
        maps "rank 0 of 4" and so on to that rank's ``state_dict()``, in host memory. So it takes as
        many times the memory of one. ``load_state_dict`` takes it on every rank, among any number
        of ranks. Where layers are cut into shards, rank 0 of each part's group gets a dict.

        Raises ``RanksDiffer`` if another rank cannot give its state, or is at another step, and
        ``RankFailed`` if one trains on instead, or is lost.
        """
        from .state.joint_call import JointCall
        from .state.redistribution import place_name

        call = JointCall(self._engine, "gather_state()", "gathered")
        with call.refusing():
            own = self.state_dict()
        call.agree(own, strict=True, next_step=self._progress.step)
        states = call.gather(own)
        return {place_name(rank, self.world_size): state for rank, state in enumerate(states)}

    def sharded_state(self, *, saved_by: int | None = None) -> dict[str, Any]:
        """The state of all ranks, for ``torch.distributed.checkpoint`` to save, and to load into.

        All ranks of the job must call this, between the same two steps. What is kept for each
        element is a DTensor of the shape (replicas, *that of the parameter*), in the field's dtype,
        so it is written by those that hold it and cut anew for other shards. ``saved_by`` is the
        number of replicas that saved what is to be loaded, where it was another one. Give what was
        loaded to ``load_state_dict``: each replica then goes on from the sum of its rows, times new
        / old replicas.

        Raises ``InvalidSetting`` for local steps, pilots, hosts of several ranks, and newcomers.
        """
        from .state.sharded import sharded_state

        if self.joined:
            accepted, remedy = "of torch.distributed", "save what gather_state() returns"
            raise invalid("the group", "one with a rank that came in later", accepted, remedy)
        self._engine.refuse_copy()
        saved = self.state_dict()
        return sharded_state(self._owners, saved, saved_by, has_pilot=self._controls is not None)

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Continues where ``state_dict`` was saved, bit for bit.

        All ranks of the group (and of ``shards``) must call this, between the same two steps, each
        with the state that it saved itself, what ``gather_state`` returned on rank 0, or what
        ``torch.distributed.checkpoint`` has loaded into its ``sharded_state()``. They
        agree on it before any of them loads. States of another number of ranks, or of ranks on a
        host, are taken where all of them are there, as ``gather_state`` has them, and cut anew; see
        ``gw.redistribute``. With ``strict=False`` parameters that the state lacks begin afresh, and
        state of parameters that the model lacks is dropped.

        Under a pilot (``auto``) the plan in force stays: state goes over to it by name, residuals
        that it has no place for arrive with the next gradients. A new run plans anew.

        Raises ``InvalidSetting`` for the state of another rank, shard, number of ranks, algorithm
        or model, or a damaged one, and ``RanksDiffer`` if another rank refused or has a state of
        another moment: in both cases the present state stays. Raises ``RankFailed`` if a rank
        trains on without loading.
        """
        from .state.joint_call import JointCall
        from .state.redistribution import part_of
        from .state.sharded import own_part

        call = JointCall(self._engine, "load_state_dict()", "loaded")
        with call.refusing():
            self._between_steps("load_state_dict()")
            self.synchronize()
            own = part_of(own_part(self._owners, state_dict, self._origin), self._origin)
            put_in_place = self._checked(own, strict)
        call.agree(own, strict=strict, next_step=self._progress.step)
        put_in_place()
        self._num_loads += 1

    def _checked(self, saved: Mapping[str, Any], strict: bool) -> Callable[[], None]:
        """A function that puts a state in place, once all of it was found to fit."""
        from .state import checkpoint

        messages, controls = self._progress.messages, self._controls
        if controls is not None:
            checkpoint.refuse_other(saved, messages, self._origin, strict=strict)
            made = controls.prepared(saved)
        else:
            states = checkpoint.loaded(saved, messages, self._origin, strict=strict)

        def put_in_place() -> None:
            if controls is not None:
                of_shares = saved["share"] != ""
                controls.put(controls.prepared(controls.of_host(saved)) if of_shares else made)
            else:
                for message, state in zip(messages, states, strict=True):
                    message.state = state
            self._progress.go_on_from(saved["step"])
            self._progress.synchroniser.check.forget()

        return put_in_place

    @property
    def _origin(self) -> Origin:
        from .state import checkpoint

        per_host = self._engine.ranks_per_host
        own = self._algorithm, self.world_size, self.rank, self._shard, per_host
        return checkpoint.Origin(*own, checkpoint.share_of(self._progress.messages, per_host))

    @property
    def _owners(self) -> Owners:
        from .state.sharded import Owners

        return Owners(dict(trained(self._model)), self.group, self.rank, self.world_size)

    def detach(self) -> None:
        """Removes every hook; the model is then as it was before ``attach``.

        A DistributedDataParallel model goes back to its plain all-reduce. Residuals are dropped:
        save ``state_dict()`` first to keep them. Called in another thread during a backward pass,
        it waits until that has ended, for the time-out at most. In a process that was forked it
        leaves the process that attached as it is.

        Raises ``InvalidSetting`` in a backward pass, or if one of another thread does not end.
        """
        if self.attached:
            self._between_steps("detach()", takes_a_torn_step=True)
            self._await_backward()
            self.attached = False
            self._undo.close()  # all of it, even if a lost peer is noticed here

    def _await_backward(self) -> None:
        """Waits for the end of another thread's backward pass, and has no further one exchanged."""
        progress, engine = self._progress, self._engine
        begin_s = wall_clock()
        with progress.opening:  # a step that is being opened is one under way
            progress.is_leaving = True
        while progress.backward() is not None and not engine.is_copy:
            if wall_clock() - begin_s > engine.timeout.total_seconds():
                progress.is_leaving = False
                raise InvalidSetting(
                    "detach() was called while another thread is in a backward pass, which did not "
                    f"end within {engine.timeout}; call it after backward() has returned there"
                )
            time.sleep(_POLL_S)

    def go_on_in(self, group: Group | None) -> None:
        """Belongs to a group of other ranks from now on, and to a run of its own."""
        self.group, self._run, self._num_loads = group, run_of(self._engine.who), 0
        self.backend = AFTER_A_CHANGE

    def enter_model(self) -> None:
        """Notes when forward passes of the model start and end, for the trace; lends ``no_sync``.

        By these the model keeps the handle alive.
        """
        started: list[float] = []

        def before(module: nn.Module, args: Any) -> None:
            if isinstance(module, DistributedDataParallel):
                self._engine.refuse_copy()  # its buffers would be broadcast
            started.clear()  # of a forward pass that raised
            if torch.is_grad_enabled():
                started.append(wall_clock())

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if started:
                self._progress.mark_forward(started.pop(), wall_clock())

        self._undo.callback(Hooked(self._model.register_forward_pre_hook, before).remove)
        self._undo.callback(Hooked(self._model.register_forward_hook, after).remove)
        if self._hooks is not None:
            self._hooks.switch = vars(getattr(self._model, "_orig_mod", self._model))
            if not hasattr(self._model, "no_sync"):
                self._undo.callback(Lent(self._model, "no_sync", self.no_sync).remove)

    def _between_steps(self, what: str, *, takes_a_torn_step: bool = False) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise InvalidSetting(
                f"{what} was called during a backward pass; call it after loss.backward() returned"
            )
        is_pending = self.overlap is not None and self.overlap.is_open
        if self.synchroniser.open and not is_pending and not takes_a_torn_step:
            raise InvalidSetting(
                f"{what} was called after a backward pass that raised before its end: part of the "
                "step is still being exchanged; run a whole step first, or detach()"
            )

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
