"""One rank of ``bench faults``: trains a few steps, in which a fault strikes if it is a victim."""

from __future__ import annotations

import ctypes
import os
import signal
import time
import zlib
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from ..compress.none import none
from ..compress.onebit import onebit
from ..compress.topk import topk
from ..contract import Exchange
from ..data.plan import Chunk, Plan, PlannedMessage
from ..error_feedback import with_error_feedback
from ..errors import GradwireError, IncompatiblePair
from ..exchange import exchange_for
from ..load import load, names
from ..pairing import pair
from ..runtime import engine, last_verbs
from ..runtime.attach import attach
from ..runtime.handle import Handle
from .striking import Accident, Left, Striker, Texts

WORLD = 4
NUM_STEPS = 5
SAVE_AFTER, LOAD_AFTER = 1, 2
"""The steps after which all ranks save a state, and load it again."""
DDP, OVERLAP, HOSTS = "ddp", "overlap", "hosts"
_COLLECTIVES = tuple(name for name in names("collective") if name != "allreduce")
WAYS = ("plain", DDP, OVERLAP, HOSTS, *_COLLECTIVES)
"""How models are trained: a plain module, DDP, a plan that overlaps the next forward pass, hosts of
two ranks, and a plain module by each collective."""
POINTS = ("rendezvous", "connect", "broadcast", "step", "save", "load", "detach")
"""Where faults strike but for verbs: in attach before ranks meet, where they connect and where
parameters are broadcast; before a step, and before the calls of the handle."""
_SMALL_MB = 0.004
_PR_SET_PDEATHSIG = 1
_JOIN = timedelta(seconds=60)


class Ending(NamedTuple):
    """The end of a rank's training, and the CRC-32 of its parameters where no error ended it.

    ``error`` is the type of the error that ended it ("" for none), and ``is_ours`` tells whether it
    is gradwire's; then ``ranks`` and ``step`` are what it names.
    """

    error: str
    is_ours: bool
    ranks: tuple[int, ...]
    step: int
    text: str
    end_s: float
    digest: int


def live(accident: Accident, rank: int, end: Connection, folder: str) -> None:
    """A rank's life: it joins the group, trains, and tells how that ended.

    It sends ("port", number) on rank 0, ("struck", seconds) where a fault strikes, and at last
    ("over", Ending).
    """
    # Whoever started it may be killed, and a stopped process would stay.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(Path(folder) / f"{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ[last_verbs.FOLDER] = folder
    torch.set_num_threads(1)
    _join(rank, end)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 36), nn.Tanh(), nn.Linear(36, 4)
    )
    striker = None
    if rank in accident.victims:
        striker = Striker(accident, lambda now_s: end.send(("struck", now_s)))
    error: BaseException | None = None
    try:
        _train(accident, rank, model, striker)
    except (Exception, Left) as raised:
        error = raised
    end.send(("over", _ending(error, 0 if error else _digest(model))))
    if isinstance(error, Left):
        end.poll(None)  # It lives on, until the parent closes the pipe.
    elif error is not None:
        raise error


def _digest(model: nn.Module) -> int:
    return zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))


def _ending(error: BaseException | None, digest: int) -> Ending:
    ranks, step = getattr(error, "ranks", ()), getattr(error, "step", -1)
    kind = "" if error is None else type(error).__name__
    ours = isinstance(error, GradwireError)
    return Ending(kind, ours, ranks, step, str(error or ""), time.monotonic(), digest)


def _join(rank: int, end: Connection) -> None:
    """Joins the group; rank 0 opens a store on a port that the system picks."""
    port = 0 if rank == 0 else int(end.recv())
    store: Any = TCPStore("127.0.0.1", port, None, rank == 0, _JOIN)
    if rank == 0:
        end.send(("port", store.port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=_JOIN)


def _train(accident: Accident, rank: int, model: nn.Module, striker: Striker | None) -> None:
    optimizer = SGD(model.parameters(), lr=0.05)
    way = accident.way
    if striker is not None and accident.point in ("connect", "broadcast"):
        striker.around(
            engine, {"connect": "open_channels", "broadcast": "broadcast_all"}[accident.point]
        )
    trained = DistributedDataParallel(model, broadcast_buffers=False) if way == DDP else model
    _at(striker, "rendezvous")
    handle = _attached(accident, rank, trained, optimizer)
    if striker is not None and accident.point == "verb":
        texts = Texts(striker)
        for message in handle.synchroniser.messages:
            texts.around(message)
    draw = torch.Generator().manual_seed(rank)
    saved: dict[str, Any] = {}
    for step in range(NUM_STEPS):
        _at(striker, "step", step)
        x, y = torch.randn(8, 12, generator=draw), torch.randint(4, (8,), generator=draw)
        optimizer.zero_grad()
        loss: Any = F.cross_entropy(trained(x), y)
        loss.backward()
        optimizer.step()
        if step == SAVE_AFTER:
            _at(striker, "save")
            saved = handle.state_dict()
        if step == LOAD_AFTER:
            _at(striker, "load")
            handle.load_state_dict(saved)
    _at(striker, "detach")
    handle.synchronize()
    handle.detach()


def _at(striker: Striker | None, point: str, step: int | None = None) -> None:
    if striker is not None:
        striker.at(point, step)


def _attached(accident: Accident, rank: int, model: nn.Module, optimizer: SGD) -> Handle:
    way, limit = accident.way, timedelta(seconds=accident.timeout_s)
    begin = partial(attach, model, timeout=limit, check_every=accident.check_every)
    if way == OVERLAP:
        return begin(_plan(model), optimizer=optimizer)
    if way == HOSTS:
        os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))
        return begin(onebit(block=64), mesh="torchrun", bucket_cap_mb=_SMALL_MB)
    exchange = exchange_of(way) if way in _COLLECTIVES else exchange_for(none())
    return begin(exchange, bucket_cap_mb=_SMALL_MB)


def exchange_of(collective: str) -> Exchange:
    """An exchange by a collective: of dense gradients, or of sparse ones where it takes these."""
    made = load("collective", collective)()
    try:
        return pair(none(), made)
    except IncompatiblePair:
        return with_error_feedback(pair(topk(density=0.1), made))


def _plan(model: nn.Module) -> Plan:
    """A message for each parameter, the last first, whose means the next forward pass waits for."""
    messages = (
        PlannedMessage(chunks=(Chunk(tensor=name, start=0, stop=param.numel()),))
        for name, param in reversed([*model.named_parameters()])
    )
    return Plan(
        planner="bench faults",
        model=type(model).__name__,
        messages=tuple(messages),
        credit=2,
        overlap_forward=True,
    )
