"""One rank of ``matrix``: runs a program as torchrun would, and tells
how it ended.

The exchange that the program names is replaced by the cell's, where ``gw.attach`` and
every integration pass by.
"""

import ctypes
import hashlib
import os
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradwire.compress.int8 import int8
from gradwire.compress.none import none
from gradwire.compress.powersgd import powersgd
from gradwire.compress.topk import topk
from gradwire.compress.uniform import uniform
from gradwire.contract import Compressor, Exchange
from gradwire.errors import GradwireError
from gradwire.planning.data.cluster import Cluster
from gradwire.planning.data.plan import Plan
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from gradwire.runtime.attach import Attachment
from gradwire.runtime.grid.dtensors import shard_of
from gradwire.runtime.grid.reals import as_reals
from gradwire.runtime.handle import Handle
from gradwire.runtime.settings import Settings, trained
from gradwire.runtime.transport import wire
from gradwire_lab.planner.usbyte import usbyte

PROGRAMS = Path(__file__).resolve().parents[1] / "examples" / "matrix"
PLAN = "plan"
EXCHANGES: dict[str, Compressor | Exchange | None] = {
    "none": none(),
    "8 bits": int8(),
    "4 bits": uniform(bitwidth=4),
    "powersgd": powersgd(rank=2),
    "topk": topk(density=0.05),
    PLAN: None,
}
"""The exchanges that the cells of a program attach; a plan is made for its model."""
OURS = "# gradwire"
THEIRS = "# native"
"""The ends of lines that only the attached program has, and only the native one."""
_PR_SET_PDEATHSIG = 1


class ProgramRun(NamedTuple):
    """A run of a program: native where ``exchange`` is "", with these arguments."""

    path: Path
    exchange: str
    arguments: tuple[str, ...]
    world: int
    port: int


class ProgramEnd(NamedTuple):
    """The end of a program on one rank.

    ``bits`` are digests of its trained parameters by name, with the shard's place for
    DTensors. ``error`` is empty where none was raised, and ``is_ours`` tells whether it
    is gradwire's. ``overlapped`` counts steps that the next forward pass did not wait
    for.
    """

    bits: dict[str, str]
    error: str = ""
    is_ours: bool = False
    num_attached: int = 0
    overlapped: int = 0


def live(task: ProgramRun, rank: int, end: Connection, log: Path) -> None:
    """A rank's life: it runs the program, sends its ``ProgramEnd``, and stays until all
    have.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(_of_torchrun(task, rank), **{wire.FOLDER: str(log.parent)})
    sys.argv = [str(task.path), *task.arguments]
    sys.path[:0] = [str(task.path.parent), str(PROGRAMS)]  # the second for one_run.py
    torch.set_num_threads(1)
    handles = _take_over(task.exchange)
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(task.path)}
    try:
        exec(
            compile(source(task.path, bool(task.exchange)), str(task.path), "exec"),
            names,
        )
        bits = dict(digests(names["model"]))
        overlaps = [handle.stats()["overlapped_steps"] for handle in handles]
        ending = ProgramEnd(bits, num_attached=len(handles), overlapped=sum(overlaps))
    except BaseException as error:
        traceback.print_exc()
        ending = _of_error(error)
    sys.stdout.flush()
    end.send(ending)
    end.poll(None)  # the others may still need this rank, which is killed in the end


def source(path: Path, attached: bool) -> str:
    """The text of a program, attached or native; its lines keep their numbers.

    >>> path = PROGRAMS / "lbfgs.py"
    >>> [text.count("gw.attach(") + 2 * text.count("DDP(model)") for text in
    ...  (source(path, True), source(path, False))]
    [1, 2]
    """
    dropped = THEIRS if attached else OURS
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join("" if line.endswith(dropped) else line for line in lines) + "\n"


def _of_torchrun(task: ProgramRun, rank: int) -> dict[str, str]:
    """The variables that torchrun sets."""
    rank_text = str(rank)
    world = str(task.world)
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank_text),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), world),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(task.port),
        "TORCHELASTIC_RUN_ID": "matrix",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _take_over(cell: str) -> list[Handle]:
    """Has every attach take the cell's exchange; returns the list that its handles come
    into.
    """
    handles: list[Handle] = []
    attach = Attachment.attach

    def swapped(
        self: Attachment,
        model: nn.Module,
        settings: Settings,
        grid: Any,
        newcomer: Any = None,
    ) -> Handle:
        exchange = plan_of(model, grid.who.world) if cell == PLAN else EXCHANGES[cell]
        settings = replace(settings, exchange=exchange)
        handles.append(attach(self, model, settings, grid, newcomer))
        return handles[-1]

    Attachment.attach = swapped  # type: ignore[method-assign]
    return handles


def plan_of(model: nn.Module, world: int) -> Plan:
    """A plan that overlaps the next forward pass, for layers with seconds that are made
    up.
    """
    layers: dict[str, list[ProfiledTensor]] = {}
    for name, param in trained(model):
        held = as_reals(shard_of(param))
        dtype: Any = str(held.dtype).removeprefix("torch.")
        tensor = ProfiledTensor(name=name, shape=tuple(held.shape), dtype=dtype)
        layers.setdefault(name.rpartition(".")[0], []).append(tensor)
    made = tuple(
        Layer(
            name=name or "model",
            tensors=tuple(tensors),
            forward_s=1e-3,
            backward_s=2e-3,
        )
        for name, tensors in layers.items()
    )
    profile = Profile(
        model=type(model).__name__, source="seconds made up", batch_size=1, layers=made
    )
    cluster = Cluster(num_ranks=world, rate_bytes_per_s=1.25e7)
    return usbyte(profile, cluster, basic_partition_bytes=2048)


def digests(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Name and SHA-256 of each parameter, or of this rank's shard of it.

    Names are those of the module inside of a DDP or a compiled one.
    """
    for name, param in model.named_parameters():
        inner = ".".join(
            part for part in name.split(".") if part not in ("module", "_orig_mod")
        )
        where = "".join(f"@{place}" for place in _places(param))
        tensor: Tensor = shard_of(param).detach().resolve_conj().contiguous()
        flat = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor
        yield inner + where, hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def _places(param: Tensor) -> Iterable[int]:
    """This rank's place in each dimension of a mesh along which a DTensor is cut."""
    if not isinstance(param, DTensor):
        return ()
    cut = [dim for dim, how in enumerate(param.placements) if how.is_shard()]
    return [param.device_mesh.get_local_rank(dim) for dim in cut]


def _of_error(error: BaseException) -> ProgramEnd:
    """The ending by an error; gradwire's own may be the cause of a framework's."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, GradwireError):
        cause = cause.__cause__ or cause.__context__
    shown = cause or error
    return ProgramEnd({}, f"{type(shown).__name__}: {shown}", cause is not None)
