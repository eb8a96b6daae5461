"""Transformers: ``hook_trainer(trainer, exchange)`` before ``trainer.train()``.

    trainer = Trainer(model, args, train_dataset=data)
    hook_trainer(trainer, gw.compress.int8())
    trainer.train(resume_from_checkpoint=True)

Callbacks never see the DDP model, so the exchange is attached where the trainer's
accelerator makes it. Each rank's state lies in the trainer's checkpoints, as a file for
each rank.
"""

from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..errors import NotInstalled, log
from ..runtime.settings import FailurePolicy, Options
from ..runtime.transport.wire import Group
from .framework_attachment import AnyExchange, FrameworkAttachment

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ModuleNotFoundError as error:
    raise NotInstalled(__name__, "transformers", "frameworks") from error


def hook_trainer(
    trainer: Trainer,
    exchange: AnyExchange,
    *,
    mesh: DeviceMesh | str | None = None,
    options: Options | None = None,
    failure: FailurePolicy | None = None,
    process_group: Group | None = None,
) -> FrameworkAttachment:
    """Attaches an exchange to a trainer's DDP model, with state in its checkpoints.

    ``gw.attach`` gets the trainer's loss scaler too.

    Args:
        trainer: The trainer, before ``train()``.
        exchange: A compressor, an exchange, a plan, or its name or path; or a recipe of
            local steps, such as ``gw.recipes.diloco``.
        mesh: As for ``gw.attach``.
        options: As for ``gw.attach``.
        failure: As for ``gw.attach``.
        process_group: The ranks among which DDP averages. For islands of local steps it
            is a host of ``mesh``: ``mesh.get_group("local")``. Default: all ranks.

    Returns:
        The attachment. Its ``handle`` is there once training has begun.

    Raises:
        InvalidSetting: The trainer's settings have a communication hook, or it makes no
            DDP model (FSDP, DeepSpeed).

    Example:

        attachment = hook_trainer(trainer, gw.compress.int8())
        trainer.train(resume_from_checkpoint=True)
    """
    from .accelerate import (
        hook_accelerator,
    )  # transformers installs accelerate, or says so

    accelerator = trainer.accelerator
    attachment = FrameworkAttachment(
        exchange, accelerator.scaler, mesh, options, failure
    )
    hook_accelerator(accelerator, attachment, process_group)
    if attachment.is_local and trainer.args.average_tokens_across_devices:
        log.warning(
            "TrainingArguments(average_tokens_across_devices=True), the default, has "
            "ranks wait for each other in each step of a language model; pass False"
        )
    keeper = _Keeper(attachment)
    trainer.add_callback(keeper)
    train = trainer.train

    def hooked(
        resume_from_checkpoint: str | Path | bool | None = None, **others: Any
    ) -> Any:
        """``trainer.train``, which notes the checkpoint that is resumed."""
        resumed = resume_from_checkpoint
        keeper.resumed = (
            get_last_checkpoint(trainer.args.output_dir) if resumed is True else resumed
        )
        return train(resume_from_checkpoint=resume_from_checkpoint, **others)

    trainer.train = hooked
    return attachment


class _Keeper(TrainerCallback):  # type: ignore[misc]
    """Saves and loads beside the trainer, which calls it on every rank."""

    def __init__(self, attachment: FrameworkAttachment) -> None:
        self._attachment = attachment
        self.resumed: str | Path | bool | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **others: Any
    ) -> None:
        if self.resumed and not isinstance(self.resumed, bool):
            self._attachment.load(self.resumed)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if control.should_save or control.should_training_stop:
            self._attachment.end_period()

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Ends a period where the trainer decides next whether to save the model."""
        if args.save_strategy == "best":
            self._attachment.end_period()

    def on_train_end(self, *args: Any, **others: Any) -> None:
        self._attachment.end_period()

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._attachment.save(Path(args.output_dir) / f"checkpoint-{state.global_step}")
