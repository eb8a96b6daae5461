"""One definition of how a verb travels: bytes and costs agree, and a broadcast is
gloo's tree.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from gradwire.collective.steps.travel import (
    NAMES,
    bytes_sent,
    copies_sent,
    sent_bytes,
    travel,
)
from gradwire.contract.verbs import Broadcast
from gradwire.errors import UnknownName
from gradwire.planning.data.cluster import VERBS, Cluster
from tests.each import each

WORLDS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 64, 100)


def _receivers(place: int, world: int) -> list[int]:
    """Gloo's own loop: in round i the lowest 2^i places hold the buffer, and each sends
    it on.
    """
    dim = (world - 1).bit_length()
    mask, found = (1 << dim) - 1, []
    for i in range(dim):
        mask ^= 1 << i
        peer = place ^ 1 << i
        if not place & mask and not place & 1 << i and peer < world:
            found.append(peer)
    return found


@each("world", WORLDS)
def test_a_broadcast_is_gloos_tree(world: int) -> None:
    receivers = {place: _receivers(place, world) for place in range(world)}
    reached = sorted(itertools.chain.from_iterable(receivers.values()))
    assert reached == list(range(1, world)), "each gets it once"
    for place, own in receivers.items():
        assert copies_sent("broadcast", world, place) == (len(own), 1)

    def there_at(place: int) -> int:
        """When the last below a place has it, if the children of each share its link
        equally.
        """
        own = receivers[place]
        return len(own) + max(map(there_at, own), default=0)

    assert travel("broadcast", world).copies == there_at(0)
    assert travel("broadcast", world).rounds == (world - 1).bit_length()


@each("verb", VERBS)
@each("world", WORLDS)
def test_seconds_and_bytes_are_of_one_way(verb: str, world: int) -> None:
    """No link carries more in a verb's seconds than its rate, and the busiest is busy
    throughout, but for a tree's, where ranks wait for those above them.
    """
    rounds, copies = travel(verb, world)
    line = Cluster(num_ranks=world, rate_bytes_per_s=2.0, hop_s=0.5).line(verb)
    if world > 1:
        assert (line.alpha_s, line.per_unit_s) == (rounds / 2, copies / 2)
    shares = [copies_sent(verb, world, place) for place in range(world)]
    busiest = max(parts / of for parts, of in shares)
    assert copies == busiest or (verb == "broadcast" and copies > busiest)
    size_bytes = 840 * world
    sent = [bytes_sent(verb, size_bytes, world, place) for place in range(world)]
    assert sent == [parts * size_bytes // of for parts, of in shares]


def test_every_verb_of_a_cluster_has_a_way_and_no_other() -> None:
    assert set(NAMES.values()) == set(VERBS)
    with pytest.raises(UnknownName, match="broadcast"):
        travel("gossip", 4)


def test_the_root_of_a_broadcast_is_place_0() -> None:
    verb = Broadcast(2, torch.zeros(10))
    assert [sent_bytes(verb, rank, 4) for rank in range(4)] == [0, 0, 80, 40]
