"""State as ``torch.distributed.checkpoint`` saves it: DTensors, cut anew.

What an exchange keeps for each element of a parameter has the parameter's shape behind
one more dimension, of replicas: each holds its own row, and of it the shard that it
holds of the parameter. All else is small, and lies in one object that holds every
rank's.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...contract.bounds import check_whole
from ...errors import InvalidSetting, invalid
from ..engine.plain import packed, read_packed, values_of_all
from ..grid.dtensors import is_dtensor, shard_of
from ..grid.reals import as_reals
from ..transport.wire import Group
from .checkpoint import Origin, parted, summed

_REST = "rest"
"""The entry beside parameters: state of no element, of all ranks.

It is as ``torch.save`` writes it.
"""
ROWS = "one row for each of sharded_state(saved_by=) replicas"
"""The entry of parameters.

``dcp.load`` names it where another number of replicas saved: it compares sizes before
anything of gradwire is called.
"""
_FORM = "gradwire's sharded state, 2"
_MOST_REPLICAS = 2**24
"""The most replicas, and parts of a parameter: shapes of their rows can be counted."""
_DAMAGED = "load an undamaged checkpoint into what handle.sharded_state() returned"


class Owners(NamedTuple):
    """The parameters that a rank exchanges, by name, and its place among replicas."""

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
            shown = sorted(map(str, found))
            remedy = "save a file a rank, by state_dict()"
            raise invalid(
                "model",
                f"one cut on {shown}",
                "cut on one mesh of one dimension",
                remedy,
            )
        return next(iter(found), None)

    @property
    def part(self) -> tuple[int, int]:
        """This rank's part of each parameter, and how many there are."""
        within = self.within
        return (0, 1) if within is None else (within.get_local_rank(), within.size())

    def gathered(self, own: Any) -> dict[str, Any]:
        """All ranks' objects, each by the text "replica, part" of its rank."""
        found = {f"{self.replica}, {self.part[0]}": own}
        within = self.within
        groups = [self.group] if self.replicas > 1 else []
        for group in [*groups, *([] if within is None else [within.get_group()])]:
            found = {
                place: rest
                for one in values_of_all(found, group)
                for place, rest in one.items()
            }
        return dict(sorted(found.items()))

    def mesh(self) -> DeviceMesh | None:
        """The mesh of replicas and, where parameters are cut, of parts.

        None without a group.
        """
        within = self.within
        if self.group is None:
            return None
        if within is None:
            return DeviceMesh.from_group(self.group, "cpu")
        ranks = values_of_all(within.mesh.tolist(), self.group)
        groups = [self.group, within.get_group()]
        names = "replica", "part"
        return DeviceMesh.from_group(
            groups, "cpu", torch.tensor(ranks), mesh_dim_names=names
        )


def sharded_state(
    owners: Owners, saved: Mapping[str, Any], saved_by: int | None, *, has_pilot: bool
) -> dict[str, Any]:
    """The state of all ranks, of which each gives its part.

    ``saved`` is this rank's state_dict.

    As ``Handle.sharded_state``, which says what is given and raised.
    """
    if saved["ranks_per_host"] > 1 or "outer" in saved or has_pilot:
        raise InvalidSetting(
            "sharded_state() needs gw.attach with an exchange or a plan, and without "
            "mesh=: state of hosts' shares, local steps and 'auto' does not have the "
            "parameters' shapes; save what gather_state() returns on rank 0, or "
            "state_dict() on each rank"
        )
    if owners.part[1] == 1 and saved["shard"] not in ("", "part 0 of 1"):
        remedy = "save a file a rank, by state_dict()"
        raise invalid(
            "shards", saved["shard"], "None, or parameters that are DTensors", remedy
        )
    if saved_by is not None:
        remedy = (
            "give the number of replicas that saved (of gw.fsdp.reduce_scatter: of "
            "ranks)"
        )
        check_whole("saved_by", saved_by, remedy, most=_MOST_REPLICAS)
    by_element, whole = parted(saved["params"])
    rest = {
        "form": _FORM,
        "replicas": owners.replicas,
        "parts": owners.part[1],
        **{key: saved[key] for key in ("version", "algorithm", "step", "run")},
        "places": owners.gathered({"params": whole, "messages": saved["messages"]}),
    }
    mesh = owners.mesh()
    count = owners.replicas if saved_by is None else saved_by
    params = {
        name: {
            path: _rows(owners, name, held_N, mesh, count)
            for path, held_N in fields.items()
        }
        for name, fields in by_element.items()
        if fields
    }
    return {_REST: packed(rest).numpy().tobytes(), ROWS: params}


def _rows(
    owners: Owners, name: str, held_N: Tensor, mesh: DeviceMesh | None, count: int
) -> Tensor:
    """One field of a parameter behind a dimension of ``count`` rows.

    Replicas hold some of these.

    Where there are as many as replicas, each holds what it keeps, else zeros to be
    loaded into.
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
    cut = (
        [Shard(p.dim + 1) if p.is_shard() else p for p in param.placements]
        if is_cut
        else []
    )
    shape = torch.Size((count, *as_reals(param).shape))
    layout: Any = {"shape": shape, "stride": torch.empty(shape, device="meta").stride()}
    return DTensor.from_local(held, mesh, [Shard(0), *cut], run_check=False, **layout)


def own_part(owners: Owners, given: Any, origin: Origin) -> Any:
    """This rank's state_dict, of what was loaded into a ``sharded_state``.

    What is no such state is returned as it is. Raises ``InvalidSetting`` where it
    cannot be cut for these ranks.
    """
    if not isinstance(given, dict) or set(given) != {_REST, ROWS}:
        return given
    rest = _rest_of(given)
    part, parts = owners.part
    replicas = rest["replicas"]
    is_cut_alike = rest["parts"] == parts
    beside = rest["places"][
        f"{owners.replica % replicas}, {part}" if is_cut_alike else "0, 0"
    ]
    if not is_cut_alike and any(beside["params"].values()):
        raise InvalidSetting(
            f"this state was saved by {rest['parts']} shards of each parameter and "
            f"there are {parts} now, and {rest['algorithm']} keeps state of whole "
            "shards, which cannot be cut; go on with as many shards"
        )
    # Other cuts leave other ranks without an element of a small parameter.
    own_names = [
        name for name, param in owners.params.items() if shard_of(param).numel()
    ]
    names = beside["params"] if is_cut_alike else own_names
    params = {name: dict(beside["params"].get(name, {})) for name in names}
    _check_trees("params of the state", given[ROWS])
    for name, fields in params.items():
        for path, held in given[ROWS].get(name, {}).items():
            what = f"{path} of {name}"
            if not isinstance(held, Tensor) or held.is_meta or not held.dim():
                raise invalid(what, type(held).__name__, "a tensor of rows", _DAMAGED)
            local = shard_of(held)
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


def _rest_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """All of a sharded state but parameters' tensors, once its form was checked."""
    try:
        rest: dict[str, Any] = read_packed(io.BytesIO(given[_REST]))
    except Exception as error:  # whatever torch.load raises for damaged bytes
        text = (
            f"the rest of the state cannot be read ({type(error).__name__}); {_DAMAGED}"
        )
        raise InvalidSetting(text) from error
    form = rest.get("form") if isinstance(rest, dict) else type(rest).__name__
    if form != _FORM:
        raise invalid("form of the state", form, _FORM, "save it with this version")
    if missing := {"version", "algorithm", "step", "run"} - set(rest):
        what = f"the rest of the state lacks {', '.join(sorted(missing))}"
        raise InvalidSetting(f"{what}; {_DAMAGED}")
    for key in ("replicas", "parts"):
        check_whole(f"{key} of the state", rest.get(key), _DAMAGED, most=_MOST_REPLICAS)
    places: Any = rest.get("places")
    count = rest["replicas"] * rest["parts"]
    accepted = f"those of all {count} ranks that saved"
    if not isinstance(places, dict) or len(places) != count:
        raise invalid("places of the state", type(places).__name__, accepted, _DAMAGED)
    for replica, part in product(range(rest["replicas"]), range(rest["parts"])):
        if (place := f"{replica}, {part}") not in places:
            raise invalid("places of the state", f"none of {place}", accepted, _DAMAGED)
    for place, own in places.items():
        _check_trees(f"what rank {place} keeps", own)
        for key in ("params", "messages"):
            _check_trees(f"{key} of rank {place}", own.get(key))
    return rest


def _check_trees(what: str, given: Any) -> None:
    """Raises ``InvalidSetting`` unless this is a dict of dicts."""
    if not isinstance(given, dict) or not all(
        isinstance(one, dict) for one in given.values()
    ):
        raise invalid(what, type(given).__name__, "a dict of dicts", _DAMAGED)
