"""Another thread detaches during a step; a forked child has the handle: neither hangs
anybody.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import gradwire as gw
from gradwire.errors import ExitCode, GradwireError
from gradwire.runtime.ddp import comm_hook
from gradwire.runtime.transport.task_graph import Task
from tests.each import each
from tests.runtime.given import keywords
from tests.runtime.ranks import Ranks
from tests.runtime.training import TOPK, Net, ddp, digest, gradients, loss_of

pytestmark = pytest.mark.multi
KINDS = ["module", "ddp"]


def put(kind: str, **settings: Any) -> tuple[Net, nn.Module, Any]:
    """A model, the module to call, and its handle."""
    net = Net()
    model = ddp(net) if kind == "ddp" else net
    return net, model, gw.attach(model, TOPK, **keywords(**settings))


def during_backward(net: Net, work: Callable[[], object]) -> None:
    """Has ``work`` done in the next backward pass, behind its first gradients."""

    def within(module: nn.Module, given: Any, output: Any) -> None:
        hook.remove()
        output.register_hook(lambda _: work())

    hook = net.middle.register_forward_hook(within)


def late(complete: Any) -> Any:
    """Completes a bucket's future some time after its messages are done."""

    def completed(bucket: Any, failure: BaseException | None) -> None:
        time.sleep(0.1)
        complete(bucket, failure)

    return completed


def in_another_thread(rank: int, world: int, kind: str) -> tuple[str, bool, int]:
    with pytest.MonkeyPatch.context() as patch:
        bucket = comm_hook._Bucket
        patch.setattr(bucket, "complete", late(bucket.complete))
        return detached_meanwhile(rank, kind)


def detached_meanwhile(rank: int, kind: str) -> tuple[str, bool, int]:
    net, model, handle = put(kind)
    expected = Net()
    thread = threading.Thread(target=handle.detach)

    def work() -> None:
        thread.start()
        thread.join(0.3)  # time to do harm; it waits for this pass

    for step in range(2):
        if step:
            during_backward(net, work)
        net.zero_grad()
        loss_of(model, rank, step).backward()
    means = digest(gradients(net))  # type: ignore[arg-type]
    thread.join()
    is_local, steps = handle.attached, handle.step
    if kind == "module":
        expected.load_state_dict(net.state_dict())
        for one in (net, expected):
            one.zero_grad()
            loss_of(one, rank, 2).backward()
        assert digest(gradients(net)) == digest(gradients(expected))  # type: ignore[arg-type]
    return means, is_local, steps


@each("kind", KINDS)
def test_detach_in_another_thread_waits_for_the_step(kind: str, two: Ranks) -> None:
    one, other = two.run(in_another_thread, kind)
    assert one == other
    assert one[1:] == (False, 2)


def in_endless_backward(rank: int, world: int) -> int:
    net, model, handle = put("module")
    engine = handle._synchroniser.engine
    patient = engine.timeout
    said: list[BaseException] = []

    def work() -> None:
        # for the detach alone, as ranks wait for each other behind it
        engine.timeout = timedelta(seconds=0.2)
        thread = threading.Thread(target=detach)
        thread.start()
        thread.join()
        engine.timeout = patient

    def detach() -> None:
        try:
            handle.detach()
        except gw.InvalidSetting as error:
            said.append(error)

    during_backward(net, work)
    for step in range(2):
        loss_of(model, rank, step).backward()
    assert "another thread is in a backward pass" in str(said[0])
    assert handle.attached
    return int(handle.step)


def test_detach_waits_no_longer_than_the_time_out(two: Ranks) -> None:
    assert two.run(in_endless_backward) == [2, 2]


def closed_in_mid_step(rank: int, world: int) -> str:
    """The last net: who waits for what is closed gets an error, and never waits for
    ever.
    """
    handle = put("module")[2]
    engine = handle._synchroniser.engine
    waits = threading.Thread(
        target=lambda: said.append(_error(lambda: engine.wait([never])))
    )
    said: list[str] = []
    never = engine._manager.add(Task("never", lambda: None, num_blockers=1))
    waits.start()
    while not any(not one.called for one in engine._waiters):
        pass
    handle.detach()
    waits.join()
    return said[0]


def _error(work: Callable[[], object]) -> str:
    try:
        work()
    except GradwireError as error:
        return str(error)
    return "nothing was raised"


def test_who_waits_for_a_closed_exchange_gets_an_error(two: Ranks) -> None:
    assert all(
        "in the middle of a step" in said for said in two.run(closed_in_mid_step)
    )


def ended(work: Callable[[], object]) -> int:
    """How a forked child ends that does this: 0 if nothing is raised; a hang ends by a
    signal.
    """
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            work()
            gc.collect()
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forked(rank: int, world: int, kind: str) -> tuple[list[int], str]:
    net, model, handle = put(kind)
    loss_of(model, rank, 0).backward()
    held = [net, model, handle]
    del net, model, handle

    def refused(work: Callable[[], object]) -> None:
        assert "was forked from process" in _error(work)

    def trains_alone() -> None:
        held[2].detach()
        own = held[0]
        own.zero_grad()
        loss_of(own, rank, 1).backward()
        assert own.last.weight.grad is not None

    def refused_all() -> None:
        refused(lambda: loss_of(held[1], rank, 1).backward())
        refused(held[2].gather_state)
        refused(held[2].sharded_state)

    codes = [ended(refused_all), ended(trains_alone), ended(held.clear)]
    net, model, handle = held
    for step in (1, 2):
        net.zero_grad()
        loss_of(model, rank, step).backward()
    assert handle.step == 3
    bits = digest(gradients(net))  # type: ignore[arg-type]
    handle.detach()
    dist.barrier()
    return codes, bits


@each("kind", KINDS)
def test_a_forked_child_is_refused_and_the_job_goes_on(kind: str, two: Ranks) -> None:
    (codes, one), other = two.run(forked, kind)
    assert codes == [0] * 3
    assert other == (codes, one)


PROGRAM = """
import os, sys
import torch, torch.distributed as dist
import gradwire as gw

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
model = torch.nn.Linear(64, 64)
handle = gw.attach(model, "topk")
loader = torch.utils.data.DataLoader(
    [(handle, n) for n in range(6)],
    None,
    num_workers=2,
    collate_fn=lambda pair: pair[1],
    multiprocessing_context="fork",
)
assert [*loader] == [*range(6)]
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    model(torch.ones(2, 64)).sum().backward()
    assert handle.step == 1
    if rank:
        raise ZeroDivisionError("the user's own mistake")
    model.zero_grad()
    model(torch.ones(2, 64)).sum().backward()
"""


@pytest.mark.slow
def test_children_that_leave_end_well_and_a_job_ends_when_one_rank_raises() -> None:
    """Children leave by the end of the program, where no destructor may wait for
    threads, or as loaders' do.

    Whole interpreters: they close their exchanges as they end, which forked ranks do
        not.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        command = [
            sys.executable,
            "-c",
            PROGRAM,
            f"tcp://127.0.0.1:{probe.getsockname()[1]}",
        ]
    settings: Any = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    ranks = [subprocess.Popen([*command, str(rank)], **settings) for rank in range(2)]
    try:
        texts = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for one in ranks:
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()
    assert [one.returncode for one in ranks] == [ExitCode.RANK_LOST, 1], texts
    assert "ZeroDivisionError: the user's own mistake" in texts[1]
    assert (
        "RankFailed: step 1 cannot be finished: rank 1 of 2 stopped answering"
        in texts[0]
    )
