"""State as ``torch.distributed.checkpoint`` saves it: DTensors, which it cuts anew on loading.

What an exchange keeps for each element of a parameter has the parameter's shape behind one more
dimension, of replicas: each holds its own row, and of it the shard that it holds of the parameter.
All else is small, and lies in one object that holds every rank's.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...errors import InvalidSetting, invalid
from ..grid.dtensors import is_dtensor, shard_of
from ..step.messages import as_reals
from ..step.wire import Group
from .checkpoint import Origin, parted, summed
from .plain import packed, read_packed, values_of_all

_REST = "rest"
"""The entry beside parameters: what is no element's, of all ranks, as ``torch.save`` writes it."""
_FORM = "gradwire's sharded state, 1"


class Owners(NamedTuple):
    """The parameters whose gradients a rank exchanges, by name, and its place among replicas."""

    params: Mapping[str, Tensor]
    group: Group | None
    replica: int
    replicas: int

    @property
    def within(self) -> DeviceMesh | None:
        """The mesh that cuts parameters; None where they are whole.

        Raises ``InvalidSetting`` where there are several.
        """
        found: Any = {p.device_mesh for p in self.params.values() if is_dtensor(p)}  # type: ignore[attr-defined]
        if len(found) > 1 or any(mesh.ndim > 1 for mesh in found):
            shown, remedy = sorted(map(str, found)), "save a file a rank, by state_dict()"
            raise invalid(
                "model", f"one cut on {shown}", "cut on one mesh of one dimension", remedy
            )
        return next(iter(found), None)

    @property
    def part(self) -> tuple[int, int]:
        """This rank's part of each parameter, and how many there are."""
        within = self.within
        return (0, 1) if within is None else (within.get_local_rank(), within.size())

    def gathered(self, own: Any) -> dict[str, Any]:
        """All ranks' objects, each by the text "replica, part" of its rank."""
        found, within = {f"{self.replica}, {self.part[0]}": own}, self.within
        groups = [self.group] if self.replicas > 1 else []
        for group in [*groups, *([] if within is None else [within.get_group()])]:
            found = {
                place: rest for one in values_of_all(found, group) for place, rest in one.items()
            }
        return dict(sorted(found.items()))

    def mesh(self) -> DeviceMesh | None:
        """The mesh of replicas and, where parameters are cut, of parts; None without a group."""
        within = self.within
        if self.group is None:
            return None
        if within is None:
            return DeviceMesh.from_group(self.group, "cpu")
        ranks = values_of_all(within.mesh.tolist(), self.group)
        groups = [self.group, within.get_group()]
        names = "replica", "part"
        return DeviceMesh.from_group(groups, "cpu", torch.tensor(ranks), mesh_dim_names=names)


def sharded_state(
    owners: Owners, saved: Mapping[str, Any], saved_by: int | None, *, has_pilot: bool
) -> dict[str, Any]:
    """The state of all ranks, of which each gives its part; ``saved`` is this rank's state_dict.

    As ``Handle.sharded_state``, which says what is given and raised.
    """
    if saved["ranks_per_host"] > 1 or "outer" in saved or has_pilot:
        raise InvalidSetting(
            "sharded_state() needs gw.attach with an exchange or a plan, and without mesh=: state "
            "of hosts' shares, local steps and 'auto' does not have the parameters' shapes; save "
            "what gather_state() returns on rank 0, or state_dict() on each rank"
        )
    if owners.part[1] == 1 and saved["shard"] not in ("", "part 0 of 1"):
        remedy = "save a file a rank, by state_dict()"
        raise invalid("shards", saved["shard"], "None, or parameters that are DTensors", remedy)
    if saved_by is not None and (type(saved_by) is not int or saved_by < 1):
        remedy = "give the number of replicas that saved (of gw.fsdp.reduce_scatter: of ranks)"
        raise invalid("saved_by", saved_by, "a whole number, at least 1", remedy)
    by_element, whole = parted(saved["params"])
    rest = {
        "form": _FORM,
        "replicas": owners.replicas,
        "parts": owners.part[1],
        **{key: saved[key] for key in ("version", "algorithm", "step", "run")},
        "places": owners.gathered({"params": whole, "messages": saved["messages"]}),
    }
    mesh, count = owners.mesh(), owners.replicas if saved_by is None else saved_by
    params = {
        name: {path: _rows(owners, name, held_N, mesh, count) for path, held_N in fields.items()}
        for name, fields in by_element.items()
        if fields
    }
    return {_REST: packed(rest).numpy().tobytes(), "params": params}


def _rows(owners: Owners, name: str, held_N: Tensor, mesh: DeviceMesh | None, count: int) -> Tensor:
    """One field of a parameter behind a dimension of ``count`` rows, of which replicas hold some.

    Where there are as many as replicas, each holds what it keeps, else zeros to be loaded into.
    """
    from torch.distributed.tensor import DTensor, Shard

    param: Any = owners.params[name]
    is_cut = is_dtensor(param)
    local = as_reals(shard_of(param))
    most = -(-count // owners.replicas)  # as a DTensor is cut
    num_own = max(0, min(most, count - owners.replica * most))
    if count == owners.replicas:
        held = held_N.view(1, *local.shape)
    else:
        held = held_N.new_zeros((num_own, *local.shape))
    if mesh is None:
        return held
    cut = [Shard(p.dim + 1) if p.is_shard() else p for p in param.placements] if is_cut else []
    shape = torch.Size((count, *as_reals(param).shape))
    layout: Any = {"shape": shape, "stride": torch.empty(shape, device="meta").stride()}
    return DTensor.from_local(held, mesh, [Shard(0), *cut], run_check=False, **layout)


def own_part(owners: Owners, given: Any, origin: Origin) -> Any:
    """This rank's state_dict, of what was loaded into a ``sharded_state``.

    What is no such state is returned as it is. Raises ``InvalidSetting`` where it cannot be cut for
    these ranks.
    """
    if not isinstance(given, dict) or set(given) != {_REST, "params"}:
        return given
    rest = read_packed(io.BytesIO(given[_REST]))
    if rest.get("form") != _FORM:
        raise invalid("form of the state", rest.get("form"), _FORM, "save it with this version")
    part, parts = owners.part
    replicas, is_cut_alike = rest["replicas"], rest["parts"] == parts
    beside = rest["places"][f"{owners.replica % replicas}, {part}" if is_cut_alike else "0, 0"]
    if not is_cut_alike and any(beside["params"].values()):
        raise InvalidSetting(
            f"this state was saved by {rest['parts']} shards of each parameter and there are "
            f"{parts} now, and {rest['algorithm']} keeps state of whole shards, which cannot be "
            "cut; go on with as many shards"
        )
    # Other cuts leave other ranks without an element of a small parameter.
    own_names = [name for name, param in owners.params.items() if shard_of(param).numel()]
    names = beside["params"] if is_cut_alike else own_names
    params = {name: dict(beside["params"].get(name, {})) for name in names}
    for name, fields in params.items():
        for path, held in given["params"].get(name, {}).items():
            local, what = shard_of(held), f"{path} of {name}"
            if held.shape[0] != replicas:
                remedy = f"load into handle.sharded_state(saved_by={replicas})"
                accepted = f"{replicas}, as many as were saved"
                raise invalid(f"rows of {what}", held.shape[0], accepted, remedy)
            rows = {rank: row.reshape(-1) for rank, row in enumerate(local)}
            like = local.new_zeros(local.shape[1:].numel())
            fields[path] = summed(what, like, rows, owners.replicas / replicas)
    return {
        **origin._asdict(),
        **{key: rest[key] for key in ("version", "algorithm", "step", "run")},
        "saved_by": replicas,
        "saved_per_host": 1,
        "params": params,
        "messages": beside["messages"] if is_cut_alike else {},
    }
