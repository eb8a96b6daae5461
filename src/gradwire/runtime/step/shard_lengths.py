"""Ranks with parts of the same layers announce their messages' lengths."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from ...contract.shards import Shards
from ..agreement.fingerprint import (
    first_difference,
    refuse_differences,
    refuse_if_one_did,
)
from ..liveness.membership import Membership
from .messages import Message


def agree_among_shards(
    who: Membership,
    shards: Membership,
    settings: Mapping[str, object],
    messages: Sequence[Message],
    timeout: timedelta,
) -> None:
    """Tells every message the lengths of all its parts.

    Raises ``RanksDiffer`` on every rank of ``shards`` where their settings differ, or
    their messages do not correspond.
    """
    if shards.world == 1:
        return
    own = {
        "place": f"rank {who.rank} of {who.world}",
        **settings,
        "setting shards": shards.world,
        **{
            f"message {place}": _described(message)
            for place, message in enumerate(messages)
        },
    }
    sizes = [message.spec.numel for message in messages]

    def checked(found: Mapping[int, Any]) -> list[list[int]]:
        refuse_if_one_did(found, "the rank of shard {} refused to attach")
        remedy = (
            "give all ranks the same settings, and a bucket_cap_mb that cuts their "
            "parameters alike, such as one below the size of each"
        )
        announced = {rank: one["own"] for rank, one in found.items()}
        how = "of a layer would not travel together"
        refuse_differences(announced, "shard", how, remedy, first_difference)
        return [one["numels"] for one in found.values()]

    of_all = shards.agree({"own": own, "numels": sizes}, checked, timeout)
    for message, numels in zip(messages, zip(*of_all, strict=True), strict=True):
        message.member.shards = Shards(shards.rank, numels)


def _described(message: Message) -> str:
    """The facts, in words, that all parts of one message must have in common."""
    names = ", ".join(message.names)
    return f"of {names} as {message.spec.dtype} by {message.exchange!r}"
