"""Handle: a model's exchanges as the user sees them; ``attach`` returns it.

Methods that make or load checkpoints import the modules for that themselves.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..contract import Exchange
from ..contract.trace.span import Trace
from ..errors import InvalidSetting, invalid
from ..exchange.error_feedback import residuals as residuals_of
from .engine.backends import AFTER_A_CHANGE
from .engine.engine import Engine
from .grid.dtensors import has_dtensors
from .grid.shards import place_in
from .liveness.membership import Run
from .settings import algorithm, plan_in, trained
from .step.figures import Log, adapted, memory_of, norm_over_all, spread, whereabouts
from .step.hooked import Hooked, TemporaryAttribute
from .step.hooks import ModuleHooks
from .step.progress import Progress
from .step.synchroniser import Synchroniser
from .transport.task_graph import wall_clock
from .transport.wire import Group

if TYPE_CHECKING:
    from ..planning.data.plan import Plan
    from .controls import Controls, Pilot
    from .state.sharded import Owners
    from .state.table import Origin
    from .step.hooks import DefersGradients

_POLL_S = 0.005
"""Seconds between two looks whether another thread's backward pass has ended."""


class Handle:
    """One attached model. ``gw.attach`` returns it, and ``detach`` ends it.

    The model's hooks keep the handle alive, so a loop need not hold it. Used as a
    context manager, it detaches at the end, also after an error. If ``detach`` then
    fails too, the first error is raised, with a note on the second.

    Attributes:
        exchange: The exchange or the plan that averages the gradients, or the pilot
            (``gw.pilot``) that chooses a plan.
        attached: True until ``detach``.
        group: The process group whose ranks average; None without one.

    >>> import gradwire as gw
    >>> import torch
    >>> model = torch.nn.Linear(4, 2)
    >>> handle = gw.attach(model, "topk")
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> handle.step, handle.world_size, sorted(handle.residuals())
    (1, 1, ['weight'])
    >>> handle.detach()
    >>> model.zero_grad()
    >>> with gw.attach(model, "cast16") as handle:
    ...     model(torch.ones(1, 4)).sum().backward()
    >>> handle.attached
    False
    """

    def __init__(
        self,
        model: nn.Module,
        exchange: Exchange | Plan | Pilot,
        progress: Progress,
        hooks: ModuleHooks | None,
        controls: Controls | None,
        undo: ExitStack,
        run: Run,
        backend: dict[str, Any],
    ) -> None:
        self.exchange = exchange
        self._controls = controls
        self._synchroniser = progress.synchroniser
        self._model = model
        self._progress = progress
        self._hooks = hooks
        self._undo = undo
        self._attached_model: Any = weakref.ref(model)
        """The model of ``attach``. After ``detach`` of a DDP model, ``_model`` is its
        inner module.
        """
        self.attached = True
        self._run = run
        self._backend = backend
        self._algorithm = algorithm(exchange)
        self._shard = place_in(self._engine.shards, model)
        self._enter_model()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        try:
            self.detach()
        except Exception as second:
            if error is None:
                raise
            error.add_note(f"detach() failed too: {type(second).__name__}: {second}")

    def __repr__(self) -> str:
        given = plan_in(self.exchange)
        plan = self.exchange if given is None else f"a plan of {given.planner}"
        detached = "" if self.attached else ", detached"
        return (
            f"<{type(self).__name__} of {type(self._model).__name__} through {plan}: "
            f"rank {self.rank} of {self.world_size}, step {self.step}{detached}>"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses ``copy.copy``, ``copy.deepcopy`` and ``pickle``.

        A copied model is not attached.
        """
        raise InvalidSetting(
            f"{self!r} is a handle and cannot be copied or pickled, as it has "
            "connections of this process; save handle.state_dict(), attach each copy "
            "of the model anew, and keep the handle out of what is copied, such as the "
            "model's attributes"
        )

    @property
    def _engine(self) -> Engine:
        return self._synchroniser.engine

    @property
    def _overlap(self) -> DefersGradients | None:
        """The overlap with the next forward pass; None if backward waits for means."""
        return None if self._hooks is None else self._hooks.overlap

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None if an exchange was attached, or no plan is chosen."""
        if self._controls is not None:
            return self._controls.plan
        return plan_in(self.exchange)

    @property
    def group(self) -> Group | None:
        """The process group whose ranks average; None without one."""
        return self._run.group

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
        """Accumulates gradients of the backward passes inside, without an exchange.

        For a DDP model this is DDP's own ``no_sync``: the forward pass must be inside
        the block. For a plain module the call of ``backward()`` must be inside. A plain
        module without a ``no_sync`` gets this method as its own. Setting its
        ``require_backward_grad_sync`` to False has the same effect.

        >>> import gradwire as gw
        >>> model = nn.Linear(4, 2)
        >>> handle = gw.attach(model, "cast16")
        >>> with handle.no_sync():
        ...     model(torch.ones(1, 4)).sum().backward()
        >>> handle.step
        0
        >>> handle.detach()
        """
        if self._hooks is None:
            model = self._attached_model()
            is_ddp = isinstance(model, DistributedDataParallel)
            with model.no_sync() if is_ddp else nullcontext():
                yield
            return
        before = self._hooks.is_paused
        self._hooks.is_paused = True
        try:
            yield
        finally:
            self._hooks.is_paused = before

    def synchronize(self) -> None:
        """Waits for all means and parameter updates that are still pending.

        They are pending only if a plan overlaps the next forward pass. Then call this
        before you read or write parameters by hand between ``step()`` and the next
        forward pass. ``state_dict()`` and evaluation call it themselves.
        """
        if self._overlap is not None:
            self._overlap.settle(None)

    def stats(self) -> dict[str, Any]:
        """Figures of this rank since ``attach``.

        Bytes and seconds:

        - ``steps``, ``step_s``: the number of exchanged backward passes, and the median
          seconds of one step.
        - ``wire_bytes_per_step``: bytes that this rank sends, also to ranks of its
          host.
        - ``wait_s_per_step``: seconds that ``backward()`` waits for the network once
          all gradients are computed.
        - ``inline_s_per_step``: seconds of encodes and scaling that the backward pass
          does itself.
        - ``communication_s_per_step``: seconds of all communication, waits for other
          ranks included.
        - ``messages``: the number of messages.
        - ``memory``: bytes beside weights and gradients, by kind. ``bytes_a_parameter``
          is their sum, divided by the number of elements of all parameters.

        What is sent:

        - ``residual_norm``: the norm of this rank's residuals of all parameters, as one
          vector. ``gw.mean_residual_norm`` is its mean over ranks.
        - ``density_asked``, ``density_local``, ``density_actual``: the share of
          elements that the setting asks for, that this rank sends, and that the mean
          has. None if no message selects elements.
        - ``guard``: the last comparison with dense means (``Options(guard_every=)``).
          ``error`` is the norm of the difference over the norm of the dense mean.
          ``worst`` is the message with the largest error.
        - ``adapted``: by parameter name, the settings that ``gw.adapt`` has chosen.
        - ``ways``: by parameter name, the way in which an embedding's rows were sent
          last.
        - ``push_imbalance``, ``pull_imbalance``: of the last step's sparse messages,
          the largest imbalance of the parts that ranks send and receive (ZEN,
          definition 8).

        How it is sent:

        - ``averaged_by``: "gradwire", or "DDP" if DDP's own reducer averages. Then
          no messages are counted.
        - ``overlapped_steps``: steps whose means could arrive during the next forward
          pass. ``fallbacks`` counts, by reason, the steps that were waited for earlier.
        - ``pilot``: the figures of ``auto`` or of a planner's name, and its decisions
          in words; None without them.
        - ``encoded_on``: the number of messages by the device that encodes them.
        - ``offloaded``: tensors on a device that the host encodes, and their bytes.
        - ``backend``: the back ends that carry messages within hosts and between them.
        - ``left``, ``joined``: ranks that were lost or joined, with their steps.

        If there are residuals, this call waits for the pending means of an overlapping
        plan.
        """
        recorder = self._progress.recorder
        synchroniser = self._synchroniser
        numel = sum(param.numel() for param in synchroniser.params.values())
        messages = synchroniser.messages if self._engine.num_channels else []
        backend = AFTER_A_CHANGE if self._run.has_changed else self._backend
        overlap = self._overlap
        guard = self._progress.guard
        return {
            **recorder.stats(),
            "inline_s_per_step": self._engine.inline_s / max(1, recorder.num_steps),
            "rank": self.rank,
            "world_size": self.world_size,
            "averaged_by": "gradwire" if self._engine.num_channels else "DDP",
            "messages": len(messages),
            "memory": memory_of(messages, self._engine.routes.ahead_bytes, numel),
            "residual_norm": norm_over_all(self.residuals().values()),
            "overlapped_steps": 0 if overlap is None else overlap.num_overlapped,
            "fallbacks": {} if overlap is None else dict(overlap.fallbacks),
            "guard": None if guard is None else guard.reading,
            "adapted": adapted(synchroniser.messages),
            "left": [*map(dict, self._run.left)],
            "joined": [*map(dict, self._run.joined)],
            "pilot": None,
            **({} if self._controls is None else self._controls.stats()),
            **spread(synchroniser.messages),
            **whereabouts(
                messages, synchroniser.streams.staging, recorder.num_steps, backend
            ),
        }

    def log_to(self, to: Any, *, every: int = 100) -> None:
        """Writes a row of this rank's figures to a log, every ``every`` steps.

        The figures are those of ``stats()``, over the steps since the last row. Their
        names begin with "gradwire/". With residuals, ``residual_norm`` and
        ``gradient_norm`` are norms of the row's step. One warning is given if a
        residual has a much larger norm than its gradient. Under ``local_steps`` a step
        is an exchange; with a quorum it is a local step, and rows have no norms. If
        ``to`` raises, its log ends with a warning, and training goes on. A further call
        adds a log; with the same ``to`` it only sets ``every``.

        Args:
            to: TensorBoard's ``SummaryWriter``; a wandb run; a ``Meter`` of
                OpenTelemetry; a ``Gauge`` of Prometheus with one label; a logger of
                Lightning; an ``Accelerator``; or a function of the step and a dict of
                figures. None ends all logs. If all ranks would write to the same log,
                let rank 0 alone call this method. Under DDP another thread writes the
                rows, so a function ``to`` must not use this handle.
            every: Steps between two rows.

        >>> import gradwire as gw
        >>> model = nn.Linear(4, 2)
        >>> handle = gw.attach(model, "cast16")
        >>> handle.log_to(lambda step, figures: print(step, len(figures) > 3), every=1)
        >>> model(torch.ones(1, 4)).sum().backward()
        1 True
        >>> handle.detach()
        """
        progress = self._progress
        added = [] if to is None else [Log(to, every, progress.recorder)]
        kept = [log for log in progress.logs if to is not None and log.to is not to]
        progress.logs = kept + added

    def residuals(self) -> dict[str, Tensor]:
        """The residuals of this rank: the part of its gradients that no mean holds yet.

        Returns:
            A tensor by parameter name; parameters without a residual are left out. With
            ``mesh=`` a residual is that of the host's mean gradient. It is 0 outside of
            the share that this rank exchanges. For a complex parameter it has real and
            imaginary parts in turn.
        """
        from .state import checkpoint

        messages = self._progress.messages
        if self._overlap is not None and any(
            residuals_of(message.state) for message in messages
        ):
            self._overlap.settle(
                "stats() or residuals() read what is still being exchanged"
            )
        return checkpoint.residuals(messages)

    def trace(self) -> Trace:
        """The measured spans (tasks with start and end) of this rank's last steps.

        ``Options(trace_steps=)`` says how many steps it has.

        Returns:
            The trace. If DDP's own reducer averages, only the wait for the network is
            in it, and no transfer.
        """
        return self._progress.recorder.trace()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's exchanges, such as residuals, by parameter name.

        Save one file for each rank. ``gather_state`` returns the state of all ranks for
        one file. Use ``sharded_state`` for ``torch.distributed.checkpoint``.

        Raises:
            InvalidSetting: It was called inside a backward pass, or after one that
                raised.

        >>> import gradwire as gw
        >>> handle = gw.attach(nn.Linear(4, 2), "topk")
        >>> saved = handle.state_dict()
        >>> handle.load_state_dict(saved)
        >>> handle.detach()
        """
        from .state import checkpoint

        self._between_steps("state_dict()")
        self.synchronize()
        run = f"{self._run.name}.{self._run.num_loads}"
        # Until the scaler has decided about a step, the weights are from before it.
        undone = frozenset[str]().union(*self._synchroniser.known)
        return checkpoint.collect(
            self._progress.messages,
            self._origin,
            step=self._progress.step,
            run=run,
            undone=undone,
        )

    def gather_state(self) -> dict[str, Any]:
        """The state of all ranks in one dict, for one file.

        All ranks of the group (and of ``shards``) must call this between the same two
        steps. Rank 0 needs the memory for the states of all ranks.

        Returns:
            On rank 0 each rank's ``state_dict()`` in host memory, under "rank 0 of 4"
            and so on; {} on other ranks. Every rank may load this dict by
            ``load_state_dict``, also if the number of ranks has changed. If layers are
            cut into shards, the ranks with the same shard are a group, and rank 0 of
            each group gets a dict.

        Raises:
            RanksDiffer: Another rank cannot give its state, or is at another step.
            RankFailed: A rank trains on without the call, or is lost.
        """
        from .state.joint_call import JointCall
        from .state.redistribution import place_name

        call = JointCall(self._engine, "gather_state()", "gathered")
        with call.refusing():
            own = self.state_dict()
        call.agree(own, self._shared(own), strict=True, next_step=self._progress.step)
        states = call.gather(own)
        return {
            place_name(rank, self.world_size): state
            for rank, state in enumerate(states)
        }

    def sharded_state(self, *, saved_by: int | None = None) -> dict[str, Any]:
        """All ranks' state for ``torch.distributed.checkpoint``, to save or load into.

        All ranks of the job must call this between the same two steps. A replica is the
        ranks that together hold the model once, often one rank. Each replica has a row
        of each DTensor. To load, have ``torch.distributed.checkpoint`` fill this dict,
        and pass it to ``load_state_dict``. If the number of replicas has changed, a
        replica gets the sum of some old rows, times the new number of replicas over the
        old number.

        Args:
            saved_by: The number of replicas that saved the checkpoint, if it differs
                from now. If it is missing, ``load_state_dict`` refuses the state, and
                the error names the number.

        Returns:
            A dict whose DTensors have the shape (replicas, *shape of the parameter*).

        Raises:
            InvalidSetting: The handle is of ``auto``, of local steps with a quorum or
                of hosts of several ranks.
        """
        from .state.sharded import sharded_state

        self._engine.refuse_copy()
        saved = self.state_dict()
        return sharded_state(
            self._owners, saved, saved_by, has_pilot=self._controls is not None
        )

    def load_state_dict(
        self, state_dict: dict[str, Any], *, strict: bool = True
    ) -> None:
        """Continues from a saved state; among as many ranks, with the same bits.

        All ranks of the group (and of ``shards``) must call this between the same two
        steps. They compare their states first. Then all ranks load, or none does. The
        number of ranks, or of ranks per host, may differ if ``state_dict`` has the
        states of all old ranks (``gw.redistribute``). Under ``auto`` the plan in force
        stays, and residuals move to it by parameter name.

        Args:
            state_dict: The result of ``state_dict`` on this rank, the result of
                ``gather_state`` on rank 0, or a loaded ``sharded_state``.
            strict: If False, parameters that the state lacks start anew, and state of
                parameters that the model lacks is dropped. Default: True.

        Raises:
            InvalidSetting: The state is of another rank, shard, algorithm or model, or
                damaged. Nothing is loaded then.
            RanksDiffer: Another rank refused, or its state was saved at another step or
                in another run. Nothing is loaded then.
            RankFailed: A rank trains on without loading.
        """
        from .state.joint_call import JointCall
        from .state.redistribution import part_of
        from .state.sharded import own_part

        call = JointCall(self._engine, "load_state_dict()", "loaded")
        with call.refusing():
            self._between_steps("load_state_dict()")
            self.synchronize()
            part = part_of(
                own_part(self._owners, state_dict, self._origin), self._origin
            )
            put_in_place = self._checked(part, strict)
        call.agree(
            part, self._shared(part), strict=strict, next_step=self._progress.step
        )
        put_in_place()
        self._run.num_loads += 1

    def _shared(self, saved: Mapping[str, Any]) -> dict[str, str]:
        """The values in a state that ranks compare, by the names that errors show."""
        from .state import checkpoint

        exchanges = [message.exchange for message in self._progress.messages]
        return checkpoint.shared_values(saved, exchanges)

    def _checked(self, saved: Mapping[str, Any], strict: bool) -> Callable[[], None]:
        """Checks that all of a state fits; returns a function that puts it in place."""
        from .state import checkpoint

        messages = self._progress.messages
        controls = self._controls
        if controls is not None:
            checkpoint.refuse_other(saved, messages, self._origin, strict=strict)
            made = controls.prepared(saved)
        else:
            states = checkpoint.loaded(saved, messages, self._origin, strict=strict)

        def put_in_place() -> None:
            if controls is not None:
                of_shares = saved["share"] != ""
                controls.put(
                    controls.prepared(controls.of_host(saved)) if of_shares else made
                )
            else:
                for message, state in zip(messages, states, strict=True):
                    message.state = state
            self._progress.go_on_from(saved["step"])
            self._synchroniser.check.forget()
            self._synchroniser.forget_steps()

        return put_in_place

    @property
    def _origin(self) -> Origin:
        from .state import checkpoint
        from .state.table import Origin

        if self._engine.servers:
            raise invalid(
                "handle",
                "one beside servers",
                "of ranks that all train: servers keep state of their own",
                "save the model",
            )
        per_host = self._engine.ranks_per_host
        return Origin(
            self._algorithm,
            self.world_size,
            self.rank,
            self._shard,
            per_host,
            checkpoint.share_of(self._progress.messages, per_host),
        )

    @property
    def _owners(self) -> Owners:
        from .state.sharded import Owners

        return Owners(
            dict(trained(self._model)), self.group, self.rank, self.world_size
        )

    def detach(self) -> None:
        """Removes every hook; the model is then as it was before ``attach``.

        A DDP model goes back to its plain all-reduce. Residuals are dropped: save
        ``state_dict()`` first to keep them. If another thread is in a backward pass,
        this call waits for its end, for the time-out at most. In a forked process it
        does not change the process that attached.

        Raises:
            InvalidSetting: It was called inside a backward pass, or the backward pass
                of another thread does not end.
        """
        if self.attached:
            self._between_steps("detach()", takes_a_torn_step=True)
            progress = self._progress
            engine = self._engine
            begin_s = wall_clock()
            # a step that another thread opens just now counts as under way
            with progress.opening:
                progress.is_leaving = True
            while progress.backward() is not None and not engine.is_copy:
                if wall_clock() - begin_s > engine.timeout.total_seconds():
                    progress.is_leaving = False
                    raise InvalidSetting(
                        "detach() was called while another thread is in a backward "
                        f"pass, which did not end within {engine.timeout}; call it "
                        "after backward() has returned there"
                    )
                time.sleep(_POLL_S)
            self.attached = False
            if isinstance(self._model, DistributedDataParallel):
                # the loop may make another DDP model of it
                self._model = self._model.module
            engine.detach()
            self._undo.close()  # calls all callbacks, even if one of them raises

    def _enter_model(self) -> None:
        """Hooks the model: forward passes are timed, and ``no_sync`` is added.

        By these hooks the model keeps the handle alive.
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
                self._progress.record_forward(started.pop(), wall_clock())

        self._undo.callback(
            Hooked(self._model.register_forward_pre_hook, before).remove
        )
        self._undo.callback(Hooked(self._model.register_forward_hook, after).remove)
        if self._hooks is not None:
            self._hooks.switch = vars(getattr(self._model, "_orig_mod", self._model))
            if not hasattr(self._model, "no_sync"):
                self._undo.callback(
                    TemporaryAttribute(self._model, "no_sync", self.no_sync).remove
                )

    def _between_steps(self, what: str, *, takes_a_torn_step: bool = False) -> None:
        """Raises if the method ``what`` is called in the middle of a step.

        A torn step is one whose backward pass raised before its end.
        """
        if torch._C._current_graph_task_id() != -1:
            raise InvalidSetting(
                f"{what} was called during a backward pass; call it after "
                "loss.backward() returned"
            )
        is_pending = self._overlap is not None and self._overlap.is_open
        if self._synchroniser.open and not is_pending and not takes_a_torn_step:
            raise InvalidSetting(
                f"{what} was called after a backward pass that raised before its "
                "end: part of the "
                "step is still being exchanged; run a whole step first, or detach()"
            )

    def backward_without_batch(self) -> None:
        """Takes part in a step on a rank that has no batch, in place of ``backward()``.

        This rank's gradient counts as zero in the mean. Every ``.grad`` is the mean
        afterwards, so call ``optimizer.step()``. Gradients that ``.grad`` held before
        are dropped.

        Raises:
            InvalidSetting: The model is a DDP model, or has sharded layers. Or the
                handle is of ``auto``, local steps, or a plan that overlaps the next
                forward pass.
            RankFailed: A rank was lost, as in ``backward()``.
        """
        hooks = self._hooks
        reason = ""
        if isinstance(self._model, DistributedDataParallel):
            reason = "a DDP model, which has join()"
        elif self._controls is not None:
            reason = "'auto'"
        elif self._overlap is not None:
            reason = "a plan that overlaps the next forward pass"
        elif self._engine.shards.world > 1 or has_dtensors(
            self._model.named_parameters()
        ):
            reason = "sharded layers"
        if hooks is None or reason:
            raise invalid(
                "backward_without_batch",
                f"the handle of {reason or 'local_steps'}",
                "used with a fixed exchange of a plain module's whole gradients",
                "give each rank a batch",
            )
        hooks.backward_without_batch()

    def join_hook(self, **kwargs: Any) -> None:
        """Refuses torch's ``Join([handle])``.

        A DDP model has its own ``model.join()``.
        """
        raise InvalidSetting(
            "Join takes no handle: write `with model.join():` with a DDP model, "
            "or call "
            "handle.backward_without_batch() in each step in which a rank has no batch"
        )


def synchroniser_of(handle: Handle) -> Synchroniser:
    """The synchroniser inside a handle, for ``gw.serve`` and for benchmarks."""
    return handle._synchroniser
