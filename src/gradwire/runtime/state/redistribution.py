"""Redistribution: state for another number of ranks, from all old ranks' states."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...contract.bounds import check_whole
from ...errors import InvalidSetting, invalid
from ..agreement.fingerprint import first_difference, refuse_differences
from .outer_state import merged_outer
from .table import Origin, check_form, copied, described, is_by_element, summed

Saved = Mapping[str, Any]
"""A state_dict whose form was checked."""


def redistribute(
    state_dicts: Sequence[dict[str, Any]], world_size: int, ranks_per_host: int = 1
) -> list[dict[str, Any]]:
    """Makes states for another number of ranks from the states of all old ranks.

    No residual is lost. The residual of old rank j goes to new rank j mod
    ``world_size``. It is multiplied by the new number of ranks over the old one, since
    a mean divides by that number. Velocities, and other state with a value for each
    element, go the same way. Other state comes from the old rank of the same number, or
    starts anew if its length differs. On hosts of several ranks, hosts count in place
    of ranks. Between two exchanges of local steps each new rank starts from the mean of
    the old ranks' parameters.

    Args:
        state_dicts: What ``handle.state_dict()`` returned on each old rank.
        world_size: The new number of ranks.
        ranks_per_host: The new number of ranks a host, where ``attach(mesh=)`` is used.
            Default: 1.

    Returns:
        A state for each new rank, in rank order.

    Raises:
        InvalidSetting: A state is missing or damaged. The message names rank and
            parameter.
        RanksDiffer: The states are of different steps or runs.

    >>> import gradwire as gw
    >>> from torch import nn
    >>> handle = gw.attach(nn.Linear(4, 2), "topk")
    >>> states = redistribute([handle.state_dict()], world_size=2)
    >>> [state["rank"] for state in states]
    [0, 1]
    >>> handle.detach()
    """
    check_whole("world_size", world_size, "pass the new number of ranks")
    if (
        type(ranks_per_host) is not int
        or ranks_per_host < 1
        or world_size % ranks_per_host
    ):
        raise invalid(
            "ranks_per_host",
            ranks_per_host,
            f"a divisor of world_size, {world_size}",
            "leave it out without mesh=",
        )
    olds = _of_one_moment(state_dicts)
    return [_part(olds, rank, world_size, ranks_per_host) for rank in range(world_size)]


def place_name(rank: int, world_size: int) -> str:
    """The name of a rank's state among all ranks' states.

    >>> place_name(0, 4)
    'rank 0 of 4'
    """
    return f"rank {rank} of {world_size}"


def part_of(saved: Any, origin: Origin) -> Any:
    """The state_dict of ``origin``'s rank in ``saved``, which may hold all ranks'.

    Any other value is returned as it is. Another number of ranks, or of ranks on a
    host, is cut anew. Raises as ``redistribute`` does.
    """
    if not isinstance(saved, dict) or not saved:
        return saved
    if not all(
        type(key) is str and re.fullmatch(r"rank \d+ of \d+", key) for key in saved
    ):
        return saved
    own_state = saved.get(place_name(origin.rank, origin.world_size))
    if own_state is not None:
        check_form(own_state)
        is_of_hosts = own_state["ranks_per_host"] == origin.ranks_per_host
        if is_of_hosts and own_state["share"] in ("", origin.share):
            return own_state
    olds = _of_one_moment(list(saved.values()))
    return _part(olds, origin.rank, origin.world_size, origin.ranks_per_host)


def _of_one_moment(state_dicts: Any) -> list[Saved]:
    """The state_dicts in rank order.

    Raises unless there is one of each rank, saved together.
    """
    if not isinstance(state_dicts, list | tuple):
        kind = type(state_dicts).__name__
        raise invalid(
            "state_dicts", kind, "a list of state_dicts", "pass those of all old ranks"
        )
    for place, state_dict in enumerate(state_dicts):
        check_form(state_dict, f"state_dicts[{place}]")
    shards = sorted({state_dict["shard"] for state_dict in state_dicts})
    if len(shards) > 1:
        raise invalid(
            "state_dicts",
            shards,
            "those of ranks that hold the same part of every layer",
            "redistribute each part's by itself",
        )
    olds = sorted(state_dicts, key=lambda old: int(old["rank"]))
    count = olds[0]["world_size"] if olds else 1
    ranks = [old["rank"] for old in olds]
    if len(ranks) != count or ranks != list(range(count)):
        raise InvalidSetting(
            f"redistribute needs the state_dicts of all {count} old ranks, got those "
            f"of ranks {ranks}; load every rank's file"
        )
    how = "did not save the same thing"
    remedy = "load the state_dicts that all old ranks saved at one moment"
    announced = {old["rank"]: described(old) for old in olds}
    refuse_differences(announced, "rank", how, remedy, first_difference)
    if count % (per_host := olds[0]["ranks_per_host"]):
        raise invalid(
            "ranks_per_host of a state_dict",
            per_host,
            f"a divisor of its world_size, {count}",
            "load an undamaged checkpoint",
        )
    return olds


def _part(
    olds: list[Saved], rank: int, world_size: int, ranks_per_host: int
) -> dict[str, Any]:
    """The state of one new rank."""
    per_host = olds[0]["ranks_per_host"]
    num_hosts = world_size // ranks_per_host
    hosts = [olds[first : first + per_host] for first in range(0, len(olds), per_host)]
    mine = []
    for host in hosts[rank // ranks_per_host :: num_hosts]:
        # Without shares each rank has all of its host's state.
        mine += host if host[0]["share"] else host[:1]
    # Ranks at different places of a host may have decided apart, of their shares.
    donor = olds[0] if olds[0]["share"] else olds[rank % len(olds)]
    new: dict[str, Any] = copied(donor)
    for name, fields in new["params"].items():
        for old in hosts[rank // ranks_per_host % len(hosts)]:
            # State of a whole tensor is with one rank of the host.
            for path, kept in old["params"][name].items():
                fields.setdefault(path, copied(kept))
        for path, like in fields.items():
            if is_by_element(path):
                values = {old["rank"]: old["params"][name][path] for old in mine}
                fields[path] = summed(
                    f"{path} of {name}", like, values, num_hosts / len(hosts)
                )
    if world_size == len(olds) and per_host == ranks_per_host == 1:
        return new
    if "outer" in new:
        new["outer"] = merged_outer(olds)
    return {
        **new,
        "rank": rank,
        "world_size": world_size,
        "ranks_per_host": ranks_per_host,
        "share": "",
        "saved_by": len(olds),
        "saved_per_host": per_host,
    }
