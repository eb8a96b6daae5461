"""Text as words: Python's documentation topics and its library's own sources.

Words are runs of letters, digits and underscores, single other marks, and ends of
lines; a vocabulary is the most frequent of them, and one entry stands for all the rest.
Python's licence allows reading what it installed; nothing of it is shipped here.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.errors import invalid
from gradwire_bench.workloads.text import topics

UNKNOWN = 0
"""The vocabulary's entry for all words that are in none other."""
_WORD = re.compile(r"\w+|[^\w\s]|\n")
_BLOCK = 1000
"""The words of a block. The last of every ten blocks is held out, so both parts are of
all files.
"""


class Words(NamedTuple):
    """A text as words: train_N and held_out_N int32 are indices into ``vocabulary``.

    The vocabulary has the most frequent word first.
    """

    train_N: Tensor
    held_out_N: Tensor
    vocabulary: tuple[str, ...]


@cache
def sources(max_bytes: int = 4_000_000) -> str:
    """The documentation topics, then modules of the standard library by name,
    ``max_bytes`` in all.

    They differ a little from one version of Python to the next.
    """
    parts = [topics().decode()]
    left = max_bytes
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        left -= len(parts[-1])
        if left <= 0:
            break
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
    return "".join(parts)[:max_bytes]


@cache
def load(vocabulary: int = 10_000, max_bytes: int = 4_000_000) -> Words:
    """``sources`` as words of a vocabulary of at most so many entries.

    >>> words = load(vocabulary=100, max_bytes=50_000)
    >>> int(words.train_N.max()), len(words.vocabulary), words.vocabulary[UNKNOWN]
    (99, 100, '<unknown>')
    """
    if vocabulary < 2:
        raise invalid("vocabulary", vocabulary, "at least 2 words", "write 10_000")
    words = _WORD.findall(sources(max_bytes))
    frequent = [word for word, _ in Counter(words).most_common(vocabulary - 1)]
    places = {word: place for place, word in enumerate(frequent, start=1)}
    words_N = torch.tensor(
        [places.get(word, UNKNOWN) for word in words], dtype=torch.int32
    )
    blocks = words_N[: len(words_N) // _BLOCK * _BLOCK].view(-1, _BLOCK)
    held_out = torch.arange(len(blocks)) % 10 == 9
    return Words(
        blocks[~held_out].flatten(),
        blocks[held_out].flatten(),
        ("<unknown>", *frequent),
    )
