"""recipes: the optimizers, period and exchange of a paper's local steps in one call.

Each function returns the optimizer that the training loop steps, and the handle of
``gw.local_steps``. The loop stays as it is on one rank, and the handle's
``end_period()`` ends it on all. Make the model on its device first. Further settings
are as in ``gw.local_steps``.

Source: Stich, ICLR 2019 (LocalSGD); Douillard et al. 2023, arXiv 2311.08105 (DiLoCo);
Douillard et al. 2025, arXiv 2501.18512 (Streaming DiLoCo); Thérien et al. 2025, arXiv
2505.23725 (MuLoCo); Jordan et al. 2024 (Muon); Wang et al., ICLR 2020 (SlowMo).

>>> import torch
>>> import gradwire as gw
>>> model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 2))
>>> optimizer, handle = gw.recipes.muloco(model, lr=1e-3)
>>> for step in range(10):
...     optimizer.zero_grad()
...     model(torch.arange(16)).square().mean().backward()
...     optimizer.step()
>>> handle.stats()["steps"], handle.stats()["exchanges"]
(10, 2)
>>> handle.detach()
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import SGD, AdamW, Optimizer

from ...contract import Compressor, Exchange
from ...errors import invalid, log
from ..grid.dtensors import is_dtensor
from .local_steps import local_steps
from .lock_step import LocalSteps
from .outer import DILOCO, PLAIN, MakeOuter

SLOWMO: MakeOuter = partial(SGD, lr=1.0, momentum=0.4)
"""The outer optimizer of SlowMo: parameters become the ranks' mean, moved on by a slow
momentum. It suits periods of few steps, for which DiLoCo's goes too far
(docs/measured.md).
"""
STREAMING: MakeOuter = partial(SGD, lr=0.4, momentum=0.9, nesterov=True)
"""The outer optimizer of Streaming DiLoCo."""
TIMES_RATE = 10
"""The rate of orthogonal steps over one that suits AdamW: Muon's 0.02 and Dion's 0.01
are usual beside 0.001 or 0.002.
"""

Started = tuple[Optimizer, LocalSteps]
"""The optimizer of a recipe and the handle of its local steps."""
Way = Exchange | Compressor | str
"""An exchange of pseudo-gradients, as ``gw.local_steps`` takes it."""


def localsgd(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    lr: float = 0.1,
    every: int = 8,
    exchange: Way = "none",
    **settings: Any,
) -> Started:
    """LocalSGD: SGD on each rank; parameters are averaged every ``every`` steps.

    Source: Stich, ICLR 2019. The paper analyses plain SGD, and periods from 1 to 64
        steps.

    Args:
        model: The model, on its device. Other ranks get the parameters of rank 0.
        optimizer: Default: SGD with momentum 0.9.
        lr: The learning rate of SGD, by default 0.1.
        every: Local steps from one average to the next, by default 8.
        exchange: A compressor, an exchange or a name. Default: exact, in float32.
        **settings: Further settings of ``gw.local_steps``, such as ``outer`` and
            ``group``.

    Returns:
        The optimizer that the loop steps, and the handle.

    Raises:
        InvalidSetting, RanksDiffer, RankFailed: As ``gw.local_steps``.

    >>> model = nn.Linear(2, 1)
    >>> optimizer, handle = localsgd(model, every=4)
    >>> for step in range(8):
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    >>> handle.stats()["exchanges"]
    2
    >>> handle.detach()
    """
    inner = optimizer or SGD(model.parameters(), lr, momentum=0.9)
    return _started(PLAIN, model, inner, exchange, every, settings)


def diloco(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    lr: float = 4e-4,
    every: int = 500,
    exchange: Way = "none",
    **settings: Any,
) -> Started:
    """DiLoCo: AdamW on each rank, Nesterov momentum over pseudo-gradients.

    Source: Douillard et al. 2023, arXiv 2311.08105, whose settings are the defaults.
    The outer learning rate is 0.7 and the momentum 0.9. Small models need shorter
    periods, such as 20 steps.

    Args:
        model: The model, on its device. Other ranks get the parameters of rank 0.
        optimizer: Default: AdamW with weight decay 0.1.
        lr: The learning rate of AdamW, by default 4e-4.
        every: Local steps from one exchange to the next, by default 500.
        exchange: A compressor, an exchange or a name. Default: exact, in float32.
        **settings: Further settings of ``gw.local_steps``, such as ``outer`` and
            ``group``.

    Returns:
        The optimizer that the loop steps, and the handle.

    Raises:
        InvalidSetting, RanksDiffer, RankFailed: As ``gw.local_steps``.

    >>> optimizer, handle = diloco(nn.Linear(2, 1), every=20)
    >>> type(optimizer).__name__, handle.outer.param_groups[0]["lr"]
    ('AdamW', 0.7)
    >>> handle.detach()
    """
    inner = optimizer or _adamw(model, lr)
    return _started(DILOCO, model, inner, exchange, every, settings)


def lora(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    lr: float = 2e-4,
    every: int = 20,
    exchange: Way = "uniform",
    **settings: Any,
) -> Started:
    """LoRA over far hosts: AdamW on adapters, whose means move with a slow momentum.

    The base model is frozen and never travels, if each rank has loaded the same.

    Source: Hu et al. 2021, arXiv 2106.09685 (LoRA); the learning rate is usual with
        PEFT. The other defaults lost least in docs/two_sites.md.

    Args:
        model: The model with adapters, as PEFT makes it, on its device. Other ranks get
            the adapters of rank 0.
        optimizer: Default: AdamW of the parameters with ``requires_grad``.
        lr: The learning rate of AdamW, by default 2e-4.
        every: Local steps from one mean to the next, by default 20.
        exchange: A compressor, an exchange or a name. Default: 4 bits an element.
        **settings: Further settings of ``gw.local_steps``, such as ``outer`` and
            ``group``.

    Returns:
        The optimizer that the loop steps, and the handle.

    Raises:
        InvalidSetting, RanksDiffer, RankFailed: As ``gw.local_steps``.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    >>> _ = model[0].requires_grad_(False)
    >>> optimizer, handle = lora(model)
    >>> [len(group["params"]) for group in optimizer.param_groups]
    [2]
    >>> handle.detach()
    """
    adapters = [param for param in model.parameters() if param.requires_grad]
    inner = optimizer or AdamW(adapters, lr)
    return _started(SLOWMO, model, inner, exchange, every, settings)


def streaming_diloco(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    lr: float = 4e-4,
    every: int = 30,
    exchange: Way = "uniform",
    **settings: Any,
) -> Started:
    """Streaming DiLoCo: ``diloco`` whose fragments travel in turn during training.

    Source: Douillard et al. 2025, arXiv 2501.18512, whose settings are the defaults:
    outer learning rate 0.4, momentum 0.9, mixing 0.5. Means take effect 5 steps late.
    The paper's 4 bits are floats with 3 bits of exponent; here they are ``uniform``'s
    levels, rounded at random. Neither has error feedback. A fragment is three blocks of
    a transformer in the paper, and a third of the parameters here.

    Args:
        model: The model, on its device. Other ranks get the parameters of rank 0.
        optimizer: Default: AdamW with weight decay 0.1.
        lr: The learning rate of AdamW, by default 4e-4.
        every: Local steps in which every fragment is exchanged once, by default 30.
        exchange: A compressor, an exchange or a name. Default: 4 bits an element.
        **settings: Further settings of ``gw.local_steps``, such as ``outer`` and
            ``group``.

    Returns:
        The optimizer that the loop steps, and the handle.

    Raises:
        InvalidSetting, RanksDiffer, RankFailed: As ``gw.local_steps``.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> optimizer, handle = streaming_diloco(model, fragments=2)
    >>> type(optimizer).__name__, handle.outer.param_groups[0]["lr"]
    ('AdamW', 0.4)
    >>> handle.detach()
    """
    inner = optimizer or _adamw(model, lr)
    if settings.get("quorum") is None:
        settings = {"delay": 5, "mixing": 0.5, **settings}
    settings = {"fragments": 3, **settings}
    return _started(STREAMING, model, inner, exchange, every, settings)


def muloco(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    lr: float = 1e-3,
    every: int = 5,
    exchange: Way = "uniform",
    **settings: Any,
) -> Started:
    """MuLoCo: Muon on each rank, and pseudo-gradients in few bits.

    Source: Thérien et al. 2025, arXiv 2505.23725. The defaults (5 steps, 4 bits,
    SlowMo's outer optimizer) are those of docs/measured.md. The paper has 30 steps, 2
    bits with error feedback and a tuned Nesterov momentum:
    ``every=30, exchange=gw.compress.sparseloco(density=1.0), outer=...``, with
    gradwire-lab.

    Args:
        model: The model, on its device. Other ranks get the parameters of rank 0.
        optimizer: Default: ``MuonWithAdamW``, which trains matrices at ten times
            ``lr``.
        lr: The learning rate of AdamW, by default 1e-3.
        every: Local steps from one exchange to the next, by default 5.
        exchange: A compressor, an exchange or a name. Default: 4 bits an element.
        **settings: Further settings of ``gw.local_steps``, such as ``outer`` and
            ``group``.

    Returns:
        The optimizer that the loop steps, and the handle.

    Raises:
        InvalidSetting, RanksDiffer, RankFailed: As ``gw.local_steps``.

    >>> optimizer, handle = muloco(nn.Linear(2, 2))
    >>> [group["lr"] for group in optimizer.param_groups]
    [0.01, 0.001]
    >>> handle.detach()
    """
    inner = optimizer or MuonWithAdamW(model, lr)
    return _started(SLOWMO, model, inner, exchange, every, settings)


def _started(
    outer: MakeOuter,
    model: nn.Module,
    inner: Optimizer,
    exchange: Way,
    every: int,
    settings: dict[str, Any],
) -> Started:
    """Begins local steps with the recipe's outer optimizer, but for partial rounds.

    Its momentum makes the loss worse there (docs/measured.md).
    """
    if settings.get("quorum") is None:
        settings = {"outer": outer, **settings}
    return inner, local_steps(model, inner, exchange, every=every, **settings)


def _adamw(model: nn.Module, lr: float) -> AdamW:
    return AdamW(model.parameters(), lr, weight_decay=0.1)


# ---- Muon with AdamW -----------------------------------------------------------------


class MuonWithAdamW(Optimizer):
    """One optimizer of two: torch's Muon for hidden matrices, AdamW for the rest.

    Muon steps a matrix by its momentum, made orthogonal. A convolution's kernels are a
    matrix with a row for each channel that comes out. Matrices in one tensor of three
    dimensions or more, such as experts, are stepped one by one. AdamW steps tables of
    embeddings, the output layer and vectors. Each optimizer has a parameter group. A
    print of the optimizer, and the log at level INFO, name the parameters of each.

    Source: Jordan et al. 2024 (Muon).

    Args:
        model: The model; its parameters with ``requires_grad`` are trained.
        rate: The learning rate of AdamW. Muon's is ten times it.
        head: The output layer, which AdamW steps. Default: as ``hidden`` finds it.

    Raises:
        InvalidSetting: torch has no Muon, which came with 2.9, or a kernel is not
            contiguous.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> optimizer = MuonWithAdamW(model, rate=1e-3)
    >>> [group["param_names"] for group in optimizer.param_groups]
    [['0.weight'], ['0.bias', '2.weight', '2.bias']]
    """

    def __init__(
        self, model: nn.Module, rate: float, *, head: nn.Module | None = None
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            remedy = "install that, or give an optimizer of your own: optimizer="
            raise invalid("torch for Muon", torch.__version__, "2.9 or newer", remedy)
        matrices = hidden(model, head)
        chosen = set(matrices)
        others = [p for p in model.parameters() if p.requires_grad and p not in chosen]
        names = {param: name for name, param in model.named_parameters()}
        rates = {"Muon": TIMES_RATE * rate, "AdamW": rate}
        groups = []
        for kind, params in (("Muon", matrices), ("AdamW", others)):
            param_names = [names[param] for param in params]
            groups.append(
                {"params": params, "param_names": param_names, "lr": rates[kind]}
            )
            log.info("%s steps %s", kind, ", ".join(param_names) or "nothing")
        super().__init__(groups, {})
        convolutions = (m for m in model.modules() if isinstance(m, _ConvNd))
        self._kernels = {module.weight for module in convolutions}
        # Torch's Muon takes matrices alone, so it is given views of the same memory.
        self._views = [
            [nn.Parameter(view) for view in self._matrices(param)] for param in matrices
        ]
        views = [view for views in self._views for view in views]
        adamw = partial(AdamW, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self._parts: list[Optimizer | None] = [
            torch.optim.Muon(views) if views else None,
            adamw(others) if others else None,
        ]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters; a closure is called once, before."""
        loss = None if closure is None else closure()
        for param, views in zip(
            self.param_groups[0]["params"], self._views, strict=True
        ):
            matrices = self._matrices(param)
            for view, matrix in zip(views, matrices, strict=True):
                view.data = matrix  # a framework may have moved the model since
                view.grad = None
            if param.grad is not None:
                grads = self._split(param, param.grad)
                for view, grad in zip(views, grads, strict=True):
                    view.grad = grad
        for part, group in zip(self._parts, self.param_groups, strict=True):
            if part is not None:
                part.param_groups[0]["lr"] = group["lr"]
                part.step()
        return loss

    def _matrices(self, param: nn.Parameter) -> Sequence[Tensor]:
        """Views of the matrices that a parameter holds."""
        matrices = self._split(param, param.detach())
        # a copy, whose steps the parameter would not see
        if matrices[0].data_ptr() != param.data_ptr():
            shape = tuple(param.shape)
            given = f"a parameter of shape {shape} and strides {param.stride()}"
            remedy = "leave channels_last to inputs"
            raise invalid("kernels for Muon", given, "contiguous ones", remedy)
        return matrices

    def _split(self, param: nn.Parameter, values: Tensor) -> Sequence[Tensor]:
        if param.dim() == 2 or param in self._kernels:
            return [values.flatten(1)]
        if is_dtensor(param):
            given = f"shards of {tuple(param.shape)}"
            remedy = "make each of them a parameter, or give Muon the others alone"
            raise invalid("experts for Muon", given, "whole ones", remedy)
        return values.flatten(0, -3).unbind()

    def state_dict(self) -> dict[str, Any]:
        """Both optimizers' states, in one dict."""
        parts = [None if part is None else part.state_dict() for part in self._parts]
        return {**super().state_dict(), "parts": parts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a state that ``state_dict`` returned."""
        saved = [len(group["params"]) for group in state_dict["param_groups"]]
        own = [len(group["params"]) for group in self.param_groups]
        if saved != own:
            given = f"one of {saved} parameters for Muon and AdamW"
            remedy = "pass the head= of the saved one, or nn.Identity() if it had none"
            raise invalid("state of MuonWithAdamW", given, f"one of {own}", remedy)
        super().load_state_dict(
            {key: state_dict[key] for key in ("state", "param_groups")}
        )
        for part, part_state in zip(self._parts, state_dict["parts"], strict=True):
            if part is not None:
                part.load_state_dict(part_state)


def hidden(model: nn.Module, head: nn.Module | None = None) -> list[nn.Parameter]:
    """The parameters that Muon suits: matrices and kernels between input and output.

    Args:
        model: The model.
        head: The output layer, which is left out. Default: what the model's
            ``get_output_embeddings()`` returns, as in Transformers. Without it, the
            last ``nn.Linear`` in the model's order. Pass ``nn.Identity()`` to leave
            no layer out.

    Returns:
        The model's parameters with ``requires_grad`` and two dimensions or more, in its
        order, without tables of embeddings and the output layer.

    Source: Jordan et al. 2024 (Muon): embeddings and the output layer belong to AdamW.

    >>> model = nn.Sequential(nn.Embedding(9, 3), nn.Linear(3, 2), nn.Linear(2, 9))
    >>> [tuple(param.shape) for param in hidden(model)]
    [(2, 3)]
    """
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding))
    outside = {table.weight for table in tables}
    head = _output_layer(model) if head is None else head
    if head is not None:
        outside.update(head.parameters())
    params = [param for param in model.parameters() if param.requires_grad]
    return [param for param in params if param.dim() >= 2 and param not in outside]


def _output_layer(model: nn.Module) -> nn.Module | None:
    for module in model.modules():
        find = getattr(module, "get_output_embeddings", None)
        found = None if find is None else find()
        if isinstance(found, nn.Module):
            return found
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return layers[-1] if layers else None
