"""One rank of ``bench faults``: trains a few steps, in which a fault strikes if it is a
victim.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
import zlib
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from gradwire.collective.casync_ps import casync_ps
from gradwire.compress.none import none
from gradwire.compress.onebit import onebit
from gradwire.compress.topk import topk
from gradwire.contract import Exchange
from gradwire.contract.registry import load
from gradwire.errors import GradwireError, IncompatiblePair, RanksLost
from gradwire.exchange.by_name import exchange_for
from gradwire.exchange.error_feedback import with_error_feedback
from gradwire.exchange.pair import pair
from gradwire.exchange.rounds import FragmentLearner, Merge
from gradwire.planning.data.plan import (
    Bulk,
    Chunk,
    ExchangeSetting,
    Plan,
    PlannedMessage,
)
from gradwire.runtime import attach as attachment
from gradwire.runtime import serve as serving
from gradwire.runtime.attach import attach
from gradwire.runtime.engine import engine
from gradwire.runtime.grid.dtensors import shard_of
from gradwire.runtime.handle import Handle, synchroniser_of
from gradwire.runtime.local_steps.local_steps import local_steps
from gradwire.runtime.settings import FailurePolicy, Options
from gradwire.runtime.step.synchroniser import Synchroniser
from gradwire.runtime.survive import rejoin
from gradwire.runtime.transport import wire

from ..testbed.netns import INTERFACE, Namespaces, host_address, join_network
from .accidents import (
    COLLECTIVES,
    COORDINATED,
    DDP,
    DDP_SHRINK,
    FLIP_ON_THE_WAY,
    FSDP,
    HOSTS,
    HOSTS_SHRINK,
    HSDP_SHRINK,
    LOAD_AFTER,
    LOCAL,
    NUM_STEPS,
    OVERLAP,
    REJOIN,
    SAVE_AFTER,
    SERVER,
    SHRINKING,
    WITH_HELP,
    Accident,
)
from .faults_judge import Ending
from .striking import LoopLeft, Striker, StruckSteps

_SMALL = Options(bucket_cap_mb=0.004)
_PR_SET_PDEATHSIG = 1
_JOIN = timedelta(seconds=60)
OVER = "over"
"""The file that is there once local steps may end."""


class Surroundings(NamedTuple):
    """The surroundings of a trial's ranks: their folder, their hosts, if they have any,
    and whether they go on from the files that others have saved there.
    """

    folder: str
    spaces: Namespaces | None
    resume: bool


def keep_store(end: Connection, folder: str, spaces: Namespaces | None) -> None:
    """The life of a process that only holds the store, as the agent of torchrun
    does, on the last host.
    """
    enter(folder, spaces, len(spaces.pids) - 1 if spaces else -1)
    store = TCPStore("127.0.0.1", 0, None, True, _JOIN, wait_for_workers=False)
    end.send(store.port)
    end.poll(None)


def live(end: Connection, accident: Accident, rank: int, start: Surroundings) -> None:
    """A rank's life: it joins the group, trains, and tells how that ended.

    It sends ("port", number) on rank 0, ("struck", seconds) where a fault strikes, and
    at last ("over", Ending).
    """
    enter(start.folder, start.spaces, rank)
    os.environ[wire.FOLDER] = start.folder
    host = "127.0.0.1"
    if start.spaces is not None:
        host = host_address(len(start.spaces.pids) - 1 if accident.has_store else 0)
    store = _join(accident, rank, end, host)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 36), nn.Tanh(), nn.Linear(36, 4)
    )
    striker = None
    if rank in accident.victims:
        striker = Striker(accident, partial(_report, accident, end))
        if place := _PLACES.get(accident.point):
            striker.around(*place)
        if kind := MESSAGES.get(accident.point):
            striker.at_message(kind, int(accident.message * _NUM_MESSAGES))
    error: BaseException | None = None
    training = _Training(accident, rank, model, striker, start)
    try:
        if accident.way == LOCAL:
            training.run_locally(store, end)
        else:
            training.run()
    except (Exception, LoopLeft) as raised:
        error = raised
    end.send(("over", _ending(error, training)))
    if isinstance(error, LoopLeft):
        end.poll(None)  # It lives on, until the parent closes the pipe.
    elif error is not None:
        raise error


def enter(folder: str, spaces: Namespaces | None, host: int) -> None:
    """Puts this process on a host, and its output into a file of the folder.

    It ends with whoever started it, whose end a stopped one would outlive.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    file = Path(folder) / f"{host}.log"
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if spaces is not None:
        join_network(spaces, host)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)


def _report(accident: Accident, end: Connection, now_s: float) -> None:
    """Tells that the fault strikes; where another process carries it out, returns once
    it has.
    """
    end.send(("struck", now_s))
    if accident.kind in WITH_HELP:
        end.recv()


def _ending(error: BaseException | None, training: _Training) -> Ending:
    ranks = tuple(sorted(training.lost))
    return Ending(
        error="" if error is None else type(error).__name__,
        is_ours=isinstance(error, GradwireError),
        ranks=getattr(error, "ranks", () if error else ranks),
        step=getattr(error, "step", -1),
        text=str(error or ""),
        end_s=time.monotonic(),
        digest=0 if error else training.digest(),
        steps=training.steps,
        of_all=training.of_all,
        next_s=training.next_s,
    )


def _join(accident: Accident, rank: int, end: Connection, host: str) -> TCPStore:
    """Joins the group; rank 0 opens a store on a port that the system picks, if nobody
    else has.

    A process that comes in gets the store alone, once another has ended.
    """
    is_host = rank == 0 and not accident.has_store
    port = 0 if is_host else int(end.recv())
    store = TCPStore(host, port, None, is_host, _JOIN, wait_for_workers=False)
    if is_host:
        end.send(("port", store.port))
    world = accident.world
    if rank < world:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=_JOIN
        )
    elif accident.kind == REJOIN:
        end.recv()
    return store


class _Training:
    """The training of one rank, in which a fault strikes if it is a victim."""

    def __init__(
        self,
        accident: Accident,
        rank: int,
        model: nn.Module,
        striker: Striker | None,
        start: Surroundings,
    ) -> None:
        self._accident = accident
        self._rank = rank
        self._model = model
        self._striker = striker
        self._folder = Path(start.folder)
        self._file = self._folder / f"state-{rank}.pt"
        self._kept = torch.load(self._file, weights_only=True) if start.resume else None
        self._draw = torch.Generator().manual_seed(rank)
        self.lost: list[int] = []
        """The ranks without which this one has gone on."""
        self.steps = 0
        """Its local steps, and those of all ranks in the model."""
        self.of_all = 0
        self.next_s = 0.0
        """When the first whole step ended after a loss; under local steps, when this
        rank went on in its rounds.
        """
        self._anchors: Iterable[torch.Tensor] = ()
        self._saved: dict[str, Any] = {}
        self._older: dict[str, Any] = {}

    def run(self) -> None:
        accident = self._accident
        model = self._model
        first = 0
        group = None
        trained = model
        if self._kept is not None:
            model.load_state_dict(self._kept["model"])
        if accident.way in (FSDP, HSDP_SHRINK):
            group = _sharded(model, accident.timeout_s)
        elif accident.way in (DDP, DDP_SHRINK):
            trained = DistributedDataParallel(model, broadcast_buffers=False)
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
        self._at("rendezvous")
        if accident.way == SERVER and self._rank == accident.world - 1:
            self._serve()
            return
        handle = _attached(accident, self._rank, trained, optimizer, group)
        if self._kept is not None:
            first = self._resume(optimizer, handle)
        self._struck(handle)
        for step in range(first, NUM_STEPS):
            self._step(step, trained, optimizer, handle)
        # parameters are compared as a backward pass begins, and the last step's too
        self._backward(trained, optimizer)
        self._at("detach")
        handle.synchronize()
        handle.detach()

    def run_locally(self, store: TCPStore, end: Connection) -> None:
        """Trains at a speed of its own, for some seconds and until all have come."""
        world = self._accident.world
        comes_in = self._rank >= world
        model = self._model
        optimizer = SGD(model.parameters(), lr=0.05)
        failure = FailurePolicy(
            timeout=timedelta(seconds=self._accident.timeout_s),
            on_failure="shrink",
            rejoin=store if comes_in else None,
        )
        handle: Any = local_steps(
            model,
            optimizer,
            none(),
            every=world,
            quorum=2,
            fragments=world,
            failure=failure,
        )
        if comes_in:
            end.send(("in", None))
        end_s = time.monotonic() + LOCAL_S
        while time.monotonic() < end_s or not (self._folder / OVER).exists():
            self._at("step", self.steps // 3)
            x = torch.randn(8, 12, generator=self._draw)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            time.sleep(0.02 * (1 + self._rank))
            optimizer.step()
            self.steps += 1
            self._note_lost(handle)
        handle.end_period()
        self._note_lost(handle)
        self.of_all = handle.steps_of_all
        self._anchors = handle.anchors().values()
        handle.detach()

    def _note_lost(self, handle: Any) -> None:
        lost = [rank for left in handle.stats()["left"] for rank in left["ranks"]]
        if lost != self.lost:
            self.next_s = time.monotonic()
        self.lost = lost

    def digest(self) -> int:
        """A checksum of parameters, and of anchors under local steps."""
        held = [*map(shard_of, self._model.parameters()), *self._anchors]
        return zlib.crc32(b"".join(one.detach().numpy().tobytes() for one in held))

    def _struck(self, handle: Handle) -> Synchroniser:
        """The synchroniser of a handle, in whose messages a fault strikes."""
        synchroniser = synchroniser_of(handle)
        if self._striker is not None and self._accident.point == "verb":
            struck = StruckSteps(self._striker)
            for message in synchroniser.messages:
                struck.around(message)
        return synchroniser

    def _serve(self) -> None:
        """The last rank's training, where it only serves."""
        # serve calls it once
        vars(serving)["synchroniser_of"] = self._struck
        if self._striker is not None and self._accident.point == "step":
            self._striker.around(engine.Engine, "hears_of_step")
        policy = _policy(self._accident)
        serving.serve(self._model, _served(), failure=policy, options=_SMALL)

    def _step(
        self, step: int, trained: nn.Module, optimizer: SGD, handle: Handle
    ) -> None:
        self._at("step", step)
        self._backward(trained, optimizer)
        optimizer.step()
        if self._accident.way in (SERVER, *SHRINKING):
            return
        if step == self._accident.step:
            self._at("settle")
            handle.synchronize()
        if step == SAVE_AFTER - 1:
            self._older = handle.state_dict()
        if step == SAVE_AFTER:
            self._at("save")
            self._save(optimizer, handle)
        if step == LOAD_AFTER:
            self._at("load")
            is_wrong = self._striker is not None and self._accident.kind == "other step"
            handle.load_state_dict(self._older if is_wrong else self._saved)

    def _backward(self, trained: nn.Module, optimizer: SGD) -> None:
        """Fills gradients with the means of a step, which losses make it repeat."""
        x = torch.randn(8, 12, generator=self._draw)
        y = torch.randint(4, (8,), generator=self._draw)
        while True:
            optimizer.zero_grad()
            loss: Any = F.cross_entropy(trained(x), y)
            try:
                loss.backward()
                break
            except RanksLost as failure:
                self.lost += failure.ranks
                self.next_s = inf
        if self.next_s == inf:
            self.next_s = time.monotonic()

    def _save(self, optimizer: SGD, handle: Handle) -> None:
        """Keeps the state in this process, and all that a resumed run needs in a
        file.
        """
        self._saved = handle.state_dict()
        if self._accident.way == FSDP:
            return  # whose own checkpoints are of other tools
        kept = {
            "model": self._model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "handle": self._saved,
            "draw": self._draw.get_state(),
        }
        torch.save(kept, self._file)
        if self._accident.kind == "resume":
            dist.barrier()  # no rank is killed before all files are there

    def _resume(self, optimizer: SGD, handle: Handle) -> int:
        """Takes up what the file holds; returns the next step."""
        assert self._kept is not None
        optimizer.load_state_dict(self._kept["optimizer"])
        self._saved = self._kept["handle"]
        handle.load_state_dict(self._saved)
        self._draw.set_state(self._kept["draw"])
        return SAVE_AFTER + 1

    def _at(self, point: str, step: int | None = None) -> None:
        if self._striker is not None:
            self._striker.at(point, step)


LOCAL_S = 6.0
"""Seconds of local steps, at least."""
_NUM_MESSAGES = 20
MESSAGES: dict[str, type] = {"message": tuple, "merge": Merge}
"""The kind of messages of a point."""
_PLACES: dict[str, tuple[Any, str]] = {
    "agree": (attachment, "agree"),
    "connect": (engine, "open_channels"),
    "broadcast": (engine, "broadcast_all"),
    "offer": (rejoin.Newcomer, "enter"),
    "admission": (rejoin, "open_group"),
    "anchors": (FragmentLearner, "catch_up"),
}
"""The function that the runtime calls at a point in attach, or as a process comes in,
and where it finds it.
"""


def _sharded(model: nn.Module, timeout_s: float) -> dist.ProcessGroup:
    """Shards the model over two ranks; returns the group of those that hold the same
    shard.
    """
    limit = timedelta(seconds=timeout_s)
    among = [
        dist.new_group(pair, timeout=limit) for pair in ([0, 2], [1, 3], [0, 1], [2, 3])
    ]
    rank = dist.get_rank()
    mesh = DeviceMesh.from_group(
        [among[rank % 2], among[2 + rank // 2]],
        "cpu",
        mesh=torch.tensor([[0, 1], [2, 3]]),
        mesh_dim_names=("replicate", "shard"),
    )
    fully_shard(model, mesh=mesh["shard"])
    return mesh["replicate"].get_group()


def _policy(accident: Accident) -> FailurePolicy:
    return FailurePolicy(
        timeout=timedelta(seconds=accident.timeout_s),
        check_every=accident.check_every,
        checksums=accident.kind == FLIP_ON_THE_WAY,
        on_failure="shrink" if accident.way in SHRINKING else "end",
    )


def _attached(
    accident: Accident, rank: int, model: nn.Module, optimizer: SGD, group: Any
) -> Handle:
    way = accident.way
    begin = partial(attach, model, failure=_policy(accident))
    if way == OVERLAP:
        return begin(_plan(model, overlap_forward=True), optimizer=optimizer)
    if way in COORDINATED:
        # on each rank in turn, so that it is often the victim
        bulk = Bulk(rank=accident.number % 4)
        return begin(_plan(model, bulk=bulk), optimizer=optimizer)
    if way in (HOSTS, HOSTS_SHRINK):
        os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))
        return begin(onebit(block=64), mesh="torchrun", options=_SMALL)
    if way == SERVER:
        return begin(_served(), options=_SMALL)
    exchange = exchange_of(way) if way in COLLECTIVES else exchange_for(none())
    return begin(exchange, group=group, options=_SMALL)


def _served() -> Exchange:
    return with_error_feedback(pair(onebit(block=64), casync_ps(servers=1)))


def exchange_of(collective: str) -> Exchange:
    """An exchange by a collective: of dense gradients, or of sparse ones where it takes
    these.
    """
    made = load("collective", collective)()
    try:
        return pair(none(), made)
    except IncompatiblePair:
        return with_error_feedback(pair(topk(density=0.1), made))


def _plan(
    model: nn.Module, *, overlap_forward: bool = False, bulk: Bulk | None = None
) -> Plan:
    """A message for each parameter, the last first.

    With ``bulk`` they have sends, which a coordinator starts.
    """
    served = ExchangeSetting(
        compressor="onebit", collective="casync_ps", error_feedback=True
    )
    messages = (
        PlannedMessage(
            chunks=(Chunk(tensor=name, start=0, stop=param.numel()),),
            exchange="dense" if bulk is None else "served",
        )
        for name, param in reversed([*model.named_parameters()])
    )
    return Plan(
        planner="bench faults",
        model=type(model).__name__,
        messages=tuple(messages),
        credit=2,
        overlap_forward=overlap_forward,
        exchanges={} if bulk is None else {"served": served},
        bulk=bulk,
    )
