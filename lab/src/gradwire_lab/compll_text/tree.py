"""Declarations of a parsed text: param structures, globals and functions, each with its
place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from gradwire.errors import InvalidSetting

if TYPE_CHECKING:
    from lark import Token, Tree

_FORMS: dict[str, dict[str, tuple[list[str], ...]]] = {
    "compressor": {
        "encode": (["float*", "uint8*"], ["float*", "float*", "uint8*"]),
        "decode": (["float*", "uint8*"],),
    },
    "coder": dict.fromkeys(("encode", "decode"), (["uint8*", "uint8*"],)),
    "matrices": {
        "encode": (["float**", "float**", "uint8*"],),
        "decode": (["float**", "uint8*"],),
    },
}
"""The parameters of a program's functions, by what it may be."""
_LONGEST = 200
"""Characters of a line that are shown."""

Parsed: TypeAlias = "Tree[Token]"


@dataclass(frozen=True)
class Text:
    """A program's text, or one of several; ``label`` is its path."""

    label: str
    content: str

    def error(self, line: int, column: int, reason: str) -> TextError:
        """``reason`` with its place in front, the line and a caret below."""
        lines = self.content.splitlines() or [""]
        shown = lines[min(line, len(lines)) - 1]
        before = min(column - 1, len(shown))
        first = 0
        if len(shown) > _LONGEST:
            first = max(0, before - _LONGEST // 2)
        shown = shown[first : first + _LONGEST]  # what is around the place
        under = "".join("\t" if c == "\t" else " " for c in shown[: before - first])
        return TextError(
            f"{self.label}:{line}:{column}: {reason}\n    {shown}\n    {under}^"
        )


class TextError(InvalidSetting):
    """A mistake in a text, with its line and column."""


@dataclass(frozen=True)
class Kind:
    """A declared type: of one value, of one an element (``float*``), of a matrix
    (``float**``).
    """

    name: str
    num_stars: int = 0

    @classmethod
    def of(cls, name: str, num_stars: int = 0) -> Kind:
        """The type of this name; two have two."""
        return cls({"float32": "float", "int": "int32"}.get(name, str(name)), num_stars)

    def __str__(self) -> str:
        return self.name + "*" * self.num_stars


@dataclass(frozen=True)
class ParamField:
    """A field of a param structure; ``default`` is its expression, if it has one."""

    text: Text
    kind: Kind
    default: Parsed | None

    @property
    def plain(self) -> type:
        """The Python type of its values."""
        return {"float": float, "bool": bool}.get(self.kind.name, int)


@dataclass(frozen=True)
class Function:
    """A function of a text: encode, decode or the author's own."""

    text: Text
    name: Token
    kind: Kind
    parameters: tuple[tuple[Kind, str], ...]
    body: tuple[Parsed, ...]


class Declared:
    """The declarations of one or several texts."""

    def __init__(self, parsed: Iterable[tuple[Text, Parsed]]) -> None:
        self.structs: dict[str, dict[str, ParamField]] = {}
        self.globals: list[tuple[Text, Parsed]] = []
        self.functions: dict[str, Function] = {}
        self.draws = False
        for text, tree in parsed:
            for subtree in trees(tree.children):
                self._add(text, subtree)
            self.draws |= any(_is_draw(subtree) for subtree in tree.iter_subtrees())
        self.form = self._form()

    def _add(self, text: Text, parsed: Parsed) -> None:
        match parsed.data:
            case "declaration":
                self.globals.append((text, parsed))
            case "struct":
                self.structs[str(parsed.children[0])] = {
                    str(name): ParamField(text, kind, default)
                    for row in trees(parsed.children)
                    for kind, name, default in declarations(row)
                }
            case _:
                made = _function(text, parsed)
                if made.name in self.functions:
                    raise at(
                        text, made.name, f"a second {made.name}; give it another name"
                    )
                self.functions[str(made.name)] = made

    def _form(self) -> str:
        """The kind of program that encode's parameters say, which decode's must fit
        to.
        """
        forms = dict(_FORMS)
        for name in ("encode", "decode"):
            if name not in self.functions:
                continue
            function = self.functions[name]
            arrays = [
                str(kind)
                for kind, _ in function.parameters
                if kind.name not in self.structs
            ]
            forms = {
                form: kinds
                for form, kinds in forms.items()
                if sorted(arrays) in kinds[name]
            }
            if not forms:
                wanted = "(float* gradient, uint8* compressed, and param structures)"
                reason = (
                    f"{name} takes {wanted}; docs/compll.md has coders and matrices"
                )
                raise at(function.text, function.name, reason)
        return next(iter(forms))

    def settings(self) -> dict[str, ParamField]:
        """Fields of all param structures: a program's settings."""
        return {
            name: parsed
            for struct in self.structs.values()
            for name, parsed in struct.items()
        }

    @property
    def wants_latest(self) -> bool:
        """Whether encode takes the gradient alone beside the gradient with its
        residual.
        """
        return (
            sum(kind.name == "float" for kind, _ in self.functions["encode"].parameters)
            == 2
        )


def trees(children: Iterable[Parsed | Token]) -> list[Parsed]:
    """The children that are trees; tokens are strings."""
    return [child for child in children if not isinstance(child, str)]


def at(text: Text, place: Parsed | Token, reason: str) -> TextError:
    """The error of ``reason`` at a tree or token of ``text``."""
    meta = place if isinstance(place, str) else place.meta
    return text.error(meta.line or 1, meta.column or 1, reason)


def declarations(row: Parsed) -> Iterator[tuple[Kind, Token, Parsed | None]]:
    """(type, name, initial value or None) of each name that a declaration declares."""
    kind = _kind(row)
    for declared in trees(row.children):
        name, *value = declared.children
        assert isinstance(name, str)
        yield kind, name, next(iter(trees(value)), None)


def _kind(row: Parsed) -> Kind:
    tokens = [child for child in row.children if isinstance(child, str)]
    return Kind.of(tokens[0], sum(token.type == "STAR" for token in tokens))


def _function(text: Text, parsed: Parsed) -> Function:
    (name,) = [c for c in parsed.children if isinstance(c, str) and c.type == "NAME"]
    inside = trees(parsed.children)
    parameters = [tree for tree in inside if tree.data in ("parameter", "settings")]
    return Function(
        text,
        name,
        _kind(parsed),
        tuple((_kind(tree), str(tree.children[-1])) for tree in parameters),
        tuple(tree for tree in inside if tree not in parameters),
    )


def _is_draw(parsed: Parsed) -> bool:
    return parsed.data == "draw" or (
        parsed.data == "call" and parsed.children[0] == "random"
    )
