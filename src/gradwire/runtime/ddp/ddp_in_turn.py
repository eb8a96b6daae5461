"""A DDP model under a pilot: DDP's own reducer averages until a plan's messages do, and after them.

No way to the mean of dense gradients is as fast as DDP's own (`reducer`). So its communication hook
is taken only when a plan comes. Reducers keep a hook, so behind a plan DDP gets a new reducer.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.nn.parallel import DistributedDataParallel

from ...planning.default_fusion import NamedParam
from ..overlap.overlap import Overlap
from ..step.progress import Progress
from . import ddp as hook
from .reducer import count_steps


class DDPInTurn:
    """Hands a DDP model's gradients to messages or leaves them to DDP, from step to step.

    ``on_end`` is called when all means of a backward pass are in DDP's buckets, as by `DDPHooks`.
    """

    overlap: Overlap | None = None

    def __init__(
        self, progress: Progress, ddp: DistributedDataParallel, params: list[NamedParam]
    ) -> None:
        self._progress, self._ddp, self._params = progress, ddp, params
        self.on_end: Callable[[], None] | None = None
        self._hooks: hook.DDPHooks | None = None
        self._stop_counting: Callable[[], None] | None = self._count()
        self._keep_reducer: Callable[[], None] = lambda: None

    @property
    def is_left_to_ddp(self) -> bool:
        """Whether DDP's own reducer averages at present."""
        return self._hooks is None

    def use_messages(self, wanted: bool) -> None:
        """Has the next steps averaged by messages, or by DDP; called between two steps."""
        if wanted is not self.is_left_to_ddp:
            return
        self.remove()
        if wanted:
            self._hooks = hook.register(self._progress, self._ddp, self._params)
            self._hooks.on_end = self._ended
        else:
            self._keep_reducer = hook.renew_reducer(self._ddp)
            self._stop_counting = self._count()

    def remove(self) -> None:
        """Leaves the model to DDP, and counts no more; its reducer stays for who attaches next."""
        self._keep_reducer()
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        if self._stop_counting is not None:
            self._stop_counting()
            self._stop_counting = None

    def _count(self) -> Callable[[], None]:
        return count_steps(self._progress, self._ddp, self._params, on_end=self._ended)

    def _ended(self) -> None:
        if self.on_end is not None:
            self.on_end()
