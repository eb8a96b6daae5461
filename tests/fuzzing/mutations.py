"""Bytes and texts made wrong: few places of something sound, or much of it."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

_FLOATS = (float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 1e-45, 0.0, -0.0)


def mutated(rng: random.Random, data: bytes, sizes: Sequence[int] = ()) -> bytes:
    """The bytes with one to four things changed.

    ``sizes`` are numbers whose neighbours are tried as indices and counts.
    """
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if made:
            rng.choice(_CHANGES)(rng, made, sizes)
    return bytes(made)


def resized(rng: random.Random, size: int) -> int:
    """Another size, mostly a near one."""
    change = rng.choice((-8, -4, -1, 1, 4, 8, -size, size, rng.randint(-size, 64)))
    return max(0, size + change)


def _flip(rng: random.Random, made: bytearray, sizes: Sequence[int]) -> None:
    made[rng.randrange(len(made))] ^= 1 << rng.randrange(8)


def _byte(rng: random.Random, made: bytearray, sizes: Sequence[int]) -> None:
    made[rng.randrange(len(made))] = rng.choice(
        (0, 1, 127, 128, 255, rng.randrange(256))
    )


def _word(rng: random.Random, made: bytearray, sizes: Sequence[int]) -> None:
    near = [size + off for size in sizes for off in (-1, 0, 1)]
    value = rng.choice((0, 1, -1, 2**31 - 1, -(2**31), rng.getrandbits(31), *near))
    code, width = rng.choice((("<i", 4), ("<i", 4), ("<q", 8), ("<h", 2)))
    if width == 2:
        value = (value + 2**15) % 2**16 - 2**15
    elif width == 8:
        value = rng.choice((value, 2**63 - 1, -(2**63), 2**40))
    _put(rng, made, struct.pack(code, value))


def _float(rng: random.Random, made: bytearray, sizes: Sequence[int]) -> None:
    _put(rng, made, struct.pack("<f", rng.choice(_FLOATS)))


def _run(rng: random.Random, made: bytearray, sizes: Sequence[int]) -> None:
    start = rng.randrange(len(made))
    count = rng.randint(1, len(made) - start)
    made[start : start + count] = bytes([rng.choice((0, 255, 85))]) * count


def _noise(rng: random.Random, made: bytearray, sizes: Sequence[int]) -> None:
    start = rng.randrange(len(made))
    count = rng.randint(1, min(64, len(made) - start))
    made[start : start + count] = rng.randbytes(count)


def _moved(rng: random.Random, made: bytearray, sizes: Sequence[int]) -> None:
    count = rng.randint(1, min(32, len(made)))
    start, to = (rng.randint(0, len(made) - count) for _ in range(2))
    made[to : to + count] = made[start : start + count]


def _put(rng: random.Random, made: bytearray, word: bytes) -> None:
    if len(made) >= len(word):
        start = rng.randrange(len(made) - len(word) + 1) // len(word) * len(word)
        made[start : start + len(word)] = word


_CHANGES = (_flip, _byte, _word, _word, _float, _run, _noise, _moved)


def mutated_text(rng: random.Random, text: str) -> str:
    """The text with pieces taken out, doubled, moved or put in the place of others."""
    words = _pieces(text)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not words:
            break
        at, other = rng.randrange(len(words)), rng.randrange(len(words))
        match rng.randrange(6):
            case 0:
                del words[at]
            case 1:
                words.insert(at, words[other])
            case 2:
                words[at] = rng.choice(_WORDS)
            case 3:
                words[at], words[other] = words[other], words[at]
            case 4:
                del words[min(at, other) : max(at, other)]
            case _:
                words[at] = words[at][: len(words[at]) // 2] + rng.choice(_WORDS)
    return "".join(words)


_WORDS = (
    *(
        "0",
        "-1",
        "1",
        "1e999",
        "-1e-400",
        "NaN",
        "Infinity",
        "null",
        "true",
        '""',
        '"none"',
    ),
    *(
        "[]",
        "{}",
        "[[[[",
        "}",
        "{",
        '"',
        "9" * 30,
        "2147483648",
        "0.1",
        "\x00",
        "é",
        " ",
        "\n",
    ),
    *(
        "(",
        ")",
        ";",
        "%",
        "/ 0",
        "<<",
        "uint2",
        "float*",
        "param",
        "return",
        "-",
        "8" * 400,
    ),
)


def _pieces(text: str) -> list[str]:
    found, start = [], 0
    for end in range(1, len(text) + 1):
        if end == len(text) or not (text[end].isalnum() and text[end - 1].isalnum()):
            found.append(text[start:end])
            start = end
    return found
