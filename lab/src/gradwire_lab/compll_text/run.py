"""Runs a parsed text on symbols: its variables, its statements and its functions.

Every operator of the text is one of ``language``; values.py has what C says of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from gradwire.dsl import language
from gradwire.dsl.language import Compressed, Vector
from gradwire.dsl.operators import registered
from gradwire.dsl.symbols import Refusal, Symbol, count_operation, refuse
from gradwire.errors import InvalidSetting
from gradwire_lab.dsl.matrices import Matrix

from ..dsl import matrices
from ..library import exponent, zero_run  # noqa: F401  # which register operators
from .tree import (
    Declared,
    Function,
    Kind,
    ParamField,
    Parsed,
    Text,
    TextError,
    at,
    declarations,
)
from .values import (
    BINARY,
    OPERATORS,
    TYPES,
    UNARY,
    Value,
    apply_function,
    converted,
    truth,
    typed,
)

if TYPE_CHECKING:
    from lark import Token


@dataclass
class _Variable:
    kind: Kind
    value: Value = None


@dataclass
class _Frame:
    """One call of a function of the text."""

    text: Text
    name: str
    variables: dict[str, _Variable] = field(default_factory=dict)
    structs: dict[str, dict[str, ParamField]] = field(default_factory=dict)


class ProgramTrace:
    """One trace of a program's functions, under the settings of ``codec``."""

    def __init__(self, declared: Declared, codec: object = None) -> None:
        self._declared = declared
        self._codec = codec
        self._frames: list[_Frame] = []
        self._globals: dict[str, _Variable] = {}
        for text, row in declared.globals:
            with self._framed(_Frame(text, "", self._globals)):
                self._declare(row)

    def encode(self, *vectors: Vector | Matrix) -> Value:
        """The value of encode's last ``uint8*``, for the gradient (and latest, or the
        start).
        """
        return self._entered("encode", vectors, "uint8*")

    def decode(self, compressed: Compressed | Vector) -> Value:
        """The value of decode's ``float*`` or ``float**``; a coder's of its last
        ``uint8*``.
        """
        result = {"coder": "uint8*", "matrices": "float**"}.get(
            self._declared.form, "float*"
        )
        return self._entered("decode", (compressed,), result)

    def default(self, setting: ParamField) -> bool | int | float | None:
        """The value that a setting has unless another is given; None where one must
        be.
        """
        if setting.default is None:
            return None
        with self._framed(_Frame(setting.text, "")), self._at(setting.default):
            value = converted(setting.kind, self._value(setting.default))
            if isinstance(value, Symbol):
                refuse("a default that depends on a gradient", "write a number")
            plain: bool | int | float = setting.plain(value)
            return plain

    def _entered(self, name: str, values: Sequence[Value], result: str) -> Value:
        function = self._declared.functions[name]
        rest = iter(values)
        frame = _Frame(function.text, name)
        out = _Variable(Kind(""))
        assigned = next(
            (p for kind, p in function.parameters[::-1] if str(kind) == result), None
        )
        for kind, parameter in function.parameters:
            if kind.name in self._declared.structs:
                frame.structs[parameter] = self._declared.structs[kind.name]
                continue
            frame.variables[parameter] = variable = _Variable(kind)
            if parameter == assigned:
                out = variable
            else:
                variable.value = next(rest)
        with self._framed(frame), self._at(function.name):
            self._body(function)
            if out.value is None:
                refuse(
                    f"{name} assigns no {result}",
                    "end it with an assignment to its result",
                )
        return out.value

    # ---- statements ------------------------------------------------------------------

    def _body(self, function: Function) -> Value:
        """The value of the first return; None without one."""
        for statement in function.body:
            with self._at(statement):
                if statement.data == "returned":
                    return self._value(statement.children[0])
                self._statement(statement)
        return None

    def _statement(self, statement: Parsed) -> None:
        match statement.data:
            case "declaration":
                self._declare(statement)
            case "assignment":
                name, expression = statement.children
                variable = self._assigned(str(name))
                value = self._value(expression)
                with self._at(expression):
                    variable.value = converted(variable.kind, value)
            case _:
                called, *arguments = statement.children[0].children  # type: ignore[union-attr]
                if called not in ("extract", "decomp"):
                    refuse(
                        f"{called} without a use of what it gives",
                        "assign it to a variable",
                    )
                self._extract(*arguments) if called == "extract" else self._decomp(
                    *arguments
                )

    def _declare(self, row: Parsed) -> None:
        for kind, name, expression in declarations(row):
            with self._at(name):
                if kind.name not in (*TYPES, "bool"):
                    refuse(
                        f"a variable of type {kind}",
                        f"types are bool, {', '.join(TYPES)}",
                    )
                if name in self._frame.variables:
                    refuse(f"a second {name}", "give it another name")
            variable = _Variable(kind)
            if expression is not None:
                value = self._value(expression)
                with self._at(expression):
                    variable.value = converted(kind, value)
            self._frame.variables[str(name)] = variable

    def _extract(self, *arguments: Parsed) -> None:
        if not arguments:
            refuse("extract from nothing", "write extract(compressed, a, b);")
        payload, *targets = arguments
        vector = language.extract(self._value(payload))
        if len(vector) != len(targets):
            refuse(
                f"extract into {len(targets)} variables",
                f"{len(vector)} fields were sent",
            )
        self._fill("extract", targets, vector)

    def _decomp(self, *arguments: Parsed) -> None:
        if len(arguments) != 4:
            refuse(
                f"decomp of {len(arguments)} values",
                "write decomp(gradient, start, P, Q);",
            )
        gradient, start, *targets = arguments
        self._fill(
            "decomp",
            targets,
            matrices.decomp(self._value(gradient), self._value(start)),
        )

    def _fill(
        self, called: str, targets: Sequence[Parsed], values: Sequence[Value]
    ) -> None:
        for target, value in zip(targets, values, strict=True):
            with self._at(target):
                if target.data != "name":
                    refuse(
                        f"{called} into an expression",
                        "name a variable for each result",
                    )
                variable = self._assigned(str(target.children[0]))
                variable.value = converted(variable.kind, value)

    def _assigned(self, name: str) -> _Variable:
        """The variable that an assignment to ``name`` changes."""
        if name in self._frame.variables:
            return self._frame.variables[name]
        if name not in self._globals:
            refuse(f"no variable {name}", f"declare it, as float {name};")
        if self._frame.name not in ("encode", "decode"):
            refuse(f"a function that changes the global {name}", "return it instead")
        return self._globals[name]

    # ---- expressions: one method a node of the grammar -------------------------------

    def _value(self, tree: Any) -> Value:
        with self._at(tree):
            count_operation()
            return getattr(self, f"_{tree.data}")(*tree.children)

    def _number(self, token: Token) -> int | float:
        text = token.lower()
        if text.startswith("0x"):
            return int(text, 16)
        if text.isdecimal():
            return int(text)
        return float(text.rstrip("f"))

    def _name(self, token: Token) -> Value:
        variable = self._frame.variables.get(token) or self._globals.get(token)
        if variable is None:
            return self._function(str(token))
        if variable.value is None:
            refuse(f"{token} has no value yet", f"assign one first: {token} = ...;")
        return variable.value

    def _function(self, name: str) -> Callable[..., Value]:
        """A function of the text, an operator of the language, or a registered one."""
        if name in self._declared.functions:
            return lambda *values: self._called(self._declared.functions[name], values)
        known: dict[str, Any] = {**registered(), **OPERATORS}
        if name in known:
            operator: Callable[..., Value] = known[name]
            return operator
        names = [
            *self._frame.variables,
            *self._globals,
            *self._declared.functions,
            *known,
        ]
        close = get_close_matches(name, names, n=1)
        refuse(f"no {name}", f"did you mean {close[0]}?" if close else "declare it")

    def _member(self, name: Token, member: Token) -> Value:
        struct = self._frame.structs.get(name)
        if struct is None:
            if member != "size":
                refuse(
                    f"{name}.{member}",
                    "members are those of param structures, and v.size",
                )
            return language.size(self._name(name))
        if member not in struct:
            refuse(f"no {member} in {name}", f"it has {', '.join(struct)}")
        value = getattr(self._codec, member)
        # A float setting keeps its digits, as in Python: a share of 0.01 counts
        # elements exactly.
        if isinstance(value, float):
            return value
        return converted(struct[member].kind, value)

    def _cast(self, to: Token, inner: Parsed) -> Value:
        return converted(Kind.of(to), self._value(inner))

    def _draw(self, random: Token, low: Parsed, high: Parsed) -> Value:
        """random<T>(low, high): a float in [low, high), or a whole number in it."""
        kind = Kind.of(random.partition("<")[2].rstrip("> ").strip())
        first = self._value(low)
        end = self._value(high)
        if kind.name == "float":
            return language.random(first, end)
        return converted(kind, first + language.int32(language.random(0, end - first)))

    def _unary(self, sign: Token, inner: Parsed) -> Value:
        return UNARY[sign](self._value(inner))

    def _binary(self, a: Parsed, sign: Token, b: Parsed) -> Value:
        """The value of a row of operations, taken in a loop: a call a term would be too
        deep.
        """
        row = [(sign, b)]
        while a.data == "binary":
            a, sign, b = a.children  # type: ignore[assignment]
            row.append((sign, b))
        value = self._value(a)
        for sign, b in reversed(row):
            value = BINARY[sign](value, self._value(b))
        return value

    def _logical(self, a: Parsed, sign: Token, b: Parsed) -> Value:
        return BINARY[sign[0]](truth(self._value(a)), truth(self._value(b)))

    def _choice(self, condition: Parsed, a: Parsed, b: Parsed) -> Value:
        chosen = truth(self._value(condition))
        if isinstance(chosen, bool):
            return self._value(a if chosen else b)
        return language.where(chosen, self._value(a), self._value(b))

    def _call(self, name: Token, *arguments: Parsed) -> Value:
        if name == "concat":
            return self._concat(arguments)
        if name == "extract":
            refuse(
                "extract in an expression", "write extract(compressed, a, b); by itself"
            )
        if name == "decomp":
            refuse(
                "decomp in an expression",
                "write decomp(gradient, start, P, Q); by itself",
            )
        function = self._function(str(name))
        return apply_function(
            str(name), function, [self._value(argument) for argument in arguments]
        )

    def _concat(self, arguments: Sequence[Parsed]) -> Compressed:
        fields: dict[str, Value] = {}
        for argument in arguments:
            with self._at(argument):
                name, kind = self._field(argument)
                if name in fields:
                    refuse(f"a second field {name}", "send a variable of another name")
                fields[name] = typed(kind, self._value(argument))
        if self._declared.form == "matrices":
            return Compressed(fields)  # factors, in order: nothing is packed
        return language.concat(**fields)

    def _field(self, sent: Parsed) -> tuple[str, Kind | None]:
        """A field's name, and the type that a plain number travels in."""
        match sent.data, [str(child) for child in sent.children]:
            case "name", [name]:
                variable = self._frame.variables.get(name) or self._globals.get(name)
                return name, None if variable is None else variable.kind
            case "member", [struct, name] if struct in self._frame.structs:
                setting = self._frame.structs[struct].get(name)
                return name, None if setting is None else setting.kind
            case "call", [name, *_]:
                return name, None
            case _:
                refuse(
                    "a field without a name", "assign it to a variable and send that"
                )

    def _called(self, function: Function, values: Sequence[Value]) -> Value:
        """A function of the text on these values: converted to its parameters, and
        back.
        """
        name = str(function.name)
        if name in ("encode", "decode") or any(
            frame.name == name for frame in self._frames
        ):
            refuse(
                f"{name} called from within",
                "functions end; elements are visited by map",
            )
        if len(values) != len(function.parameters):
            refuse(
                f"{name} of {len(values)} values",
                f"it takes {len(function.parameters)}",
            )
        frame = _Frame(function.text, name)
        for (kind, parameter), value in zip(function.parameters, values, strict=True):
            frame.variables[parameter] = _Variable(kind, converted(kind, value))
        with self._framed(frame), self._at(function.name):
            result = self._body(function)
            if result is None:
                refuse(f"{name} returns nothing", "end it with return ...;")
            return typed(function.kind, converted(function.kind, result))

    # ---- places ----------------------------------------------------------------------

    @property
    def _frame(self) -> _Frame:
        return self._frames[-1]

    @contextmanager
    def _framed(self, frame: _Frame) -> Iterator[None]:
        self._frames.append(frame)
        try:
            yield
        finally:
            self._frames.pop()

    @contextmanager
    def _at(self, place: Parsed | Token) -> Iterator[None]:
        """Within the block, errors name this place of the text; the innermost place
        counts.
        """
        try:
            yield
        except TextError:
            raise
        except InvalidSetting as error:
            reason = str(error)
            if isinstance(error, Refusal):
                reason = error.reason
            raise at(self._frame.text, place, reason) from None
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            reason = f"{error}; this cannot be computed of these values"
            raise at(self._frame.text, place, reason) from error
