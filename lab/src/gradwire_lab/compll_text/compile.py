r"""CompLL's own C-like text (HiPress, figure 5): a second front end to the same
language.

>>> import torch
>>> sign = compile_text('''
...     float magnitude;
...     uint1 positive(float x) { return x >= 0; }
...     float signed(uint1 bit) { return bit == 1 ? magnitude : -magnitude; }
...     void encode(float* gradient, uint8* compressed) {
...         magnitude = reduce(map(gradient, abs), add) / gradient.size;
...         uint1* bits = map(gradient, positive);
...         compressed = concat(magnitude, bits);
...     }
...     void decode(uint8* compressed, float* gradient) {
...         uint1* bits;
...         extract(compressed, magnitude, bits);
...         gradient = map(bits, signed);
...     }
... ''', name="sign", nonexpansive=True, error_feedback=True)
>>> payload, _ = sign(block=4096).encode(None, torch.tensor([1.0, -2.0, 6.0]))
>>> payload.size_bytes, sign(block=4096).decode(payload, torch.empty(3))
(5, tensor([ 3., -3.,  3.]))

A text is parsed (compll.lark) and its two functions are run on symbols by the operators
of ``language`` (run.py): no other representation lies between. What it gives is a
``Program`` like any other: fields of its ``param`` structures are settings, beside
``block`` (``gradient`` is one block of that many elements) and, where numbers are
drawn, ``seed``.

Source: HiPress (CompLL), section 4.3 and figure 5. What the figure leaves open:
``extract`` fills the variables named after its first argument, in the order of
``concat``; a field bears the name of the variable that was sent.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterable, Sequence
from itertools import pairwise
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from torch import Tensor

from gradwire.contract import Memory, Residual, State
from gradwire.contract.payload import Payload
from gradwire.dsl import ir
from gradwire.dsl.language import Compressed, Type
from gradwire.dsl.program import Program
from gradwire.dsl.symbols import Vector, tracing
from gradwire.errors import InvalidSetting, NotInstalled, invalid
from gradwire_lab.dsl.coders import Coder, coder
from gradwire_lab.dsl.lowrank import MatrixProgram
from gradwire_lab.dsl.matrices import Matrix

from .run import ProgramTrace
from .tree import Declared, Parsed, Text, trees

if TYPE_CHECKING:
    from lark import Lark, UnexpectedInput

_GRAMMAR = Path(__file__).with_name("compll.lark")

_REMEDIES = {
    **dict.fromkeys(("if", "else", "switch"), "write condition ? a : b"),
    **dict.fromkeys(
        ("for", "while", "do"), "use map, filter or reduce: they visit every element"
    ),
    "double": "the language computes in float",
    "unsigned": "the unsigned types are uint1, uint2, uint4 and uint8",
    "struct": "settings are declared with param",
}
_READABLE = {
    "NAME": "a name",
    "NUMBER": "a number",
    "TYPE": "a type",
    "RANDOM": "random<type>",
    "EQUAL": "=",
    "SEMICOLON": ";",
    "COMMA": ",",
    "DOT": ".",
    "LPAR": "(",
    "RPAR": ")",
    "LBRACE": "{",
    "RBRACE": "}",
    "PARAM": "param",
    "$END": "the end",
}
"""Terminals as a user knows them; those of arithmetic are summed up as "an
operator".
"""


def compile_text(
    text: str | Path, *more: str | Path, name: str = "", **traits: Any
) -> type[Any]:
    """The compressor of a text, a class derived from ``Program``; ``traits`` as in
    ``Program``.

    A text whose gradient is a matrix, ``float**``, is an exchange derived from
    ``MatrixProgram``, whose traits follow from its form.

    A ``Path`` is read, and then names the compressor unless ``name`` does. ``more`` are
    further texts of the same program: what the first declares is known to them. A
    program without decode, as the figure prints it, encodes only. Errors are
    InvalidSetting with line, column, the line's text and a caret. Raises NotInstalled
    without lark, the extra ``gradwire-lab[text]``.
    """
    declared = _declared(text, *more)
    name = name or (text.stem if isinstance(text, Path) else "compressor")
    if "encode" not in declared.functions:
        raise invalid(
            "a program", name, "a text with encode", "write void encode(float* ...)"
        )
    if declared.form == "coder":
        accepted = "a text that encodes a gradient"
        remedy = "compile_coder makes a coder of it"
        raise invalid("a program", name, accepted, remedy)
    if declared.form == "matrices":
        return types.new_class(
            name, (MatrixProgram,), {}, _factorising(declared, name, traits)
        )
    if "decode" not in declared.functions:
        return types.new_class(
            name, (_EncodeOnly, Program), traits, _body(declared, name)
        )
    return types.new_class(name, (Program,), traits, _body(declared, name))


def compile_coder(
    text: str | Path, *more: str | Path, name: str = "", takes: tuple[Type, ...]
) -> Coder:
    """The coder of a text whose encode and decode are
    ``(uint8* given, uint8* result)``.

    ``takes`` are the types whose packed bytes it codes. Texts and errors are those of
    ``compile_text``; ``register`` makes it known to other texts.
    """
    declared = _declared(text, *more)
    name = name or (text.stem if isinstance(text, Path) else "coder")
    if not {"encode", "decode"} <= {*declared.functions} or declared.form != "coder":
        accepted = "a text whose encode and decode take bytes to bytes"
        raise invalid(
            "a coder", name, accepted, "write void encode(uint8* plain, uint8* coded)"
        )
    return coder(
        name,
        takes=takes,
        encode=lambda plain: ProgramTrace(declared).encode(plain),
        decode=lambda coded: ProgramTrace(declared).decode(coded),
    )


def _declared(*texts: str | Path) -> Declared:
    return Declared(_parsed(_read(text)) for text in texts)


def _read(source: str | Path) -> Text:
    if not isinstance(source, Path):
        return Text("<text>", source)
    try:
        return Text(str(source), source.read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid(
            "text", str(source), "a file that can be read", str(error.strerror)
        ) from None
    except UnicodeDecodeError as error:
        raise invalid(
            "text", str(source), "a file in UTF-8", str(error.reason)
        ) from None


def _settings(
    declared: Declared, name: str, base: type, own_settings: Sequence[str]
) -> tuple[dict[str, type], dict[str, Any]]:
    """Types and defaults of the settings.

    Of the base's names they may have those in ``own_settings``.
    """
    settings = declared.settings()
    for key in settings:
        if iskeyword(key) or (hasattr(base, key) and key not in own_settings):
            raise invalid(
                "a setting's name", key, "none of a program's own", "choose another"
            )
    with tracing(f"the globals and defaults of {name}"):
        run = ProgramTrace(declared)
        defaults = {key: run.default(setting) for key, setting in settings.items()}
    return {key: setting.plain for key, setting in settings.items()}, defaults


def _factorising(declared: Declared, name: str, traits: Iterable[str]) -> Any:
    """Fills the namespace of a program of matrices."""
    kinds, defaults = _settings(declared, name, MatrixProgram, ("rank", "seed"))
    if traits:
        accepted = "none, as those of matrices follow from their form"
        raise invalid("traits", [*traits], accepted, "leave them out")
    if "decode" not in declared.functions:
        raise invalid(
            "a program of matrices",
            name,
            "a text with decode",
            "pass decode's text too",
        )

    def encode(self: MatrixProgram, gradient: Matrix, start: Matrix) -> tuple[Any, ...]:
        return tuple(
            ProgramTrace(declared, self).encode(gradient, start).fields.values()
        )

    def decode(self: MatrixProgram, *factors: Any) -> Any:
        sent = Compressed({f"factor {i}": factor for i, factor in enumerate(factors)})
        return ProgramTrace(declared, self).decode(sent)

    doc = f"{name}, a program of matrices in CompLL's text."
    return _filling(kinds, defaults, doc, encode=encode, decode=decode)


def _body(declared: Declared, name: str) -> Any:
    """Fills a class's namespace: settings with their defaults, and the two
    functions.
    """
    kinds, defaults = _settings(declared, name, Program, ("block",))
    if declared.draws and "seed" not in kinds:
        kinds["seed"] = int
        defaults["seed"] = 0

    def encode(self: Program, gradient: Vector) -> Any:
        return ProgramTrace(declared, self).encode(gradient)

    def encode_both(self: Program, gradient: Vector, latest: Vector) -> Any:
        return ProgramTrace(declared, self).encode(gradient, latest)

    def decode(self: Program, compressed: Compressed) -> Any:
        return ProgramTrace(declared, self).decode(compressed)

    return _filling(
        kinds,
        defaults,
        f"{name}, a program of CompLL's text.",
        encode=encode_both if declared.wants_latest else encode,
        decode=decode if "decode" in declared.functions else _nothing,
    )


def _filling(
    kinds: dict[str, type], defaults: dict[str, Any], doc: str, **functions: Any
) -> Any:
    """A function that fills a class's namespace."""

    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {
            key: value for key, value in defaults.items() if value is not None
        }
        namespace |= {"__annotations__": kinds, "__doc__": doc, **functions}

    return fill


def _nothing(self: Program, compressed: Compressed) -> Vector:
    return Vector(ir.const(0.0, ir.FLOAT32))


class _EncodeOnly:
    """Methods of a program whose text has no decode."""

    traits: ClassVar[Any]

    def encode(
        self,
        state: State,
        grad_N: Tensor,
        *,
        residual_N: Residual = None,
        buffer: Memory = None,
    ) -> tuple[Payload, State]:
        if residual_N is not None:
            self.decode()
        encoded: tuple[Payload, State] = super().encode(state, grad_N, buffer=buffer)  # type: ignore[misc]
        return encoded

    def encode_many(
        self,
        states: Sequence[State],
        grads: Sequence[Tensor],
        residuals: Sequence[Tensor | None] | None = None,
        buffers: Sequence[Tensor | None] | None = None,
    ) -> list[tuple[Payload, State]]:
        if any(residual_N is not None for residual_N in residuals or ()):
            self.decode()
        encoded: list[tuple[Payload, State]]
        encoded = super().encode_many(states, grads, None, buffers)  # type: ignore[misc]
        return encoded

    def decode(self, *_: Any, **__: Any) -> NoReturn:
        raise invalid(
            f"the text of {type(self).__name__}",
            "encode alone",
            "one with decode to decode, merge or keep a residual",
            "pass decode's text too: compile_text(encode, decode)",
        )

    merge = decode_many = decode


# ---- parsing -------------------------------------------------------------------------


@functools.cache
def _parser() -> Lark:
    try:
        from lark import Lark
    except ImportError:
        raise NotInstalled(
            "a program in the C-like text", "lark", "text", "gradwire-lab"
        ) from None
    grammar = _GRAMMAR.read_text(encoding="utf-8")
    return Lark(
        grammar,
        parser="lalr",
        start="program",
        propagate_positions=True,
        maybe_placeholders=False,
    )


def _parsed(text: Text) -> tuple[Text, Parsed]:
    parser = _parser()
    from lark import UnexpectedInput

    try:
        tree: Parsed = parser.parse(text.content)
    except UnexpectedInput as error:
        raise _syntax_error(text, error) from None
    for block in tree.iter_subtrees():
        _check_semicolons(text, block)
    return text, tree


def _check_semicolons(text: Text, block: Parsed) -> None:
    """A semicolon may be missing only at the end of a line: statements on one line need
    theirs.
    """
    whole = [child for child in trees(block.children) if not child.meta.empty]
    ends = ("declaration", "assignment", "returned", "effect")
    for first, second in pairwise(whole):
        ended = text.content[first.meta.end_pos - 1] == ";"
        if first.data in ends and not ended and first.meta.end_line == second.meta.line:
            line = first.meta.end_line
            column = first.meta.end_column
            raise text.error(
                line, column, "a semicolon is missing; write ; between statements"
            )


def _syntax_error(text: Text, error: UnexpectedInput) -> InvalidSetting:
    from lark import UnexpectedToken

    lines = text.content.splitlines() or [""]
    if not isinstance(error, UnexpectedToken):
        matched = re.match(r"\w+|.", text.content[error.pos_in_stream or 0 :])
        word = matched[0] if matched else ""
        remedy = _REMEDIES.get(word, "see docs/compll.md for what is")
        return text.error(
            error.line, error.column, f"{word!r} is no part of the language; {remedy}"
        )
    accepted = _accepted(error.accepts or error.expected)
    if error.token.type == "$END":
        place = len(lines), len(lines[-1]) + 1
        return text.error(*place, f"the text ends here; expected {accepted}")
    reason = f"{str(error.token)!r} does not fit here; expected {accepted}"
    return text.error(error.line, error.column, reason)


def _accepted(terminals: Iterable[str]) -> str:
    """The terminals that may stand somewhere, in words.

    >>> _accepted(["NAME", "STAR", "SIGN", "SEMICOLON"])
    '; or a name or an operator'
    """
    words = {_READABLE.get(terminal, "an operator") for terminal in terminals}
    return " or ".join(sorted(words))
