"""ShardReduction: the handle of ``reduce_scatter``, and the call that FSDP makes.

Columns are the parameters of one ``fully_shard``, as FSDP lays their shards out.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler

from ...collective.casync_ps import casync_ps
from ...collective.steps.chunks import Chunks
from ...collective.steps.tensorwise import tensorwise
from ...collective.steps.travel import sent_bytes
from ...compress.none import none
from ...contract import Compressor, Layout, Member, Residual
from ...contract.spec import TensorSpec, working_dtype
from ...contract.state import leaves
from ...contract.verbs import Compute, Steps, Verb, carried_out
from ...errors import InvalidSetting, invalid
from ..agreement.fingerprint import agree, fingerprint, refusing
from ..liveness.forks import watch
from ..liveness.membership import Membership, run_of
from ..state import checkpoint
from ..state.sharded import Owners, own_part, sharded_state
from ..state.table import Origin, described
from ..step.backup import Backup
from ..step.figures import norm_over_all
from ..step.hooked import living
from ..step.layout import Slot
from ..step.scaling import observe, scale_of, unscaling_factor
from ..transport.wire import Group, as_on_a_lane, carry_out, give_back, open_channels

WAY = casync_ps()


class Column(NamedTuple):
    """One parameter, and its shard's place among the shards of its module."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The elements of a shard, padding included."""
        return self.stop - self.start


class KeptOfColumns(NamedTuple):
    """The state of columns: each rank's codec's, and the residual."""

    codecs: tuple[Any, ...]
    residual_N: Residual


class ColumnsOfCodec:
    """Columns of one ``fully_shard`` that one codec encodes, and their state.

    To checkpoints it is a message whose ``slots`` are every rank's shard of every
    column.
    """

    chooser = None
    """No codec of columns chooses its settings."""

    def __init__(
        self,
        codec: Compressor,
        columns: list[Column],
        dtype: torch.dtype,
        who: Membership,
    ) -> None:
        world = who.world
        self.exchange = codec
        self.columns = columns
        self.dtype = dtype
        self.key = ""
        self.me = Member(who.rank, world)
        self.numel = numel = sum(column.size for column in columns)
        whole = tensorwise(codec, tuple(column.size for column in columns) * world)
        mine = whole.for_world(world, who.rank)
        self._anyones = whole.for_world(world)
        bounds = tuple((r * numel, (r + 1) * numel) for r in range(world))
        codecs = tuple(mine.chunk(a, b) for a, b in bounds)
        first = columns[0].name  # streams of random numbers follow from names
        specs = tuple(TensorSpec(f"{first}[{a}:{b}]", numel, dtype) for a, b in bounds)
        formats = tuple(
            codec.format(spec) for codec, spec in zip(codecs, specs, strict=True)
        )
        self._chunks = Chunks(bounds, codecs, specs, formats)
        ends = accumulate((column.size for column in columns), initial=0)
        self._placed = [*zip(ends, columns, strict=False)]
        self.slots: list[Slot] = []
        self._padding: list[slice] = []
        for place, column in self._placed:
            for rank in range(world):
                start = rank * numel + place
                left = prod(column.shape) - rank * column.size
                stop = start + min(max(left, 0), column.size)
                self.slots.append(
                    Slot(column.name, rank * column.size, start, stop, False)
                )
                self._padding.append(slice(stop, start + column.size))
        self.state = self.first_state()
        self.backup = Backup(self, (column.name for column in columns))
        self._sent_N = torch.empty(world * numel, dtype=dtype, device="cpu")
        self._mean_C = torch.empty(numel, dtype=dtype, device="cpu")

    def steps(self, given_N: Tensor, out_C: Tensor, scale: float) -> Steps[None]:
        """One reduce-scatter of these columns.

        ``given_N`` has a row for each rank. Its gradients have this ``scale``, which is
        taken off before the exchange where values are not sent as they are.
        """
        rows = given_N.view(self.me.world, -1)
        own_rows = self._sent_N.view(self.me.world, -1)
        for place, column in self._placed:
            own_rows[:, place : place + column.size] = rows[
                :, column.start : column.stop
            ]
        factor = 1.0 if keeps_scale(self.exchange) else scale
        if factor != 1.0:
            self._sent_N.mul_(unscaling_factor(factor))
        codecs, residual_N = self.state
        steps = WAY.reduce_scatter(
            self.me, self._chunks, codecs, self._sent_N, self._mean_C, residual_N
        )
        self.state = KeptOfColumns(tuple((yield from steps)), residual_N)
        if factor != 1.0:
            self._mean_C.mul_(factor)
        for place, column in self._placed:
            out_C[column.start : column.stop] = self._mean_C[
                place : place + column.size
            ]
        if residual_N is not None:
            for padding in self._padding:
                residual_N[padding] = 0  # no saved state has it

    def first_state(self) -> KeptOfColumns:
        """The state that training begins with."""
        pairs = zip(self._chunks.bounds, self._chunks.specs, strict=True)
        residual_N = None
        states = tuple(
            self._anyones.chunk(*bounds).init(spec) for bounds, spec in pairs
        )
        if self.exchange.traits.error_feedback:
            whole = self.me.world * self.numel
            residual_N = torch.zeros(
                whole, dtype=working_dtype(self.dtype), device="cpu"
            )
        return KeptOfColumns(states, residual_N)

    def kept_range(self, slot: Slot) -> tuple[int, int]:
        """The range of a slot's parameter with state here: all this rank sends."""
        return slot.first, slot.last

    def state_of(
        self, slot: Slot, state: KeptOfColumns | None = None
    ) -> dict[str, Tensor]:
        """The part of ``state`` (None: the own one) of one rank's shard of a column."""
        residual_N = (state or self.state).residual_N
        return {} if residual_N is None else {"residual_N": self.part(slot, residual_N)}

    def part(self, slot: Slot, residual_N: Tensor) -> Tensor:
        """The residual of one rank's shard of one column."""
        return residual_N[slot.start : slot.stop]

    def range_of(self, slot: Slot, held: Tensor) -> tuple[int, int]:
        """The elements of its parameter that a slot is of."""
        return slot.first, slot.last

    def rest_of_state(self, state: KeptOfColumns | None = None) -> dict[str, Tensor]:
        """The tensors of ``state`` (None: the own one) beside residuals."""
        return dict(leaves((state or self.state).codecs))


class ShardReduction:
    """The handle that ``gw.fsdp.reduce_scatter`` returns."""

    def __init__(
        self,
        codec: Compressor,
        group: Group,
        who: Membership,
        timeout: timedelta,
        params: Mapping[str, Tensor],
        scaler: GradScaler | None,
    ) -> None:
        self.codec = codec
        self._group = group
        self._who = who
        self._timeout = timeout
        self._names = {id(param): name for name, param in params.items()}
        self._known: set[str] = set()
        """The parameters of optimizers that the scaler has stepped."""
        self._scaler = scaler
        self._follows_scaler = scaler is not None and scaler.is_enabled()
        self._stop_observing = observe(scaler, self)
        self._channels = open_channels(*who[:3], 1, timeout) if who.world > 1 else []
        self._run = run_of(who)
        self._num_loads = 0
        self._wire_bytes = 0
        self.step = 0
        """Number of backward passes whose gradients were reduced."""
        self._loaded_step = 0
        self._comms: list[PayloadReduceScatter] = []
        watch(self)

    def become_copy(self, error: InvalidSetting) -> list[Any]:
        """Sends nothing more.

        Called in a process that was forked, where FSDP itself waits.
        """
        channels = self._channels
        self._channels = []
        return channels

    def take(
        self, module: Any, columns: list[Column], dense: set[str], dtype: torch.dtype
    ) -> None:
        """Puts payloads in the place of one module's reduce-scatter."""
        parts = [
            ColumnsOfCodec(codec, chosen, dtype, self._who)
            for codec, is_dense in ((self.codec, False), (none(), True))
            if (
                chosen := [
                    column for column in columns if (column.name in dense) is is_dense
                ]
            )
        ]
        self._comms.append(PayloadReduceScatter(self, module, parts, columns[-1].stop))
        for place, part in enumerate(self._parts):
            part.key = str(place)

    def reduce(
        self, comm: PayloadReduceScatter, given_N: Tensor, out_C: Tensor, op: Any
    ) -> None:
        """Carries out a module's reduce-scatter in the backward pass's thread."""
        self.step += comm is self._comms[0]
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise InvalidSetting(
                f"fully_shard asks for {op}, and payloads are averaged or added up; "
                "leave out set_gradient_divide_factor()"
            )
        if self.step == 1 and self._scaler is None:
            refuse_other_scaler()
        scale = scale_of(self._scaler)
        with as_on_a_lane():
            for part in comm.parts:
                if self._follows_scaler:
                    part.backup.begin(by_step=True, by_pass=False)
                    part.backup.keep()
                carried_out(part.steps(given_N, out_C, scale), self._carry)
            if op == dist.ReduceOp.SUM:
                out_C.mul_(self._who.world)

    def decide(self, params: Sequence[Tensor], *, is_skipped: bool) -> None:
        """Ends the step of an optimizer that holds ``params``; see `scaling`.

        ``fully_shard`` has its parts' infs added up among ranks, so scalers skip alike.
        """
        names = {self._names[id(param)] for param in params if id(param) in self._names}
        self._known |= names
        for part in self._parts:
            part.backup.decide(names, is_skipped=is_skipped)

    def end_iteration(self, *, is_by_hand: bool) -> None:
        """Counts a step by hand as taken.

        A rank knows the means of its own shards alone.
        """
        for part in self._parts if is_by_hand else ():
            part.backup.forget()

    def _carry(self, verbs: tuple[Verb, ...]) -> list[Any]:
        network = [verb for verb in verbs if not isinstance(verb, Compute)]
        carry_out(network, self._channels * len(network), straight=True)
        self._wire_bytes += sum(
            sent_bytes(verb, self._who.rank, self._who.world) for verb in network
        )
        return [verb.fn() if isinstance(verb, Compute) else None for verb in verbs]

    def stats(self) -> dict[str, Any]:
        """Figures of this rank.

        Returns:
            ``steps``, ``wire_bytes_per_step`` since the last load, and
            ``residual_norm`` over all shards.
        """
        return {
            "steps": self.step,
            "wire_bytes_per_step": self._wire_bytes
            / max(1, self.step - self._loaded_step),
            "residual_norm": norm_over_all(self.residuals().values()),
        }

    def residuals(self) -> dict[str, Tensor]:
        """The residuals by parameter name: the part of this rank's gradients that was
        not sent yet.

        Returns:
            A 1-D tensor of each whole parameter, in the working dtype. It is 0 at this
            rank's own shard.
        """
        return checkpoint.residuals(self._parts)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank: save one file a rank, or use ``sharded_state``."""
        return checkpoint.collect(
            self._parts, self._origin, step=self.step, run=self._run, undone=self._known
        )

    def sharded_state(self, *, saved_by: int | None = None) -> dict[str, Any]:
        """All ranks' state for ``torch.distributed.checkpoint``, to save or load into.

        Args:
            saved_by: The number of ranks that saved the checkpoint, if it differs from
                now. Each rank counts as a replica here. Left out, ``load_state_dict``
                refuses the loaded state, and names this number.

        Returns:
            DTensors with a row of residuals for each rank.
        """
        return sharded_state(self._owners, self.state_dict(), saved_by, has_pilot=False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a saved state. All ranks call this between the same two steps.

        Args:
            state_dict: What ``state_dict`` returned on this rank, or a loaded
                ``sharded_state``.

        Raises:
            InvalidSetting: The state is of another rank, algorithm or model, or
                damaged. Nothing is loaded then.
        """
        self._num_loads += 1
        who = self._who.beside(f"load {self._num_loads}")
        with refusing(who):
            saved = own_part(self._owners, state_dict, self._origin)
            states = checkpoint.loaded(saved, self._parts, self._origin)
        agree(who, fingerprint([], described(saved)), self._timeout)
        for part, state in zip(self._parts, states, strict=True):
            part.state = state
            part.backup.forget()
        self.step = self._loaded_step = saved["step"]
        self._wire_bytes = 0

    def detach(self) -> None:
        """Gives FSDP its reduce-scatter back, and drops residuals.

        Save ``state_dict()`` first.
        """
        self._stop_observing()
        for comm in self._comms:
            comm.remove()
        self._comms = []
        give_back(self._channels)

    @property
    def _parts(self) -> list[Any]:
        return [part for comm in self._comms for part in comm.parts]

    @property
    def _origin(self) -> Origin:
        algorithm = f"reduce_scatter({self.codec!r})"
        return Origin(algorithm, self._who.world, self._who.rank)

    @property
    def _owners(self) -> Owners:
        shapes = {
            column.name: column.shape for part in self._parts for column in part.columns
        }
        whole = {
            name: torch.empty(shape, device="meta") for name, shape in shapes.items()
        }
        return Owners(whole, self._group, self._who.rank, self._who.world)


class PayloadReduceScatter:
    """The reduce-scatter that one module asks for, in the form that FSDP calls."""

    def __init__(
        self,
        owner: ShardReduction,
        module: Any,
        parts: list[ColumnsOfCodec],
        numel: int,
    ) -> None:
        self._owner = owner
        self._module = module
        self.parts = parts
        self._numel = numel
        (group,) = groups_of(module)
        self._before = group._reduce_scatter_comm, group.reduce_scatter_unused_params
        module.set_custom_reduce_scatter(self)
        # all ranks send as much
        module.set_reduce_scatter_unused_params(True, recurse=False)

    def remove(self) -> None:
        """Puts back the function that was there before."""
        comm, includes_unused = self._before
        self._module.set_custom_reduce_scatter(comm)
        self._module.set_reduce_scatter_unused_params(includes_unused, recurse=False)

    def allocate(
        self, size: Any, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Memory for a module's gradients, and for its shards of them."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: Any = None,
    ) -> None:
        """Leaves this rank's shard of the mean, or of the sum, in ``output_tensor``."""
        dtype = self.parts[0].dtype
        if input_tensor.dtype != dtype:
            raise InvalidSetting(
                f"fully_shard reduces gradients in {input_tensor.dtype} and parameters "
                f"are {dtype}; write MixedPrecisionPolicy(reduce_dtype={dtype}), as "
                "payloads are small anyway"
            )
        if output_tensor.numel() != self._numel:
            raise InvalidSetting(
                f"fully_shard reduces {output_tensor.numel()} elements a rank and "
                f"there were {self._numel} when reduce_scatter() was called; call it "
                "when the model, and what of it is trained, no longer changes"
            )
        self._owner.reduce(self, input_tensor, output_tensor, op)


def groups_of(module: Any) -> list[Any]:
    """FSDP's groups of a module's parameters, whose order torch does not publish."""
    return list(module._get_fsdp_state()._fsdp_param_groups)


def keeps_scale(codec: Compressor) -> bool:
    """Whether gradients keep a loss scaler's scale on the wire, as in `buffer`."""
    return codec.traits.layout is Layout.DENSE and not codec.traits.error_feedback


def refuse_half(params: Mapping[str, Tensor]) -> None:
    """Raises ``InvalidSetting`` for float16, which loses unscaled gradients."""
    for name, param in params.items():
        if param.dtype == torch.float16:
            raise invalid(
                f"dtype of {name}",
                param.dtype,
                "torch.float32 beside a scaler, as small gradients without "
                "their scale become 0",
                "write MixedPrecisionPolicy(param_dtype=torch.float16) and keep "
                "parameters in float32",
            )


def refuse_other_scaler() -> None:
    """Raises ``InvalidSetting`` if a loss scaler is in use, as none was given.

    A scaler has no scale before it has scaled a loss. Gradients do not show that they
    were scaled, so the process is searched for scalers, once.
    """
    if not _scales_in_use():
        return
    gc.collect()  # one that nobody holds any more
    if scales := _scales_in_use():
        raise invalid(
            "scaler",
            f"None beside a GradScaler with the scale {scales[0]:g}",
            "the scaler of the model's loss, as residuals must not have its scale",
            "write reduce_scatter(model, algorithm, scaler=scaler), or "
            "scaler=GradScaler(enabled=False) if that one scales another model's loss",
        )


def _scales_in_use() -> list[float]:
    return [
        s.get_scale()
        for s in living(GradScaler)
        if s.is_enabled() and vars(s)["_scale"] is not None
    ]
