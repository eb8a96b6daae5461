"""What an algorithm allocates in a step, as torch's dispatcher sees it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Elements of every new tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        self.numels += [
            t.numel() for t in _tensors(result) if t.untyped_storage().data_ptr() not in given
        ]
        return result


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [t for p in parts for t in _tensors(p)] if isinstance(value, dict | list | tuple) else []
