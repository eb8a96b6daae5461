"""Accelerate: ``prepare(accelerator, exchange)`` before its own ``prepare``.

    accelerator = Accelerator()
    gradwire = prepare(accelerator, gw.compress.int8())
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

Accelerate asks its DDP handler to register a communication hook on each DDP model that
it makes; that is where the exchange is attached. Its ``save_state`` and ``load_state``
call hooks on every rank, which write and read one file for each rank beside the
model's.
"""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..errors import NotInstalled, invalid
from ..runtime.settings import FailurePolicy, Options
from ..runtime.transport.wire import Group
from .framework_attachment import AnyExchange, FrameworkAttachment

try:
    from accelerate import Accelerator
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
except ModuleNotFoundError as error:
    raise NotInstalled(__name__, "accelerate", "frameworks") from error


def prepare(
    accelerator: Accelerator,
    exchange: AnyExchange,
    *,
    mesh: DeviceMesh | str | None = None,
    options: Options | None = None,
    failure: FailurePolicy | None = None,
    process_group: Group | None = None,
) -> FrameworkAttachment:
    """Attaches an exchange to every DDP model that the accelerator prepares later.

    ``gw.attach`` gets the accelerator's loss scaler too. On one rank nothing is
    attached.

    Args:
        accelerator: The accelerator, before its ``prepare``.
        exchange: A compressor, an exchange, a plan, or its name or path; or a recipe of
            local steps, such as ``gw.recipes.diloco``.
        mesh: As for ``gw.attach``.
        options: As for ``gw.attach``.
        failure: As for ``gw.attach``.
        process_group: The ranks among which DDP averages. For islands of local steps it
            is a host of ``mesh``: ``mesh.get_group("local")``. Default: all ranks.

    Returns:
        The attachment. Its ``handle`` is there once a model is prepared.

    Raises:
        InvalidSetting: A model was prepared before, or the accelerator has a
            communication hook, or makes no DDP models (FSDP, DeepSpeed).

    Example:

        accelerator = Accelerator()
        attachment = prepare(accelerator, gw.compress.int8())
        model, optimizer = accelerator.prepare(model, optimizer)
    """
    if accelerator._models:
        raise invalid(
            "accelerator", "a model in it", "empty", "call gradwire's prepare() first"
        )
    attachment = FrameworkAttachment(
        exchange, accelerator.scaler, mesh, options, failure
    )
    hook_accelerator(accelerator, attachment, process_group)
    folders: list[str] = []
    load_state = accelerator.load_state

    def load_all(*args: Any, **others: Any) -> None:
        """``accelerator.load_state``; local steps restore a rank's own parameters."""
        load_state(*args, **others)
        attachment.load(folders.pop())

    accelerator.load_state = load_all
    accelerator.register_load_state_pre_hook(
        lambda models, folder: folders.append(folder)
    )
    accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: attachment.save(folder)
    )
    return attachment


def hook_accelerator(
    accelerator: Accelerator,
    attachment: FrameworkAttachment,
    process_group: Group | None,
) -> None:
    """Has an accelerator hand in its DDP models and optimizers.

    It is done by the models' communication hook.
    """
    kind = accelerator.distributed_type.value
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise invalid(
            "accelerator",
            f"one of {kind}",
            "one of DDP",
            "call fully_shard() with the mesh of a site yourself, then "
            "accelerator.prepare(), then gw.local_steps(group=mesh['site'])",
        )
    handler = accelerator.ddp_handler or DistributedDataParallelKwargs()
    hooks = (handler.comm_hook, handler.comm_wrapper)
    if any(hook != DDPCommunicationHookType.NO for hook in hooks):
        raise invalid(
            "comm_hook", hooks, "none beside gradwire", "leave it out of the settings"
        )

    class AttachingKwargs(DistributedDataParallelKwargs):  # type: ignore[misc]
        def to_kwargs(self) -> dict[str, Any]:
            """The settings of a DDP to be made, maybe of a module that had one."""
            *others, coming = accelerator._models
            attachment.let_go_but_of(others, coming)
            keywords: dict[str, Any] = super().to_kwargs()
            return {**keywords, "process_group": process_group}

        def register_comm_hook(self, model: DistributedDataParallel) -> None:
            attachment.attach_to(model)

    accelerator.ddp_handler = AttachingKwargs(**vars(handler))
    prepare_optimizer = accelerator.prepare_optimizer

    def taken(optimizer: Optimizer, *args: Any, **others: Any) -> Any:
        """``accelerator.prepare_optimizer``."""
        # it may be prepared already
        attachment.take(getattr(optimizer, "optimizer", optimizer))
        return prepare_optimizer(optimizer, *args, **others)

    accelerator.prepare_optimizer = taken
