"""Operators added from outside, with all their forms, used like the built-in.

>>> import torch
>>> from gradwire.dsl.language import *
>>> from gradwire.dsl.program import Program
>>> copysign = register(
...     Operator(
...         "copysign",
...         operands=(float32, float32),
...         result=float32,
...         interp=torch.copysign,
...         cpp="__builtin_copysignf({}, {})",
...         triton="tl.where({1}.to(tl.int32, bitcast=True) < 0, "
...         "-tl.abs({0}), tl.abs({0}))",
...     )
... )
>>> class one(Program):
...     "Every element becomes 1 with its own sign, that of a zero too."
...
...     def encode(self, gradient):
...         return concat(signs=map(gradient, lambda x: uint1(copysign(1, x) > 0)))
...
...     def decode(self, compressed):
...         return map(extract(compressed)[0], lambda sign: where(sign == 1, 1.0, -1.0))
>>> payload, _ = one().encode(None, torch.tensor([3.0, -2.0, -0.0]))
>>> one().decode(payload, torch.empty(3))
tensor([ 1., -1., -1.])

The interpreter's form is the definition: the others give its bits for every input. They
are expressions with ``{}``, or ``{0}`` and ``{1}``, where the operands stand, in
parentheses if need be; what takes more than a line is a function in the ``support``,
which stands before the kernels.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from string import Formatter
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor

from ..errors import invalid
from . import language
from .interp import torch_dtype
from .ir import BOOL, FLOAT32, INT32, DType, Kernel, Node, Op, Rule, walk
from .language import Type
from .symbols import Number, Scalar, alike, lifted, made, refuse, working

Form = Literal["cpp", "triton"]

_TAKEN = (FLOAT32, INT32, BOOL)
_FORMS: tuple[Form, ...] = ("cpp", "triton")


@dataclass(frozen=True, eq=False)
class Operator:
    """A function of elements (or of values a block), in each back end's form.

    Types are the language's, or ``bool``. Unsigned operands are given as int32; a
    result of an unsigned type has to lie in its range. ``interp`` takes and gives
    tensors of torch's float32, int32 and bool, of shapes that broadcast. ``triton`` may
    be left out where no GPU is used.
    """

    name: str
    _: KW_ONLY
    operands: tuple[Type | type[bool], ...]
    result: Type | type[bool]
    interp: Callable[..., Tensor]
    cpp: str
    triton: str = ""
    cpp_support: str = ""
    triton_support: str = ""

    def __post_init__(self) -> None:
        """Refuses taken names, types no operand has, and forms that do not fit."""
        check_name("operator", self.name)
        what = f"operator {self.name}"
        if not self.dtypes or not set(self.dtypes) <= {*_TAKEN}:
            raise invalid(
                f"{what} operands",
                self.dtypes,
                "one or more of float32, int32 and bool",
                "take unsigned ones as int32",
            )
        if not callable(self.interp):
            raise invalid(
                f"{what} interp",
                self.interp,
                "a function of torch tensors",
                "it defines the operator",
            )
        places = {str(place) for place in range(len(self.dtypes))}
        for form in _FORMS:
            template = getattr(self, form)
            if (template or form == "cpp") and _places(template) != places:
                raise invalid(
                    f"{what} {form}",
                    template,
                    f"an expression that uses each of {len(places)} operands",
                    "write {0}, {1}, ... for them",
                )

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """Types of the operands."""
        return tuple(_dtype(kind) for kind in self.operands)

    @property
    def rule(self) -> Rule:
        """The operator's types, in the form of ``RULES`` for built-in operations."""
        return Rule(
            tuple(frozenset({dtype}) for dtype in self.dtypes), _dtype(self.result)
        )

    @property
    def texts(self) -> tuple[object, ...]:
        supports = (self.cpp_support, self.triton_support)
        return self.rule, self.cpp, self.triton, *supports

    def __call__(self, *values: Number) -> Scalar:
        """The operator in a program: numbers beside float32 operands become floats."""
        if len(values) != len(self.dtypes):
            refuse(
                f"{self.name} of {len(values)} values", f"it takes {len(self.dtypes)}"
            )
        sources = [
            _operand(value, dtype)
            for value, dtype in zip(values, self.dtypes, strict=True)
        ]
        return Scalar(made(Op.OPERATOR, *sources, arg=self))

    def interpreted(self, *operands: Tensor) -> Tensor:
        """The result by definition.

        Refuses one of another type than the operator states.
        """
        value = self.interp(*operands)
        wanted = torch_dtype(_dtype(self.result))
        if value.dtype != wanted:
            raise invalid(
                f"operator {self.name} interp's result",
                value.dtype,
                f"{wanted}",
                "convert it there",
            )
        return value

    def template(self, form: Form) -> str:
        """The expression of a back end, with places for the operands.

        Refuses where it lacks.
        """
        expression: str = getattr(self, form)
        if not expression:
            raise invalid(
                f"operator {self.name} {form}",
                "nothing",
                "an expression",
                f"register it with {form}='...', or run the program on the CPU",
            )
        return expression


def check_name(kind: str, name: str) -> None:
    """Refuses what is no name, or is that of a built-in operator."""
    if not name.isidentifier() or name in language.__all__:
        raise invalid(f"{kind} name", name, "a name of its own", "choose another")


class Registrable(Protocol):
    """An operator of elements or a coder (``symbols.Coded``).

    Programs call it, also by name.
    """

    @property
    def name(self) -> str: ...

    @property
    def texts(self) -> tuple[object, ...]:
        """All but the definition: two with the same are taken for the same."""

    def __call__(self, *operands: Any) -> Any: ...


Registered = TypeVar("Registered", bound=Registrable)

_registered: dict[str, Registrable] = {}


def register(operator: Registered) -> Registered:
    """Makes an operator known by name, for programs in text too.

    What it returns can be called.

    A name may be registered again with the same types and texts, as a notebook's cell
    does.
    """
    before = _registered.get(operator.name)
    if before is not None and before.texts != operator.texts:
        raise invalid(
            "operator name", operator.name, "one that is free", "choose another"
        )
    _registered[operator.name] = operator
    return operator


def registered() -> Mapping[str, Registrable]:
    """All registered operators by name."""
    return MappingProxyType(_registered)


def support(kernels: Iterable[Kernel], form: Form) -> tuple[str, ...]:
    """The texts before these kernels: each used operator's support, once."""
    texts = (
        getattr(operator, f"{form}_support")
        for k in kernels
        for operator in _used(k.stores)
    )
    return tuple(dict.fromkeys(text for text in texts if text))


def _used(roots: Iterable[Node]) -> Iterator[Operator]:
    for node in walk(roots):
        if node.op is Op.OPERATOR:
            yield node.arg
        elif node.op is Op.REDUCE:
            yield from _used([node.arg.body])


def _dtype(kind: Type | type[bool]) -> DType:
    return kind.dtype if isinstance(kind, Type) else BOOL


def _operand(value: Number, dtype: DType) -> Node:
    if dtype is FLOAT32:
        return alike(value, floating=True)[0]
    return working(value) if dtype is INT32 else lifted(value)


def _places(template: str) -> set[str]:
    """The operand numbers that a template uses: {} count up, {0} are themselves."""
    try:
        names = [
            name for _, name, _, _ in Formatter().parse(template) if name is not None
        ]
    except ValueError:  # a brace alone
        return set()
    return {name or str(number) for number, name in enumerate(names)}
