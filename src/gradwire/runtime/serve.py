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
    """Aggregates the gradients of the ranks that train, until rank 0 detaches or ends.

    With ``gw.collective.casync_ps(servers=S)`` the last S ranks of the group are
    servers: they train no model, and call this function. All other ranks call
    ``gw.attach`` with the same arguments.

    Args:
        model: The model that the other ranks train. Only names, shapes and dtypes of
            its tensors count, and their memory is given up. So make the model on the
            meta device.
        exchange: The exchange of the other ranks: a pair with
            ``gw.collective.casync_ps(servers=...)``, or a plan with such exchanges.
        group: The process group. Default: all ranks.
        options: As for ``gw.attach``. Default: ``gw.Options()``.
        failure: As for ``gw.attach``. The time between two steps may exceed its
            time-out. Default: the run ends.

    Raises:
        InvalidSetting: An argument cannot be used, or this rank is not one of the last
            S ranks.
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
