"""State as ``torch.distributed.checkpoint`` saves it: DTensors, cut anew.

Values that an exchange keeps for each element have the parameter's shape behind
one more dimension, of replicas: each holds its own row, and of it the shard that it
holds of the parameter. All else is small, and lies in one object that holds every
rank's.
"""

import io
from collections.abc import Mapping
from functools import partial
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
from .outer_state import OuterForm, collect_outer, spread_outer
from .table import Origin, check_form, fields_of, is_tree, summed

_REST = "rest"
"""The entry beside parameters: state of no element, of all ranks.

It is as ``torch.save`` writes it.
"""
_ONCE = ("version", "algorithm", "step", "run")
"""Entries of state_dicts that lie there once, as they are the same on all ranks."""
_OF_PLACES = ("messages", "outer", "local_step")
"""Entries of state_dicts, some of local steps alone, that lie there for each rank."""
_FORM = "gradwire's sharded state, 1"
_MOST_REPLICAS = 2**24
"""The most replicas, and parts of a parameter: shapes of their rows can be counted."""
_DAMAGED = "load an undamaged checkpoint into what handle.sharded_state() returned"


class Owners(NamedTuple):
    """The parameters that a rank exchanges, by name, and its place among replicas."""

    params: Mapping[str, Tensor]
    group: Group | None
    replica: int
    replicas: int
    form: OuterForm | None = None
    """The form of local steps' state."""

    @property
    def within(self) -> DeviceMesh | None:
        """The mesh that cuts parameters; None where they are whole.

        Raises ``InvalidSetting`` where there are several.
        """
        meshes: Any = {p.device_mesh for p in self.params.values() if is_dtensor(p)}  # type: ignore[attr-defined]
        if len(meshes) > 1 or any(mesh.ndim > 1 for mesh in meshes):
            shown = sorted(map(str, meshes))
            raise invalid(
                "model",
                f"one cut on {shown}",
                "cut on one mesh of one dimension",
                "save a file a rank, by state_dict()",
            )
        return next(iter(meshes), None)

    @property
    def part(self) -> tuple[int, int]:
        """This rank's part of each parameter, and how many there are."""
        within = self.within
        return (0, 1) if within is None else (within.get_local_rank(), within.size())

    @property
    def groups(self) -> list[Group]:
        """The group of replicas and, where parameters are cut, that of parts."""
        of_parts = [] if self.within is None else [self.within.get_group()]
        return [*([] if self.group is None else [self.group]), *of_parts]

    def gathered(self, value: Any) -> dict[str, Any]:
        """All ranks' objects, each by the text "replica, part" of its rank."""
        values = {f"{self.replica}, {self.part[0]}": value}
        for group in self.groups:
            values = {
                place: rest
                for part in values_of_all(values, group)
                for place, rest in part.items()
            }
        return dict(sorted(values.items()))

    def mesh(self) -> DeviceMesh | None:
        """The mesh of replicas and, where parameters are cut, of parts.

        None without a group.
        """
        within = self.within
        if self.group is None:
            return None
        if within is None:
            return DeviceMesh.from_group(self.group, "cpu")
        ranks = torch.tensor(values_of_all(within.mesh.tolist(), self.group))
        names = "replica", "part"
        return DeviceMesh.from_group(self.groups, "cpu", ranks, mesh_dim_names=names)


def sharded_state(
    owners: Owners, saved: Mapping[str, Any], saved_by: int | None, *, has_pilot: bool
) -> dict[str, Any]:
    """The state of all ranks; each rank gives its part, ``saved``, its state_dict.

    ``Handle.sharded_state`` explains arguments and errors.
    """
    if saved["ranks_per_host"] > 1 or "rounds" in saved or has_pilot:
        raise InvalidSetting(
            "sharded_state() needs an exchange or a plan, and neither mesh= nor "
            "quorum=: state of hosts' shares, rounds and 'auto' does not have the "
            "parameters' shapes; save what gather_state() returns on rank 0, or "
            "state_dict() on each rank"
        )
    if owners.part[1] == 1 and saved["shard"] not in ("", "part 0 of 1"):
        raise invalid(
            "shards",
            saved["shard"],
            "None, or parameters that are DTensors",
            "save a file a rank, by state_dict()",
        )
    if saved_by is not None:
        remedy = (
            "give the number of replicas that saved (of gw.fsdp.reduce_scatter: of "
            "ranks)"
        )
        check_whole("saved_by", saved_by, remedy, most=_MOST_REPLICAS)
    if owners.form is not None:
        spread_outer(saved, owners.form)
    place = {key: saved[key] for key in _OF_PLACES if key in saved}
    place["params"] = fields_of(saved["params"], by_element=False)
    rest = {
        "form": _FORM,
        "replicas": owners.replicas,
        "parts": owners.part[1],
        **{key: saved[key] for key in _ONCE},
        "places": owners.gathered(place),
    }
    mesh = owners.mesh()
    count = owners.replicas if saved_by is None else saved_by
    params = {
        name: {
            path: _rows(owners, name, held_N, mesh, count)
            for path, held_N in fields.items()
        }
        for name, fields in fields_of(saved["params"], by_element=True).items()
        if fields
    }
    return {_REST: packed(rest).numpy().tobytes(), "params": params}


def _rows(
    owners: Owners, name: str, held_N: Tensor, mesh: DeviceMesh | None, count: int
) -> Any:
    """One field of a parameter behind a dimension of ``count`` rows.

    Replicas hold some of these. Where there are as many as replicas, each holds what it
    keeps, else NaNs to be loaded over: a checkpoint of these is refused as damaged.
    """
    from torch.distributed.tensor import DTensor, Shard

    param: Any = owners.params[name]
    local = as_reals(shard_of(param))
    most = -(-count // owners.replicas)  # as a DTensor is cut
    num_own = max(0, min(most, count - owners.replica * most))
    if count == owners.replicas:
        whole = held_N.view(1, *local.shape)
    else:
        unread = torch.nan if held_N.is_floating_point() else 0
        whole = held_N.new_full((num_own, *local.shape), unread)
    placed: Any = whole
    shape = torch.Size((count, *as_reals(param).shape))
    if mesh is not None:
        stride = torch.empty(shape, device="meta").stride()
        cut = [
            Shard(placement.dim + 1) if placement.is_shard() else placement
            for placement in getattr(param, "placements", ())
        ]
        placed = DTensor.from_local(
            whole, mesh, [Shard(0), *cut], run_check=False, shape=shape, stride=stride
        )
    placed.size = partial(_size, shape)
    return placed


class _AnyNumber(int):
    """A number of rows that ``dcp.load`` takes for that of any checkpoint.

    torch compares the shape of a tensor with the saved one before it reads anything,
    and its error names no remedy. With this number `own_part` compares rows.
    In a checkpoint it is a plain number.
    """

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def _size(shape: torch.Size, dim: int | None = None) -> torch.Size | int:
    """The ``size`` of a tensor of rows, whose shapes fit any number of them."""
    size = torch.Size((_AnyNumber(shape[0]), *shape[1:]))
    return size if dim is None else size[dim]


def own_part(owners: Owners, gathered: Any, origin: Origin) -> Any:
    """This rank's state_dict, from a loaded ``sharded_state``.

    Any other value is returned as it is. Raises ``InvalidSetting`` where it
    cannot be cut for these ranks.
    """
    if not isinstance(gathered, dict) or set(gathered) != {_REST, "params"}:
        return gathered
    rest = _rest_of(gathered)
    part, parts = owners.part
    replicas = rest["replicas"]
    is_cut_alike = rest["parts"] == parts
    place = f"{owners.replica % replicas}, {part}" if is_cut_alike else "0, 0"
    places: Any = rest.get("places")
    if not isinstance(places, dict) or not isinstance(places.get(place), dict):
        raise invalid(
            "places of the state",
            f"none of {place}",
            f"those of all {replicas * rest['parts']} ranks that saved",
            _DAMAGED,
        )
    found = {
        **origin._asdict(),
        **{key: rest[key] for key in _ONCE if key in rest},
        "saved_by": replicas,
        "saved_per_host": 1,
        **places[place],
    }
    check_form(found, "the sharded state")
    if not is_tree(gathered["params"]):
        kind = type(gathered["params"]).__name__
        raise invalid("params of the state", kind, "a dict of dicts", _DAMAGED)
    whole = found["params"]
    names = whole
    if not is_cut_alike:
        if any(whole.values()):
            raise InvalidSetting(
                f"this state was saved by {rest['parts']} shards of each parameter and "
                f"there are {parts} now, and {rest['algorithm']} keeps state of whole "
                "shards, which cannot be cut; go on with as many shards"
            )
        found["messages"] = {}
        # Other cuts leave other ranks without an element of a small parameter.
        names = [n for n, param in owners.params.items() if shard_of(param).numel()]
    found["params"] = {
        name: {
            **whole.get(name, {}),
            **{
                path: _sum_of_rows(f"{path} of {name}", rows, replicas, owners)
                for path, rows in gathered["params"].get(name, {}).items()
            },
        }
        for name in names
    }
    if owners.form is None or "outer" not in found:
        return found
    if replicas != owners.replicas:
        raise invalid(
            "the number of sites that saved a state of local steps",
            replicas,
            f"{owners.replicas}, as now",
            "go on with as many, or save model.state_dict() after end_period()",
        )
    try:
        collect_outer(found, owners.form)
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise InvalidSetting(
            f"the sharded state is none of these local steps ({error!r}); {_DAMAGED}"
        ) from error
    return found


def _sum_of_rows(what: str, rows: Any, replicas: int, owners: Owners) -> Tensor:
    """One field of this rank, of the rows that it has loaded."""
    if not isinstance(rows, Tensor) or rows.is_meta or not rows.dim():
        raise invalid(what, type(rows).__name__, "a tensor of rows", _DAMAGED)
    if rows.shape[0] != replicas:
        raise invalid(
            f"rows of {what}",
            rows.shape[0],
            f"{replicas}, as many as were saved",
            f"load into handle.sharded_state(saved_by={replicas})",
        )
    local = shard_of(rows)
    like = local.new_zeros(local.shape[1:].numel())
    values = {place: row.reshape(-1) for place, row in enumerate(local)}
    return summed(what, like, values, owners.replicas / replicas)


def _rest_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """All of a sharded state but parameters' tensors, once its form was checked."""
    try:
        rest: Any = read_packed(io.BytesIO(state[_REST]))
    except Exception as error:  # whatever torch.load raises for damaged bytes
        raise InvalidSetting(
            f"the rest of the state cannot be read ({type(error).__name__}); {_DAMAGED}"
        ) from error
    form = rest.get("form") if isinstance(rest, dict) else type(rest).__name__
    if form != _FORM:
        raise invalid("form of the state", form, _FORM, "save it with this version")
    for key in ("replicas", "parts"):
        check_whole(f"{key} of the state", rest.get(key), _DAMAGED, most=_MOST_REPLICAS)
    return rest  # type: ignore[no-any-return]
