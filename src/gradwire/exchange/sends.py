"""Sends that a scheduler starts, in place of the order of their messages.

The engine asks a scheduler if a plan has ``bulk``. HiPress's coordinator, in the
package gradwire-lab, is the one that there is.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..contract.verbs import AllGather, AllToAll, Among, Recv, Send

THREADS = "gradwire slots"
"""The name of a scheduler's threads, which cannot wait for their own end."""


class SendScheduler(Protocol):
    """One rank's scheduler."""

    num_batches: int
    """Batches that this rank has sent."""
    told_bytes: int
    """Bytes that this rank has sent beside payloads."""

    def launch(self) -> int:
        """Counts a message, which all ranks launch; returns its number."""
        ...

    def offer(
        self, message: int, verb: Any, over: Callable[[BaseException | None], None]
    ) -> None:
        """Takes a send or a receive that a message has come to.

        Calls ``over`` once it is done.
        """
        ...

    def end(self) -> None:
        """Counts a message that has ended here."""
        ...

    def stop(self, error: BaseException | None) -> None:
        """Ends the threads, at once after an error."""
        ...


SchedulerOf = Callable[[Any, Any], SendScheduler]
"""Makes a scheduler of two channels: one for payloads, one for what ranks tell."""


def as_sends(verb: Any, rank: int, world: int) -> list[Any]:
    """The sends and receives of a verb whose parts go straight to each rank.

    Any other verb stays as it is.
    """
    match verb:
        case AllToAll(out, buf, out_sizes, in_sizes, Among.RANKS):
            own = torch.split(buf, list(in_sizes))
            arriving = torch.split(out, list(out_sizes))
        case AllGather(out, buf, Among.RANKS):
            own = (buf.view(-1),) * world
            arriving = out.view(world, -1).unbind()
        case _:
            return [verb]
    arriving[rank].copy_(own[rank].view_as(arriving[rank]))
    others = [(rank + away) % world for away in range(1, world)]
    verbs: list[Any] = [Recv(i, arriving[i]) for i in others if arriving[i].numel()]
    return verbs + [Send(i, own[i]) for i in others if own[i].numel()]
