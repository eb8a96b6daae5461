"""A fuzzer of programs that people write.

Plans, profiles and clusters are damaged in ``tests/planning/data/test_malformed.py``,
checkpoints in ``tests/runtime/state/test_malformed_states.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path

from gradwire.contract import Compressor
from gradwire.contract.spec import TensorSpec
from gradwire.dsl.language import uint2, uint_3
from gradwire_lab.compll_text.compile import compile_coder, compile_text
from tests.fuzzing.mutations import mutated_text

FOLDER = Path(__file__).parents[1] / "lab"


def programs(rng: random.Random) -> None:
    """Compiles a CompLL program in which something changed, and lays a payload out."""
    text = mutated_text(rng, rng.choice(_programs()))
    if rng.randrange(4) == 0:
        compile_coder(text, takes=rng.choice(((uint_3,), (uint2,))))
        return
    made = compile_text(text, name="fuzzed")
    settings = {one.name: 2 for one in fields(made) if one.default is MISSING}
    found = made(**settings)
    if isinstance(found, Compressor):
        found.format(TensorSpec("gradient", 100))


@cache
def _programs() -> tuple[str, ...]:
    return tuple(
        path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.compll"))
    )


TARGETS: dict[str, Callable[[random.Random], None]] = {"programs": programs}
