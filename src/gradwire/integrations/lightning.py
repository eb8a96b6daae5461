"""Lightning: ``GradwireStrategy(exchange)``, and Fabric's ``GradwireFabric``.

The state of all ranks lies in the framework's one checkpoint, under the key "gradwire".
"""

from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..errors import NotInstalled
from ..runtime.settings import FailurePolicy, Options
from .framework_attachment import AnyExchange, FrameworkAttachment, warn_of_no_state

try:
    from lightning.fabric.strategies import DDPStrategy as FabricDDP
    from lightning.pytorch.strategies import DDPStrategy
except ModuleNotFoundError as error:
    raise NotInstalled(__name__, "lightning", "frameworks") from error

_KEY = "gradwire"


class _Attaching:
    """A DDP strategy with an attachment."""

    def __init__(
        self,
        exchange: AnyExchange,
        *,
        scaler: GradScaler | None = None,
        mesh: DeviceMesh | str | None = None,
        options: Options | None = None,
        failure: FailurePolicy | None = None,
        **others: Any,
    ) -> None:
        super().__init__(**others)
        self.attachment = FrameworkAttachment(exchange, scaler, mesh, options, failure)


class GradwireStrategy(_Attaching, DDPStrategy):  # type: ignore[misc]
    """Lightning's DDP strategy with an exchange.

    All ranks' state lies in Lightning's checkpoint.

    ``attachment.handle`` is there once training has begun.

    Args:
        exchange: A compressor, an exchange, a plan, or its name or path; or a recipe of
            local steps, such as ``gw.recipes.diloco``.
        scaler: As for ``gw.attach``.
        mesh: As for ``gw.attach``.
        options: As for ``gw.attach``.
        failure: As for ``gw.attach``.
        **others: Settings of Lightning's ``DDPStrategy``, such as ``process_group``:
            for islands of local steps a host of ``mesh``, ``mesh.get_group("local")``.

    Example:

        Trainer(strategy=GradwireStrategy(gw.compress.int8()))
    """

    _resumed: Any = None

    def configure_ddp(self) -> None:
        """Makes the DDP model and attaches to it.

        A checkpoint that was read before is loaded.
        """
        self.attachment.let_go(self.model)
        super().configure_ddp()
        self.attachment.attach_to(self.model)
        self._load()

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the optimizers, of which local steps begin with the first."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self.attachment.take(optimizer)
        if self.attachment.is_local:
            # Ranks would wait for rank 0 in each batch. Each still sees its own signal.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        self._load()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state in a checkpoint; all ranks come here."""
        self.attachment.end_period()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def on_train_end(self) -> None:
        """Ends a period of local steps."""
        self.attachment.end_period()
        super().on_train_end()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], *args: Any, **others: Any
    ) -> None:
        """Adds the state of all ranks to what Lightning saves; all ranks come here."""
        if self.attachment.handles:
            checkpoint[_KEY] = self.attachment.state_dict()
        super().save_checkpoint(checkpoint, *args, **others)

    def load_checkpoint(self, *args: Any, **others: Any) -> dict[str, Any]:
        """Keeps the exchange's part of a checkpoint until a model can load it."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **others)
        self._resumed = checkpoint.get(_KEY)
        if self._resumed is None:
            warn_of_no_state("the checkpoint")
        self._load()
        return checkpoint

    def _load(self) -> None:
        if self._resumed is None or not self.attachment.handles:
            return
        states = self._resumed
        self._resumed = None
        self.attachment.load_state_dict(states)


class GradwireFabric(_Attaching, FabricDDP):  # type: ignore[misc]
    """Fabric's DDP strategy with an exchange.

    All ranks' state lies in the checkpoint that ``fabric.save`` writes. A period of
    local steps ends before. ``fabric.load`` into a dict loads it, after
    ``fabric.setup``.

    Args:
        exchange: A compressor, an exchange, a plan, or its name or path; or a recipe of
            local steps, such as ``gw.recipes.diloco``.
        **others: The other settings, as of ``GradwireStrategy``, and ``process_group``.

    Example:

        Fabric(strategy=GradwireFabric(gw.compress.int8()))
    """

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Makes the DDP model and attaches to it."""
        self.attachment.let_go(module)
        model: DistributedDataParallel = super().setup_module(module)
        self.attachment.attach_to(model)
        return model

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Hands in an optimizer, with which local steps begin."""
        self.attachment.take(optimizer)
        made: Optimizer = super().setup_optimizer(optimizer)
        return made

    def save_checkpoint(self, path: Any, state: Any, **others: Any) -> None:
        """Adds the state of all ranks to what Fabric saves; all ranks come here."""
        super().save_checkpoint(path, {_KEY: self.attachment, **state}, **others)

    def load_checkpoint(self, path: Any, state: Any = None, **others: Any) -> Any:
        """Loads the state of all ranks, too, if ``state`` is a dict of objects."""
        # with that key a loop loads by itself
        adds = isinstance(state, dict) and _KEY not in state
        if adds:
            state[_KEY] = self.attachment
        rest = super().load_checkpoint(path, state, **others)
        if adds:
            del state[_KEY]
        return rest
