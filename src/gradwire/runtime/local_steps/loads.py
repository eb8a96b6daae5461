"""Loads: weights that are loaded into a model between two of its local steps.

Loaded weights are no progress of a rank. So anchors restart at them, on each rank by
itself, and in the next exchange ranks compare the weights that they have loaded.

A load is ``load_state_dict`` of the model or of a part of it. Before the first forward
pass after ``local_steps``, and after the handle has loaded a state, any change is a
load: nothing trains yet. All other values that a loop writes into parameters belong to
the pseudo-gradient: steps by hand, clamped weights, noise.

Digests, taken before a load and before the next step, show the load's changes.
So weights that the loop puts back in time, such as an average of parameters for an
evaluation, change nothing. Nor does a load of bits that are there already, for example
bits that the handle's state has restored.

A step takes no digests unless a load came before it.

A rank of an island has a shard of each parameter. A load may leave the bits of one
shard as they are, and a parameter is loaded on all ranks of the island or on none. So
these ranks agree on the parameters that were loaded.
"""

import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ...contract.spec import NamedParam
from ..grid.dtensors import shard_of
from ..state.outer_state import NO_LOADS
from ..step.hooked import Hooked
from ..step.integrity import digests_of


class Loads:
    """Watches one model for loads.

    ``notice`` is called before each forward pass that trains. Whoever is called there,
    before a step and before an exchange calls ``take``. ``of_island`` says of flags
    whether any rank of the island has them.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[NamedParam],
        notice: Callable[[], None],
        of_island: Callable[[list[bool]], list[bool]],
        undo: ExitStack,
    ) -> None:
        self._params = dict(params)
        self._notice = notice
        self._of_island = of_island
        self._before: dict[str, int] | None = None
        """The digests before a load; None where there was none."""
        self.tally = NO_LOADS
        """How many loads there were, and a checksum of all that was loaded."""
        for module in model.modules():
            register = module.register_load_state_dict_pre_hook
            undo.callback(Hooked(register, self._before_load).remove)
        forward = Hooked(model.register_forward_pre_hook, self._before_forward)
        undo.callback(forward.remove)

    def _before_load(self, module: nn.Module, *_: Any) -> None:
        if self._before is None:
            self.note()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._notice()

    @property
    def may_be_pending(self) -> bool:
        """Whether anything may have been loaded that was not taken yet."""
        return self._before is not None

    def note(self) -> None:
        """Takes whatever changes parameters from now until ``take`` for a load."""
        self._before = self._digests()

    def pending(self) -> dict[str, int]:
        """Digests of the parameters that were loaded and not taken yet, by name."""
        if self._before is None:
            return {}
        before = self._before
        now = self._digests()
        is_loaded = self._of_island([now[name] != before[name] for name in now])
        return {
            name: now[name] for name, is_in in zip(now, is_loaded, strict=True) if is_in
        }

    def tally_with(
        self, loaded: dict[str, int], dropped: Collection[str]
    ) -> tuple[int, int]:
        """The tally if these parameters are taken and ``dropped`` means do not count.

        Where these differ among ranks, momenta of the outer optimizer would differ
        later.
        """
        num_loads, checksum = self.tally
        if not loaded:
            return self.tally
        text = repr((checksum, sorted(loaded.items()), sorted(dropped)))
        return num_loads + 1, zlib.crc32(text.encode())

    def take(self, loaded: dict[str, int], dropped: Collection[str]) -> None:
        """Counts pending loads; later changes are the loop's own."""
        self.tally = self.tally_with(loaded, dropped)
        self._before = None

    def _digests(self) -> dict[str, int]:
        tensors = [shard_of(param).detach() for param in self._params.values()]
        return dict(zip(self._params, digests_of(tensors), strict=True))
