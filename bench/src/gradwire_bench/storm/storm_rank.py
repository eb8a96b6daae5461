"""One life of a rank of ``bench storm``, from its start until it is killed.

A life writes a line for each thing that happens into its rank's file: a JSON list of
the seconds since the storm began, a word, and values. ``reading`` knows the words.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from datetime import timedelta
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from gradwire.compress.uniform import uniform
from gradwire.runtime.local_steps.local_steps import local_steps
from gradwire.runtime.settings import FailurePolicy

from ..faults.faults_rank import enter
from ..testbed.netns import Namespaces, host_address
from ..training.tasks import CONTEXT, make_task
from ..workloads.gpt import GPT
from .schedule import CALM, DDP, GRADWIRE, TORCHFT, StormBench

POINTS = 24
"""How often the model is scored; ranks take turns."""
TOKENS = 4 * CONTEXT
"""Tokens of a step."""
READY = "ready"
"""The file that says that the store is there."""
_STORE = 29500
_LIGHTHOUSE = 29510
_JOIN_MS = 60_000
"""The milliseconds for which the Lighthouse's own program waits for live ranks."""


class Life(NamedTuple):
    """A life of a rank, and the storm that it is in."""

    storm: StormBench
    way: str
    folder: str
    spaces: Namespaces
    begin_s: float
    """When the storm began, by ``time.monotonic()``."""
    rank: int
    number: int
    """Lives of this rank before; under DDP also starts of all."""


def live(life: Life) -> None:
    """Trains until this process is killed, or an error ends it."""
    enter(life.folder, life.spaces, life.rank)
    _WAYS[life.way](Learner(life))


def serve(life: Life) -> None:
    """Holds the store, and torchft's Lighthouse, on the host after the last rank's."""
    enter(life.folder, life.spaces, life.rank)
    held = [TCPStore("0.0.0.0", _STORE, is_master=True, wait_for_workers=False)]
    if life.way == TORCHFT:
        from torchft._torchft import LighthouseServer

        lighthouse = LighthouseServer(
            bind=f"0.0.0.0:{_LIGHTHOUSE}",
            min_replicas=life.rank // 2,
            join_timeout_ms=_JOIN_MS,
        )
        held.append(lighthouse)
    (Path(life.folder) / READY).touch()
    signal.pause()
    del held


class Learner:
    """The model of one life, its batches and its file."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.storm = life.storm
        self.timeout = timedelta(seconds=life.storm.timeout_s)
        self._file = (Path(life.folder) / f"{life.rank}").open("a", encoding="utf-8")
        self.note("life")
        torch.manual_seed(0)
        self._task = make_task("gpt")
        self.model = GPT(CONTEXT, width=self.storm.width, num_layers=4)
        self._scored = deepcopy(self.model)
        self.optimizer = self._task.make_optimizer(self.model.parameters())
        # batches that no life before has seen
        self._batch = life.number * 100_000
        self._point = -1
        self.open: list[int] = []
        """The numbers of steps that are not in the model."""

    def note(self, what: str, *values: object) -> None:
        """Writes a line into this rank's file."""
        line = [round(self._now_s(), 3), what, *values]
        self._file.write(f"{json.dumps(line)}\n")
        self._file.flush()

    def take_in(self, round_name: object, num_steps: int | None = None) -> None:
        """Notes a round that took in the next steps of this life, or all."""
        self.note("in", round_name, self.open[:num_steps], bool(self.open))
        del self.open[:num_steps]

    def state(self) -> dict[str, Any]:
        """All that another process needs to train on."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from another's state, without this rank's own steps."""
        self.open.clear()
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _now_s(self) -> float:
        return time.monotonic() - self.life.begin_s

    def store(self) -> TCPStore:
        """The store beside the ranks."""
        return TCPStore(host_address(self.storm.hosts), _STORE, is_master=False)

    def step(
        self,
        forward: nn.Module,
        tokens: int,
        weights: Mapping[str, Tensor],
    ) -> None:
        """Makes a step, most of whose seconds are a wait; before it scores the
        weights, if it is this rank's turn.
        """
        rank = self.life.rank
        ranks = self.storm.hosts
        begin_s = self._now_s()
        # the last rank is four times as slow as the first one
        step_s = self.storm.step_s * (1 + 3 * rank / (ranks - 1))
        point = int(begin_s / self.storm.seconds * POINTS)
        if point != self._point and point % ranks == rank:
            self._point = point
            self._scored.load_state_dict(weights)
            self.note("loss", tokens, self._task.score(self._scored))
        inputs, targets = self._task.batch(self._batch, rank, ranks)
        self.optimizer.zero_grad()
        loss: Any = self._task.loss(forward, inputs, targets)
        # DDP averages in the backward pass, which is behind the step's seconds then
        is_local = forward is self.model
        if is_local:
            loss.backward()
        time.sleep(max(0.0, begin_s + step_s - self._now_s()))
        self.open.append(self._batch)
        # a step that a busy machine makes longer counts no more
        self.note("step", max(begin_s, self._now_s() - step_s), self._batch)
        self._batch += 1
        if not is_local:
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def _ddp(learner: Learner) -> None:
    storm = learner.storm
    rank = learner.life.rank
    store = PrefixStore(f"{learner.life.number}", learner.store())
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=storm.hosts, timeout=learner.timeout
    )
    file = Path(learner.life.folder) / "checkpoint.pt"
    step = 0
    if file.exists():
        saved = torch.load(file, weights_only=True)
        step = saved["step"]
        learner.load(saved)
    learner.note("back", step)
    model = DistributedDataParallel(learner.model)
    while True:
        if rank == 0 and step % storm.every == 0:
            torch.save({**learner.state(), "step": step}, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
        learner.step(model, step * storm.hosts * TOKENS, learner.model.state_dict())
        learner.take_in(step)
        step += 1


def _torchft(learner: Learner) -> None:
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    storm = learner.storm
    rank = learner.life.rank
    own = host_address(rank)
    # where others fetch its state from; a host has the machine's name
    socket.gethostname = partial(str, own)
    store = TCPStore(own, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=learner.timeout),
        load_state_dict=learner.load,
        state_dict=learner.state,
        min_replica_size=storm.hosts // 2,
        use_async_quorum=False,
        timeout=learner.timeout,
        quorum_timeout=timedelta(milliseconds=2 * _JOIN_MS),
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=f"http://{host_address(storm.hosts)}:{_LIGHTHOUSE}",
        replica_id=f"rank_{rank}",
        hostname=own,
        init_sync=False,
    )
    commit = manager.should_commit

    def should_commit() -> bool:
        round_number = manager.current_step()
        if is_in := commit():
            learner.take_in(round_number)
        else:
            learner.note("out")
            learner.open.clear()
        return bool(is_in)

    manager.should_commit = should_commit
    model = learner.model
    outer = SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    diloco = DiLoCo(
        manager, [model], learner.optimizer, outer, storm.every, use_bucketization=True
    )
    with diloco:
        while True:
            if not learner.open:
                anchors = deepcopy(model.state_dict())
            tokens = manager.batches_committed() * storm.every * TOKENS
            learner.step(model, tokens, anchors)


def _gradwire(learner: Learner) -> None:
    storm = learner.storm
    rank = learner.life.rank
    number = learner.life.number
    store = learner.store()
    if not number:
        dist.init_process_group(
            "gloo",
            store=PrefixStore("group", store),
            rank=rank,
            world_size=storm.hosts,
        )
    policy = FailurePolicy(
        on_failure="shrink",
        timeout=learner.timeout,
        store=None if number else store,
        rejoin=store if number else None,
    )
    # fragments take turns evenly within a period
    fragments = gcd(storm.hosts, storm.every)
    reached = 0

    def on_merge(line: str) -> None:
        nonlocal reached
        merge = json.loads(line)
        for entry in merge["who"]:
            if entry["rank"] != merge["rank"]:
                continue
            if not entry["weight"]:
                learner.note("out")
                continue
            before = reached // fragments
            reached += entry["steps"]
            name = f"{merge['fragment']}.{merge['round']}"
            # a step is in the model once all fragments have it
            learner.take_in(name, reached // fragments - before)

    handle: Any = local_steps(
        learner.model,
        learner.optimizer,
        uniform(),
        every=storm.every,
        fragments=fragments,
        quorum=storm.hosts // 2,
        # a step of the slowest rank, whose push would wait for a period otherwise
        grace=4 * storm.step_s,
        tape=on_merge,
        failure=policy,
    )

    while True:
        handle.count_tokens(TOKENS)
        weights = {**learner.model.state_dict(), **handle.anchors()}
        learner.step(learner.model, handle.tokens, weights)


_WAYS: dict[str, Callable[[Learner], None]] = {
    DDP: _ddp,
    TORCHFT: _torchft,
    GRADWIRE: _gradwire,
    CALM: _gradwire,
}
"""The ways to train, as functions that never return."""
