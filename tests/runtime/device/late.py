"""Late: a device that is none, whose streams run as late as they may.

Tensors on it (``device="late"``) are what torch takes for those of a device: autograd
has a thread for them, no kernel of gradwire's C++ is handed their memory, and a host
that wants their values must copy them. Their kernels are done at once, in host memory,
but each is held against all others that use the same memory (a clock of streams, as
race detectors have). One that no event puts behind those before it is noted in
``wrong``, and so is memory that is given up while another stream may use it. Copies to
and from the host that do not wait are made as late as may be, or at once, as a seed
draws. Where a test says that it ``has_network``, it has process groups of its own: gloo
on its memory, behind what is launched, and over only for streams that wait for a work.
Where one says that it ``needs_pinned``, such copies of other host memory are noted too:
torch's DDP makes some.
"""

from __future__ import annotations

import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from operator import attrgetter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.utils import _pytree as pytree

from gradwire.dsl import build
from gradwire.runtime.device import devices
from gradwire.runtime.step import refusals

Clock = dict[str, int]
"""How far each stream is known to have come, by name."""


class LateStream:
    """Kernels in order; ``clock`` is what is known to be over when the next of them
    runs.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {name: 0}

    def wait_for(self, clock: Clock) -> None:
        for name, time in clock.items():
            self.clock[name] = max(self.clock.get(name, 0), time)


class LateEvent:
    def __init__(self, stream: LateStream) -> None:
        self.clock = dict(stream.clock)

    def wait(self, stream: LateStream) -> None:
        with _LOCK:
            stream.wait_for(self.clock)

    def synchronize(self) -> None:
        LATE.host_waits_for(self.clock)


class Use(NamedTuple):
    """The time at which a stream has used the bytes ``start:stop`` of some memory."""

    stream: str
    time: int
    start: int
    stop: int


class Memory:
    """The memory of some tensors: who wrote which bytes last, and who has read them
    since.
    """

    def __init__(self, owner: LateStream) -> None:
        self.owner = owner
        self.written: list[Use] = []
        self.read: list[Use] = []
        self.landing: list[Callable[[], None]] = []
        weakref.finalize(self, LATE.given_up, owner, self.written, self.read)


class Late(Tensor):
    """A tensor on the device; ``inner`` has its values, in host memory."""

    inner: Tensor
    memory: Memory
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, memory: Memory) -> Late:
        made: Late = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner, made.memory = inner, memory
        return made

    @property
    def __class__(self) -> type:  # a tensor of a device is a plain one
        return Tensor

    @__class__.setter
    def __class__(self, other: type) -> None:
        raise TypeError("a late tensor stays what it is")

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with _LOCK:
            return LATE.call(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()


class LateDevice:
    """The device, with the functions of ``devices.Accelerator``; see the top of this
    file.
    """

    def __init__(self) -> None:
        self.default = LateStream("default")
        self.reset(None)
        self._threads = threading.local()
        self._num_streams = 0
        self._pinned: set[int] = set()
        self._host: Clock = {}

    def reset(self, seed: int | None) -> None:
        """Forgets what was noted; copies are late, where there is a ``seed`` some of
        them.
        """
        self._draws = None if seed is None else random.Random(seed)
        self.wrong: list[str] = []
        self.waits: list[str] = []
        """The streams that the host has waited for, by a copy or a look at a value."""
        self.num_pinned = 0
        self._later: list[tuple[str, int, Callable[[], None]]] = []
        self.is_recording = self.has_network = self.is_shared = self.needs_pinned = (
            False
        )

    # What gradwire asks.

    def current_stream(self, device: torch.device) -> LateStream:
        return getattr(self._threads, "stream", self.default)

    def new_stream(self, device: torch.device) -> LateStream:
        self._num_streams += 1
        return LateStream(f"stream {self._num_streams}")

    def record(self, stream: LateStream) -> LateEvent:
        with _LOCK:
            return LateEvent(stream)

    @contextmanager
    def _use(self, stream: LateStream) -> Iterator[None]:
        before = self.current_stream(DEVICE)
        self._threads.stream = stream
        try:
            yield
        finally:
            self._threads.stream = before

    def use(self, stream: LateStream) -> AbstractContextManager[None]:
        return self._use(stream)

    def pinned(self, size_bytes: int) -> Tensor:
        self.num_pinned += 1
        made = torch.full((size_bytes,), 0x7F, dtype=torch.uint8)
        self._pinned.add(made.untyped_storage().data_ptr())
        return made

    def is_capturing(self) -> bool:
        return self.is_recording

    def network_name(self, device: torch.device) -> str | None:
        name = "of all" if self.is_shared else f"of process {os.getpid()}"
        return name if self.has_network else None

    def connect(
        self,
        device: torch.device,
        store: Any,
        rank: int,
        world: int,
        timeout: timedelta,
    ) -> LateGroup:
        assert self.has_network, "asked for a group where there is no network"
        return LateGroup(store, rank, world, timeout, self.new_stream(device))

    def launch(
        self, stream: LateStream, reads: list[Tensor], writes: list[Tensor]
    ) -> None:
        """Notes that a process group uses memory, on a stream of its own."""
        with _LOCK:
            stream.wait_for(self.current_stream(DEVICE).clock)
            for given, is_written in ((reads, False), (writes, True)):
                for one in given:
                    assert type(one) is Late, (
                        "memory of the host in a group of the device"
                    )
                    self._land(one.memory)
                    self._use_memory(stream, one, "a group", is_written=is_written)

    # What a device does.

    def host_waits_for(self, clock: Clock) -> None:
        with _LOCK:
            for name, time in clock.items():
                self._host[name] = max(self._host.get(name, 0), time)
            due = [one for one in self._later if clock.get(one[0], -1) >= one[1]]
            self._later = [one for one in self._later if one not in due]
            for _, _, copy in due:
                copy()

    def given_up(self, owner: LateStream, written: list[Use], read: list[Use]) -> None:
        """Memory goes back to its owner's pool, which may hand it out at once."""
        owner.wait_for(self._host)
        for what, uses in (("written", written), ("read", read)):
            self._check(
                owner.clock, uses, f"memory of {owner.name} given up, and {what}"
            )

    def _check(self, known: Clock, uses: list[Use], what: str) -> None:
        for one in uses:
            if known.get(one.stream, -1) < one.time:
                self.wrong.append(f"{what} by {one.stream}, for which nobody waits")

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Launches one operation of torch's on the current stream."""
        stream = self.current_stream(DEVICE)
        stream.wait_for(self._host)
        if func is torch.ops.aten.copy_.default:
            return self._copy(stream, *args, **kwargs)
        to = kwargs.get("device")
        leaves, spec = pytree.tree_flatten((args, kwargs))
        late = [one for one in leaves if type(one) is Late]
        if late and (
            _looks(func) or (to is not None and torch.device(to).type == "cpu")
        ):
            self._wait(stream)
        for one in late if not func.is_view else ():
            self._land(one.memory)
        if not func.is_view:
            written = {id(one) for one in _written(func, args, kwargs)}
            for one in late:
                self._use_memory(stream, one, func, is_written=id(one) in written)
        plain_args, plain_kwargs = pytree.tree_unflatten(
            [_inner(one) for one in leaves], spec
        )
        if to is not None:
            plain_kwargs["device"] = torch.device("cpu")
        found = func(*plain_args, **plain_kwargs)
        if to is not None and torch.device(to).type == "cpu":
            return found
        return pytree.tree_map(lambda one: self._wrapped(stream, one, late), found)

    def _wrapped(self, stream: LateStream, found: Any, given: Sequence[Late]) -> Any:
        if not isinstance(found, Tensor):
            return found
        for one in given:
            if one.inner is found:
                return one
        for one in given:
            if one.inner.untyped_storage()._cdata == found.untyped_storage()._cdata:
                return Late(found, one.memory)
        made = Late(found, Memory(stream))
        self._use_memory(stream, made, None, is_written=True)
        return made

    def _use_memory(
        self, stream: LateStream, one: Late, func: Any, *, is_written: bool
    ) -> None:
        memory, (start, stop) = one.memory, _extent(one.inner)
        written, read = (
            [use for use in uses if use.start < stop and start < use.stop]
            for uses in (memory.written, memory.read)
        )
        self._check(
            stream.clock, written, f"{func} on {stream.name}, of what is written"
        )
        if is_written:
            self._check(
                stream.clock, read, f"{func} on {stream.name} writes what is read"
            )
        stream.clock[stream.name] += 1
        own = Use(stream.name, stream.clock[stream.name], start, stop)
        if is_written:  # what lies within it counts no more
            _forget(memory.written, own)
            _forget(memory.read, own)
            memory.written.append(own)
        else:
            _forget(memory.read, own, of=own.stream)
            memory.read.append(own)

    def _copy(
        self, stream: LateStream, to: Tensor, given: Tensor, non_blocking: bool = False
    ) -> Any:
        for one in (to, given):
            if type(one) is Late:
                self._land(one.memory)
                self._use_memory(stream, one, "a copy", is_written=one is to)
        into, values = _inner(to), _inner(given)
        if type(to) is Late and type(given) is Late:
            into.copy_(values)
        elif not non_blocking:
            self._wait(stream)
            into.copy_(values)
        elif self.needs_pinned and not self._is_pinned(
            given if type(to) is Late else to
        ):
            self.wrong.append(
                "a copy that nobody waits for, of memory that is not pinned"
            )
        elif type(given) is Late:
            values = values.clone()  # the device may write there again behind the copy
            self._do_later(stream, lambda: into.copy_(values))
        else:
            assert type(to) is Late
            once = _Once(lambda: into.copy_(values))
            to.memory.landing.append(once)
            self._do_later(stream, once)
        return to

    def _is_pinned(self, plain: Tensor) -> bool:
        return plain.untyped_storage().data_ptr() in self._pinned

    def _do_later(self, stream: LateStream, copy: Callable[[], Any]) -> None:
        if self._draws is not None and self._draws.random() < 0.5:
            copy()
        else:
            self._later.append((stream.name, stream.clock[stream.name], copy))

    def _land(self, memory: Memory) -> None:
        """Makes copies from the host that what comes now is behind."""
        landing, memory.landing = memory.landing, []
        for copy in landing:
            copy()

    def _wait(self, stream: LateStream) -> None:
        self.waits.append(stream.name)
        self.host_waits_for(stream.clock)


class LateGroup:
    """A process group of the device's own; sends and receives must be launched
    together.
    """

    def __init__(
        self, store: Any, rank: int, world: int, timeout: timedelta, stream: LateStream
    ) -> None:
        self._gloo: Any = ProcessGroupGloo(store, rank, world, timeout)
        self._stream = stream
        self._together: list[Any] | None = None

    def allreduce(self, bufs: list[Tensor]) -> LateWork:
        return self._begin(bufs, bufs, lambda: self._gloo.allreduce([_inner(bufs[0])]))

    def broadcast(self, bufs: list[Tensor], options: Any) -> LateWork:
        is_root = options.rootRank == self._gloo.rank()
        ways = (bufs, []) if is_root else ([], bufs)
        return self._begin(
            *ways, lambda: self._gloo.broadcast([_inner(bufs[0])], options)
        )

    def _allgather_base(self, out: Tensor, buf: Tensor) -> LateWork:
        work = self._gloo._allgather_base
        return self._begin([buf], [out], lambda: work(_inner(out), _inner(buf)))

    def alltoall_base(
        self, out: Tensor, buf: Tensor, out_sizes: list[int], in_sizes: list[int]
    ) -> LateWork:
        sizes, work = (out_sizes, in_sizes), self._gloo.alltoall_base
        return self._begin([buf], [out], lambda: work(_inner(out), _inner(buf), *sizes))

    def send(self, bufs: list[Tensor], dst: int, tag: int) -> None:
        assert self._together is not None, "a send by itself"
        self._begin(bufs, [], lambda: self._gloo.send([_inner(bufs[0])], dst, tag))

    def recv(self, bufs: list[Tensor], src: int, tag: int) -> None:
        assert self._together is not None, "a receive by itself"
        self._begin([], bufs, lambda: self._gloo.recv([_inner(bufs[0])], src, tag))

    def _begin(
        self, reads: list[Tensor], writes: list[Tensor], work: Callable[[], Any]
    ) -> LateWork:
        LATE.launch(self._stream, reads, writes)
        begun = work()
        if self._together is None:
            begun.wait()
        else:
            self._together.append(begun)
        return LateWork(self._stream)

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, device: torch.device) -> LateWork:
        begun, self._together = self._together, None
        for work in begun or ():
            work.wait()
        return LateWork(self._stream)

    def abort(self) -> None:
        self._gloo.abort()

    def shutdown(self) -> None:
        self._gloo.shutdown()


class LateWork:
    def __init__(self, stream: LateStream) -> None:
        self._over = LATE.record(stream)

    def wait(self) -> None:
        self._over.wait(LATE.current_stream(DEVICE))


class _Once:
    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work

    def __call__(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


def _forget(uses: list[Use], own: Use, of: str | None = None) -> None:
    """Forgets uses of bytes within those of ``own``, of all streams or of one."""
    uses[:] = [
        use
        for use in uses
        if use.start < own.start or own.stop < use.stop or of not in (None, use.stream)
    ]


def _extent(inner: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its memory, and the one behind its last."""
    if not inner.numel():
        return 0, 0
    steps = zip(inner.size(), inner.stride(), strict=True)
    last = inner.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    return inner.storage_offset() * inner.itemsize, (last + 1) * inner.itemsize


def _looks(func: Any) -> bool:
    """Whether an operation gives the host a value, or a tensor of a size that follows
    from one.
    """
    tags = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
    return any(tag in func.tags for tag in tags)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for place, asked in enumerate(func._schema.arguments):
        if asked.alias_info is not None and asked.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(asked.name)
            found += pytree.tree_leaves(given)
    return found


def _inner(one: Any) -> Any:
    return one.inner if type(one) is Late else one


def _made(func: Any, *args: Any, **kwargs: Any) -> Any:
    with _LOCK:
        return LATE.call(func, args, kwargs)


DEVICE = torch.device("privateuseone:0")
_LOCK = threading.RLock()
_PAST_DISPATCH = (
    "copy_.default",  # that of torch.tensor(device=)
    "_to_copy.default",
    # torch makes these of a tensor that grows, and its size would stay 0
    "arange.default",
    "arange.start",
    "arange.start_step",
)
LATE = LateDevice()
_libraries: list[Any] = []

try:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
except ImportError:
    pytest.skip(
        f"torch {torch.__version__} has no devices in Python", allow_module_level=True
    )


def install() -> LateDevice:
    """Makes the device known to torch and to gradwire, in this process, and returns it
    anew.
    """
    if not _libraries:
        _setup_privateuseone_for_python_backend("late")
        every, own = (
            torch.library.Library("_", "IMPL"),
            torch.library.Library("aten", "IMPL"),
        )
        every.fallback(_made, "PrivateUse1")
        for name in _PAST_DISPATCH:
            func = attrgetter(name)(torch.ops.aten)
            own.impl(
                name.removesuffix(".default"),
                lambda *args, _func=func, **kwargs: _made(_func, *args, **kwargs),
                "PrivateUse1",
            )
        _libraries.extend([every, own])
        devices._KINDS["late"] = LATE
        build.has_triton = lambda: False  # which has no driver for it
        # a late tensor is a class of its own
        refusals._refuse_odd_tensors = lambda model: None
    LATE.reset(None)
    return LATE
