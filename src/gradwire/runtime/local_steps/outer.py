"""Outer: the anchors that local steps start from, and the optimizer that moves them.

Between two exchanges every rank trains by itself. Its pseudo-gradient is anchor -
parameter, as the parameter's dtype holds the anchor: what a gradient of all its local
steps would be. The mean of the ranks' pseudo-gradients is the gradient of the anchor,
with which the outer optimizer steps. Anchors and outer optimizer are the same on all
ranks, bit for bit, as they depend on means only.

Of a DTensor a rank has the anchor of its own shard, and the outer optimizer steps that.

Anchors may be kept in 16 bits. They then lie up to half a unit in the last place away
from where the parameters went on, and the next pseudo-gradient is off by as much. With
plain SGD of rate 1 it makes up for that, as parameters have what the anchor has lost.
The outer step itself computes in the working dtype.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ...contract.spec import NamedParam, working_dtype
from ...errors import InvalidSetting, invalid
from ..grid.dtensors import laid_out_like, shard_of
from ..state.outer_state import DAMAGED, OuterForm, check_outer
from ..state.table import check_layout, refuse_values
from ..step.hooked import params_of

MakeOuter = Callable[[list[nn.Parameter]], Optimizer]
"""A function that makes the outer optimizer of anchors, as ``partial`` of a class."""

DILOCO: MakeOuter = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of DiLoCo (Douillard et al. 2023, section 3)."""
PLAIN: MakeOuter = partial(SGD, lr=1.0)
"""The outer optimizer by which anchors become means."""
_REMEDY = (
    "write functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)"
)


class Outer:
    """The anchors of parameters, and the outer optimizer, which ``make`` makes of them.

    An anchor has the shape and strides of this rank's part of its parameter. Its dtype
    is ``dtype``, by default the working dtype: float32 for parameters of 16 bits. It
    lies on ``device``, by default the parameter's.
    """

    def __init__(
        self,
        params: Sequence[NamedParam],
        make: MakeOuter,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        _check_place(params, dtype, device)
        self._params = dict(params)
        self._make = make
        self._dtype = dtype
        with torch.inference_mode(False), torch.no_grad():
            self.anchors = {
                name: nn.Parameter(
                    shard_of(param)
                    .detach()
                    .to(device, dtype or working_dtype(param.dtype), copy=True)
                )
                for name, param in params
            }
            self.optimizer = _made(make, list(self.anchors.values()))

    def _part(self, name: str) -> Tensor:
        """This rank's part of a parameter, which FSDP may move to other memory."""
        return shard_of(self._params[name]).detach()

    @property
    def whole(self) -> dict[str, Tensor]:
        """The anchors in their parameters' layout, on their device."""
        return {
            name: laid_out_like(
                param,
                self.anchors[name]
                .detach()
                .to(param.device, working_dtype(param.dtype)),
            )
            for name, param in self._params.items()
        }

    @property
    def sent(self) -> dict[str, Tensor]:
        """Tensors of the form that pseudo-gradients have, without memory."""
        return {
            name: anchor.detach()
            .new_empty((), dtype=working_dtype(anchor.dtype))
            .expand(anchor.shape)
            for name, anchor in self.anchors.items()
        }

    @property
    def settings(self) -> tuple[str, object]:
        """The outer optimizer's class and hyper-parameters, which ranks share."""
        groups = self.optimizer.param_groups
        values = [
            {key: group[key] for key in sorted(group) if key != "params"}
            for group in groups
        ]
        return type(self.optimizer).__name__, values

    def shared(self, names: Collection[str] | None) -> list[NamedParam]:
        """The anchors of parameters (None: all), and their outer optimizer's state."""
        params: list[NamedParam] = []
        for name in self.anchors if names is None else names:
            anchor = self.anchors[name]
            params.append((f"the anchor of {name}", anchor))
            state = self.optimizer.state.get(anchor, {})
            params += [
                (f"{k} of {name}", v) for k, v in state.items() if isinstance(v, Tensor)
            ]
        return params

    @torch.no_grad()
    def restart(self, names: Iterable[str]) -> None:
        """Puts the anchors of these names where their parameters are."""
        for name in names:
            self.anchors[name].copy_(self._part(name))

    @torch.no_grad()
    def has_learnt(self) -> bool:
        """Whether any parameter differs from its anchor, in the dtype of fewer bits."""
        for name, anchor in self.anchors.items():
            dtype = self._dtype or self._params[name].dtype
            param = self._part(name).to(anchor.device, dtype)
            if not torch.allclose(
                anchor.to(dtype), param, rtol=0, atol=0, equal_nan=True
            ):
                return True
        return False

    @torch.no_grad()
    def pseudo_gradient(self, name: str) -> Tensor:
        """A new tensor: the change on this rank since the anchor was put in place."""
        param = self._part(name)
        anchor = self.anchors[name]
        wide = anchor.to(param.dtype).to(working_dtype(param.dtype))
        return torch.sub(wide, param.to(anchor.device))

    @torch.no_grad()
    def apply(self, means: Mapping[str, Tensor], mixing: float) -> None:
        """Makes an outer step with mean pseudo-gradients, and moves their parameters.

        A parameter becomes ``mixing`` times itself plus 1 - ``mixing`` times its new
        anchor. Anchors that have no mean here stay where they are.
        """
        self._cast(means, None)
        self.step(means)
        for name in means:
            param = self._part(name)
            anchor = self.anchors[name]
            if mixing:
                param.lerp_(anchor.to(param.device, param.dtype), 1.0 - mixing)
            else:
                param.copy_(anchor)
        self._cast(means, self._dtype)

    def _cast(self, names: Iterable[str], dtype: torch.dtype | None) -> None:
        """Puts anchors and their state into a dtype, None for the working dtype."""
        for name in names:
            anchor = self.anchors[name]
            to = dtype or working_dtype(anchor.dtype)
            state = self.optimizer.state.get(anchor, {})
            for key, value in state.items():
                # torch's optimizers count in "step", a scalar
                if key != "step" and getattr(value, "shape", None) == anchor.shape:
                    state[key] = value.to(to)
            anchor.data = anchor.data.to(to)

    def step(self, means: Mapping[str, Tensor]) -> None:
        """Makes an outer step of the anchors that have a mean pseudo-gradient here."""
        for name, mean in means.items():
            self.anchors[name].grad = mean
        self.optimizer.step()
        for name in means:
            self.anchors[name].grad = None

    def state(self, restarted: Collection[str] = ()) -> dict[str, Any]:
        """Copies of anchors and parameters by name, and the optimizer's state_dict.

        Anchors of the ``restarted`` names are as if they were where their parameters
        are.
        """
        anchors = {
            name: anchor.detach().clone() for name, anchor in self.anchors.items()
        }
        for name in restarted:
            anchors[name].copy_(self._part(name))
        return {
            "anchors": anchors,
            "parameters": {name: self._part(name).clone() for name in self._params},
            "optimizer": deepcopy(self.optimizer.state_dict()),
        }

    def form(self, *, arrives: bool) -> OuterForm:
        """The form of ``state``.

        ``arrives`` says whether means may be on their way between two steps.
        """
        names = {id(anchor): name for name, anchor in self.anchors.items()}
        order = [names[id(anchor)] for anchor in params_of(self.optimizer)]
        # an optimizer has its fields from its first step on
        param = nn.Parameter(torch.zeros(2))
        param.grad = torch.zeros(2)
        trial = _made(self._make, [param])
        trial.step()
        fields = [
            key
            for key, value in trial.state[param].items()
            if isinstance(value, Tensor) and value.shape == param.shape
        ]
        fields += ["arriving"] * arrives
        return OuterForm(order, self.anchors, fields)

    def checked(self, saved: Any) -> Callable[[], None]:
        """A function that puts a saved state in place, once all of it fits."""
        check_outer(saved)
        kept: dict[str, Mapping[str, Tensor]] = {
            "anchors": self.anchors,
            "parameters": {name: self._part(name) for name in self._params},
        }
        for key, own in kept.items():
            if odd := sorted(set(saved[key]) ^ set(own)):
                raise InvalidSetting(
                    f"only one of the saved and the present model has {odd[0]} "
                    f"among its {key}; "
                    "load the state of the same model"
                )
            _check_tensors(key, saved[key], own)
        _check_tensors("arriving", saved["arriving"], self.sent)
        self._check_optimizer(saved["optimizer"])

        def put_in_place() -> None:
            self.optimizer.load_state_dict(deepcopy(saved["optimizer"]))
            with torch.no_grad():
                for key, own in kept.items():
                    for name, tensor in own.items():
                        tensor.copy_(saved[key][name])

        return put_in_place

    def _check_optimizer(self, saved: dict[str, Any]) -> None:
        """Raises ``InvalidSetting`` unless a new outer optimizer can load it."""
        anchors = [nn.Parameter(a.detach().clone()) for a in self.anchors.values()]
        trial = _made(self._make, anchors)
        try:
            trial.load_state_dict(deepcopy(saved))
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise InvalidSetting(
                f"the state of the outer optimizer cannot be loaded ({error}); "
                f"{DAMAGED}"
            ) from error
        for fields in trial.state.values():
            for field, value in fields.items():
                if isinstance(value, Tensor):
                    refuse_values(f"{field} of the outer optimizer", value)


def _check_place(
    params: Sequence[NamedParam], dtype: torch.dtype | None, device: Any
) -> None:
    """Raises ``InvalidSetting`` for a dtype or a device that anchors cannot have."""
    if device is not None and str(device) != "cpu":
        raise invalid("outer_device", device, "'cpu' or None", "leave it out")
    if dtype is None:
        return
    if dtype not in (torch.bfloat16, torch.float16):
        accepted = "torch.bfloat16, torch.float16 or None"
        raise invalid("outer_dtype", dtype, accepted, "leave it out for float32")
    if any(param.dtype.itemsize == 2 for _, param in params):
        accepted = (
            "None for parameters of 16 bits, which cannot keep what anchors round away"
        )
        remedy = "pass outer_device='cpu' to save a device's memory"
        raise invalid("outer_dtype", dtype, accepted, remedy)


def _check_tensors(
    key: str, saved: Mapping[str, Any], kept: Mapping[str, Tensor]
) -> None:
    """Raises ``InvalidSetting`` unless saved tensors have the form of the model's."""
    for name, tensor in saved.items():
        what = f"{name} among the {key} of the state"
        fits = kept.get(name)
        if not isinstance(tensor, Tensor) or fits is None:
            raise invalid(
                what, type(tensor).__name__, "a tensor of the model's", DAMAGED
            )
        check_layout(what, tensor, fits.shape, fits.dtype)
        refuse_values(what, tensor.detach())


def _made(make: MakeOuter, anchors: list[nn.Parameter]) -> Optimizer:
    """The outer optimizer of these anchors; raises unless it has exactly these."""
    if not callable(make):
        raise invalid("outer", type(make).__name__, "a function of parameters", _REMEDY)
    made = make(anchors)
    if not isinstance(made, Optimizer):
        accepted = (
            "a function that makes a torch.optim.Optimizer of the parameters it is "
            "given"
        )
        raise invalid(
            "outer", f"one that returns {type(made).__name__}", accepted, _REMEDY
        )
    taken = [id(param) for param in params_of(made)]
    if sorted(taken) != sorted(map(id, anchors)):
        accepted = (
            "one whose optimizer has all parameters that it is given, and no others"
        )
        raise invalid(
            "outer", f"one that takes {len(taken)} parameters", accepted, _REMEDY
        )
    return made
