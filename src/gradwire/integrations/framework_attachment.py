"""FrameworkAttachment: an exchange for DDP models that a framework makes.

A framework makes the DDP model late, may make it again, and saves when it likes. So the
exchange waits here until there is a model, and goes from a module's old DDP to its new
one with its state.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..contract import Compressor, Exchange
from ..errors import InvalidSetting, log
from ..planning.data.plan import Plan
from ..runtime.attach import attach
from ..runtime.engine.plain import values_of_all
from ..runtime.handle import Handle
from ..runtime.settings import FailurePolicy, Options
from ..runtime.state.redistribution import place_name
from ..runtime.step.hooked import params_of

AnyExchange = Exchange | Compressor | Plan | str | Path | Callable[..., Any]
"""The exchange, in any form ``gw.attach`` takes, or a function that begins local steps.

The function gets the DDP model and the framework's optimizer: a recipe such as
``gw.recipes.diloco``, or ``partial(gw.local_steps, exchange="uniform", every=20)``.
"""
_NOTHING = "it finds none"


@dataclass
class _Held:
    """A module once attached in its DDP: its handle, or the state of a dropped one."""

    module: nn.Module
    ddp: DistributedDataParallel | None = None
    optimizer: Optimizer | None = None
    handle: Any = None
    state: dict[str, Any] | None = None


class FrameworkAttachment:
    """An exchange, and the handles of the DDP models it was attached to, in order.

    Methods that save, load or attach are called by all ranks. Users call ``log_to``,
    ``end_period``, ``save`` and ``load``; the integrations call the other methods.

    Args:
        exchange: A compressor, an exchange, a plan, or its name or path; or a function
            that begins local steps, as ``AnyExchange`` says.
        scaler: As for ``gw.attach``, with its default.
        mesh: As for ``gw.attach``, with its default.
        options: As for ``gw.attach``, with its default.
        failure: As for ``gw.attach``, with its default.
    """

    def __init__(
        self,
        exchange: AnyExchange,
        scaler: GradScaler | None = None,
        mesh: DeviceMesh | str | None = None,
        options: Options | None = None,
        failure: FailurePolicy | None = None,
    ) -> None:
        given = {"mesh": mesh, "options": options, "failure": failure}
        settings: dict[str, Any] = {
            name: value for name, value in given.items() if value is not None
        }
        self._attach: Callable[..., Any]
        self.is_local = False
        if callable(exchange) and not isinstance(
            exchange, Exchange | Compressor | type
        ):
            self.is_local = True
            self._attach = partial(exchange, **settings)
        else:
            settings |= {"exchange": exchange, "scaler": scaler}
            self._attach = partial(attach, **settings)
        self._optimizers: list[Optimizer] = []
        self._held: dict[int, _Held] = {}
        """The modules that were attached, by id."""
        self._logs: list[tuple[Any, int]] = []
        """The logs, for handles that are made later."""

    @property
    def handles(self) -> list[Handle]:
        """The handles of all models that are attached now."""
        return [
            record.handle for record in self._held.values() if record.handle is not None
        ]

    @property
    def handle(self) -> Handle:
        """The handle of the one model.

        Raises ``InvalidSetting`` where there is not one.
        """
        if len(self.handles) != 1:
            raise InvalidSetting(
                "attachment.handle needs one attached model, and there are "
                f"{len(self.handles)}; let the framework prepare the model first, on "
                "two ranks or more, or use .handles"
            )
        return self.handles[0]

    def log_to(self, to: Any, *, every: int = 100) -> None:
        """Calls ``log_to`` of each handle, also of the handles that are made later.

        A further call adds a log, as for a handle.

        Args:
            to: As for ``Handle.log_to``; also a Transformers ``Trainer``, whose
                callbacks get rows.
            every: Steps between two rows.
        """
        self._logs = [log for log in self._logs if to is not None and log[0] is not to]
        if to is not None:
            self._logs.append((to, every))
        for handle in self.handles:
            handle.log_to(to, every=every)

    def let_go(self, module: nn.Module) -> None:
        """Detaches from a module's DDP before another is made of it.

        Its state waits for that.
        """
        record = self._of(module)
        if record.handle is not None:
            record.state = record.handle.state_dict()
            record.handle.detach()
            record.handle = record.ddp = None  # both hold the old DDP

    def let_go_but_of(self, others: Iterable[nn.Module], coming: nn.Module) -> None:
        """Lets go of modules whose DDP a framework has dropped, or will make anew.

        The framework still has ``others``, whether as DDPs or as what is in them, and
        wraps what is in ``coming`` next.
        """
        kept = {id(module) for model in others for module in model.modules()}
        kept -= {id(module) for module in coming.modules()}
        for record in self._held.values():
            if record.handle is not None and id(record.module) not in kept:
                self.let_go(record.module)

    def attach_to(self, model: DistributedDataParallel) -> None:
        """Attaches to a DDP model, with the state of its module's released handle.

        Local steps begin as soon as ``take`` has got the model's optimizer, too.
        """
        record = self._of(model.module)
        record.ddp = model
        if not self.is_local:
            self._start(record, model)
        for optimizer in self._optimizers:
            self._start_local(record, optimizer)

    def take(self, optimizer: Optimizer) -> None:
        """Notes an optimizer of the framework's.

        Under local steps its model's steps begin.
        """
        if self.is_local:
            self._optimizers = [
                known for known in self._optimizers if known is not optimizer
            ]
            self._optimizers.append(optimizer)
            for record in self._held.values():
                self._start_local(record, optimizer)

    def _start_local(self, record: _Held, optimizer: Optimizer) -> None:
        """Begins a model's local steps by its own optimizer, also in place of one."""
        if (ddp := record.ddp) is None or (
            record.handle and record.optimizer is optimizer
        ):
            return
        ids = {id(param) for param in ddp.parameters()}
        if any(id(param) in ids for param in params_of(optimizer)):
            self.let_go(record.module)
            record.ddp = ddp
            record.optimizer = optimizer
            self._start(record, ddp, optimizer)

    def _start(
        self, record: _Held, model: DistributedDataParallel, *optimizer: Optimizer
    ) -> None:
        # What gradients hold was exchanged by the handle before; attach would refuse
        # them.
        left = [] if record.state is None else model.parameters()
        grads = [(param, param.grad) for param in left]
        for param, _ in grads:
            param.grad = None
        try:
            made = self._attach(model, *optimizer)
            # a recipe's optimizer aside
            record.handle = made[1] if isinstance(made, tuple) else made
            if record.state is not None:
                record.handle.load_state_dict(record.state)
                record.state = None
            for to, every in self._logs:
                record.handle.log_to(to, every=every)
        finally:
            for param, grad in grads:
                param.grad = grad

    def end_period(self) -> None:
        """Ends each period of local steps, so that all ranks have the same parameters.

        Nothing happens without local steps, or if no rank has made one since the last
        call.
        """
        for handle in self.handles if self.is_local else ():
            handle.end_period()  # type: ignore[attr-defined]

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of all ranks, for one file; all ranks call it.

        A period of local steps ends before.

        Returns:
            On rank 0 what ``gather_state`` of each handle returns.
        """
        self.end_period()
        return [handle.gather_state() for handle in self.handles]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Loads the state of all models that are attached; all ranks call it.

        Args:
            states: What ``state_dict`` returned on rank 0, once there are handles.

        Raises:
            InvalidSetting: Other models are attached.
        """
        handles = self.handles
        if len(states) != len(handles):
            raise InvalidSetting(
                f"the checkpoint holds the state of {len(states)} models and "
                f"{len(handles)} are attached; attach to the same models"
            )
        for handle, state in zip(handles, states, strict=True):
            handle.load_state_dict(state)

    def _of(self, module: nn.Module) -> _Held:
        return self._held.setdefault(id(module), _Held(module))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes this rank's state of each model into a folder, in a file of its own.

        A period of local steps ends before.

        Args:
            folder: The folder, which is made if it is not there.
        """
        self.end_period()
        Path(folder).mkdir(parents=True, exist_ok=True)
        for place, handle in enumerate(self.handles):
            path = Path(folder) / _name(place, handle.rank, handle.world_size)
            beside = path.with_suffix(".part")
            torch.save(handle.state_dict(), beside)
            beside.replace(path)
            for old in Path(folder).glob(_name(place, "*", "*")):
                if not old.name.endswith(f"-of-{handle.world_size}.pt"):
                    old.unlink(missing_ok=True)  # of an earlier moment, by other ranks

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Loads what ``save`` wrote.

        The number of ranks may differ if all files are in reach.

        A folder without any state was saved without gradwire: nothing is loaded, with a
        warning.

        Args:
            folder: The folder that ``save`` wrote into.

        Raises:
            InvalidSetting: A rank cannot read its state, or only some ranks find
                theirs. All ranks raise it.
        """
        states = []
        for place, handle in enumerate(self.handles):
            loaded = None
            report = _NOTHING
            try:
                loaded = _read(Path(folder), place, handle)
            except Exception as error:  # the others would wait for this rank
                report = f"{type(error).__name__}: {error}"
            announced = values_of_all("" if loaded else report, handle.group)
            if all(text == _NOTHING for text in announced):
                warn_of_no_state(folder)
                return
            bad = [
                f"rank {rank}: {text}" for rank, text in enumerate(announced) if text
            ]
            if bad or loaded is None:
                raise InvalidSetting(
                    f"the state of gradwire in {folder} cannot be read "
                    f"({'; '.join(bad)}); save on all ranks, and load an "
                    "undamaged checkpoint, with every rank's file in reach"
                )
            states.append(loaded)
        self.load_state_dict(states)


def _name(place: int, rank: int | str, world: int | str) -> str:
    model = "" if place == 0 else f"-model-{place}"
    return f"gradwire{model}-rank-{rank}-of-{world}.pt"


def _read(folder: Path, place: int, handle: Handle) -> dict[str, Any] | None:
    """This rank's state in a folder: its own file, or all old ranks' together."""
    own = folder / _name(place, handle.rank, handle.world_size)
    if own.is_file():
        return _loaded(own)
    olds = [_loaded(path) for path in sorted(folder.glob(_name(place, "*", "*")))]
    return {place_name(old["rank"], old["world_size"]): old for old in olds} or None


def _loaded(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def warn_of_no_state(where: object) -> None:
    """Warns that a checkpoint was saved without gradwire."""
    log.warning(
        "%s holds no state of gradwire: nothing is loaded, and residuals stay "
        "as they are",
        where,
    )
