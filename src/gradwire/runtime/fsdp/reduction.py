"""ShardReduction: the handle of ``reduce_scatter``, and what FSDP calls in its place."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress.none import none
from ...contract import Compressor
from ...contract.travel import sent_bytes
from ...contract.verbs import Compute, Steps
from ...errors import InvalidSetting, invalid
from ..failure.forks import watch
from ..failure.membership import Membership, run_of
from ..setup.fingerprint import agree, fingerprint, refusing
from ..state import checkpoint
from ..state.saved import check_form
from ..state.sharded import Owners, own_part, sharded_state
from ..step.figures import norm_over_all
from ..step.wire import Group, as_on_a_lane, carry_out, give_back, open_channels
from ._columns import Column, ColumnsOfCodec


class ShardReduction:
    """The handle that ``gw.fsdp.reduce_scatter`` returns."""

    def __init__(
        self, codec: Compressor, group: Group, who: Membership, timeout: timedelta
    ) -> None:
        self.codec, self._group, self._who, self._timeout = codec, group, who, timeout
        self._channels = open_channels(*who, 1, timeout) if who.world > 1 else []
        self._run, self._num_loads, self._wire_bytes = run_of(who), 0, 0
        self.step = 0
        """Number of backward passes whose gradients were reduced."""
        self._loaded_step = 0
        self._comms: list[PayloadReduceScatter] = []
        watch(self)

    def become_copy(self, error: InvalidSetting) -> list[Any]:
        """Sends nothing more; called in a process that was forked, where FSDP itself waits."""
        channels, self._channels = self._channels, []
        return channels

    def take(self, module: Any, columns: list[Column], dense: set[str], dtype: torch.dtype) -> None:
        """Puts payloads in the place of one module's reduce-scatter."""
        parts = [
            ColumnsOfCodec(codec, found, dtype, self._who)
            for codec, is_dense in ((self.codec, False), (none(), True))
            if (found := [one for one in columns if (one.name in dense) is is_dense])
        ]
        self._comms.append(PayloadReduceScatter(self, module, parts, columns[-1].stop))
        for place, part in enumerate(self._parts):
            part.key = str(place)

    def reduce(self, comm: PayloadReduceScatter, given_N: Tensor, out_C: Tensor, op: Any) -> None:
        """Carries out one module's reduce-scatter, in the thread of the backward pass."""
        self.step += comm is self._comms[0]
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise InvalidSetting(
                f"fully_shard asks for {op}, and payloads are averaged or added up; leave out "
                "set_gradient_divide_factor()"
            )
        with as_on_a_lane():
            for part in comm.parts:
                self._carry_out(part.text(given_N, out_C))
            if op == dist.ReduceOp.SUM:
                out_C.mul_(self._who.world)

    def _carry_out(self, text: Steps[None]) -> None:
        value: Any = None
        while True:
            try:
                asked = text.send(value)
            except StopIteration:
                return
            verbs = asked if isinstance(asked, tuple) else (asked,)
            network: list[Any] = [verb for verb in verbs if not isinstance(verb, Compute)]
            carry_out(network, self._channels * len(network))
            world = self._who.world
            self._wire_bytes += sum(sent_bytes(verb, self._who.rank, world) for verb in network)
            found = [verb.fn() if isinstance(verb, Compute) else None for verb in verbs]
            value = found if isinstance(asked, tuple) else found[0]

    def stats(self) -> dict[str, Any]:
        """Figures of this rank.

        Returns:
            ``steps``, ``wire_bytes_per_step`` since the last load, and ``residual_norm`` over all
            shards.
        """
        return {
            "steps": self.step,
            "wire_bytes_per_step": self._wire_bytes / max(1, self.step - self._loaded_step),
            "residual_norm": norm_over_all(self.residuals().values()),
        }

    def residuals(self) -> dict[str, Tensor]:
        """The residuals by parameter name: the part of this rank's gradients that was not sent yet.

        Returns:
            A 1-D tensor of each whole parameter, in the working dtype. It is 0 at this rank's own
            shard.
        """
        return checkpoint.residuals(self._parts)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank: save one file a rank, or use ``sharded_state``."""
        return checkpoint.collect(self._parts, self._origin, step=self.step, run=self._run)

    def sharded_state(self, *, saved_by: int | None = None) -> dict[str, Any]:
        """The state of all ranks for ``torch.distributed.checkpoint``, to save and to load into.

        Args:
            saved_by: The number of ranks that saved the checkpoint, if it differs from now.

        Returns:
            DTensors with a row of residuals for each rank.
        """
        return sharded_state(self._owners, self.state_dict(), saved_by, has_pilot=False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a saved state. All ranks call this between the same two steps.

        Args:
            state_dict: What ``state_dict`` returned on this rank, or a loaded ``sharded_state``.

        Raises:
            InvalidSetting: The state is of another rank, algorithm or model, or damaged. Nothing is
                loaded then.
        """
        self._num_loads += 1
        who = self._who.beside(f"load {self._num_loads}")
        with refusing(who):
            saved = own_part(self._owners, state_dict, self._origin)
            check_form(saved)
            for key in ("algorithm", "world_size", "rank"):
                if saved[key] != (own := getattr(self._origin, key)):
                    remedy = "load each rank's own state, or that of other ranks by sharded_state()"
                    raise invalid(f"{key} of the state", saved[key], f"{own}, as here", remedy)
            states = checkpoint.loaded(saved, self._parts, self._origin)
        told = {"step of the state": saved["step"], "run of the state": saved["run"]}
        agree(who, fingerprint([], told), self._timeout)
        for part, state in zip(self._parts, states, strict=True):
            part.state = state
        self.step = self._loaded_step = saved["step"]
        self._wire_bytes = 0

    def detach(self) -> None:
        """Gives FSDP its reduce-scatter back, and drops residuals: save ``state_dict()`` first."""
        for comm in self._comms:
            comm.remove()
        self._comms = []
        give_back(self._channels)

    @property
    def _parts(self) -> list[Any]:
        return [part for comm in self._comms for part in comm.parts]

    @property
    def _origin(self) -> checkpoint.Origin:
        return checkpoint.Origin(
            f"reduce_scatter({self.codec!r})", self._who.world, self._who.rank, ""
        )

    @property
    def _owners(self) -> Owners:
        shapes = {one.name: one.shape for part in self._parts for one in part.columns}
        whole = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        return Owners(whole, self._group, self._who.rank, self._who.world)


class PayloadReduceScatter:
    """The reduce-scatter that one module asks for, in the form that FSDP calls."""

    def __init__(
        self, owner: ShardReduction, module: Any, parts: list[ColumnsOfCodec], numel: int
    ) -> None:
        self._owner, self._module, self.parts, self._numel = owner, module, parts, numel
        (group,) = groups_of(module)
        self._before = group._reduce_scatter_comm, group.reduce_scatter_unused_params
        module.set_custom_reduce_scatter(self)
        module.set_reduce_scatter_unused_params(True, recurse=False)  # all ranks send as much

    def remove(self) -> None:
        """Puts back what was there before."""
        comm, includes_unused = self._before
        self._module.set_custom_reduce_scatter(comm)
        self._module.set_reduce_scatter_unused_params(includes_unused, recurse=False)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a module's gradients, and for its shards of them."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: Any = None
    ) -> None:
        """Leaves this rank's shard of the mean, or of the sum, in ``output_tensor``."""
        own = self.parts[0].dtype
        if input_tensor.dtype != own:
            raise InvalidSetting(
                f"fully_shard reduces gradients in {input_tensor.dtype} and parameters are {own}; "
                f"write MixedPrecisionPolicy(reduce_dtype={own}), as payloads are small anyway"
            )
        if output_tensor.numel() != self._numel:
            raise InvalidSetting(
                f"fully_shard reduces {output_tensor.numel()} elements a rank and there were "
                f"{self._numel} when reduce_scatter() was called; call it when the model, and what "
                "of it is trained, no longer changes"
            )
        self._owner.reduce(self, input_tensor, output_tensor, op)


def groups_of(module: Any) -> list[Any]:
    """FSDP's groups of a module's parameters, for whose order torch has no public name."""
    return list(module._get_fsdp_state()._fsdp_param_groups)
