"""PendingGrad: what ``param.grad`` is between the end of backward and the arrival of the mean.

It stands for a gradient whose storage is still being written by the network. Whoever computes with
it, by name or inside a list of ``torch._foreach_*``, first makes its round settle, then gets the
plain tensor. So a look at a gradient is always right, and costs that step its overlap. What only
asks for shape, dtype or place does not wait.

Python code is caught by ``__torch_function__``; autograd, which adds a second gradient to ``.grad``
from C++, by ``__torch_dispatch__``. Not caught: ``torch.utils.dlpack.to_dlpack``, which takes the
storage past both (``numpy()``, ``data_ptr()`` and ``__dlpack__()`` are caught).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor


class Round:
    """The gradients of one backward pass, while they are on their way.

    ``settle(reason)`` is called at the first look at any of them; ``is_over`` is set by whoever
    knows that all means have arrived.
    """

    __slots__ = ("is_over", "settle")

    def __init__(self, settle: Callable[[str], None]) -> None:
        self.settle = settle
        self.is_over = False


class PendingGrad(Tensor):
    """A gradient on its way: it shares storage with ``plain``, which the mean is written into."""

    plain: Tensor
    _round: Round

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


def pending(grad: Tensor, round: Round) -> PendingGrad:
    """Stands for ``grad``, a strided tensor without a graph, until ``round`` is over."""
    stand_in: PendingGrad = Tensor._make_subclass(PendingGrad, grad)
    stand_in.plain, stand_in._round = grad, round
    return stand_in


def stands_for(grad: Tensor | None, plain: Tensor) -> bool:
    """Whether ``grad`` is the PendingGrad of ``plain``."""
    return isinstance(grad, PendingGrad) and grad.plain is plain


def _settled(given: Any, func: Any) -> Any:
    """``given`` with every PendingGrad in it, however deep, replaced by its settled tensor."""
    if isinstance(given, PendingGrad):
        if not given._round.is_over:
            given._round.settle(_who_looks(func))
        return given.plain
    if isinstance(given, dict):
        return {key: _settled(value, func) for key, value in given.items()}
    if isinstance(given, list | tuple):
        parts = [_settled(value, func) for value in given]
        return type(given)(*parts) if hasattr(given, "_fields") else type(given)(parts)
    return given


def _who_looks(func: Any) -> str:
    """The function that the user called and the place in the user's file.

    It is the outermost function of torch that is not a wrapper; ``func`` itself where no function
    of torch stands between the user's line and the tensor.
    """
    name = _name_of(func)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_inside(frame.f_code.co_filename):
        inner = frame.f_code.co_name
        if frame.f_code.co_filename.startswith(_TORCH) and not _is_wrapper(inner):
            name = inner
        frame = frame.f_back
    where = "" if frame is None else f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return f"{name}{where}"


def _name_of(func: Any) -> str:
    """A function's name; for a property its own, for an operator such as aten.add_.Tensor add_."""
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(func.__self__, "__name__", name)
    return name.partition(".")[0]


_PLUMBING = ("handle_torch_function", "decorate_context", "inner")
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


def _is_inside(path: str) -> bool:
    return path.startswith((_TORCH, _HERE))


def _is_wrapper(name: str) -> bool:
    return name.startswith(("_", "<")) or "wrap" in name or name in _PLUMBING


_PROPERTIES = (
    "shape ndim dtype device layout names itemsize nbytes requires_grad grad_fn is_leaf "
    "is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_meta is_cpu is_cuda is_xpu is_mps"
)
_METHODS = (
    "__hash__ __len__ size dim ndimension numel nelement stride storage_offset element_size "
    "get_device is_contiguous is_floating_point is_complex is_signed is_inference"
)
_WITHOUT_VALUES: frozenset[Any] = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES.split() if hasattr(Tensor, name)]
    + [getattr(Tensor, name) for name in _METHODS.split()]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)
"""What can be asked of a gradient without a look at its values."""
