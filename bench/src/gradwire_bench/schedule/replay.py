"""Replay: a model of a profile's layers whose computation is waiting, and whose
gradients are real.

A virtual device does the work of a real one: it computes nothing, but layers occupy it
one behind the other for the profile's seconds. So eight ranks with a GPU's layer times
run on two cores, while every byte of their gradients really crosses the links, through
autograd, hooks and optimizer as in any model.

As on a GPU the host runs ahead: forward layers are queued without waiting, a layer of
the backward pass is waited for because its gradients are handed out when it ends.
Deadlines are absolute: a sleep that lasts too long (they all do) delays what comes
after it by nothing. The device stands idle only where a host that had to wait for
gradients came later than its last layer ended.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradwire.contract.trace.span import Span
from gradwire.errors import invalid
from gradwire.planning.data.profile import Layer, Profile, ProfiledTensor
from gradwire.runtime.transport.task_graph import wall_clock


def scaled_profile(
    profile: Profile, *, scale: float = 1.0, slowdown: float = 1.0
) -> Profile:
    """The profile with 1/``scale`` of the bytes and ``slowdown`` times the seconds.

    With links of rate / (scale * slowdown) all seconds are ``slowdown`` times as long.
    Tensors become flat and keep at least one element; empty ones stay empty.
    """
    for name, factor in (("scale", scale), ("slowdown", slowdown)):
        if not 0 < factor < float("inf"):
            raise invalid(
                name, factor, "a positive number", "1 leaves the profile as it is"
            )

    def tensor_of(tensor: ProfiledTensor) -> ProfiledTensor:
        numel = 0
        if tensor.numel:
            numel = max(1, round(tensor.numel / scale))
        return tensor.model_copy(update={"shape": (numel,)})

    def layer_of(layer: Layer) -> Layer:
        return layer.model_copy(
            update={
                "tensors": tuple(map(tensor_of, layer.tensors)),
                "forward_s": layer.forward_s * slowdown,
                "backward_s": layer.backward_s * slowdown,
            }
        )

    source = (
        f"1/{scale:g} of the bytes, {slowdown:g} times the seconds of: {profile.source}"
    )
    return profile.model_copy(
        update={"layers": tuple(map(layer_of, profile.layers)), "source": source}
    )


class VirtualDevice:
    """One rank's virtual device: what runs on it, one layer behind the other.

    ``free_s`` is when its last layer ends, on ``clock``. ``take_spans`` gives what ran
    so far. ``inline_s`` tells for how many seconds, so far, encodes have held up the
    backward pass: they occupy the device behind the layer whose gradients they take.
    """

    def __init__(
        self,
        rank: int = 0,
        *,
        clock: Callable[[], float] = wall_clock,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rank = rank
        self._clock = clock
        self._sleep = sleep
        self.free_s = clock()
        self.inline_s: Callable[[], float] = lambda: 0.0
        self._in_backward = False
        self._seen_s = 0.0
        self._ran: list[tuple[str, str, float, float]] = []

    def forward(self, name: str, seconds: float) -> None:
        """Queues a layer of the forward pass and returns at once."""
        self._in_backward = False
        self._queue("forward", name, max(self._clock(), self.free_s), seconds)

    def backward(self, name: str, seconds: float) -> None:
        """Queues a layer of the backward pass and waits for its end.

        All but the first of them were queued long ago, as far as the device knows.
        """
        seen_s = self._seen_s
        self._seen_s = self.inline_s()
        start_s = max(self._clock(), self.free_s)
        if self._in_backward:
            start_s = self.free_s + self._seen_s - seen_s
        self._in_backward = True
        self._queue("backward", name, start_s, seconds)
        self.synchronise()

    def synchronise(self) -> None:
        """Waits until the device stands idle."""
        left_s = self.free_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)

    def take_spans(self) -> list[Span]:
        """Spans of the layers that ran since the last call, on lanes "forward" and
        "backward".
        """
        ran = self._ran
        self._ran = []
        return [
            Span(self.rank, lane, name, start_s, end_s)
            for lane, name, start_s, end_s in ran
        ]

    def _queue(self, lane: str, name: str, start_s: float, seconds: float) -> None:
        self.free_s = start_s + seconds
        if seconds:
            self._ran.append((lane, name, start_s, self.free_s))


@dataclass(frozen=True)
class _Job:
    """A block's job: the work of a layer (of no seconds, if another block of the layer
    does it) and the gradients that the block hands out for its parameters.
    """

    device: VirtualDevice
    work: Layer
    params: tuple[nn.Parameter, ...]
    grads: tuple[Tensor, ...]
    drawn: tuple[Tensor, ...]
    """The values that gradients get anew in each backward pass; empty where they
    stay.
    """


class _Work(torch.autograd.Function):
    """A block's place in the graph: (job, token_1, its parameters) -> token_1.

    The token is one element that makes a block's backward wait for that of the block
    behind it.
    """

    @staticmethod
    def forward(ctx: Any, job: _Job, token_1: Tensor, *params: Tensor) -> Tensor:
        ctx.job = job
        job.device.forward(job.work.name, job.work.forward_s)
        return token_1.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        job: _Job = ctx.job
        if job.drawn:  # while the device works, as its seconds end at a deadline
            torch._foreach_copy_(list(job.grads), list(job.drawn))
        job.device.backward(job.work.name, job.work.backward_s)
        # Aliases: autograd keeps a tensor that nobody else holds as .grad and copies
        # any other.
        return None, grads[0], *(grad.detach() for grad in job.grads)


class ReplayedModule(nn.Module):
    """A layer of the profile, or the part of one whose tensors have a prefix in
    common.
    """

    def __init__(self) -> None:
        super().__init__()
        self.job: _Job | None = None

    def forward(self, token_1: Tensor) -> Tensor:
        assert self.job is not None, "a module that only holds others was called"
        result: Tensor = _Work.apply(self.job, token_1, *self.job.params)  # type: ignore[no-untyped-call]
        return result


class ReplayedParameter(NamedTuple):
    """A parameter's value, its gradient, and what the gradient is set to anew in each
    step.
    """

    value: Tensor
    grad: Tensor
    drawn: Tensor | None


Memory = dict[str, ReplayedParameter]
"""The place of each parameter, by its name."""


class Replay(nn.Module):
    """The model of a profile: parameters have its names, shapes and dtypes; a call
    takes no input.

    ``model().backward()`` gives every parameter a gradient at the time the profile
    says. It lies in one buffer for good, filled with ``gradient`` once: after an
    exchange in place it holds the mean, and that is this rank's next gradient.
    Computing others would cost this machine's cores what a GPU's gradients do not, and
    nobody looks at them. Models that are given the same ``memory`` lie in the same
    memory, and may only run in turn.
    """

    def __init__(
        self,
        profile: Profile,
        device: VirtualDevice,
        *,
        gradient: float = 1.0,
        seed: int | None = None,
        memory: Memory | None = None,
    ) -> None:
        super().__init__()
        self._device = device
        self._gradient = gradient
        self._random = None if seed is None else torch.Generator().manual_seed(seed)
        self._memory: Memory = {} if memory is None else memory
        self._order: tuple[ReplayedModule, ...] = ()
        for layer in profile.layers:
            self._order += tuple(self._blocks(layer))

    def forward(self) -> Tensor:
        token_1 = torch.zeros(1, requires_grad=True)
        for block in self._order:
            token_1 = block(token_1)
        return token_1

    def _blocks(self, layer: Layer) -> list[ReplayedModule]:
        """A block for each prefix. The last, whose backward comes first, does the
        layer's work.
        """
        tensors_of: dict[str, list[ProfiledTensor]] = {}
        for tensor in layer.tensors:
            tensors_of.setdefault(tensor.name.rpartition(".")[0], []).append(tensor)
        rest = layer.model_copy(update={"forward_s": 0.0, "backward_s": 0.0})
        parts = [*tensors_of.items()] or [("", [])]
        return [
            self._block(prefix, tensors, layer if place == len(parts) else rest)
            for place, (prefix, tensors) in enumerate(parts, start=1)
        ]

    def _block(
        self, prefix: str, tensors: list[ProfiledTensor], work: Layer
    ) -> ReplayedModule:
        owner = self._module(prefix) if prefix else self
        params = []
        places = [self._place(tensor) for tensor in tensors]
        for tensor, place in zip(tensors, places, strict=True):
            params.append(nn.Parameter(place.value))
            owner.register_parameter(tensor.name.rpartition(".")[2], params[-1])
        # Tensors of the root, and a prefix that an earlier layer has, leave their
        # module as it is.
        block = (
            owner
            if isinstance(owner, ReplayedModule) and owner.job is None
            else ReplayedModule()
        )
        grads = tuple(place.grad for place in places)
        drawn = tuple(place.drawn for place in places if place.drawn is not None)
        block.job = _Job(self._device, work, tuple(params), grads, drawn)
        return block

    def _place(self, tensor: ProfiledTensor) -> ReplayedParameter:
        """The memory of a parameter and of its gradient; tensors of one name share
        it.
        """
        if tensor.name not in self._memory:
            value = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
            grad = torch.full_like(value, self._gradient)
            drawn = None
            if self._random is not None:
                drawn = torch.empty_like(value).normal_(generator=self._random)
            self._memory[tensor.name] = ReplayedParameter(value, grad, drawn)
        return self._memory[tensor.name]

    def _module(self, path: str) -> nn.Module:
        """The module at ``path``, made with all that lead to it."""
        module: nn.Module = self
        for name in path.split("."):
            if name not in module._modules:
                module.register_module(name, ReplayedModule())
            module = module.get_submodule(name)
        return module
