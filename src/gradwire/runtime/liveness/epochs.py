"""Epochs: who is in, agreed in the store among the ranks that live.

A run begins in epoch 0, with the ranks that attach. Each change begins the next epoch.

* **Ranks are lost.** A rank finds out by itself, or hears an alarm (`pulse`). Each rank
  that goes on calls ``next_epoch`` with the lost ranks and a value of its own. The
  first that has heard from all others, or knows that the rest is gone, writes down who
  takes part. All read that line, so there are never two groups that go on. A rank that
  comes too late finds itself left out, and ends.
* **A newcomer asks.** It counts up a number in the store while it lives (`Lookout`).
* **A newcomer is admitted.** All ranks and the newcomer agree (`survive.rejoin`). The
  next epoch has one rank more.

The pulse then forgets the lost ranks, and listens for the alarm of the next epoch.
``attach`` and local steps connect anew in each epoch, with new numbers.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from ...errors import RankFailed
from .membership import Membership
from .pulse import STORE_PATIENCE_S, Pulse


class Epoch(NamedTuple):
    """Ranks that train together until one is lost or comes in."""

    number: int
    """0 at attach; each change adds 1."""
    ranks: tuple[int, ...]
    """Their numbers in the group that they agreed in, ascending."""
    values: Mapping[int, Any]
    """The value that each of them announced for this epoch, by rank."""


def next_epoch(
    pulse: Pulse,
    who: Membership,
    own: Any,
    timeout: timedelta,
    lost: Collection[int] = (),
) -> Epoch | None:
    """The epoch after the present one, the same on all of its ranks.

    Args:
        pulse: This rank's pulse, which knows the present epoch.
        who: The group of the pulse, in whose part of the store ranks meet.
        own: The value that this rank announces; it has a JSON form.
        timeout: The longest wait for a rank that lives.
        lost: The ranks of the group that nobody waits for.

    Returns:
        The epoch; None if this rank is not in it, or if the store does not answer.
        Without the store nobody can decide.
    """
    end_s = time.monotonic() + STORE_PATIENCE_S
    while not pulse.signs():
        if pulse.store_is_lost or time.monotonic() > end_s:
            return None

    def are_gone(absent: Sequence[int], announced: object) -> bool:
        return bool(pulse.signs()) and all(map(pulse.is_gone, absent))

    number = pulse.epoch + 1
    try:
        values = who.beside(f"epoch {number}").agree(
            own,
            dict[int, Any],
            timeout,
            due={*pulse.ranks}.difference(lost),
            look=are_gone,
            is_partial=True,
        )
    except RankFailed:  # the store is lost
        return None
    if who.rank not in values:
        return None
    pulse.go_on(number, values)
    return Epoch(number, tuple(sorted(values)), values)
