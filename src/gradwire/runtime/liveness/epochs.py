"""Epochs: which ranks train together; the living ranks agree on this in the store.

An epoch is a membership: ranks that train together until one is lost or comes in. Each
epoch has its own connections, pulse and part of the store. Its ranks have one kind of
meeting for all agreements there (`Membership.agree`):

* **Ranks are lost.** A rank finds out by itself, or hears an alarm (`pulse`). Each rank
  that goes on calls ``next_epoch`` with the lost ranks and a value of its own. The
  first that has heard from all others, or knows that the rest is gone, writes down who
  takes part. All read this, so there are never two groups that go on. A rank that comes
  too late finds that it is left out, and ends.
* **A newcomer asks.** It counts up a number in the store while it lives (`Lookout`).
* **A newcomer is admitted.** All ranks and the newcomer meet in the next epoch, which
  has one rank more (`survive.rejoin`).
* **A backward pass is repeated, a state is loaded.** All ranks make the call, or none
  (`step.retry`, `state.joint_call`).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

from ...errors import RankFailed
from .membership import Membership
from .pulse import STORE_PATIENCE_S, Pulse


def next_epoch(
    pulse: Pulse,
    who: Membership,
    own: Any,
    timeout: timedelta,
    lost: Collection[int] = (),
    ranks_per_host: int = 1,
) -> dict[int, Any]:
    """The ranks of the epoch after this one, the same on all of them.

    Args:
        pulse: This rank's pulse in this epoch.
        who: This epoch, in whose part of the store ranks meet.
        own: The value that this rank announces; it has a JSON form.
        timeout: The longest wait for a rank that lives.
        lost: The ranks of this epoch that are known to be lost. Nobody waits for
            their hosts.
        ranks_per_host: The number of ranks that go on or leave together.

    Returns:
        The value that each rank of the next epoch has announced, by its number in this
        epoch, ascending. This rank may not be among them. The dict is empty if the
        store does not answer, as nobody can decide then.
    """
    living = {*range(who.world)}.difference(lost)
    due = _of_whole_hosts(dict.fromkeys(living), ranks_per_host)
    if who.rank not in due:
        return {}

    def are_gone(absent: Sequence[int], announced: object) -> bool:
        if pulse.mute_s > min(STORE_PATIENCE_S, timeout.total_seconds()):
            raise RankFailed("the job's store does not answer")
        return bool(pulse.signs()) and all(map(pulse.is_gone, absent))

    try:
        return who.beside("next epoch").agree(
            own,
            lambda values: _of_whole_hosts(values, ranks_per_host),
            timeout,
            due=due,
            look=are_gone,
            is_partial=True,
        )
    except RankFailed:  # the store is lost
        return {}


def _of_whole_hosts(values: Mapping[int, Any], ranks_per_host: int) -> dict[int, Any]:
    """The values, by rank, of hosts with all of their ranks.

    >>> _of_whole_hosts({0: 7, 1: 7, 3: 6, 4: 5, 5: 7}, ranks_per_host=2)
    {0: 7, 1: 7, 4: 5, 5: 7}
    """
    sizes = Counter(rank // ranks_per_host for rank in values)
    return {
        rank: value
        for rank, value in sorted(values.items())
        if sizes[rank // ranks_per_host] == ranks_per_host
    }
