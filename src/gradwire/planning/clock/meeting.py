"""Meetings of ranks: a send meets its receive, a collective meets the same one of all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ...contract.travel import members
from ...contract.units import format_bytes
from ...contract.verbs import Among
from ...errors import InvalidSetting
from .supersteps import Hop, Joint


class Post(NamedTuple):
    """A verb for the network that a rank has come to; ``done`` is called once it is done."""

    rank: int
    message: int
    verb: Hop | Joint
    done: Callable[[], None]

    def __str__(self) -> str:
        size = format_bytes(self.verb.size_bytes)
        if isinstance(self.verb, Joint):
            what = f"{self.verb.name}({size})"
        elif self.verb.sends:
            what = f"Send({size} to rank {self.verb.peer})"
        else:
            what = f"Recv({size} from rank {self.verb.peer})"
        return f"rank {self.rank} waits in {what} of message {self.message}"


class Meetings:
    """All verbs that wait for their other end, in the order in which ranks came to them.

    Messages never meet: each has a lane of its own while it is on the wire.
    """

    def __init__(self, num_ranks: int, ranks_per_host: int = 1) -> None:
        self._num_ranks, self._ranks_per_host = num_ranks, ranks_per_host
        self._hops: dict[tuple[int, int, int, Among], deque[Post]] = {}
        self._joints: dict[tuple[int, range, Among], dict[int, deque[Post]]] = {}

    def come(self, post: Post) -> tuple[Post, ...]:
        """All posts that meet if ``post`` was the last of them, ranks ascending; () if more must
        come.

        Raises ``InvalidSetting`` if ranks that meet want different verbs or sizes.
        """
        if isinstance(post.verb, Joint):
            return self._come_to_all(post)
        return self._come_to_one(post, post.verb)

    def waiting(self) -> list[Post]:
        """The posts that still wait."""
        hops = [post for posts in self._hops.values() for post in posts]
        joints = [p for ranks in self._joints.values() for posts in ranks.values() for p in posts]
        return sorted((*hops, *joints), key=lambda post: (post.rank, post.message))

    def _come_to_one(self, post: Post, hop: Hop) -> tuple[Post, ...]:
        ends = (post.rank, hop.peer) if hop.sends else (hop.peer, post.rank)
        key = (post.message, *ends, hop.among)
        posts = self._hops.setdefault(key, deque())
        if not posts or _sends(posts[0]) is hop.sends:
            posts.append(post)
            return ()
        other = posts.popleft()
        if not posts:
            del self._hops[key]
        met = (post, other) if hop.sends else (other, post)
        if met[0].verb.size_bytes != met[1].verb.size_bytes:
            raise InvalidSetting(
                f"rank {ends[0]} sends {met[0].verb.size_bytes} bytes to rank {ends[1]}, which "
                f"receives {met[1].verb.size_bytes}; both ends must agree"
            )
        return met

    def _come_to_all(self, post: Post) -> tuple[Post, ...]:
        among = post.verb.among
        own = members(post.rank, self._num_ranks, self._ranks_per_host, among)
        ranks = self._joints.setdefault((post.message, own, among), {})
        ranks.setdefault(post.rank, deque()).append(post)
        if len(ranks) < len(own):
            return ()
        met = tuple(ranks[rank].popleft() for rank in own)
        self._joints[post.message, own, among] = {
            rank: posts for rank, posts in ranks.items() if posts
        }
        first = met[0].verb
        for other in met:
            verb = other.verb
            if (
                isinstance(verb, Joint)
                and isinstance(first, Joint)
                and (verb.name != first.name or verb.like != first.like)
            ):
                raise InvalidSetting(
                    f"ranks call different collectives, or with different sizes, dtypes or roots: "
                    f"{met[0]}; {other}"
                )
        return met


def _sends(post: Post) -> bool:
    return isinstance(post.verb, Hop) and post.verb.sends
