"""serve: a rank without a model aggregates the gradients of ranks that train.

Source: HiPress (Wu et al.) section 3.1 and table 3: aggregators apart from workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ..contract import Exchange
from .attach import Attachment, grid_of
from .handle import synchroniser_of
from .settings import FailurePolicy, Options, Settings, or_defaults, takes_options
from .transport.wire import Group

if TYPE_CHECKING:
    from ..planning.data.plan import Plan


@takes_options
def serve(
    model: nn.Module,
    exchange: Exchange | Plan,
    *,
    group: Group | None = None,
    options: Options | None = None,
    failure: FailurePolicy | None = None,
) -> None:
    """Aggregates the gradients of other ranks, until these detach.

    The last ``servers`` ranks of the group call it; all others call ``gw.attach`` with
    the same arguments. It returns once rank 0 detaches or ends.

    Args:
        model: The model that other ranks train. Only names, shapes and dtypes count,
            and the memory of its tensors is given up. So make it on the meta device.
        exchange: The exchange of the other ranks: a pair by
            ``gw.collective.casync_ps(servers=...)``, or a plan with such exchanges.
        group: The process group. Default: all ranks.
        options: As for ``gw.attach``. Default: ``gw.Options()``.
        failure: As for ``gw.attach``, whose time-out bounds no time between two steps.
            Default: the run ends.

    Raises:
        InvalidSetting: An argument cannot be used, or this rank is none of the last.
        RanksDiffer: Another rank refused, or has another model, setting or version.
        RankFailed: A rank was lost.

    >>> import gradwire as gw
    >>> servers = gw.collective.casync_ps(servers=1)
    >>> exchange = gw.pair(gw.compress.onebit(), servers)
    >>> model = nn.Linear(4, 2, device="meta")
    >>> # on rank 2 of 3: gw.serve(model, exchange)
    """
    settings = Settings(exchange, None, None, *or_defaults(options, failure))
    grid = grid_of(model, group, None, settings)
    if any(param.is_meta for param in model.parameters()):
        model.to_empty(device="cpu")
    serving = Attachment()
    serving.serves = True
    handle = serving.attach(model, settings, grid)
    synchroniser = synchroniser_of(handle)
    synchroniser.check.trains = False
    synchroniser.takes_means = False
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.new_empty(0)
    while synchroniser.engine.hears_of_step():
        handle.backward_without_batch()
    handle.detach()
