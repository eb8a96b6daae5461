"""DTensors: parameters that are cut into shards, one on each rank.

This rank's shard of a gradient travels, among the ranks that hold the same shard of
every layer: the replicas of HSDP, or the data-parallel dimension of a mesh. FSDP adds
gradients up among shards first, and then calls the hooks of its sharded parameters, as
autograd calls those of others. That happens during the backward pass, so exchanges
overlap what is left of it. FSDP's last gradients come in callbacks behind the pass, so
the step ends in a callback that such a callback queues. (``set_all_reduce_hook`` would
have to wait for the network within the pass.)
"""

import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...contract.spec import NamedParam
from ...errors import InvalidSetting, invalid
from .reals import as_complex


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is a DTensor, with a shard or a copy on this rank."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # torch's, if it is used
    return module is not None and isinstance(tensor, module.DTensor)


def has_dtensors(params: Iterable[NamedParam]) -> bool:
    """Whether any of these parameters is a DTensor."""
    return any(is_dtensor(param) for _, param in params)


def shard_of(tensor: Any) -> Tensor:
    """This rank's shard of a DTensor, in the same memory; another tensor itself."""
    if not is_dtensor(tensor):
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():
        local: Any = tensor.to_local()
    return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]


def shard_of_grad(param: Any) -> Tensor | None:
    """This rank's shard of a parameter's gradient.

    The gradient first gets the parameter's own layout.
    """
    grad = param.grad
    if not is_dtensor(grad):
        return grad  # type: ignore[no-any-return]
    if grad.placements != param.placements:
        with torch.no_grad():
            grad = param.grad = grad.redistribute(placements=param.placements)
    return shard_of(grad)


def laid_out_like(param: Any, local: Tensor) -> Tensor:
    """A DTensor in the layout of ``param``, of which ``local`` is this rank's shard.

    It is ``local`` itself if ``param`` is no DTensor.
    """
    if not is_dtensor(param):
        return local
    kind = sys.modules["torch.distributed.tensor"].DTensor
    mesh = param.device_mesh
    layout = {"shape": param.shape, "stride": param.stride()}
    placed: Tensor = kind.from_local(
        local, mesh, param.placements, run_check=False, **layout
    )
    return placed


def put_grad(param: Any, local: Tensor) -> None:
    """Makes ``local`` the gradient, this rank's shard of it, or the reals of either."""
    param.grad = laid_out_like(param, as_complex(local, shard_of(param)))


def num_cuts(param: Any) -> int:
    """The dimensions of a parameter's mesh along which ranks hold other parts of it."""
    placements = getattr(param, "placements", ())
    return sum(not placement.is_replicate() for placement in placements)


def island_of(model: nn.Module) -> tuple[int, ...]:
    """The ranks that hold a model's DTensors together; empty without DTensors.

    Raises ``InvalidSetting`` unless one mesh has all of these ranks.
    """
    params: Iterable[Any] = model.parameters() if isinstance(model, nn.Module) else ()
    meshes = [
        frozenset(param.device_mesh.mesh.flatten().tolist())
        for param in params
        if is_dtensor(param)
    ]
    ranks = sorted(frozenset[int]().union(*meshes))
    if meshes and frozenset(ranks) not in meshes:
        given = f"one that ranks {ranks} hold, with parameters of fewer ranks each"
        accepted = "one with parameters that all ranks of its island hold together"
        remedy = "cut parameters on dimensions of one mesh, such as mesh['shard', 'tp']"
        raise invalid("model", given, accepted, remedy)
    return tuple(ranks)


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules of a model to which ``fully_shard`` was applied."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # torch's, if it is used
    return (
        []
        if fsdp is None
        else [m for m in model.modules() if isinstance(m, fsdp.FSDPModule)]
    )


def reshard(model: nn.Module) -> None:
    """Has FSDP take the parameters apart that it left whole after a forward pass."""
    for module in sharded_modules(model) if isinstance(model, nn.Module) else ():
        module.reshard()


def places(model: Any) -> list[tuple[int, int]]:
    """This rank's shard of each layer by its number, and their count.

    Empty where all are whole.
    """
    meshes = [param.device_mesh for param in model.parameters() if is_dtensor(param)]
    found = {
        (mesh.mesh.flatten().tolist().index(mesh.get_rank()), mesh.size())
        for mesh in meshes
    }
    return sorted(found - {(0, 1)})


def refuse_other_shards(model: nn.Module, ranks: Sequence[int]) -> None:
    """Raises unless ``ranks`` of ``group`` hold the same shard of every layer."""
    tensors = [*chain(model.named_parameters(), model.named_buffers())]
    if not has_dtensors(tensors):
        return
    sharded = bool(sharded_modules(model))
    for name, tensor in tensors:
        if is_dtensor(tensor):
            _refuse_other_shard(name, tensor, ranks, sharded)
        elif sharded and tensor.requires_grad:
            raise InvalidSetting(
                f"{name} is trained and outside of what fully_shard() holds, so nobody "
                "averages it among shards; apply fully_shard() to the whole model too, "
                "or freeze it"
            )


def _refuse_other_shard(
    name: str, tensor: Any, ranks: Sequence[int], sharded: bool
) -> None:
    """Raises where another of ``ranks`` is in the mesh of a DTensor."""
    mesh = tensor.device_mesh
    if len(both := sorted({*ranks} & {*mesh.mesh.flatten().tolist()})) < 2:
        return
    if sharded and any(placement.is_replicate() for placement in tensor.placements):
        raise InvalidSetting(
            f"fully_shard() on a mesh of the dimensions {mesh.mesh_dim_names} averages "
            f"the gradient of {name} among its replicas itself, and it would be "
            "exchanged twice; shard on one dimension alone, fully_shard(module, "
            "mesh=mesh['shard']), and write gw.attach(model, exchange, "
            "group=mesh['replicate'])"
        )
    remedy = (
        "write group=mesh['replicate'] where mesh['shard'] is sharded, or mesh['dp'] "
        "beside mesh['tp']"
    )
    if sharded:
        alone = (
            "on one mesh without replicas call gw.fsdp.reduce_scatter(model, "
            "compressor)"
        )
        remedy = alone if mesh.size() == dist.get_world_size() else f"{remedy}; {alone}"
    raise invalid(
        "group",
        f"ranks {both}, which hold different shards of {name}",
        "ranks that hold the same shard of every layer",
        remedy,
    )
