"""Copies of a device's gradients stand behind the kernels that make them, and before their readers.

There is no device here: a stand-in launches kernels that run only when somebody waits for them, as
late as a device may run them. What torch's own streams do is not tested by it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.compress.selective import selective
from gradwire.runtime.driver import COMPUTE, INLINE
from gradwire.runtime.engine import Engine
from gradwire.runtime.lanes import Task
from gradwire.runtime.membership import ALONE
from gradwire.runtime.messages import Message, ParamRange
from gradwire.runtime.sparse_message import SparseMessage
from gradwire.runtime.streams import Streams
from gradwire.runtime.synchroniser import Synchroniser
from tests.runtime.training import DENSE


class Stream:
    """Kernels in the order in which they were launched; those up to ``done`` have run."""

    def __init__(self, name: str, device: LateDevice) -> None:
        self.name, self._device = name, device
        self._kernels: list[Callable[[], Any]] = []
        self.done = 0

    def launch(self, kernel: Callable[[], Any]) -> None:
        self._kernels.append(kernel)

    def run_until(self, place: int) -> None:
        for kernel in self._kernels[self.done : place]:
            kernel()
        self.done = max(self.done, place)

    def synchronize(self) -> None:
        self._device.log.append(f"wait for {self.name}")


class Event:
    def __init__(self, stream: Stream) -> None:
        self._stream, self._place = stream, len(stream._kernels)

    def wait(self, stream: Stream) -> None:
        self._stream.run_until(self._place)


class LateDevice:
    """Two streams to begin with: the lane's threads have one, the test's thread has the other."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.lanes, self.users = Stream("the lane's", self), Stream("the user's", self)
        self._thread = threading.current_thread()
        self._num_made = 0

    def current_stream(self, device: torch.device) -> Stream:
        return self.users if threading.current_thread() is self._thread else self.lanes

    def new_stream(self, device: torch.device) -> Stream:
        self._num_made += 1
        return Stream(f"own {self._num_made}", self)

    def record(self, stream: Stream) -> Event:
        return Event(stream)

    @contextmanager
    def _use(self, stream: Stream) -> Iterator[None]:
        self.log.append(f"on {stream.name}")
        yield
        self.log.append("end")

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        return self._use(stream)


class OnDevice(Tensor):
    """A tensor in host memory that says it lies on a device."""

    is_cuda = True  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # what is made of it is plain


def late_gradient(values: Tensor, stream: Stream) -> Tensor:
    """NaN until its kernel has run."""
    grad: Tensor = torch.full_like(values, float("nan")).as_subclass(OnDevice)
    stream.launch(lambda: grad.copy_(values))
    return grad


Params = dict[str, Tensor]


def params() -> Params:
    return {"first": torch.ones(4, 3), "second": torch.ones(5)}


@contextmanager
def step(streams: Streams | None, messages: Sequence[Any], of: Params) -> Iterator[Synchroniser]:
    engine = Engine(ALONE, num_channels=1, timeout=timedelta(seconds=30), on_span=lambda span: None)
    synchroniser = Synchroniser(engine, messages, of, streams)
    synchroniser.begin(0)
    try:
        yield synchroniser
    finally:
        engine.close()


def one_message(of: Params) -> list[Message]:
    return [Message(0, [ParamRange.whole(name, p) for name, p in of.items()], DENSE, 0, 1)]


def each_its_own(of: Params) -> list[Message]:
    return [
        Message(i, [ParamRange.whole(name, p)], DENSE, 0, 1)
        for i, (name, p) in enumerate(of.items())
    ]


@pytest.mark.parametrize("fused", [one_message, each_its_own])
def test_gather_waits_for_its_own_gradients(fused: Callable[[Params], list[Message]]) -> None:
    device, of = LateDevice(), params()
    later: list[str] = []
    with step(Streams(device), fused(of), of) as synchroniser:
        grads = {}
        for name, param in of.items():
            grads[name] = late_gradient(param * 3, device.users)
            synchroniser.ready(name, grads[name])
            device.users.launch(lambda name=name: later.append(name))
        synchroniser.close()
        synchroniser.finish()
    for name, param in of.items():
        assert torch.equal(grads[name].as_subclass(Tensor), param * 3)
    assert "second" not in later, "nobody waits for what was launched after the last gradient"


@pytest.mark.parametrize("lane", [COMPUTE, INLINE])
def test_an_encode_ahead_waits_for_its_own_gradient(lane: str) -> None:
    device, of = LateDevice(), params()
    exchange = selective(sparsifier="topk", density=1.0, num_dense=0)
    ranges = [ParamRange.whole(name, param) for name, param in of.items()]
    message = Message(0, ranges, exchange, 0, 2, lanes=dict.fromkeys(of, lane))
    later: list[str] = []
    with step(Streams(device), [message], of) as synchroniser:
        synchroniser.ready("first", late_gradient(of["first"] * 3, device.users))
        device.users.launch(lambda: later.append("first"))
        behind = synchroniser.engine.begin(Task("behind", lambda: None, COMPUTE, order=(1,)))
        synchroniser.engine.wait([behind])
    assert message.flat_N.tolist() == [3.0] * 12 + [0.0] * 5
    assert [*message.member.ahead] == [0]
    assert message.member.ahead[0].values_K.tolist() == [3.0] * 12
    assert not later


def test_copies_are_made_on_a_stream_of_their_own_and_waited_for() -> None:
    device, of = LateDevice(), params()
    with step(Streams(device), one_message(of), of) as synchroniser:
        for name, param in of.items():
            synchroniser.ready(name, late_gradient(param, device.users))
        synchroniser.close()
        synchroniser.finish()
    assert device.log == ["on own 1", "wait for own 1", "end"] * 2  # gather, scatter


def test_what_a_scatter_makes_is_made_on_the_producers_stream() -> None:
    """Its memory outlives the scatter, and belongs to the stream that it is made on."""
    device, table = LateDevice(), torch.ones(6, 2)
    values = torch.zeros(6, 2)
    values[[4, 1]] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    grad = late_gradient(values, device.users)
    of = {"table": table}
    with step(Streams(device), [SparseMessage(0, "table", table, 0, 1)], of) as synchroniser:
        synchroniser.ready("table", grad)
        synchroniser.close()
        synchroniser.finish()
    assert device.log[:3] == ["on own 1", "wait for own 1", "end"]
    assert device.log[3:] == ["on the user's", "wait for the user's", "end"]
    assert torch.equal(grad.as_subclass(Tensor), values)


def test_gradients_of_several_streams() -> None:
    """Autograd has a thread and a stream for each device, and each forward stream its own."""
    device, of = LateDevice(), params()
    with step(Streams(device), one_message(of), of) as synchroniser:
        grads = {name: late_gradient(param * 2, device.users) for name, param in of.items()}
        synchroniser.ready("first", grads["first"])
        device.users = Stream("another", device)
        late = late_gradient(of["second"] * 5, device.users)
        synchroniser.ready("second", late)
        synchroniser.close()
        synchroniser.finish()
    assert torch.equal(grads["first"].as_subclass(Tensor), of["first"] * 2)
    assert torch.equal(late.as_subclass(Tensor), of["second"] * 5)


class Heedless(Streams):
    """Copies at once, as a thread does that knows of no stream but its own."""

    def behind(self, marks: Any, *, allocates: bool = False) -> Any:
        return nullcontext()


def test_a_copy_that_waits_for_nothing_is_found() -> None:
    device, of = LateDevice(), params()
    with step(Heedless(device), one_message(of), of) as synchroniser:
        grads = {name: late_gradient(param, device.users) for name, param in of.items()}
        for name, grad in grads.items():
            synchroniser.ready(name, grad)
        synchroniser.close()
        synchroniser.finish()
    assert all(grad.as_subclass(Tensor).isnan().all() for grad in grads.values())


def test_gradients_in_host_memory_ask_for_nothing() -> None:
    class Nothing(Streams):
        def mark(self, device: torch.device) -> Any:
            raise AssertionError("a mark costs microseconds")

    of = params()
    with step(Nothing(LateDevice()), one_message(of), of) as synchroniser:
        for name, param in of.items():
            synchroniser.ready(name, param.clone())
        synchroniser.close()
        synchroniser.finish()
