"""Refusals: models that cannot be attached, and changes after attach.

One gradient has one exchange. Where ``DistributedDataParallel``, ``replicate()`` or
FSDP exchange the gradients of a model too, both write into the same ``.grad`` and
neither mean is right. A DDP inside of a wrapper is attached in the wrapper's place
(`sole_ddp`). A DDP around the model is found among all living objects. A DDP that is
made later is refused when it takes the model in.
"""

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ...contract.spec import NamedParam
from ...errors import InvalidSetting, invalid
from ..grid.dtensors import is_dtensor
from ..transport.wire import has_store
from .hooked import Hooked, is_in_backward, living, untraced

_attached: dict[int, weakref.ref[Tensor]] = {}
"""Parameters that are exchanged, by id.

No second model with one of them can be attached.
"""
_modules: WeakSet[nn.Module] = WeakSet()
"""The modules of models that are attached, whatever becomes of their parameters."""
_quiet: WeakSet[DistributedDataParallel] = WeakSet()
"""DDPs whose modules train by local steps: they exchange nothing, or within a host."""
_watch: list[Any] = []
"""The hook that sees modules taken in by others, while any parameter is exchanged."""


def sole_ddp(model: nn.Module) -> nn.Module:
    """The one DDP inside of ``model`` that holds all it trains; ``model`` itself if
    there is none.

    So a compiled DDP, one in an ``nn.Sequential`` and one in a framework's wrapper are
    attached as the DDP itself is.
    """
    if isinstance(model, nn.Module) and not isinstance(model, DistributedDataParallel):
        found = _ddps_in(model)
        if len(found) == 1 and not _trained_outside(model, found[0]):
            return found[0]
    return model


def refuse_wrong_model(model: nn.Module) -> None:
    """Raises ``InvalidSetting`` for a model that cannot be attached, or not now."""
    _refuse_no_module(model)
    _refuse_no_group()
    _refuse_attached(model)
    _refuse_sharded(model)
    _refuse_odd_tensors(model)
    _refuse_ddp_inside(model)
    _refuse_changed(model)
    _refuse_ddp_around(model)
    _refuse_in_backward(model)


def _refuse_no_module(model: nn.Module) -> None:
    """Refuses what is no module, and a module that takes no hooks."""
    if not isinstance(model, nn.Module):
        raise invalid(
            "model", type(model).__name__, "an nn.Module", "pass the model itself"
        )
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if isinstance(inner, torch.jit.ScriptModule):
        raise invalid(
            "model",
            type(inner).__name__,
            "a module that takes hooks, as no module of TorchScript does",
            "write nn.Sequential(scripted), for DDP too, or leave torch.jit out",
        )


def _refuse_no_group() -> None:
    """Refuses one of several ranks without a process group.

    It would train alone, unnoticed.
    """
    world = os.environ.get("WORLD_SIZE", "")
    if world.isdigit() and int(world) > 1 and not has_store():
        raise InvalidSetting(
            f"this is one of WORLD_SIZE={world} ranks and no process group exists, so "
            "nothing would be exchanged; call torch.distributed.init_process_group() "
            "before attach (or unset WORLD_SIZE to train alone)"
        )


def _refuse_attached(model: nn.Module) -> None:
    """Refuses a model of which a parameter is exchanged already."""
    for name, param in model.named_parameters():
        if is_attached(param):
            raise InvalidSetting(
                f"this model is attached already ({name} is exchanged); a parameter "
                "has one exchange: call handle.detach() on the first handle, then "
                "attach again"
            )


def _refuse_ddp_around(model: nn.Module) -> None:
    """Refuses parameters that another DistributedDataParallel averages too."""
    params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not _ddps_around(model, params):
        return
    gc.collect()  # One that was dropped may only not have been collected yet.
    for name in _ddps_around(model, params):
        if isinstance(model, DistributedDataParallel):
            raise InvalidSetting(
                f"the gradients of {name} would be exchanged twice: another "
                "DistributedDataParallel of them still lives; drop it "
                "(del), then attach"
            )
        raise shown_as_around(name)


def _refuse_in_backward(model: nn.Module) -> None:
    """Refuses a call during a backward pass, or after one whose gradients are left."""
    if is_in_backward():
        raise InvalidSetting(
            "attach was called during a backward pass; call it before the training loop"
        )
    left = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p.grad is not None
    ]
    if left:
        raise InvalidSetting(
            f"attach was called while {len(left)} parameters hold gradients "
            f"({left[0]}, ...) of an earlier backward pass, to which the next one "
            "would add its own; call optimizer.zero_grad(set_to_none=True) first"
        )


def refuse_own_writes(model: nn.Module) -> None:
    """Refuses modules whose forward pass changes weights by the batch, which each rank
    has its own.

    Ranks would hold other parameters after the first step, and nothing would fail
    there.
    """
    for path, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.max_norm is not None
        ):
            raise invalid(
                f"max_norm of {path or type(module).__name__}",
                module.max_norm,
                "None, as a forward pass shortens the rows of its own rank's "
                "batch alone",
                "leave it out, and shorten all rows after optimizer.step(): with "
                f"torch.no_grad(): weight.copy_(weight.renorm({module.norm_type:g}, 0, "
                f"{module.max_norm:g})) (check_every=None allows it)",
            )


def is_attached(param: Tensor) -> bool:
    """Whether a parameter's gradients are exchanged."""
    known = _attached.get(id(param))
    return known is not None and known() is param


def record_attached(
    model: nn.Module, params: Sequence[NamedParam]
) -> Callable[[], None]:
    """Notes that a model's ``params`` are exchanged from now on.

    Returns a function to undo it.
    """
    ids = [id(param) for _, param in params]
    root = weakref.ref(model)
    _modules.update(model.modules())
    _attached.update({id(param): weakref.ref(param) for _, param in params})
    if not _watch:
        _watch.append(register_module_module_registration_hook(untraced(_taken_in)))

    def forget() -> None:
        for key in ids:
            _attached.pop(key, None)
        if (left := root()) is not None:
            _modules.difference_update(left.modules())
        if not _attached and _watch:
            _watch.pop().remove()

    return forget


def quietened(ddp: nn.Module, undo: ExitStack, *, goes_on: bool = False) -> nn.Module:
    """The module in a DDP, which exchanges nothing until ``undo`` is closed.

    Another one itself. A DDP that ``goes_on`` exchanges as before.

    As in ``no_sync``, each forward pass decides for its backward pass. So loops may
    call ``no_sync`` themselves, or set ``require_backward_grad_sync``. Raises
    ``InvalidSetting`` for a DDP that would exchange something all the same.
    """
    if not isinstance(ddp, DistributedDataParallel):
        return ddp
    _refuse_ddp_inside(ddp)
    _quiet.add(ddp)
    undo.callback(_quiet.discard, ddp)
    if goes_on:
        return ddp.module  # type: ignore[no-any-return]
    if ddp.static_graph or ddp.parameters_to_ignore or ddp._delay_all_reduce_params:
        raise invalid(
            "model",
            "a DistributedDataParallel with one of them",
            "one without static_graph, ignored parameters and delayed parameters",
            "leave these settings out when DDP is made",
        )
    found = []

    def before(module: Any, args: Any) -> None:
        found.append(module.require_backward_grad_sync)
        module.require_backward_grad_sync = False

    def after(module: Any, args: Any, output: Any) -> None:
        module.require_backward_grad_sync = found.pop()

    undo.callback(Hooked(ddp.register_forward_pre_hook, before, prepend=True).remove)
    undo.callback(Hooked(ddp.register_forward_hook, after, always_call=True).remove)
    return ddp.module  # type: ignore[no-any-return]


def exchanged_by(
    ddp: DistributedDataParallel, params: Iterable[NamedParam]
) -> list[str]:
    """The names of the parameters in ``params`` whose gradients ``ddp`` exchanges."""
    inner = vars(ddp).get("_modules", {}).get("module")
    if inner is None or ddp in _quiet:  # None: its constructor raised
        return []
    own = _given_to(ddp, inner)
    return [name for name, param in params if id(param) in own]


def shown_as_around(name: str) -> InvalidSetting:
    """The error where a DDP exchanges gradients of a model attached or to attach."""
    return InvalidSetting(
        f"the gradients of {name} would be exchanged twice: the model is inside of a "
        "DistributedDataParallel, which exchanges them too; give gw.attach or "
        "gw.local_steps the DistributedDataParallel itself (what Accelerate's "
        "prepare() and Fabric's setup() return, the Trainer's model_wrapped, "
        "Lightning's trainer.strategy.model), once the framework has made it, or train "
        "without it and drop it (del)"
    )


def _given_to(ddp: DistributedDataParallel, inner: nn.Module) -> set[int]:
    """Ids of the parameters in ``inner`` that ``ddp`` exchanges."""
    params = [
        p
        for name, p in inner.named_parameters()
        if name not in ddp.parameters_to_ignore
    ]
    return {id(p) for p in (*params, *ddp._delay_all_reduce_params) if p.requires_grad}


def _ddps_in(model: nn.Module) -> list[DistributedDataParallel]:
    return [one for one in model.modules() if isinstance(one, DistributedDataParallel)]


def _trained_outside(model: nn.Module, ddp: DistributedDataParallel) -> list[str]:
    inside = {id(param) for param in ddp.parameters()}
    return [
        n
        for n, p in model.named_parameters()
        if p.requires_grad and id(p) not in inside
    ]


def _refuse_sharded(model: nn.Module) -> None:
    """Refuses models that torch replicates, or shards and exchanges by itself."""
    for path, module in model.named_modules():
        where = path or type(module).__name__
        if _is_fsdp(module):
            raise invalid(
                "model",
                f"{where} in FullyShardedDataParallel",
                "one that is whole on each rank, or sharded by fully_shard()",
                _BY_FSDP2,
            )
        if "replicate" in _registry(module):
            raise InvalidSetting(
                f"replicate() exchanges the gradients of {where} itself, and they "
                "would be exchanged twice; attach the model without replicate()"
            )


_BY_FSDP2 = (
    "write fully_shard(module, mesh=mesh['shard']) and attach with "
    "group=mesh['replicate']"
)


def _registry(module: nn.Module) -> Any:
    """The composable functions that were applied to a module, by their names."""
    # torch's, if it is used
    contract = sys.modules.get("torch.distributed._composable.contract")
    return (contract and contract._get_registry(module)) or {}


def _is_fsdp(module: object) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def _refuse_odd_tensors(model: nn.Module) -> None:
    """Refuses tensors without values on this rank, which no message could carry."""
    is_ddp = isinstance(model, DistributedDataParallel)
    # DDP itself shares the buffers of its model
    buffers = () if is_ddp else model.named_buffers()
    for name, tensor in (*model.named_parameters(), *buffers):
        kind = type(tensor)
        is_plain = kind.__torch_dispatch__ is Tensor.__torch_dispatch__
        if is_lazy(tensor):
            raise invalid(
                name,
                kind.__name__,
                "a tensor with a shape",
                "run one forward pass, which gives lazy parameters their shape, "
                "then attach",
            )
        if not is_plain and (is_ddp or not is_dtensor(tensor)):
            raise invalid(
                name,
                kind.__name__,
                "a plain tensor, whole on each rank",
                "give the model plain tensors; those of DTensors are attached "
                "without DDP",
            )
        if tensor.is_meta:
            raise invalid(
                f"device of {name}",
                "meta",
                "one that holds values",
                "give the model its values first (to_empty() and its initialisation)",
            )
        is_conjugate = tensor.is_conj() or tensor.is_neg()
        if is_conjugate or tensor.is_quantized or tensor.layout is not torch.strided:
            raise invalid(
                name,
                f"{tensor.dtype} in the layout {tensor.layout}",
                "a dense tensor of plain numbers, no conjugate",
                "call its dequantize(), to_dense(), resolve_conj() or resolve_neg(), "
                "or make it a plain attribute, which gradwire leaves alone",
            )


def _refuse_ddp_inside(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel) and model._use_python_reducer:
        raise invalid(
            "torch._dynamo.config.optimize_ddp",
            "python_reducer",
            "another value when DDP is made",
            "leave it as it is: that reducer has no place for the exchange of "
            "gradients",
        )
    inside = [one for one in _ddps_in(model) if one is not model]
    if not inside:
        return
    if len(inside) == 1 and not isinstance(model, DistributedDataParallel):
        outside = _trained_outside(model, inside[0])
        raise InvalidSetting(
            f"{outside[0]} is trained and outside of the DistributedDataParallel that "
            f"is inside of the model ({type(model).__name__}), which exchanges the "
            "rest; attach a model without DDP, or wrap all that is trained in one DDP "
            "and attach that"
        )
    raise InvalidSetting(
        f"the model has {len(inside)} DistributedDataParallel modules inside of it "
        f"({type(model).__name__}), and they exchange their gradients too; attach each "
        "by itself, or a model without DDP"
    )


def _refuse_changed(model: nn.Module) -> None:
    """Refuses a DDP made for other parameters.

    It averages neither them nor new ones.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    made = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    known = made.get("num_parameter_tensors"), made.get("total_parameter_size_bytes")
    own = model.parameters_to_ignore
    params = [
        p
        for n, p in model.module.named_parameters()
        if p.requires_grad and n not in own
    ]
    num_bytes = sum(p.nbytes for p in params)
    if None not in known and known != (len(params), num_bytes):
        raise InvalidSetting(
            f"the model trains {len(params)} parameters of {num_bytes} bytes, and its "
            f"DistributedDataParallel was made for {known[0]} of {known[1]} bytes: "
            "some were converted, frozen or unfrozen since, which DDP does not notice; "
            "make it anew from its module, then attach it"
        )


def _ddps_around(model: nn.Module, params: Sequence[NamedParam]) -> list[str]:
    """Names of parameters that a living DDP other than ``model`` exchanges.

    No module knows who holds it, so this asks the garbage collector, which knows every
    object but those of ``gc.freeze()``. DDPs among those are found in the forward pass;
    see `hooks`.
    """
    found = living(DistributedDataParallel)
    return [
        name for ddp in found if ddp is not model for name in exchanged_by(ddp, params)
    ]


def _taken_in(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Refuses to let an attached module enter one that exchanges its gradients."""
    if child is None:
        return
    if name == "module" and isinstance(parent, DistributedDataParallel):
        # It is being made; later a part of it may be replaced.
        if "reducer" not in vars(parent):
            given = _given_to(parent, child)
            for path, param in child.named_parameters():
                if id(param) in given and is_attached(param):
                    raise InvalidSetting(
                        f"the gradients of {path} would be exchanged twice: it is "
                        "attached, and the DistributedDataParallel that is made here "
                        "exchanges it too; call handle.detach() first, make the "
                        "DistributedDataParallel, then attach that"
                    )
    elif _is_fsdp(parent) and name == "_fsdp_wrapped_module":
        for path, module in child.named_modules():
            if module in _modules:  # Its parameters are flattened already.
                raise InvalidSetting(
                    f"{path or type(module).__name__} is attached, and "
                    "FullyShardedDataParallel would exchange its gradients too; call "
                    "handle.detach() before it is sharded"
                )


def refuse_grad_dtype(name: str, param: Tensor, given: torch.dtype | None) -> None:
    """Raises ``InvalidSetting`` unless a gradient has its parameter's dtype.

    Messages have that dtype, so the mean would be rounded to it. None allows any dtype,
    and a gradient shows which it has.
    """
    if given not in (None, param.dtype):
        raise invalid(
            f"grad_dtype of parameter {name}",
            given,
            f"{param.dtype}, its own",
            "leave grad_dtype as it is, or keep the parameter in that dtype and "
            "compute in autocast",
        )


def refuse_complex(params: Iterable[NamedParam], what: str, remedy: str) -> None:
    """Raises ``InvalidSetting`` for complex parameters, as ``what`` knows none."""
    for name, param in params:
        if param.is_complex():
            given = str(param.dtype).removeprefix("torch.")
            raise invalid(
                f"dtype of parameter {name}", given, f"a real one {what}", remedy
            )
