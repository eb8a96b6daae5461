"""Pending: gradients whose mean is on its way, parameters whose update waits.

A PendingGrad stands in ``param.grad`` between the end of backward and the arrival of
the mean, for a gradient whose storage the network still writes. A parameter is a
PendingParameter between ``optimizer.step()`` and its update: the same object, of
another class. Code that computes with one, by name or inside a list of
``torch._foreach_*``, first makes it settle and then gets the plain tensor. So a look at
a gradient or a parameter is always right, and costs that step its overlap. Code that
only asks for shape, dtype or device does not wait.

Python code is caught by ``__torch_function__``; autograd, which adds a second gradient
to ``.grad`` from C++, by ``__torch_dispatch__``. Two ways are not caught.
``torch.utils.dlpack.to_dlpack`` takes the storage past both (``numpy()``,
``data_ptr()`` and ``__dlpack__()`` are caught). A view that was taken before
(``held = param.data``) has the storage already.
"""

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..step.hooked import untraced


@dataclass(eq=False, slots=True)
class PendingPass:
    """The gradients of one backward pass, while they are on their way.

    ``settle(looker)`` is called at the first look at any of them, with the name of the
    function that looks. ``Overlap`` sets ``is_over`` once all means have arrived.
    """

    settle: Callable[[str], None]
    is_over: bool = False


class PendingGrad(Tensor):
    """A gradient on its way, which shares storage with ``plain``.

    The mean is written there.
    """

    plain: Tensor
    of_pass: PendingPass

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*_settled(args, func), **_settled(kwargs, func))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*_settled(args, func), **_settled(kwargs or {}, func))


def pending(grad: Tensor, of: PendingPass) -> PendingGrad:
    """A stand-in for ``grad``, a strided tensor without graph, until ``of`` ends."""
    stand_in: PendingGrad = Tensor._make_subclass(PendingGrad, grad)
    stand_in.plain = grad
    stand_in.of_pass = of
    return stand_in


def stands_for(grad: Tensor | None, plain: Tensor) -> bool:
    """Whether ``grad`` is the PendingGrad of ``plain``."""
    return isinstance(grad, PendingGrad) and grad.plain is plain


class PendingParameter(nn.Parameter):
    """A parameter whose update was asked for and is not made.

    A subclass's ``look`` makes it.
    """

    look: Callable[[Tensor, str], None]
    """A function of the parameter and the name of the operation that reads it.

    It makes the parameter plain.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES_OF_PARAMETER:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for param in tree_leaves((args, kwargs)):
            # a look at one may make the next one plain
            if isinstance(param, PendingParameter):
                type(param).look(param, _who_looks(func))
                assert type(param) is nn.Parameter
        return func(*args, **kwargs)

    # zero_grad() asks for each of them, and the way through __torch_function__ takes 3
    # us.
    @property
    def grad(self) -> Tensor | None:
        with torch._C.DisableTorchFunctionSubclass():
            grad: Tensor | None = _GRAD.__get__(self)
        return grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self, grad)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        type(self).look(self, "deepcopy")
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        type(self).look(self, "pickle")
        return self.__reduce_ex__(protocol)


_GRAD: Any = Tensor.grad


def pending_parameters(look: Callable[[Tensor, str], None]) -> type[PendingParameter]:
    """A class for parameters whose update is on its way; ``look`` makes the update."""
    return type("PendingParameter", (PendingParameter,), {"look": staticmethod(look)})


def unfit(grads: Mapping[str, Tensor | None]) -> str | None:
    """The reason why these gradients cannot be pending; None if they can."""
    for name, grad in grads.items():
        if grad is None:
            return f"{name} took no part in the backward pass on this rank"
        if grad.layout is not torch.strided:
            return f"the gradient of {name} is sparse"
        if grad.requires_grad:
            return f"the gradient of {name} has a graph (create_graph=True)"
    return None


def _settled(given: Any, func: Any) -> Any:
    """``given`` with every PendingGrad in it replaced by its settled tensor."""
    looker = _who_looks(func)

    def settled(grad: PendingGrad) -> Tensor:
        if not grad.of_pass.is_over:
            grad.of_pass.settle(looker)
        return grad.plain

    return tree_map_only(PendingGrad, settled, given)


@untraced  # torch 2.15 warns of ``_getframe`` in a compiled function
def _who_looks(func: Any) -> str:
    """The function that the user called and the place in the user's file.

    It is the outermost function of torch that is not a wrapper; ``func`` itself where
    no function of torch stands between the user's line and the tensor.
    """
    name = _name_of(func)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _HERE)):
        inner = frame.f_code.co_name
        is_wrapper = (
            inner.startswith(("_", "<")) or "wrap" in inner or inner in _PLUMBING
        )
        if frame.f_code.co_filename.startswith(_TORCH) and not is_wrapper:
            name = inner
        frame = frame.f_back
    where = (
        ""
        if frame is None
        else f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    )
    return f"{name}{where}"


def _name_of(func: Any) -> str:
    """A function's, property's or operator's name: ``add_`` for aten.add_.Tensor."""
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(func.__self__, "__name__", name)
    return name.partition(".")[0]


_PLUMBING = ("handle_torch_function", "decorate_context", "inner")
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parents[1])


_PROPERTIES = (
    "shape ndim dtype device layout names itemsize nbytes requires_grad grad_fn "
    "is_leaf is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_meta is_cpu "
    "is_cuda is_xpu is_mps"
)
_METHODS = (
    "__hash__ __len__ size dim ndimension numel nelement stride storage_offset "
    "element_size "
    "get_device is_contiguous is_floating_point is_complex is_signed is_inference"
)
_WITHOUT_VALUES: frozenset[Any] = frozenset(
    [
        getattr(Tensor, name).__get__
        for name in _PROPERTIES.split()
        if hasattr(Tensor, name)
    ]
    + [getattr(Tensor, name) for name in _METHODS.split()]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)
"""Functions that take a gradient and do not look at its values."""
_OF_PARAMETER: tuple[Any, ...] = (
    Tensor.requires_grad_,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
)
_WITHOUT_VALUES_OF_PARAMETER = _WITHOUT_VALUES.union(_OF_PARAMETER)
"""Functions that take a parameter and do not look at its values. They may change
attributes such as ``requires_grad``, as its pending update goes by the settings at the
time of ``step()``.
"""
