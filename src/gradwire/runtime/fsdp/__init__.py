"""FSDP2 on one mesh: encoded payloads in the place of its reduce-scatter.

``fully_shard`` reduces gradients and scatters their sums, and every rank keeps its
shard of them. Here each rank encodes the shards of all others, sends each its payload,
and adds up the parts it gets in rank order. So a shard's mean is made by one rank, and
travels no further. The unsent part of another rank's shard stays here as a residual:
a rank keeps as much as the whole gradient.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from ...contract import Compressor
from ...contract.registry import load
from ...errors import InvalidSetting, invalid, with_brackets
from ...exchange.pair import pair
from ..agreement.fingerprint import agree, fingerprint, refusing
from ..grid.dtensors import is_dtensor, sharded_modules
from ..liveness.membership import join
from ..pairs import Facts, Feature, refuse_pairs
from ..settings import FailurePolicy, Options, Settings, or_defaults, takes_options
from ..step.scaling import scale_of
from ..transport.wire import Group
from .reduction import (
    WAY,
    Column,
    PayloadReduceScatter,
    ShardReduction,
    groups_of,
    keeps_scale,
    refuse_half,
)


@takes_options
def reduce_scatter(
    model: nn.Module,
    algorithm: Compressor | str,
    *,
    scaler: GradScaler | None = None,
    options: Options | None = None,
    failure: FailurePolicy | None = None,
) -> ShardReduction:
    """Compresses the gradients that ``fully_shard`` reduces and scatters.

    All ranks must call this alike, before the first backward pass. A rank keeps
    residuals of the whole gradient. A shard's mean is added up in rank order, so a run
    can be repeated bit for bit.

    Source: torch's ``FSDPModule.set_custom_reduce_scatter``, in torch 2.13.

    Args:
        model: A model that ``fully_shard`` has cut on one mesh of one dimension.
        algorithm: A compressor or its name.
        scaler: The loss's scaler. Gradients are exchanged without its scale, and what
            was exchanged for a step that it skips is undone. Default: the loss is not
            scaled.
        options: Only ``compress_if`` is used: other parameters travel as they are.
            Default: ``gw.Options()``.
        failure: Only ``timeout`` is used. Default: ``gw.FailurePolicy()``, 5 minutes.

    Returns:
        The handle: ``stats()``, ``residuals()``, ``state_dict()``,
        ``load_state_dict()``, ``sharded_state()`` and ``detach()``.

    Raises:
        InvalidSetting: The model or the compressor cannot be used in this way. The
            first backward pass raises it too, if a scaler is in use that was not given.
        RanksDiffer: Ranks passed different models or settings.

    >>> import gradwire as gw
    >>> from torch import nn
    >>> try:
    ...     gw.fsdp.reduce_scatter(nn.Linear(4, 2), gw.compress.uniform())
    ... except gw.InvalidSetting as error:
    ...     print(str(error).partition(";")[2])
     apply fully_shard() first, or use gw.attach for what is whole on each rank
    """
    modules = _modules(model)
    codec = load("compress", algorithm)() if isinstance(algorithm, str) else algorithm
    if not isinstance(codec, Compressor):
        accepted = (
            "a compressor or its name, as a reduce-scatter has only one direction"
        )
        remedy = with_brackets(algorithm, "write gw.compress.uniform(bitwidth=4)")
        raise invalid("algorithm", algorithm, accepted, remedy)
    pair(codec, WAY)  # raises for what must agree with others, or takes tensors whole
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    group = _group_of(params)
    given = Settings(codec, None, scaler, *or_defaults(options, failure))
    given.choose_store()
    who = join(group, given.patience)
    timeout = given.patience
    with refusing(who):
        settings = given.checked(None, who)
        refuse_pairs(Facts(model, [*params.items()], settings, Feature.REDUCE_SCATTER))
        if scaler is not None and not keeps_scale(codec):
            refuse_half(params)
        dense = {
            name
            for name, param in params.items()
            if not settings.options.compress_if(name, param)
        }
        covered = [(module, _columns(module, params, who.world)) for module in modules]
        names = {column.name for _, columns in covered for column in columns}
        if outside := sorted(set(params) - names):
            raise InvalidSetting(
                f"{outside[0]} is trained and outside of what fully_shard() holds, so "
                "nobody averages it among ranks; apply fully_shard() to the whole "
                "model too, or freeze it"
            )
    tensors = [
        (n, p, "uncompressed" if n in dense else "compressed")
        for n, p in params.items()
    ]
    how = None if scaler is None else "given" if scaler.is_enabled() else "disabled"
    # Gradients that travel with their scale need one scale on all ranks, as agreed on
    # there.
    shared: dict[str, object] = {"algorithm": codec, "scaler": how}
    shared["scale of the scaler"] = repr(scale_of(scaler))
    agree(who, fingerprint(tensors, shared), timeout)
    made = ShardReduction(codec, group, who, timeout, params, scaler)
    for module, columns in covered:  # of one rank too, whose state others may load
        if columns:
            made.take(module, columns, dense, params[columns[0].name].dtype)
    return made


def _modules(model: nn.Module) -> list[Any]:
    """The modules that ``fully_shard`` was applied to.

    Raises where their sums cannot be taken.
    """
    modules = sharded_modules(model) if isinstance(model, nn.Module) else []
    if not modules:
        raise invalid(
            "model",
            type(model).__name__,
            "one that fully_shard() has cut",
            "apply fully_shard() first, or use gw.attach for what is whole on each "
            "rank",
        )
    for module in modules:
        if not hasattr(module, "set_reduce_scatter_unused_params"):
            raise invalid(
                "torch",
                torch.__version__,
                "2.13 or newer: set_reduce_scatter_unused_params() is asked for",
                "update torch",
            )
        if len(groups_of(module)) > 1:
            raise invalid(
                "model",
                "a module cut on several",
                "one mesh for each module",
                "leave them to FSDP",
            )
        if any(
            isinstance(group._reduce_scatter_comm, PayloadReduceScatter)
            for group in groups_of(module)
        ):
            raise InvalidSetting(
                "the model's reduce-scatter is taken already; detach() it first"
            )
    return [module for module in modules if groups_of(module)]


def _group_of(params: Mapping[str, Any]) -> Group:
    """The ranks among which all parameters are cut.

    Raises where there is no such group.
    """
    meshes = {param.device_mesh for param in params.values() if is_dtensor(param)}
    if len(meshes) != 1 or next(iter(meshes)).ndim != 1:
        raise invalid(
            "model",
            f"one cut on {sorted(map(str, meshes))}",
            "cut on one mesh of one dimension",
            "under HSDP shard on mesh['shard'] alone, and let gw.attach(model, "
            "exchange, group=mesh['replicate']) average among replicas",
        )
    return next(iter(meshes)).get_group()


def _columns(module: Any, params: Mapping[str, Any], world: int) -> list[Column]:
    """A module's parameters in the order in which FSDP lays their shards out."""
    names = {id(p): name for name, p in params.items()}
    columns = []
    place = 0
    for fsdp_param in groups_of(module)[0].fsdp_params:
        name = names.get(id(fsdp_param.sharded_param))
        if name is None:
            continue  # frozen
        param = params[name]
        if not param.placements[0].is_shard(0):
            raise invalid(
                f"placement of {name}",
                param.placements,
                "cut along their first dimension",
                "leave out shard_placement_fn",
            )
        shape = tuple(param.shape)
        size = -(-shape[0] // world) * prod(shape[1:])
        columns.append(Column(name, shape, place, place + size))
        place += size
    return columns
